"""Losses: gradients against autograd on plain formulas; chunks change nothing; a frozen head costs no gradient."""

import pytest
import torch
from draft_reference import random_batch, small_model, unroll

from eagle3_utils.draft.unroll import unrolled_hidden
from eagle3_utils.draft.unrolling.attention import eager_attention


@pytest.mark.parametrize("kind", ["soft", "hard", "lk_alpha", "lk_lambda"])
def test_each_loss_has_the_gradient_autograd_gives(kind):
    model, head = small_model()
    batch = random_batch([12, 20])
    result, plan = unroll(model, head, batch, num_steps=2, loss=kind)
    result.loss.backward()
    ours = model.lm_head.weight.grad.clone()
    model.zero_grad()
    outputs = torch.cat(unrolled_hidden(model, batch, plan, eager_attention(plan)))
    total = 0.0
    for row, pairs in enumerate(plan.pair_index.tolist()):
        teacher = head @ batch.final[row]
        if not model.t2d[teacher.argmax()]:
            continue
        q = teacher[model.target_ids].softmax(0)
        for step, pair in enumerate(pairs):
            if pair < plan.num_hidden:
                p = (model.lm_head.weight @ outputs[pair]).softmax(0)
                total = total + 0.8**step / plan.num_supervised[step] * plain_loss(p, q, kind)
    total.backward()
    assert float(result.loss.detach()) == pytest.approx(float(total), abs=1e-5)
    torch.testing.assert_close(ours, model.lm_head.weight.grad, atol=1e-5, rtol=1e-4)


def plain_loss(p, q, kind):
    acceptance = torch.minimum(p, q).sum()
    if kind == "soft":
        return -(q * p.log()).sum()
    if kind == "hard":
        return -p[q.argmax()].log()
    if kind == "lk_alpha":
        return -acceptance.log()
    weight = torch.exp(-3 * acceptance.detach())
    return weight * (q * (q / p).log()).sum() + (1 - weight) * 0.5 * (p - q).abs().sum()


def test_chunk_size_changes_nothing():
    model, head = small_model()
    batch = random_batch([40, 25])
    results = []
    for chunk_bytes in (1, 2000, 1 << 30):
        model.zero_grad()
        result, _ = unroll(model, head, batch, chunk_bytes=chunk_bytes, want_overlap=True)
        result.loss.backward()
        results.append(
            (result.loss.detach(), result.counts.as_tensor(), model.fc.weight.grad, model.lm_head.weight.grad)
        )
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_overlap_counts_the_targets_whole_distribution():
    model, head = small_model()
    batch = random_batch([16])
    result, plan = unroll(model, head, batch, 1, want_overlap=True)
    hidden = unrolled_hidden(model, batch, plan, eager_attention(plan))[0]
    expected = 0.0
    for row, (pair,) in enumerate(plan.pair_index.tolist()):
        if pair < plan.num_hidden:
            p, q = model.lm_head(hidden[pair]).softmax(0), (head @ batch.final[row]).softmax(0)
            expected += float(torch.minimum(p, q[model.target_ids]).sum())
    assert float(result.counts.overlap[0]) == pytest.approx(expected, abs=1e-4)


def test_frozen_head_gets_no_gradient_and_changes_no_other():
    model, head = small_model()
    batch = random_batch([20])
    unroll(model, head, batch)[0].loss.backward()
    trained = model.fc.weight.grad.clone()
    model.zero_grad()
    model.lm_head.weight.requires_grad_(False)
    unroll(model, head, batch)[0].loss.backward()
    assert model.lm_head.weight.grad is None
    torch.testing.assert_close(model.fc.weight.grad, trained)
