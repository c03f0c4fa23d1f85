"""Batches through the unroll as configured; coverage is computed at a sample's first visit and reused."""

from dataclasses import replace

import pytest
import torch

from eagle3_utils.draft.training.batch_runner import BatchRunner
from eagle3_utils.draft.training.build import corpus_vocab, new_draft, token_counts
from eagle3_utils.draft.training.distributed import Ranks
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.states.dataset import PackedDataset
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.store import StoreWriter
from eagle3_utils.target import load_target

pytest_plugins = ["draft_runs"]  # fixtures


def build(config, states, draft_vocab_size=40):
    reader, target = StoreReader(states / "hidden_states" / "train"), load_target(config.model)
    counts, _ = token_counts(reader, target)
    vocab = corpus_vocab(counts, target, draft_vocab_size)
    model = new_draft(config, target, reader.meta.aux_layers, vocab)
    return reader, BatchRunner(model, Teacher.for_model(model, target), config, int(counts.argmax()))


def test_known_coverage_equals_a_first_visit_in_any_packing(make_config, states):
    reader, runner = build(make_config(draft_vocab_size=40), states)
    for batch in PackedDataset(reader, 64, seed=1).epoch(0):
        runner(runner.prepare(batch))
    known = dict(runner._coverage)
    assert set(known) == set(reader.ids)
    assert 0 < sum(int(part.sum()) for part in known.values()) < sum(len(part) for part in known.values())
    repacked = next(iter(PackedDataset(reader, 256, seed=2).epoch(0)))
    cached = runner(runner.prepare(repacked))
    runner._coverage.clear()
    fresh = runner(runner.prepare(repacked))
    assert torch.equal(cached.covered, fresh.covered)
    assert torch.equal(cached.counts.as_tensor(), fresh.counts.as_tensor())


def test_loss_step_weights_and_rows_at_once_are_those_configured(make_config, states):
    changes = {"loss": "hard", "step_weight_decay": 0.5, "max_rows_at_once": 16}
    reader, runner = build(make_config(draft_vocab_size=40, **changes), states)
    packed = next(iter(PackedDataset(reader, 64).epoch(0)))
    plan = plan_unroll(packed.loss_mask, packed.cu_seqlens, packed.final_index, 3)
    batch = runner.prepare(packed)
    assert len(batch.parts) == -(-len(plan.rows) // 16) > 1
    options = UnrollOptions((1.0, 0.5, 0.25), "hard")
    plain = training_time_test(runner.model, packed, plan, runner.teacher, options)
    assert float(runner(batch).loss.detach()) == pytest.approx(float(plain.loss.detach()), rel=1e-5)


def test_a_step_on_encoded_states_is_one_on_decoded_states(make_config, states, tmp_path):
    reader, runner = build(make_config(draft_vocab_size=40), states)
    with StoreWriter(tmp_path / "fp8", replace(reader.meta, codec="fp8")) as writer:
        for index in range(len(reader)):
            writer.add(reader.read(index))
    dataset, results = PackedDataset(StoreReader(tmp_path / "fp8"), 128), []
    for encoded in (False, True):
        dataset.encoded = encoded
        batch = runner.prepare(dataset.load(dataset.plan(0)[0]))
        assert batch.packed.aux.dtype == (torch.uint8 if encoded else torch.bfloat16)
        runner.forget_coverage()
        results.append(runner(batch))
    assert torch.equal(results[0].loss, results[1].loss)
    assert torch.equal(results[0].counts.as_tensor(), results[1].counts.as_tensor())


def test_validation_adds_up_over_batches_and_leaves_no_gradient(make_config, states):
    reader, runner = build(make_config(draft_vocab_size=40), states)
    ranks = Ranks(0, 1, torch.device("cpu"))
    small, large = (
        runner.validate(PackedDataset(reader, tokens, shuffle=False, prepare=runner.prepare), ranks, want_overlap=True)
        for tokens in (64, 256)
    )
    torch.testing.assert_close(small.as_tensor(), large.as_tensor(), atol=1e-3, rtol=1e-5)
    supervised = sum(int(reader.read(index).loss_mask[1:].sum()) for index in range(len(reader)))
    assert int(small.supervised[0]) == supervised and runner.model.fc.weight.grad is None
