"""The teacher: the target's distribution at a position, from its stored final state and its own output head.

C rows · H hidden · V vocabulary · D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3_utils.draft.network import DraftModel
from eagle3_utils.target import Target, load_lm_head, target_logits

_OUTSIDE_BLOCK = 16384  # rows of the head at a time
_COVERAGE_ROWS = 1024  # states at a time


@dataclass
class TeacherOutput:
    """probabilities float32 [C, D]: softmax over the draft vocabulary's logits. best int64 [C]: their argmax.

    covered bool [C]: the argmax over the whole vocabulary has a draft id. mass float32 [C]: probability that the
    whole distribution gives to the draft vocabulary; None when it was not asked for, or is all.
    """

    probabilities: torch.Tensor
    best: torch.Tensor
    covered: torch.Tensor
    mass: torch.Tensor | None


@dataclass
class OutsideScores:
    """The target's logits of tokens without a draft id. highest, lse float32 [M]: maximum and log-sum-exp, None when
    not needed. covered bool [M]: known from an earlier visit, else None."""

    highest: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    covered: torch.Tensor | None = None

    def rows(self, rows: slice) -> OutsideScores:
        """The same of some rows."""
        parts = (self.highest, self.lse, self.covered)
        return OutsideScores(*(None if part is None else part[rows] for part in parts))


class Teacher:
    """Output head of the target, its rows split into those with a draft id and the rest.

    lm_head [V, H]; target_ids int64 [D]. The target's own logit scale and soft-cap are applied. The rest is read only
    at a sample's first visit; with `outside_on_host` it stays in host memory and is streamed then.
    """

    def __init__(self, lm_head: torch.Tensor, target_ids: torch.Tensor, target: Target, outside_on_host: bool = False):
        outside = torch.ones(len(lm_head), dtype=torch.bool, device=lm_head.device)
        outside[target_ids] = False
        self.inside_head, self.outside_head, self.target = lm_head[target_ids], lm_head[outside], target
        if outside_on_host and lm_head.is_cuda:
            self.outside_head = self.outside_head.cpu().pin_memory()

    @classmethod
    def for_model(cls, model: DraftModel, target: Target, outside_on_host: bool = False) -> Teacher:
        """The target's own head on the model's device, in the model's dtype."""
        weight = model.fc.weight
        head = load_lm_head(target).to(weight.device, weight.dtype)
        return cls(head, model.target_ids, target, outside_on_host)

    @torch.no_grad()
    def outside(
        self, final: torch.Tensor, covered: torch.Tensor | None = None, want_mass: bool = False
    ) -> OutsideScores:
        """One pass over the rows without a draft id for final [M, H]; none when coverage is known and enough."""
        if not len(self.outside_head) or (covered is not None and not want_mass):
            return OutsideScores(covered=covered)
        lowest = torch.full((len(final),), float("-inf"), device=final.device)
        highest, lse = lowest, lowest.clone()
        for block in self.outside_head.split(_OUTSIDE_BLOCK):
            logits = self._logits(final, block.to(final.device, non_blocking=True))
            highest = torch.maximum(highest, logits.amax(-1))
            if want_mass:
                lse = torch.logaddexp(lse, logits.logsumexp(-1))
        return OutsideScores(highest, lse if want_mass else None, covered)

    def coverage(self, final: torch.Tensor) -> torch.Tensor:
        """Whether the argmax over the whole vocabulary has a draft id, bool [M], for final [M, H]."""
        outside = self.outside(final)
        if outside.highest is None:
            return torch.ones(len(final), dtype=torch.bool, device=final.device)
        inside = [self._logits(part, self.inside_head).amax(-1) for part in final.split(_COVERAGE_ROWS)]
        return torch.cat(inside) >= outside.highest

    @torch.no_grad()
    def __call__(self, final: torch.Tensor, outside: OutsideScores) -> TeacherOutput:
        """final [C, H]: post-norm states; outside: of the same rows."""
        inside = self._logits(final, self.inside_head)
        highest, best = inside.max(dim=-1)
        covered, mass = outside.covered, None
        if covered is None:
            covered = torch.ones_like(best, dtype=torch.bool)
            if outside.highest is not None:
                covered = highest >= outside.highest
        if outside.lse is not None:
            mass = torch.sigmoid(inside.logsumexp(-1) - outside.lse)
        return TeacherOutput(inside.softmax(dim=-1), best, covered, mass)

    def _logits(self, final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return target_logits(final.to(head.dtype), head, self.target)
