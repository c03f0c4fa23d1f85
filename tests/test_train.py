"""Training end to end on a tiny random target: it learns, and an interrupted run equals an uninterrupted one."""

import logging
import signal
from types import SimpleNamespace

import pytest
import torch
from draft_runs import LAYERS, PROMPT, folder_of, train_until
from safetensors.torch import load_file

from eagle3_utils.acceptance.speculate import load_reference_model, speculative_decode
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.draft.export import export_draft, load_draft
from eagle3_utils.draft.train import Trainer, train
from eagle3_utils.draft.training.batch_runner import BatchRunner
from eagle3_utils.draft.training.checkpoint import (
    BEST_WEIGHTS,
    checkpoint_folders,
    newest_whole_checkpoint,
    training_tensors,
)
from eagle3_utils.draft.training.distributed import ONE_RANK
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.draft.training.schedule import StepSchedule
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
    tokens = sum(len(result.output_ids) - 1 for result in decoded)  # all but what prefill gives
    accept_length = tokens / sum(result.num_verifications for result in decoded)
    assert accept_length == pytest.approx(last["accept_length"], rel=0.02)


@pytest.mark.parametrize("cut_short", [False, True], ids=["whole checkpoint", "truncated checkpoint"])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(cut_short, make_config, caplog):
    whole, halves = make_config("whole"), make_config("halves")
    train(whole)

    train_until(halves, 5)
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

    def stop_in_the_last_one(self, data, ranks, want_overlap=False):
        written.append(checkpoint_folders(folder / "checkpoints")[-1].name)
        if want_overlap:
            signal.raise_signal(signal.SIGINT)
        return real(self, data, ranks, want_overlap)

    train_until(config, 2)
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


def test_with_other_parameters_a_finished_draft_gives_way_and_an_unfinished_one_stops_the_run(make_config, caplog):
    """What `eagle3 run … --from 04 --force` comes to, once and once again."""
    train(make_config(epochs=1.0))
    folder = folder_of(make_config())
    with caplog.at_level(logging.INFO):
        _, report = train(make_config(epochs=1.0, learning_rate=1e-4))
    assert "was made with learning_rate = 0.003, now it is 0.0001: training begins anew" in caplog.text
    assert report.steps == 4
    for draft, rate in ((folder, 1e-4), (folder.with_name("draft.old"), 3e-3)):
        assert max(entry["learning_rate"] for entry in read_journal(draft, "train")) == rate

    train_until(make_config(epochs=1.0), 2)
    with pytest.raises(
        UserError, match=r"unfinished training is here, made with learning_rate = 0\.003, now it is 0\."
    ):
        train(make_config(epochs=1.0, learning_rate=1e-4))
    assert train(make_config(epochs=1.0))[1].steps == 4


def test_a_training_begun_anew_is_not_taken_for_the_finished_one_before_it(make_config):
    """All its checkpoints are gone or damaged, its report is not."""
    config = make_config(epochs=1.0)
    train(config)
    best = (folder_of(config) / BEST_WEIGHTS).read_bytes()
    for path in checkpoint_folders(folder_of(config) / "checkpoints"):
        (path / "state.json").unlink()

    def stop(**fields):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(config, progress=stop)
    assert not (folder_of(config) / "report.json").exists()
    assert (folder_of(config).with_name("draft.old") / BEST_WEIGHTS).read_bytes() == best


def test_one_training_at_a_time_in_a_folder(make_config):
    config = make_config(epochs=1.0)

    def second(**fields):
        with pytest.raises(UserError, match=f"{folder_of(config)}: another training .*is at work here"):
            train(config)

    train(config, progress=second)
    train(config)


def test_too_few_samples_are_said_before_the_first_step(make_config):
    with pytest.raises(UserError, match="the train split has 8 samples: too few for steps of batches_per_step = 9"):
        Trainer(make_config(batches_per_step=9), ONE_RANK, LOG, lambda **fields: None)


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


def test_a_step_whose_loss_or_gradient_is_not_finite_changes_nothing(make_config, monkeypatch):
    """Two of them, with a good one between, are no two in a row."""
    real_call, real_optimise, changed = BatchRunner.__call__, Trainer._optimise, []

    def poisoned(self, *args, **kwargs):
        result = real_call(self, *args, **kwargs)
        if torch.is_grad_enabled() and len(changed) == 1:
            result.loss = result.loss + float("nan")  # its gradient is none the worse
        elif torch.is_grad_enabled() and len(changed) == 3:
            result.loss.register_hook(lambda upstream: upstream * float("nan"))
        return result

    def compared(self, batches):
        before = {name: tensor.clone() for name, tensor in training_tensors(self.model, self.optimizer).items()}
        entry = real_optimise(self, batches)
        after = training_tensors(self.model, self.optimizer)
        changed.append({name.split(".")[0] for name in after if not torch.equal(before[name], after[name])})
        return entry

    monkeypatch.setattr(BatchRunner, "__call__", poisoned)
    monkeypatch.setattr(Trainer, "_optimise", compared)
    config = make_config(epochs=1.25, max_nonfinite_in_a_row=2, validate_every_steps=1000)
    train(config)
    both = {"model", "optimizer"}
    assert changed == [both, set(), both, set(), both]
    figures = [(entry["loss"], entry["grad_norm"]) for entry in read_journal(folder_of(config), "train")]
    finite = [tuple(bool(torch.tensor(value).isfinite()) for value in pair) for pair in figures]
    assert finite == [(True, True), (False, True), (True, True), (True, False), (True, True)]
    assert "NaN" not in (folder_of(config) / "metrics.jsonl").read_text()


def test_rates_weight_decay_clipping_and_waiting_are_those_given(make_config, monkeypatch):
    real = StepSchedule.steps
    monkeypatch.setattr(StepSchedule, "steps", lambda *args: ((batches, 1000.0) for batches, _ in real(*args)))
    config = make_config(epochs=1.0, learning_rate=2e-3, warmup_fraction=0.5, weight_decay=0.25, max_grad_norm=0.125)
    trainer = Trainer(config, ONE_RANK, LOG, lambda **fields: None)
    assert (trainer.optimizer.weight_decay, trainer.optimizer.max_grad_norm) == (0.25, 0.125)
    _, report = trainer.run(SimpleNamespace(requested=False))
    rates = [entry["learning_rate"] for entry in read_journal(folder_of(config), "train")]
    assert rates == pytest.approx([1e-3, 2e-3, 2e-3, 1.1e-3])
    assert trainer.position.waited == 4000 and trainer.position.seconds > 4000
    assert report.wait_share == pytest.approx(4000 / trainer.position.seconds, abs=1e-4)


def test_weights_of_the_longest_validated_accept_length_are_kept(make_config, monkeypatch):
    lengths, weights = [1.2, 1.5, 1.3, 1.5], []

    def simulated(self, data, ranks, want_overlap=False):
        weights.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        figures = {"accept_length": lengths[len(weights) - 1], "accuracy": [0.1], "baseline": [0.1]}
        return SimpleNamespace(summary=lambda: figures)

    monkeypatch.setattr(BatchRunner, "validate", simulated)
    config = make_config(epochs=0.75, validate_every_steps=1)
    model, report = train(config)
    assert report.best_step == 2 and report.steps == 3 and len(weights) == 4
    for kept in (load_file(folder_of(config) / BEST_WEIGHTS), weights[3], model.state_dict()):
        assert all(torch.equal(kept[name], tensor) for name, tensor in weights[1].items())
    assert not torch.equal(weights[2]["fc.weight"], weights[1]["fc.weight"])


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
