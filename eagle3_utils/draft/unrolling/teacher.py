"""The teacher: the target's distribution at a position, from its stored final state and its own output head.

C rows · H hidden · V vocabulary · D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3_utils.draft.network import DraftModel
from eagle3_utils.target import Target, load_lm_head, target_logits


@dataclass
class TeacherOutput:
    """probabilities float32 [C, D]: softmax over the draft vocabulary's logits. best int64 [C]: their argmax.

    covered bool [C]: the argmax over the whole vocabulary has a draft id. mass float32 [C]: probability that the
    whole distribution gives to the draft vocabulary; None when it was not asked for.
    """

    probabilities: torch.Tensor
    best: torch.Tensor
    covered: torch.Tensor
    mass: torch.Tensor | None


class Teacher:
    """Output head of the target, its rows split into those with a draft id and the rest.

    lm_head [V, H]; target_ids int64 [D]. The target's own logit scale and soft-cap are applied.
    """

    def __init__(self, lm_head: torch.Tensor, target_ids: torch.Tensor, target: Target):
        outside = torch.ones(len(lm_head), dtype=torch.bool, device=lm_head.device)
        outside[target_ids] = False
        self.inside_head, self.outside_head, self.target = lm_head[target_ids], lm_head[outside], target

    @classmethod
    def for_model(cls, model: DraftModel, target: Target) -> Teacher:
        """The target's own head on the model's device, in the model's dtype."""
        weight = model.fc.weight
        return cls(load_lm_head(target).to(weight.device, weight.dtype), model.target_ids, target)

    def __call__(
        self, final: torch.Tensor, covered: torch.Tensor | None = None, want_mass: bool = False
    ) -> TeacherOutput:
        """final [C, H]: post-norm states. covered: known from an earlier visit, which spares the rest of the head."""
        inside = self._logits(final, self.inside_head)
        highest, best = inside.max(dim=-1)
        probabilities = inside.softmax(dim=-1)
        if not len(self.outside_head):
            everything = torch.ones_like(highest)
            return TeacherOutput(probabilities, best, everything.bool(), everything if want_mass else None)
        mass = None
        if covered is None or want_mass:
            outside = self._logits(final, self.outside_head)
            covered = highest >= outside.amax(dim=-1)
            if want_mass:
                mass = torch.sigmoid(inside.logsumexp(-1) - outside.logsumexp(-1))
        return TeacherOutput(probabilities, best, covered, mass)

    def _logits(self, final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return target_logits(final.to(head.dtype), head, self.target)
