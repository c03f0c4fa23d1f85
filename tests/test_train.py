"""Training end to end on a tiny random target: it learns, and an interrupted run equals an uninterrupted one."""

import logging
import signal

import pytest
import torch
from draft_runs import folder_of
from safetensors.torch import load_file

from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.checkpoint import checkpoint_folders, newest_whole_checkpoint
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.errors import UserError

pytest_plugins = ["draft_runs"]  # fixtures

LOG = logging.getLogger("test_train")


def weights_of(config):
    newest, _ = newest_whole_checkpoint(folder_of(config) / "checkpoints", LOG)
    return load_file(newest / "model.safetensors")


def test_overfits_eight_samples_at_every_step(make_config):
    config = make_config(epochs=100.0, max_tokens_per_step=256, validate_every_steps=1000, checkpoint_every_steps=1000)
    _, report = train(config)
    last = read_journal(folder_of(config), "train")[-1]
    assert min(last["accuracy"]) > 0.95
    assert report.wait_share < 0.5 and report.steps == 100


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(make_config):
    whole, halves = make_config("whole"), make_config("halves")
    train(whole)

    def stop_after_five(**fields):
        if fields["done"] == 5:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(halves, progress=stop_after_five)
    assert [path.name for path in checkpoint_folders(folder_of(halves) / "checkpoints")][-1] == "step-000005"
    train(halves)
    first, second = weights_of(whole), weights_of(halves)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    a, b = (read_journal(folder_of(config), "train") for config in (whole, halves))
    assert [entry["loss"] for entry in a] == [entry["loss"] for entry in b]


def test_resume_with_other_parameters_is_refused_by_name(make_config):
    train(make_config(epochs=1.0))
    with pytest.raises(UserError, match="learning_rate"):
        train(make_config(epochs=1.0, learning_rate=1e-4))


def test_nonfinite_steps_are_skipped_named_and_stop_the_run(make_config, monkeypatch, caplog):
    import eagle3_utils.draft.train as module

    real = module.BatchRunner.__call__

    def poisoned(self, batch, plan, *args, **kwargs):
        result = real(self, batch, plan, *args, **kwargs)
        result.loss = result.loss * float("nan")
        return result

    monkeypatch.setattr(module.BatchRunner, "__call__", poisoned)
    with caplog.at_level(logging.ERROR), pytest.raises(UserError, match="3 steps in a row"):
        train(make_config(validate_every_steps=1000))
    assert "train-" in caplog.text and "nan" in caplog.text


def test_validation_reports_the_constant_baseline(make_config):
    config = make_config(epochs=1.0)
    _, report = train(config)
    best = read_journal(folder_of(config), "best")[0]
    assert best["baseline"] == report.validation["baseline"]
    assert 0.0 <= best["baseline"][0] < 1.0
    assert all(0 <= overlap <= 1 for overlap in best["overlap"])
    assert 1.0 <= best["accept_length"] <= 1 + config.ttt_steps
