"""A plan cut into groups of slots does the same work: loss, counts, every gradient."""

import weakref

import pytest
import torch
from draft_reference import PLAIN_LOGITS, random_batch, small_model

from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling import groups
from eagle3_utils.draft.unrolling.attention import eager_attention
from eagle3_utils.draft.unrolling.groups import unroll_in_groups
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher

STEPS = 4
OPTIONS = UnrollOptions(tuple(0.8**step for step in range(STEPS)), chunk_bytes=30000)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize("max_rows", [25, 40, 500])
def test_groups_of_slots_equal_the_whole(max_rows, changes):
    model, head = small_model(**changes)
    teacher, batch = Teacher(head, model.target_ids, PLAIN_LOGITS), random_batch([17, 3, 60, 1, 29])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, STEPS)
    whole = training_time_test(model, batch, plan, teacher, OPTIONS)
    whole.loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    parts = plan.split(max_rows)
    assert (len(parts) > 1) == (max_rows < 100) and max(len(part.rows) for part in parts) <= max_rows
    assert sum(part.num_hidden for part in parts) == plan.num_hidden
    attentions = [eager_attention(part) for part in parts]
    result = unroll_in_groups(model, batch, parts, teacher, OPTIONS, plan.num_supervised, None, attentions)
    result.loss.backward()
    assert float(result.loss.detach()) == pytest.approx(float(whole.loss.detach()), abs=1e-5)
    torch.testing.assert_close(result.counts.as_tensor(), whole.counts.as_tensor(), atol=1e-4, rtol=1e-5)
    assert torch.equal(result.covered, whole.covered)
    by_slot = dict(zip(whole.slots.tolist(), whole.correct.tolist(), strict=True))
    assert by_slot == dict(zip(result.slots.tolist(), result.correct.tolist(), strict=True))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_without_gradients_groups_only_count():
    model, head = small_model()
    teacher, batch = Teacher(head, model.target_ids, PLAIN_LOGITS), random_batch([40])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, STEPS)
    parts = plan.split(9)
    attentions = [eager_attention(part) for part in parts]
    with torch.no_grad():
        result = unroll_in_groups(model, batch, parts, teacher, OPTIONS, plan.num_supervised, None, attentions)
    assert result.counts.supervised.tolist() == plan.num_supervised.tolist()
    assert model.lm_head.weight.grad is None and not result.loss.requires_grad


def test_a_groups_graph_is_gone_before_the_next_begins(monkeypatch):
    losses = []

    def watched(*args):
        assert all(loss() is None for loss in losses)
        result = training_time_test(*args)
        losses.append(weakref.ref(result.loss))
        return result

    monkeypatch.setattr(groups, "training_time_test", watched)
    model, head = small_model()
    teacher, batch = Teacher(head, model.target_ids, PLAIN_LOGITS), random_batch([17, 3, 60])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, STEPS)
    parts = plan.split(25)
    attentions = [eager_attention(part) for part in parts]
    unroll_in_groups(model, batch, parts, teacher, OPTIONS, plan.num_supervised, None, attentions)
    assert len(losses) == len(parts) > 1
