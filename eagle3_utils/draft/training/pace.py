"""How fast a training is just now: over its latest steps, since a mean from the beginning hides that it slows down."""

from __future__ import annotations

from collections import deque
from typing import Any

from eagle3_utils.draft.training.checkpoint import Position
from eagle3_utils.draft.training.journal import without_nan

WINDOW = 20  # optimiser steps


class Pace:
    """Figures of the last `WINDOW` steps of this process, from its position after each."""

    def __init__(self, position: Position):
        self._marks = deque([_mark(position)], maxlen=WINDOW + 1)

    def figures(self, position: Position, total_steps: int) -> dict[str, float]:
        """To be called after every step: tokens_per_second, wait_share (of the time, for data), total_steps and
        eta_seconds. Time counts as `Position.seconds` does."""
        self._marks.append(_mark(position))
        steps, tokens, seconds, waited = (now - then for now, then in zip(self._marks[-1], self._marks[0], strict=True))
        return {
            "tokens_per_second": tokens / seconds,
            "wait_share": waited / seconds,
            "total_steps": total_steps,
            "eta_seconds": round((total_steps - position.step) * seconds / steps),
        }


def progress_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What `Stage.progress` says of a training step, by its entry in the journal."""
    return {
        "done": entry["step"],
        "total": entry["total_steps"],
        "unit": "steps",
        "rate": round(entry["tokens_per_second"], 1),
        "rate_unit": "tokens/s",
        "eta_seconds": entry["eta_seconds"],
        "loss": without_nan(round(entry["loss"], 4)),
    }


def _mark(position: Position) -> tuple[int, int, float, float]:
    return position.step, position.tokens, position.seconds, position.waited
