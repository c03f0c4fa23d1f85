"""The journal: append only, the last entry of a step counts, a torn line is passed over."""

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eagle3_utils.draft.training.journal import Journal, read_journal


def test_entries_come_back_by_kind_and_step_and_the_last_counts(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 2, loss=1.5, accuracy=[0.1, 0.2])
        journal.write("validation", 2, accept_length=1.4)
    with Journal(tmp_path, "run") as journal:  # resumed from step 1: step 2 again
        journal.write("train", 1, loss=2.0)
        journal.write("train", 2, loss=1.25)
    assert [(entry["step"], entry["loss"]) for entry in read_journal(tmp_path, "train")] == [(1, 2.0), (2, 1.25)]
    assert read_journal(tmp_path, "validation")[0]["accept_length"] == 1.4
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


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
