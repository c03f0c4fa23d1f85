"""Every acceptance figure, each defined once. Training and evaluation both read this file.

A *supervised position* of step i is a slot whose token t+2+i the model must predict (loss mask 1, same document).
The draft is *correct* there when its argmax, mapped to target ids, is the target's argmax over its whole vocabulary;
where that argmax is outside the draft vocabulary, it is wrong. A *chain* is a slot drafted step after step.

- `accuracy[i]`      correct / supervised positions of step i.
- `conditional[i]`   the same among chains that were correct at every step before i (acceptance by position).
- `accept_length`    expected tokens per verification of a chain of S steps, greedy, the bonus token included:
                     1 + c0 + c0·c1 + … with c = conditional; 1.0 means that every draft is rejected.
- `overlap[i]`       mean Σ_v min(p(v), q(v)), the acceptance probability under sampling at temperature 1;
                     q is the target's distribution over its whole vocabulary.
- `baseline[i]`      accuracy of always drafting the most frequent token of the training corpus.
- served or decoded accept length: Σ completion tokens / Σ verifications, the bonus token included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass
class StepCounts:
    """Sums over supervised positions, one number per step, float64 [S]; sums of ranks and batches add up."""

    supervised: torch.Tensor
    correct: torch.Tensor
    out_of_vocab: torch.Tensor  # the target's argmax has no draft id
    baseline: torch.Tensor  # positions where the most frequent token would have been correct
    loss: torch.Tensor
    overlap: torch.Tensor
    alive: torch.Tensor  # chains supervised up to this step and correct at every step before it
    accepted: torch.Tensor  # those of them that are correct at this step as well

    @classmethod
    def zeros(cls, num_steps: int, device: torch.device | str = "cpu") -> StepCounts:
        """No positions yet."""
        return cls.from_tensor(torch.zeros(len(fields(cls)), num_steps, dtype=torch.float64, device=device))

    def as_tensor(self) -> torch.Tensor:
        """float64 [8, S] where the counts are, for a sum over ranks."""
        return torch.stack([getattr(self, item.name).double() for item in fields(self)])

    @classmethod
    def from_tensor(cls, stacked: torch.Tensor) -> StepCounts:
        """The inverse of `as_tensor`."""
        return cls(*stacked.unbind(0))

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts.from_tensor(self.as_tensor() + other.as_tensor())

    def summary(self) -> dict[str, object]:
        """The figures above as plain numbers: lists by step, `accept_length` a float."""
        return {
            "supervised": [int(count) for count in self.supervised],
            "loss": _ratios(self.loss, self.supervised),
            "accuracy": _ratios(self.correct, self.supervised),
            "conditional": conditional_acceptance(self.accepted, self.alive),
            "accept_length": accept_length(conditional_acceptance(self.accepted, self.alive)),
            "overlap": _ratios(self.overlap, self.supervised),
            "out_of_vocab": _ratios(self.out_of_vocab, self.supervised),
            "baseline": _ratios(self.baseline, self.supervised),
        }


def chain_counts(correct: torch.Tensor, supervised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chains alive at each step, and those accepted there.

    correct, supervised: bool [N, S]. A chain is alive at step i when steps 0…i are supervised and 0…i-1 correct.
    Returns alive, accepted: float64 [S].
    """
    whole = supervised.cumprod(dim=1).bool()
    survived = torch.ones_like(correct)
    survived[:, 1:] = correct[:, :-1].cumprod(dim=1).bool()
    alive = whole & survived
    return alive.sum(0).double(), (alive & correct).sum(0).double()


def conditional_acceptance(accepted: Sequence[float], alive: Sequence[float]) -> list[float]:
    """accepted / alive by step; 0.0 where no chain got that far."""
    return _ratios(accepted, alive)


def accept_length(conditional: Sequence[float]) -> float:
    """Expected tokens per verification with the bonus token: 1 + c0 + c0·c1 + …"""
    length, reached = 1.0, 1.0
    for rate in conditional:
        reached *= float(rate)
        length += reached
    return length


def draft_overlap(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Σ_v min(p, q): probabilities [..., V] twice -> [...]."""
    return torch.minimum(draft, target).sum(-1)


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [float(a) / float(b) if float(b) else 0.0 for a, b in zip(numerators, denominators, strict=True)]
