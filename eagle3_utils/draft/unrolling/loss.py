"""Losses over the draft vocabulary, computed in chunks: [rows, D] logits exist for one chunk at a time.

A supervised token is predicted by up to S slots, one per step, and all of them have the same teacher row. So the work
goes by teacher row: one row of teacher logits, S rows of draft logits. Gradients are taken while a chunk's logits
exist (they are linear in the scalar that backward brings), which costs three products with `lm_head` per position and
keeps nothing but two gradients.

M teacher rows · C of them in a chunk · S steps · H hidden · D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3_utils.draft.metrics import draft_overlap
from eagle3_utils.draft.unrolling.teacher import Teacher

LOSSES = ("soft", "hard", "lk_alpha", "lk_lambda")
_LAMBDA_DECAY = 3.0  # lk_lambda: weight of the KL part is exp(-3 · acceptance), as published
_TINY = 1e-12


@dataclass
class LossJob:
    """What one batch's loss needs besides the draft's hidden states and head.

    final [M, H] teacher states. pair_index int64 [M, S] (see plan.py). step_scale float32 [S]: weight of step i over
    its number of supervised positions. covered bool [M]: known coverage, or None. baseline_id: draft id of the most
    frequent token. chunk_bytes: memory for one chunk's logits.
    """

    teacher: Teacher
    final: torch.Tensor
    pair_index: torch.Tensor
    step_scale: torch.Tensor
    kind: str = "soft"
    covered: torch.Tensor | None = None
    baseline_id: int = -1
    want_overlap: bool = False
    chunk_bytes: int = 48 << 20


@dataclass
class LossDetails:
    """By-products, no gradient. loss float32 [M, S] (unscaled), correct bool [M, S], overlap float32 [M, S],
    covered bool [M], baseline_hit bool [M]."""

    loss: torch.Tensor
    correct: torch.Tensor
    overlap: torch.Tensor
    covered: torch.Tensor
    baseline_hit: torch.Tensor


def chunked_loss(hidden: torch.Tensor, head: torch.Tensor, job: LossJob) -> tuple[torch.Tensor, LossDetails]:
    """Σ over pairs of step_scale · loss. hidden [rows, H]: normed states of all steps end to end; head [D, H]."""
    num_rows, num_steps = job.pair_index.shape
    details = LossDetails(
        torch.zeros(num_rows, num_steps, device=hidden.device),
        torch.zeros(num_rows, num_steps, dtype=torch.bool, device=hidden.device),
        torch.zeros(num_rows, num_steps, device=hidden.device),
        torch.zeros(num_rows, dtype=torch.bool, device=hidden.device),
        torch.zeros(num_rows, dtype=torch.bool, device=hidden.device),
    )
    return _ChunkedLoss.apply(hidden, head, job, details), details


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, job, details):
        wants_gradient, wants_head_gradient = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        num_steps, num_hidden = job.pair_index.shape[1], len(hidden)
        chunk = max(1, job.chunk_bytes // (num_steps * len(head) * 4))
        hidden_gradient = hidden.new_zeros(num_hidden + 1, hidden.shape[1]) if wants_gradient else None
        head_gradient = torch.zeros(head.shape, device=head.device) if wants_head_gradient else None  # float32
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(job.pair_index), chunk):
            rows = slice(first, first + chunk)
            pairs = job.pair_index[rows]
            inputs = hidden.index_select(0, pairs.flatten().clamp(max=num_hidden - 1))  # [C·S, H]
            logits = (inputs @ head.T).float().unflatten(0, (-1, num_steps))  # [C, S, D]
            scaled, gradient = _chunk(logits, pairs < num_hidden, rows, job, details, wants_gradient)
            total += scaled
            if wants_gradient:
                gradient = gradient.flatten(0, 1).to(hidden.dtype)
                hidden_gradient[pairs.flatten()] = gradient @ head  # rows without a pair go to the spare last row
                if wants_head_gradient:
                    _accumulate(head_gradient, gradient, inputs)
        if wants_gradient:
            ctx.save_for_backward(hidden_gradient[:-1], head_gradient.to(head.dtype) if wants_head_gradient else None)
        return total

    @staticmethod
    def backward(ctx, upstream):
        hidden_gradient, head_gradient = ctx.saved_tensors
        head_gradient = None if head_gradient is None else head_gradient * upstream
        return hidden_gradient * upstream, head_gradient, None, None


def _accumulate(total: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
    """total [D, H] float32 += gradientᵀ [D, C·S] @ inputs [C·S, H], summed in float32 whatever the inputs' dtype."""
    if gradient.dtype == torch.float32:
        total.addmm_(gradient.T, inputs)
    elif gradient.is_cuda:
        total += torch.mm(gradient.T, inputs, out_dtype=torch.float32)
    else:
        total += gradient.T.float() @ inputs.float()


