"""The probe's figures: pure functions from dumps and references to a measured number, a threshold and a verdict.

T tokens, L auxiliary layers, H hidden size, V vocabulary, n decoder layers (so n + 1 boundaries).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle3_utils.target import Target, target_logits

_SURELY_OWN, _MARGIN = 0.99, 0.02  # cosines: see stray_rows


@dataclass(frozen=True)
class Gate:
    """One check: what was measured, what it had to be, and whether it was."""

    name: str
    measured: str
    threshold: str
    passed: bool
    detail: str = ""

    @property
    def verdict(self) -> str:
        return "pass" if self.passed else "FAIL"


def row_cosines(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cosine of each pair of rows, float32 [T], of two [T, H] tensors."""
    return torch.nn.functional.cosine_similarity(one.float(), other.float(), dim=-1)


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference over that of `other`: scale counts, unlike in a cosine."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-12))


def content_problem(dump, input_ids: list[int], num_aux: int, target: Target, dtype: torch.dtype) -> str | None:
    """The first thing wrong with a dump's ids, shapes, dtype or values; None when it is sound."""
    num_tokens, hidden_size = len(input_ids), target.hidden_size
    if dump.input_ids.tolist() != list(input_ids):
        return "token ids differ from those sent"
    for name, tensor, shape in (
        ("aux", dump.aux, (num_tokens, num_aux, hidden_size)),
        ("final", dump.final, (num_tokens, hidden_size)),
    ):
        if tuple(tensor.shape) != shape:
            return f"{name} is {tuple(tensor.shape)}, not {shape}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
        if not torch.isfinite(tensor.float()).all():
            return f"{name} has {int((~torch.isfinite(tensor.float())).sum())} values that are not finite"
        if not tensor.float().abs().sum(-1).all():
            return f"{name} has rows of zeros"
    return None


def logprob_errors(
    final: torch.Tensor,
    input_ids: torch.Tensor,
    served: list[float],
    lm_head: torch.Tensor,
    target: Target,
    model_dtype: torch.dtype,
    max_positions: int = 512,
) -> torch.Tensor:
    """|served - rebuilt| log-probability of the next token at up to `max_positions` positions spread over the sample.

    Returns float32 [min(T - 1, max_positions)]. Each position costs a row of V logits, here as on the server.

    Parameters
    ----------
    final : [T, H] post-norm states. input_ids : [T].
    served : the server's log-probabilities of input_ids[1:].
    lm_head : [V, H] as in the checkpoint. model_dtype : that in which the server multiplies; both are cast to it.
    """
    at = torch.linspace(0, len(input_ids) - 2, min(len(input_ids) - 1, max_positions)).round().long()
    logits_TV = target_logits(final[at].to(model_dtype), lm_head.to(model_dtype), target)
    rebuilt = torch.log_softmax(logits_TV, dim=-1).gather(1, input_ids[at + 1, None]).squeeze(1)
    return (rebuilt - torch.tensor(served)[at]).abs()


def match_boundaries(captured: torch.Tensor, reference: torch.Tensor, skip_first: int = 1) -> torch.Tensor:
    """Mean cosine of each captured tensor with each reference boundary, float32 [L, B].

    Parameters
    ----------
    captured : [T, L, H]. reference : [T, B, H].
    skip_first : leading tokens left out: the first one's massive activations look alike in most layers.
    """
    captured, reference = captured[skip_first:], reference[skip_first:]
    cosines = torch.empty(captured.shape[1], reference.shape[1])
    for layer in range(captured.shape[1]):
        for boundary in range(reference.shape[1]):
            cosines[layer, boundary] = row_cosines(captured[:, layer], reference[:, boundary]).mean()
    return cosines


def layer_gate(
    name: str, cosines: torch.Tensor, expected: list[int], min_cosine: float, labels: list[str] | None = None
) -> tuple[Gate, list[dict]]:
    """Which boundary each captured tensor really is, and whether that is the one asked for, clear of its neighbours.

    `cosines` [L, B] from `match_boundaries`; `expected` the boundary of each captured tensor. A tensor passes when its
    best match is the expected one, at `min_cosine` or more, and half the distance to 1 of any other.
    """
    rows, passed = [], True
    for number, boundary in enumerate(expected):
        best = int(cosines[number].argmax())
        value = float(cosines[number, boundary])
        others = torch.cat([cosines[number, :boundary], cosines[number, boundary + 1 :]])
        runner_up = float(others.max()) if len(others) else -1.0
        good = best == boundary and value >= min_cosine and (1 - value) <= 0.5 * (1 - runner_up)
        passed &= good
        label = labels[number] if labels else f"aux[{number}]"
        rows.append(
            {"tensor": label, "expected_boundary": boundary, "found_boundary": best, "cosine": round(value, 6),
             "next_best_cosine": round(runner_up, 6), "ok": good}
        )  # fmt: skip
    lowest = min(row["cosine"] for row in rows)
    highest_other = max(row["next_best_cosine"] for row in rows)
    found = ", ".join(f"{row['tensor']} = boundary {row['found_boundary']}" for row in rows)
    measured = f"cosine ≥ {lowest:.4f}, any other boundary ≤ {highest_other:.4f}"
    gate = Gate(name, measured, f"≥ {min_cosine}, best match = {expected}", passed, found)
    return gate, rows


