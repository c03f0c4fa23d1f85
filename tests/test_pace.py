"""Pace: of the latest steps alone."""

import math

import pytest

from eagle3_utils.draft.training.checkpoint import Position
from eagle3_utils.draft.training.pace import WINDOW, Pace, progress_of


def test_speed_waiting_and_time_left_are_those_of_the_latest_steps():
    """A hundred steps of 1 s, then slow ones of 10 s, half of it waiting; each of 50 tokens."""
    position = Position(step=7, tokens=1000, seconds=33.0, waited=5.0)  # resumed: none of it counts
    pace = Pace(position)
    for step in range(100 + WINDOW):
        slow = step >= 100
        position.step += 1
        position.tokens += 50
        position.seconds += 10.0 if slow else 1.0
        position.waited += 5.0 if slow else 0.0
        figures = pace.figures(position, total_steps=207)
        if step in (0, 99):
            assert figures["tokens_per_second"] == pytest.approx(50) and figures["wait_share"] == 0
    assert figures["tokens_per_second"] == pytest.approx(5) and figures["wait_share"] == pytest.approx(0.5)
    assert figures["eta_seconds"] == 10 * (207 - 127) and figures["total_steps"] == 207


def test_progress_of_a_step_whose_loss_is_not_finite_has_none():
    entry = {"step": 3, "total_steps": 9, "tokens_per_second": 12.34, "eta_seconds": 60, "loss": math.nan}
    assert progress_of(entry) == {"done": 3, "total": 9, "unit": "steps", "rate": 12.3, "rate_unit": "tokens/s",
                                  "eta_seconds": 60, "loss": None}  # fmt: skip
    assert progress_of(entry | {"loss": 1.23456})["loss"] == 1.2346