def _chunk(logits, has_pair, rows, job, details, wants_gradient):
    """One chunk: fills `details`, returns its scaled loss and, in the memory of `logits`, the scaled gradient."""
    known = None if job.covered is None else job.covered[rows]
    teacher = job.teacher(job.final[rows], known, job.want_overlap)
    details.covered[rows] = teacher.covered
    details.baseline_hit[rows] = teacher.covered & (teacher.best == job.baseline_id)
    details.correct[rows] = has_pair & teacher.covered[:, None] & (logits.argmax(-1) == teacher.best[:, None])
    if job.want_overlap:
        mass = 1.0 if teacher.mass is None else teacher.mass[:, None, None]
        overlap = draft_overlap(logits.softmax(-1), teacher.probabilities[:, None] * mass)
        details.overlap[rows] = torch.where(has_pair, overlap, 0.0)
    carries_loss = has_pair & teacher.covered[:, None]
    loss, gradient = loss_and_gradient(logits, teacher, job.kind, wants_gradient)
    loss = torch.where(carries_loss, loss, 0.0)
    details.loss[rows] = loss
    scale = carries_loss * job.step_scale  # [C, S]
    if wants_gradient:
        gradient.mul_(scale[..., None])
    return (loss * job.step_scale).sum(), gradient


def loss_and_gradient(logits, teacher, kind: str, wants_gradient: bool = True):
    """Loss [C, S] of logits [C, S, D] against the teacher's q [C, D], and its gradient [C, S, D] by the logits.

    soft: cross-entropy -Σ q log p. hard: -log p(argmax q). lk_alpha: -log A with A = Σ min(p, q). lk_lambda:
    λ KL(q‖p) + (1 - λ) TV(p, q), λ = exp(-3 A) held constant (LK losses, arXiv 2602.23881).
    """
    log_p = logits.log_softmax(-1)
    q = teacher.probabilities[:, None]  # [C, 1, D]
    if kind == "hard":
        best = teacher.best[:, None, None].expand(-1, logits.shape[1], 1)
        loss = -log_p.gather(-1, best).squeeze(-1)
        return loss, log_p.exp_().scatter_add_(-1, best, -torch.ones_like(loss)[..., None]) if wants_gradient else None
    cross_entropy = -(log_p @ teacher.probabilities[..., None]).squeeze(-1)  # [C, S]
    if kind == "soft":
        return cross_entropy, log_p.exp_().sub_(q) if wants_gradient else None
    p = log_p.exp_()
    acceptance = draft_overlap(p, q).clamp_(min=_TINY)
    below = p * (p < q)  # where min(p, q) moves with p
    acceptance_gradient = below.sub_(p * below.sum(-1, keepdim=True)) if wants_gradient else None  # dA / dlogits
    if kind == "lk_alpha":
        return -acceptance.log(), acceptance_gradient.div_(-acceptance[..., None]) if wants_gradient else None
    weight = (-_LAMBDA_DECAY * acceptance).exp()
    divergence = cross_entropy - torch.special.entr(q).sum(-1)  # KL(q‖p) = cross-entropy - entropy
    loss = weight * divergence + (1 - weight) * (1 - acceptance)
    if not wants_gradient:
        return loss, None
    weight = weight[..., None]
    return loss, p.sub_(q).mul_(weight).sub_(acceptance_gradient.mul_(1 - weight))
