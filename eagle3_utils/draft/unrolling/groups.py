"""The unroll a few thousand slots at a time: the same result in a fraction of the memory, for no more arithmetic.

Slots see each other only through the step-0 keys and values. So those are made once for all slots; then each group of
slots is unrolled and taken back to them, which frees its hidden states before the next group begins; at the end the
gradients that all groups left there go the rest of the way.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.unroll import PrefixStates, UnrollOptions, UnrollResult, prefix_states, training_time_test
from eagle3_utils.draft.unrolling.attention import Attention
from eagle3_utils.draft.unrolling.plan import UnrollPlan
from eagle3_utils.draft.unrolling.teacher import Teacher


def unroll_in_groups(
    model: DraftModel,
    batch,
    parts: list[UnrollPlan],
    teacher: Teacher,
    options: UnrollOptions,
    num_supervised: torch.Tensor,
    covered: torch.Tensor | None,
    attentions: list[Attention],
) -> UnrollResult:
    """As `training_time_test`, for the parts of one plan, each with its attention.

    num_supervised float64 [S]: positions to divide by.

    With gradients enabled the parts' share of them is in `.grad` when this returns; `loss.backward()` (of the loss
    itself, not of a multiple) adds the rest.
    """
    several = len(parts) > 1
    if covered is None and several:  # a part sees some teacher rows only
        covered = teacher.coverage(batch.final)
    options = replace(options, head_gradient_at_once=torch.is_grad_enabled() and several)
    prefix = prefix_states(model, batch)
    leaves = PrefixStates(*(t.detach().requires_grad_(t.requires_grad) for t in _tensors(prefix)))
    results = [
        _taken_back(training_time_test(model, batch, part, teacher, options, num_supervised, covered, attend, leaves))
        for part, attend in zip(parts, attentions, strict=True)
    ]
    total = sum(result.loss for result in results)
    if leaves.fused.requires_grad:
        gradients = [leaf.grad for leaf in _tensors(leaves)]
        total = _Rest.apply(total, gradients, *_tensors(prefix))
    joined = (torch.cat([getattr(result, name) for result in results]) for name in ("slots", "supervised", "correct"))
    counts = sum((result.counts for result in results[1:]), results[0].counts)
    return UnrollResult(total, counts, *joined, results[0].covered if covered is None else covered)


def _taken_back(result: UnrollResult) -> UnrollResult:
    """The result of a part whose gradients are where they belong, and whose graph, with all it refers to, is gone."""
    if result.loss.requires_grad:
        result.loss.backward()
    return replace(result, loss=result.loss.detach())


def _tensors(prefix: PrefixStates) -> list[torch.Tensor]:
    return [getattr(prefix, item.name) for item in fields(prefix)]


class _Rest(torch.autograd.Function):
    """A scalar whose gradient by the prefix states is already known."""

    @staticmethod
    def forward(ctx, total, gradients, *_prefix):
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx, upstream):
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients)
