"""Attention by the flash kernels: everything around them, with plain products in the kernels' place."""

import pytest
import torch
from draft_reference import MLA, PLAIN_LOGITS, random_batch, small_model, unroll

from eagle3_utils.draft.unroll import UnrollOptions
from eagle3_utils.draft.unrolling import flash, kernels
from eagle3_utils.draft.unrolling.attention import eager_attention
from eagle3_utils.draft.unrolling.groups import unroll_in_groups
from eagle3_utils.draft.unrolling.plan import UnrollPlan, plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher


def weights_of(query, keys, layout, lse=None, scale=1.0):
    """Causal weights [A, P, keys], each span's end on its keys' end; normalised, or by a log-sum-exp [P, A] given."""
    scores = torch.einsum("pae,kae->apk", query, keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)) * scale
    seen = torch.zeros(len(query), len(keys), dtype=torch.bool)
    query_bounds, key_bounds = layout.query_bounds.tolist(), layout.key_bounds.tolist()
    for number in range(len(query_bounds) - 1):
        (first, last), (lo, hi) = query_bounds[number : number + 2], key_bounds[number : number + 2]
        for place in range(first, last):
            seen[place, lo : hi - (last - 1 - place)] = True
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1).T if lse is None else lse
    return (scores - lse.T[..., None]).exp(), lse


def plain_forward(query, keys, values, layout, scale):
    weights, lse = weights_of(query, keys, layout, scale=scale)
    return torch.einsum("apk,kaf->paf", weights, values.repeat_interleave(query.shape[1] // keys.shape[1], 1)), lse


def plain_backward(upstream, query, attended, keys, values, lse, layout, scale):
    group = query.shape[1] // keys.shape[1]
    weights, _ = weights_of(query, keys, layout, lse, scale)
    by_values = torch.einsum("apk,paf->kaf", weights, upstream)
    by_weights = torch.einsum("paf,kaf->apk", upstream, values.repeat_interleave(group, 1))
    by_scores = weights * (by_weights - (upstream * attended).sum(-1).T[..., None]) * scale
    by_query = torch.einsum("apk,kae->pae", by_scores, keys.repeat_interleave(group, 1))
    by_keys = torch.einsum("apk,pae->kae", by_scores, query)
    return by_query, *(part.unflatten(1, (-1, group)).sum(2) for part in (by_keys, by_values))


@pytest.fixture
def plain_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "forward", plain_forward)
    monkeypatch.setattr(kernels, "backward", plain_backward)


def gradients_of(result, model):
    model.zero_grad(set_to_none=True)
    result.loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, MLA], ids=["llama", "mla"])
@pytest.mark.parametrize("lengths", [[90, 3, 200, 1, 29], [40]])
def test_loss_and_gradients_equal_those_of_plain_products(lengths, changes, plain_kernels):
    model, head = small_model(**changes)
    batch = random_batch(lengths)
    plain, _ = unroll(model, head, batch, attend=eager_attention)
    expected = gradients_of(plain, model)
    result, _ = unroll(model, head, batch, attend=lambda plan: flash.flash_attention(plan, "cpu"))
    assert float(result.loss.detach()) == pytest.approx(float(plain.loss.detach()), abs=1e-5)
    for name, gradient in gradients_of(result, model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("max_rows", [60, 500])
def test_gradients_that_groups_leave_at_step_0_keys_equal_those_of_plain_products(max_rows, plain_kernels):
    model, head = small_model()
    batch = random_batch([90, 3, 200, 1, 29])
    plain, plan = unroll(model, head, batch, attend=eager_attention)
    expected = gradients_of(plain, model)
    parts = plan.split(max_rows)
    attentions = [flash.flash_attention(part, "cpu") for part in parts]
    kinds = {isinstance(flash.span_layout(part).keys, slice) for part in parts}
    assert kinds == ({True, False} if max_rows == 60 else {False})  # neighbouring slots, and picked ones
    teacher, options = Teacher(head, model.target_ids, PLAIN_LOGITS), UnrollOptions(tuple(0.8**i for i in range(4)))
    model.zero_grad(set_to_none=True)
    result = unroll_in_groups(model, batch, parts, teacher, options, plan.num_supervised, None, attentions)
    result.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_each_part_of_a_plan_sees_the_keys_up_to_its_last_row(plain_kernels):
    batch = random_batch([150, 2, 230])
    whole = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 3)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(382, 2, 8, generator=generator) for _ in range(2))
    gathered = []
    for plan in whole.split(60):
        query = torch.randn(len(plan.rows), 4, 8, generator=generator)
        attended = flash.flash_attention(plan, "cpu")(query, keys, values, [], [], 0.5)
        torch.testing.assert_close(attended, eager_attention(plan)(query, keys, values, [], [], 0.5))
        gathered.append(not isinstance(flash.span_layout(plan).keys, slice))
    assert any(gathered) and not all(gathered)


def plan_of(rows, lengths):
    start = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(lengths))
    pairs = torch.zeros(0, 1, dtype=torch.int64)
    return UnrollPlan(torch.tensor(rows, dtype=torch.int64), [len(rows)], start, pairs, torch.zeros(1).double())


def test_places_of_rows_and_keys():
    layout = flash.span_layout(plan_of([12, 2, 15, 3], [6, 5, 7]))
    assert layout.query_bounds.tolist() == [0, 4, 10] and layout.key_bounds.tolist() == [0, 6, 13]  # to their ends
    assert layout.places.tolist() == [4, 0, 7, 1] and layout.rows.tolist() == [1, 3, 0, 0, 0, 0, 0, 2, 0, 0]
    assert layout.keys.tolist() == [0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15, 16, 17]
    assert (layout.longest_query, layout.longest_key) == (6, 7)


def test_a_span_far_from_its_documents_end_ends_at_its_last_row():
    layout = flash.span_layout(plan_of([12, 2, 15, 3], [6, 200]))
    assert layout.query_bounds.tolist() == [0, 4, 8] and layout.key_bounds.tolist() == [0, 6, 16]
    assert layout.keys == slice(0, 16)


def test_without_rows_there_is_nothing_to_attend():
    empty = torch.zeros(0, 4, 8)
    assert flash.flash_attention(plan_of([], [6]), "cpu")(empty, empty, empty, [], [], 1.0) is empty


def test_a_cpu_has_no_flash_kernels():
    assert not flash.has_flash(torch.device("cpu"), torch.bfloat16, 64)
    model, _ = small_model()
    assert flash.attention_for(model) is eager_attention
