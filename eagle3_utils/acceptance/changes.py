"""Why a served answer changed: was its first other token a close call of the target, or is something wrong?

    explain(model, prompts, runs)          # a row per pair of runs that should give the same answers

Greedy speculative decoding gives the target's own answer as long as arithmetic is exact. In bfloat16 a token's logits
move a little with whatever it is computed beside: other requests, or draft tokens to verify. Where two tokens are
nearly as good as each other the choice may flip, and the rest of the answer follows it. Two runs without a draft at
different concurrency show how much of that there is anyway. A change is a *close call* when, in float32, neither token
is further below the best one than rounding explains; anything else is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle3_utils.acceptance.heldout import first_difference
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.served import ServedRun

_STEPS = 8  # steps of bfloat16 at the size of the best logit that rounding may add up to (1.0 for a logit of 20)


@dataclass(frozen=True)
class Change:
    """The first token in which two answers differ.

    ``distance``: how far, in logits, the worse of both tokens is below the target's best there, in float32; None when
    one answer ends where the other goes on without a token of its own, or no target is at hand.
    """

    prompt_id: str
    index: int
    distance: float | None
    allowance: float | None

    @property
    def is_close_call(self) -> bool:
        return self.distance is not None and self.distance <= self.allowance


def explain(
    model: PreTrainedModel | None, prompts: Sequence[Prompt], runs: Sequence[ServedRun]
) -> list[dict[str, Any]]:
    """Rows: every run with a draft beside the one without at the same concurrency; those without beside the first.

    ``model``: the target in float32; without it changes are only counted.
    """
    by_id, plain = {prompt.id: prompt for prompt in prompts}, [run for run in runs if run.shape is None]
    pairs = [(plain[0], run) for run in plain[1:]]
    alone = {run.concurrency: run for run in plain}
    pairs += [(alone[run.concurrency], run) for run in runs if run.shape is not None and run.concurrency in alone]
    return [_row(first, second, changes(model, by_id, first, second)) for first, second in pairs]


def changes(
    model: PreTrainedModel | None, prompts: dict[str, Prompt], first: ServedRun, second: ServedRun
) -> list[Change]:
    """The answers that differ between two runs over the same prompts."""
    found = []
    for a, b in zip(first.answers, second.answers, strict=True):
        index = first_difference(a.output_ids, b.output_ids)
        if index is None:
            continue
        distance = allowance = None
        if model is not None and index < min(len(a.output_ids), len(b.output_ids)):
            known = [*prompts[a.prompt_id].input_ids, *a.output_ids[:index]]
            distance, allowance = _distance(model, known, [a.output_ids[index], b.output_ids[index]])
        found.append(Change(a.prompt_id, index, distance, allowance))
    return found


@torch.inference_mode()
def _distance(model: PreTrainedModel, known: list[int], token_ids: list[int]) -> tuple[float, float]:
    """How far the worse token is below the best, and how far rounding may put it."""
    logits_V = model(torch.tensor([known], device=model.device), logits_to_keep=1).logits[0, -1].float()
    best = float(logits_V.max())
    step = 2.0 ** (math.floor(math.log2(max(abs(best), 1e-6))) - 7)  # bfloat16 has 8 significant bits
    return best - float(logits_V[token_ids].min()), _STEPS * step


def _row(first: ServedRun, second: ServedRun, found: list[Change]) -> dict[str, Any]:
    distances = sorted(change.distance for change in found if change.distance is not None)
    return {
        "compared": f"{_name(second)} with {_name(first)}",
        "answers": len(first.answers),
        "changed": len(found),
        "close calls": sum(change.is_close_call for change in found),
        "unexplained": sum(not change.is_close_call for change in found),
        "median distance (logits)": distances[len(distances) // 2] if distances else None,
        "largest distance (logits)": distances[-1] if distances else None,
    }


def _name(run: ServedRun) -> str:
    return f"{run.draft}, {run.concurrency} in flight"
