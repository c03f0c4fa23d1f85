"""Losses over the draft vocabulary, computed in chunks: [rows, D] logits exist for one chunk at a time.

A supervised token is predicted by up to S slots, one per step, and all of them have the same teacher row. So the work
goes by teacher row: one row of teacher logits, S rows of draft logits. Gradients are taken while a chunk's logits
exist (they are linear in the scalar that backward brings), which costs three products with `lm_head` per position and
keeps nothing but two gradients, that by the hidden states in the place of these.

M teacher rows · C of them in a chunk · S steps · H hidden · D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3_utils.draft.metrics import draft_overlap
from eagle3_utils.draft.modules.fused import add_weight_gradient, fused
from eagle3_utils.draft.unrolling.teacher import Teacher

LOSSES = ("soft", "hard", "lk_alpha", "lk_lambda")
_LAMBDA_DECAY = 3.0  # lk_lambda: weight of the KL part is exp(-3 · acceptance), as published
_TINY = 1e-12


@dataclass(frozen=True)
class UnrollOptions:
    """step_weights: one per step, S of them. loss: one of `LOSSES`. want_overlap costs the whole target head.
    baseline_id: draft id of the most frequent token. chunk_bytes: memory for one chunk's logits. head_gradient_at_once:
    add it to the head's `.grad` right away, as the loss is taken, instead of keeping one of that size more until
    `backward`."""

    step_weights: tuple[float, ...]
    loss: str = "soft"
    want_overlap: bool = False
    baseline_id: int = -1
    chunk_bytes: int = 48 << 20
    head_gradient_at_once: bool = False


@dataclass
class LossJob:
    """What one batch's loss needs besides the draft's hidden states and head.

    final [M, H] teacher states. pair_index int64 [M, S] (see plan.py). step_scale float32 [S]: weight of step i over
    its number of supervised positions. covered bool [M]: known coverage, or None.
    """

    teacher: Teacher
    final: torch.Tensor
    pair_index: torch.Tensor
    step_scale: torch.Tensor
    covered: torch.Tensor | None
    options: UnrollOptions


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
    """Σ over pairs of step_scale · loss.

    hidden [rows + 1, H]: normed states of all steps end to end, then zeros, where places without a pair point. Where
    gradients are wanted it is overwritten by its own. head [D, H].
    """
    num_rows, num_steps = job.pair_index.shape
    details = LossDetails(
        torch.zeros(num_rows, num_steps, device=hidden.device),
        torch.zeros(num_rows, num_steps, dtype=torch.bool, device=hidden.device),
        torch.zeros(num_rows, num_steps, device=hidden.device),
        torch.zeros(num_rows, dtype=torch.bool, device=hidden.device),
        torch.zeros(num_rows, dtype=torch.bool, device=hidden.device),
    )
    head = head if torch.is_grad_enabled() else head.detach()  # else `needs_input_grad` would ask for its gradient
    return _ChunkedLoss.apply(hidden, head, job, details), details


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, job, details):
        wants_gradient, wants_head_gradient = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        at_once = job.options.head_gradient_at_once and wants_head_gradient
        head_gradient = torch.zeros_like(head) if wants_head_gradient and not at_once else None
        outside = job.teacher.outside(job.final, job.covered, job.options.want_overlap)
        chunk = max(1, job.options.chunk_bytes // (job.pair_index.shape[1] * len(head) * 4))
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(job.pair_index) if len(hidden) > 1 else 0, chunk):
            rows = slice(first, first + chunk)
            loss, inputs, gradient = _chunk(hidden, head, outside, rows, job, details, wants_gradient)
            total += loss
            if at_once:
                add_weight_gradient(head, gradient, inputs)
            elif wants_head_gradient:
                head_gradient.addmm_(gradient.T, inputs)
            del inputs, gradient  # before the next chunk's logits
        if wants_gradient:
            has_pair = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
            has_pair[job.pair_index.flatten()] = True
            hidden.masked_fill_(~has_pair[:, None], 0.0)
        ctx.gradients = [hidden if wants_gradient else None, head_gradient]
        return total

    @staticmethod
    def backward(ctx, upstream):
        hidden_gradient, head_gradient = ctx.gradients
        ctx.gradients = None  # so that the head's gradient becomes `.grad` without a copy
        head_gradient = None if head_gradient is None else head_gradient.mul_(upstream)
        return hidden_gradient.mul_(upstream), head_gradient, None, None


def _chunk(hidden, head, outside, rows: slice, job: LossJob, details: LossDetails, wants_gradient: bool):
    """The scaled loss of some teacher rows, scalar; fills `details`. For the head's gradient: the hidden states
    [C·S, H] and the gradient by their logits [C·S, D]; that by the hidden states takes their place."""
    pairs = job.pair_index[rows]  # each hidden state is in one pair at most
    inputs = hidden.index_select(0, pairs.flatten())  # [C·S, H]
    logits = (inputs @ head.T).unflatten(0, (-1, pairs.shape[1]))  # [C, S, D]
    teacher = job.teacher(job.final[rows], outside.rows(rows))
    loss = _loss_of(logits, teacher, pairs < len(hidden) - 1, rows, job, details, wants_gradient)
    gradient = logits.flatten(0, 1)  # now in their place
    if wants_gradient:
        hidden[pairs.flatten()] = gradient @ head
    return loss, inputs, gradient


def _loss_of(logits, teacher, has_pair, rows: slice, job: LossJob, details: LossDetails, wants_gradient: bool):
    """The scaled loss of logits [C, S, D]; fills `details`. The gradient takes the place of the logits."""
    carries_loss = has_pair & teacher.covered[:, None]
    details.covered[rows] = teacher.covered
    details.baseline_hit[rows] = teacher.covered & (teacher.best == job.options.baseline_id)
    if job.options.want_overlap:
        mass = 1.0 if teacher.mass is None else teacher.mass[:, None, None]
        overlap = draft_overlap(logits.float().softmax(-1), teacher.probabilities[:, None] * mass)
        details.overlap[rows] = torch.where(has_pair, overlap, 0.0)
    scale = carries_loss * job.step_scale  # [C, S]
    terms = _LOSS_TERMS[job.options.loss]
    loss, best = terms(logits, teacher.probabilities, teacher.best, scale, wants_gradient)
    details.correct[rows] = carries_loss & (best == teacher.best[:, None])
    loss = torch.where(carries_loss, loss, 0.0)
    details.loss[rows] = loss
    return (loss * job.step_scale).sum()


def _terms_of(kind: str):
    """(logits [C, S, D], q [C, D], argmax of q [C], scale [C, S], whether to) -> loss and argmax [C, S]; the scaled
    gradient by the logits is written over them, if wanted."""

    def terms(logits, q, best, scale, wants_gradient):
        chosen = logits.argmax(-1)
        loss, gradient = loss_and_gradient(logits.float(), q, best, kind, wants_gradient)
        if wants_gradient:
            logits.copy_(gradient.mul_(scale[..., None]))
        return loss, chosen

    terms.__name__ = f"terms_of_{kind}"
    return fused(terms)


def loss_and_gradient(logits, probabilities, best, kind: str, wants_gradient: bool = True):
    """Loss [C, S] of float32 logits [C, S, D] against the teacher's q [C, D], and its gradient [C, S, D] by them.

    soft: cross-entropy -Σ q log p. hard: -log p(argmax q). lk_alpha: -log A with A = Σ min(p, q). lk_lambda:
    λ KL(q‖p) + (1 - λ) TV(p, q), λ = exp(-3 A) held constant (LK losses, arXiv 2602.23881).
    """
    log_p = logits.log_softmax(-1)
    q = probabilities[:, None]  # [C, 1, D]
    if kind == "hard":
        best = best[:, None, None].expand(-1, logits.shape[1], 1)
        loss = -log_p.gather(-1, best).squeeze(-1)
        return loss, log_p.exp_().scatter_add_(-1, best, -torch.ones_like(loss)[..., None]) if wants_gradient else None
    cross_entropy = -_dot(log_p, probabilities)  # [C, S]
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


def _dot(log_p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Σ_v q log p: [C, S, D] and [C, D] -> [C, S]; as a sum where it is compiled into one kernel with the rest."""
    if log_p.is_cuda:
        return (log_p * q[:, None]).sum(-1)
    return (log_p @ q[..., None]).squeeze(-1)


_LOSS_TERMS = {kind: _terms_of(kind) for kind in LOSSES}
