"""Figures of draft training: all panels are drawn, and the live ones take each other's place."""

import numpy as np
import pytest

from eagle3_utils.plots import draft as plots

TRAIN = [
    {"step": step, "loss": 9.0 - step, "learning_rate": 1e-3, "grad_norm": 2.0, "tokens_per_second": 500.0,
     "wait_share": 0.01, "accuracy": [0.4, 0.1]}
    for step in range(1, 6)
]  # fmt: skip
VALIDATION = [{"step": 4, "accuracy": [0.3, 0.2], "accept_length": 1.4}]


def test_curves_have_a_panel_for_everything_the_journal_holds():
    axes = plots.training_curves(TRAIN, VALIDATION).axes
    labels = [ax.get_ylabel() for ax in axes]
    assert len(axes) == 8 and all(labels)
    assert list(axes[0].lines[0].get_ydata()) == [8.0, 7.0, 6.0, 5.0, 4.0]
    by_step = axes[labels.index("validation accuracy by unroll step")].lines
    assert [line.get_ydata()[0] for line in by_step] == [0.3, 0.2]


def test_long_runs_are_thinned_and_empty_ones_drawn():
    entries = [TRAIN[0] | {"step": step} for step in range(10 * plots.MAX_POINTS)]
    assert len(plots.training_curves(entries, []).axes[0].lines[0].get_xdata()) <= plots.MAX_POINTS
    assert len(plots.training_curves([], []).axes) == 8


def test_coverage_says_the_share_inside_the_draft_vocabulary():
    ax = plots.vocabulary_coverage(np.array([6, 3, 1, 0]), 2).axes[0]
    assert ax.texts[0].get_text() == "2: 90.00%"


def test_live_curves_replace_each_other_and_wait_their_turn(monkeypatch):
    shown = []

    class Handle:
        update = staticmethod(lambda figure: shown.append("update"))

    monkeypatch.setattr(plots, "get_ipython", lambda: object())
    monkeypatch.setattr(plots, "display", lambda figure, display_id: shown.append("display") or Handle)
    now = [0.0]
    monkeypatch.setattr(plots.time, "monotonic", lambda: now[0])
    live = plots.LiveCurves(lambda kind: {"train": TRAIN, "validation": VALIDATION}[kind], every_seconds=10)
    for second in (1.0, 5.0, 12.0, 13.0, 30.0):
        now[0] = second
        live()
    assert shown == ["display", "update", "update"]


def test_outside_a_notebook_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(plots, "get_ipython", lambda: None)
    plots.LiveCurves(lambda kind: pytest.fail("read"))()