def anchor_gate(
    hidden: torch.Tensor, final: torch.Tensor, embeddings: torch.Tensor, norm_weight: torch.Tensor, target: Target
) -> Gate:
    """The two ends of an all-boundaries dump: boundary 0 is the embedding, the norm of boundary n is the final state.

    Parameters
    ----------
    hidden : [T, n + 1, H]. final : [T, H]. embeddings : rows of the checkpoint's table for these tokens [T, H].
    norm_weight : [H] of the final RMS norm; models that store it minus 1 (Gemma) are recognised by the better match.
    """
    last = hidden[:, -1].float()
    normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + target.rms_norm_eps)
    start = float(row_cosines(hidden[:, 0], embeddings).mean())
    end_errors = [relative_error(normed * (norm_weight.float() + shift), final) for shift in (0.0, 1.0)]
    passed = start >= 0.999 and min(end_errors) <= 0.02 and hidden.shape[1] == target.num_layers + 1
    return Gate(
        "anchors",
        f"embedding cosine {start:.5f}, final-norm error {min(end_errors):.4f}, {hidden.shape[1]} boundaries",
        f"≥ 0.999, ≤ 0.02, {target.num_layers + 1}",
        passed,
        "boundary 0 against the embedding table, norm(boundary n) against the final state",
    )


class Likeness(NamedTuple):
    """How alike two dumps of one sequence are: mean and first percentile of the rows' cosines, share of stray rows."""

    mean: float
    low: float
    stray: float

    @classmethod
    def worst(cls, all_of_them: Iterable[Likeness]) -> Likeness:
        """The lowest cosines and the highest share."""
        means, lows, strays = zip(*all_of_them, strict=True)
        return cls(min(means), min(lows), max(strays))

    @property
    def text(self) -> str:
        """All three, for a report."""
        return f"cosine ≥ {self.mean:.5f} in the mean, {self.low:.5f} at 1 %, {self.stray:.2%} stray rows"

    def within(self, limits: Likeness) -> bool:
        """Whether all three are."""
        return self.mean >= limits.mean and self.low >= limits.low and self.stray <= limits.stray


def likeness(dump, reference) -> Likeness:
    """The worst of all `aux` layers and `final` of two dumps of one sequence.

    The mean tells another layer or precision, the others a few rows that belong to something else. A value that is
    not finite counts as the worst.
    """
    pairs = [(dump.aux[:, i], reference.aux[:, i]) for i in range(dump.aux.shape[1])] + [(dump.final, reference.final)]
    figures = []
    for one, other in pairs:
        own = row_cosines(one, other).nan_to_num(-1.0)
        stray = stray_rows(one, other, own, reference.input_ids[: len(own)]).float().mean()
        figures.append(Likeness(float(own.mean()), float(torch.quantile(own, 0.01)), float(stray)))
    return Likeness.worst(figures)


def stray_rows(states: torch.Tensor, reference: torch.Tensor, own: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Which rows are not the reference's own, bool [T]; states, reference [T, H], own: their cosines by row, ids [T].

    A row is the reference's own when its cosine is high, or higher than that with the row of any other token: a token
    whose experts changed with the batch is less like itself, but no more like another. Equal tokens near each other
    may have states nearly as alike as one token's in two batches.
    """
    stray, doubtful = torch.zeros(len(own), dtype=torch.bool), (own < _SURELY_OWN).nonzero().flatten()
    if not len(doubtful):
        return stray
    rows = torch.nn.functional.normalize(reference.float(), dim=-1)
    for part in doubtful.split(256):
        similar = torch.nn.functional.normalize(states[part].float(), dim=-1) @ rows.T  # [256, T]
        similar[ids[part, None] == ids] = -1.0
        stray[part] = own[part] < similar.nan_to_num(1.0).amax(-1) + _MARGIN
    return stray
