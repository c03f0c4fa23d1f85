"""The journal: append only, a step taken again undoes the later ones, a torn line is passed over."""

import json
import logging
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eagle3_utils.draft.training.journal import Journal, read_journal
from eagle3_utils.plots.draft import training_curves


def test_entries_come_back_by_kind_and_step_and_the_last_counts(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 2, loss=1.5, accuracy=[0.1, 0.2])
        journal.write("validation", 2, accept_length=1.4)
    with Journal(tmp_path, "run") as journal:  # resumed from step 1: step 2 again
        journal.write("train", 1, loss=2.0)
        journal.write("train", 2, loss=1.25)
        journal.write("validation", 2, accept_length=1.5)
    assert [(entry["step"], entry["loss"]) for entry in read_journal(tmp_path, "train")] == [(1, 2.0), (2, 1.25)]
    assert [entry["accept_length"] for entry in read_journal(tmp_path, "validation")] == [1.5]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_curves_are_of_one_training_after_a_kill(tmp_path):
    """Killed at step 9, resumed from the checkpoint of step 4."""
    with Journal(tmp_path, "run") as journal:
        for step in range(1, 10):
            journal.write("train", step, loss=1.0)
            if step % 4 == 0:
                journal.write("validation", step, accept_length=1.0)
    assert [entry["step"] for entry in read_journal(tmp_path, "train")] == list(range(1, 10))
    with Journal(tmp_path, "run") as journal:
        journal.write("validation", 4, accept_length=2.0)
        journal.write("train", 5, loss=2.0)
    assert [(e["step"], e["loss"]) for e in read_journal(tmp_path, "train")][-2:] == [(4, 1.0), (5, 2.0)]
    assert [(e["step"], e["accept_length"]) for e in read_journal(tmp_path, "validation")] == [(4, 2.0)]
    with Journal(tmp_path, "run") as journal:
        journal.write("best", 4, accept_length=2.0)  # of the weights kept: no step is taken again
    assert len(read_journal(tmp_path, "train")) == 5 and len(read_journal(tmp_path, "best")) == 1


def test_what_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 1, loss=math.nan, grad_norm=math.inf, loss_by_step=[1.0, -math.inf])
    refuse = lambda name: pytest.fail(name)  # noqa: E731
    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert written == {"kind": "train", "step": 1, "loss": None, "grad_norm": None, "loss_by_step": [1.0, None]}
    entry = read_journal(tmp_path, "train")[0]
    assert math.isnan(entry["loss"]) and math.isnan(entry["loss_by_step"][1])
    entry |= {"accuracy": [0.1], "learning_rate": 1e-3, "tokens_per_second": 9.0, "wait_share": 0.0}
    assert len(training_curves([entry], []).axes) == 8


def test_line_cut_short_by_a_kill_is_passed_over(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 1, loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_journal(tmp_path, "train")) == 1
    with Journal(tmp_path, "run") as journal:  # the next run's first entry is not glued to it
        journal.write("train", 2, loss=1.0)
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 3, loss=0.5)
    assert [entry["loss"] for entry in read_journal(tmp_path, "train")] == [2.0, 1.0, 0.5]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_tensorboard_shows_the_same_figures(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 1, loss=2.0, accuracy=[0.25, 0.5])
        journal.write("train", 2, loss=1.0, accuracy=[0.5, 0.75])
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [event.value for event in board.Scalars("train/accuracy/1")] == [0.5, 0.75]


def test_no_journal_yet_reads_as_empty(tmp_path):
    assert read_journal(tmp_path, "train") == []


def test_weights_and_biases_gets_the_curves_when_its_key_is_set(tmp_path, monkeypatch):
    wandb, seen = ModuleType("wandb"), []
    wandb.__spec__ = ModuleSpec("wandb", None)

    run = SimpleNamespace(
        summary={}, log=seen.append, finish=lambda: seen.append("finished"),
        define_metric=lambda name, step_metric=None: seen.append((name, step_metric)),
    )  # fmt: skip
    wandb.init = lambda **options: seen.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 3, loss=2.0, accuracy=[0.1, 0.2])
        journal.write("best", 2, loss=1.0)
    assert seen[0].pop("id").startswith("run-")  # and the folder's hash: another run may have the same name
    assert seen[0] == {"project": "eagle3", "name": "run", "resume": "allow"}
    steps = [("optimiser_step", None), ("train/*", "optimiser_step"), ("validation/*", "optimiser_step")]
    curves = {"optimiser_step": 3, "train/loss": 2.0, "train/accuracy/0": 0.1, "train/accuracy/1": 0.2}
    assert seen[1:] == [*steps, curves, "finished"]
    assert run.summary == {"best/step": 2, "best/loss": 1.0}


def test_key_without_the_library_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "not a key")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING), Journal(tmp_path, "run"):
        pass
    assert "wandb is not installed" in caplog.text
