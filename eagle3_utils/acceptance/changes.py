"""Why a served answer changed: was its first other token a close call of the target, or is something wrong?

    explain(model, rounded, prompts, runs)     # a row per pair of runs that should give the same answers

Greedy speculative decoding gives the target's own answer as long as arithmetic is exact. In bfloat16 a token's logits
move a little with whatever it is computed beside: other requests, or draft tokens to verify. Where two tokens are
nearly as good as each other the choice may flip, and the rest of the answer follows it. Two runs without a draft at
different concurrency show how much of that there is anyway.

A change is a *close call* when, in float32, the worse of both tokens is no further below the best one than rounding
can put it. How far that is is measured (`rounding_allowance`): the same target in the served dtype reads served
answers, and at every token the distance between the two best logits is compared with that in float32. Rounding
happens in every layer, so this error hardly depends on the logit's own size; a rule of so many bfloat16 steps of the
best logit would be too strict where logits are small and too lenient where they are large. (SmolLM2-135M, 4,410 tokens:
root mean square 0.097, from 0.07 to 0.12 over best logits of 4 to 64; the largest 0.46.)

The allowance is six root mean squares. A served run makes tens of thousands of choices, a sweep hundreds of
thousands; among so many the largest of normal errors is five root mean squares, and the tails here are a little
heavier. A token that a faulty verification lets through is as far off as a wrong guess, mostly several logits.

Answers are compared up to their stop token: SGLang does not look for one in the verification that reaches the length
limit, so what is served may go on behind it (sglang/srt/managers/schedule_batch.py, `update_finish_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle3_utils.acceptance.forward import logits_of
from eagle3_utils.acceptance.heldout import first_difference
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.served import ServedAnswer, ServedRun
from eagle3_utils.acceptance.speculate import cut

ROUNDING = 1e-3  # logits of two float32 forwards of different lengths differ by less
_NUM_RMS = 6.0
_ANSWERS = 32  # whose tokens say how large the rounding is


@dataclass(frozen=True)
class Change:
    """The first token in which two answers differ.

    ``distance``: how far, in logits, the worse of both tokens is below the target's best there, in float32; None when
    one answer ends where the other goes on, or no target is at hand. ``allowance``: how far rounding may put it.
    """

    prompt_id: str
    index: int
    distance: float | None
    allowance: float | None

    @property
    def is_close_call(self) -> bool:
        return self.distance is not None and self.distance <= self.allowance

    def __str__(self) -> str:
        what = "one answer ends here" if self.distance is None else f"{self.distance:.3f} below the best"
        return f"{self.prompt_id}, token {self.index}: {what}"


def explain(
    model: PreTrainedModel | None,
    rounded: PreTrainedModel | None,
    prompts: Sequence[Prompt],
    runs: Sequence[ServedRun],
    stop_ids: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Rows: every run with a draft beside the one without at the same concurrency; those without beside the first.

    ``model``: the target in float32, ``rounded``: in the served dtype; without them changes are only counted.
    ``stop_ids``: tokens that end an answer.
    """
    runs = [replace(run, answers=[_to_its_stop(answer, stop_ids) for answer in run.answers]) for run in runs]
    by_id, plain = {prompt.id: prompt for prompt in prompts}, [run for run in runs if run.shape is None]
    pairs = [(plain[0], run) for run in plain[1:]]
    alone = {run.concurrency: run for run in plain}
    pairs += [(alone[run.concurrency], run) for run in runs if run.shape is not None and run.concurrency in alone]
    allowance = rounding_allowance(model, rounded, by_id, plain[0].answers) if model is not None and pairs else None
    return [_row(first, second, changes(model, by_id, first, second, allowance), allowance) for first, second in pairs]


def _to_its_stop(answer: ServedAnswer, stop_ids: Sequence[int]) -> ServedAnswer:
    return replace(answer, output_ids=cut(answer.output_ids, len(answer.output_ids), stop_ids))


def changes(
    model: PreTrainedModel | None,
    prompts: dict[str, Prompt],
    first: ServedRun,
    second: ServedRun,
    allowance: float | None = None,
) -> list[Change]:
    """The answers that differ between two runs over the same prompts, judged by ``allowance``."""
    pairs = list(zip(first.answers, second.answers, strict=True))
    indices = [first_difference(a.output_ids, b.output_ids) for a, b in pairs]
    found = [(a, b, index) for (a, b), index in zip(pairs, indices, strict=True) if index is not None]
    judged = [(a, b, index) for a, b, index in found if index < min(len(a.output_ids), len(b.output_ids))]
    distances: dict[str, float] = {}
    if model is not None:
        known = [[*prompts[a.prompt_id].input_ids, *a.output_ids[:index]] for a, _, index in judged]
        for number, logits_NV in logits_of(model, known, [1] * len(known)):
            a, b, index = judged[number]
            chosen = logits_NV[-1, [a.output_ids[index], b.output_ids[index]]]
            distances[a.prompt_id] = float(logits_NV.max() - chosen.min())
    return [Change(a.prompt_id, index, distances.get(a.prompt_id), allowance) for a, _, index in found]


def rounding_allowance(
    model: PreTrainedModel, rounded: PreTrainedModel, prompts: dict[str, Prompt], answers: Sequence[ServedAnswer]
) -> float:
    """How far below the best, in logits, the served dtype may put a token that it chooses; see the module.

    ``model``: the target in float32. ``rounded``: in the served dtype. 32 of the answers, evenly spread, are read.
    """
    answers = [answer for answer in answers if answer.output_ids]
    answers = answers[:: max(1, len(answers) // _ANSWERS)][:_ANSWERS]
    texts = [[*prompts[answer.prompt_id].input_ids, *answer.output_ids[:-1]] for answer in answers]
    counts = [len(answer.output_ids) for answer in answers]
    best = {index: logits_NV.topk(2, dim=-1) for index, logits_NV in logits_of(model, texts, counts)}
    errors = [
        (logits_NV.gather(1, best[index].indices) - best[index].values).diff(dim=1).flatten()
        for index, logits_NV in logits_of(rounded, texts, counts)
    ]
    return max(ROUNDING, _NUM_RMS * float(torch.cat(errors).square().mean().sqrt()))


def _row(first: ServedRun, second: ServedRun, found: list[Change], allowance: float | None) -> dict[str, Any]:
    distances = sorted(change.distance for change in found if change.distance is not None)
    unexplained = [change for change in found if not change.is_close_call]
    judged = allowance is not None
    return {
        "run": second.name,
        "compared with": first.name,
        "answers": len(first.answers),
        "changed": len(found),
        "close calls": len(found) - len(unexplained) if judged else None,
        "unexplained": len(unexplained) if judged else None,
        "median distance": distances[len(distances) // 2] if distances else None,
        "largest distance": distances[-1] if distances else None,
        "rounding allows": allowance,
        "first unexplained": str(unexplained[0]) if judged and unexplained else "",
    }
