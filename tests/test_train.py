"""Training end to end on a tiny random target: it learns, and an interrupted run equals an uninterrupted one."""

import logging
import signal

import pytest
import torch
from draft_runs import LAYERS, PROMPT, folder_of
from safetensors.torch import load_file

from eagle3_utils.acceptance.speculate import load_reference_model, speculative_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.draft.export import export_draft, load_draft
from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.batch_runner import BatchRunner
from eagle3_utils.draft.training.checkpoint import checkpoint_folders, newest_whole_checkpoint
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.store import StoreWriter
from eagle3_utils.target import load_target

pytest_plugins = ["draft_runs"]  # fixtures

LOG = logging.getLogger("test_train")


def weights_of(config):
    newest, _ = newest_whole_checkpoint(folder_of(config) / "checkpoints", LOG)
    return load_file(newest / "part-00-of-01.safetensors")  # weights, moments, random state


def test_draft_that_overfits_eight_samples_is_accepted_as_training_said_once_exported(make_config, states, tmp_path):
    config = make_config(epochs=100.0, max_tokens_per_step=256, validate_every_steps=1000, checkpoint_every_steps=1000)
    model, report = train(config)
    last = read_journal(folder_of(config), "train")[-1]
    assert min(last["accuracy"]) > 0.95
    assert report.wait_share < 0.5 and report.steps == 100
    target = load_target(config.model)
    draft = load_draft(export_draft(model, target, tmp_path / "export"), target)
    reader, reference = StoreReader(states / "hidden_states" / "train"), load_reference_model(target)
    decoded = []
    for index in range(len(reader)):
        prompt = reader.read(index).input_ids[:PROMPT].tolist()
        tokens = 1 + 5 * (1 + config.ttt_steps)  # five whole verifications
        decoded.append(speculative_decode(reference, draft, prompt, tokens, TreeShape(config.ttt_steps), LAYERS))
    tokens = sum(result.num_verified_tokens for result in decoded)
    accept_length = tokens / sum(result.num_verifications for result in decoded)
    assert accept_length == pytest.approx(last["accept_length"], rel=0.02)


@pytest.mark.parametrize("cut_short", [False, True], ids=["whole checkpoint", "truncated checkpoint"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(cut_short, make_config, caplog):
    whole, halves = make_config("whole"), make_config("halves")
    train(whole)

    def stop_after_five(**fields):
        if fields["done"] == 5:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(halves, progress=stop_after_five)
    newest = checkpoint_folders(folder_of(halves) / "checkpoints")[-1]
    assert newest.name == "step-000005"
    if cut_short:
        with open(newest / "part-00-of-01.safetensors", "r+b") as file:
            file.truncate(1000)
    with caplog.at_level(logging.INFO):
        train(halves)
    assert ("step-000005 is damaged" in caplog.text) == cut_short
    assert f"step {4 if cut_short else 5}, epoch" in caplog.text
    first, second = weights_of(whole), weights_of(halves)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    a, b = (read_journal(folder_of(config), "train") for config in (whole, halves))
    assert [entry["loss"] for entry in a] == [entry["loss"] for entry in b]


def test_a_stop_is_heeded_before_a_validation_and_after_the_last_one(make_config, monkeypatch):
    """No validation keeps a checkpoint waiting; those left out are made up for."""
    config = make_config(epochs=1.0, validate_every_steps=2, checkpoint_every_steps=2)
    real, written = BatchRunner.validate, []
    folder = folder_of(config)

    def stop_at_two(**fields):
        if fields["done"] == 2:
            signal.raise_signal(signal.SIGTERM)

    def stop_in_the_last_one(self, data, ranks, want_overlap=False):
        written.append(checkpoint_folders(folder / "checkpoints")[-1].name)
        if want_overlap:
            signal.raise_signal(signal.SIGINT)
        return real(self, data, ranks, want_overlap)

    with pytest.raises(KeyboardInterrupt):
        train(config, progress=stop_at_two)
    assert checkpoint_folders(folder / "checkpoints")[-1].name == "step-000002"
    assert read_journal(folder, "validation") == []
    monkeypatch.setattr(BatchRunner, "validate", stop_in_the_last_one)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert written == ["step-000002", "step-000004", "step-000004"]
    monkeypatch.setattr(BatchRunner, "validate", real)
    _, report = train(config)  # nothing left but that validation: speed and waiting are of the steps before
    assert [entry["step"] for entry in read_journal(folder, "validation")] == [2, 4]
    _, position = newest_whole_checkpoint(folder / "checkpoints", logging.getLogger())
    assert report.steps == 4 and position.seconds > 0
    assert report.tokens_per_second == pytest.approx(position.tokens / position.seconds, abs=0.1)
    assert report.wait_share == pytest.approx(position.waited / position.seconds, abs=1e-4)


def test_resume_with_other_parameters_is_refused_by_name(make_config):
    train(make_config(epochs=1.0))
    with pytest.raises(UserError, match="learning_rate"):
        train(make_config(epochs=1.0, learning_rate=1e-4))


def test_nonfinite_steps_are_skipped_named_and_stop_the_run(make_config, monkeypatch, caplog):
    import eagle3_utils.draft.train as module

    real = module.BatchRunner.__call__

    def poisoned(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
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


def test_states_of_two_runs_are_trained_on_like_those_of_one(make_config, states, tmp_path):
    one = make_config("one", epochs=1.0)
    train(one)
    for split in ("train", "val"):
        reader = StoreReader(states / "hidden_states" / split)
        for number, folder in enumerate(("first", "second")):
            with StoreWriter(tmp_path / folder / "hidden_states" / split, reader.meta, shard_bytes=1 << 28) as writer:
                for index in range(number, len(reader), 2):
                    writer.add(reader.read(index))
    two = make_config("two", epochs=1.0, data_root=str(tmp_path / "first"), more_data=[str(tmp_path / "second")])
    train(two)
    curves = [[(e["loss"], e["tokens"]) for e in read_journal(folder_of(config), "train")] for config in (one, two)]
    assert curves[0] == curves[1] and len(curves[0]) > 2
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one).values(), weights_of(two).values(), strict=True))
