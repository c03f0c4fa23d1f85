"""Figures of draft training: the corpus under a draft vocabulary, curves, and what the best draft does by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure

from eagle3_utils.plots.style import figure, grouped_bars, legend, series

MAX_POINTS = 2000  # of a curve


def vocabulary_coverage(token_counts: np.ndarray, draft_vocab_size: int) -> Figure:
    """Share of supervised tokens inside a draft vocabulary of the k most frequent ones; token_counts int [V]."""
    shares = np.sort(token_counts)[::-1].cumsum() / max(1, token_counts.sum())
    fig, ax = figure(
        "Tokens inside the draft vocabulary", x="draft vocabulary (tokens)", y="share of supervised tokens"
    )
    ax.plot(np.arange(1, len(shares) + 1), shares, **(series(0) | {"marker": ""}))
    ax.axvline(draft_vocab_size, color="black", linestyle=":", linewidth=1)
    covered = shares[min(draft_vocab_size, len(shares)) - 1]
    ax.annotate(f"{draft_vocab_size:,}: {covered:.2%}", (draft_vocab_size, covered), (6, -12), fontsize=8,
                textcoords="offset points")  # fmt: skip
    ax.set_xscale("log")
    return fig


def training_curves(train: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> Figure:
    """Eight panels over optimiser steps, from the entries of `read_journal`; a page wide, to be legible in print."""
    fig, axes = figure("Training", x="optimiser step", rows=4, columns=2, height=10)
    train = train[:: 1 + len(train) // MAX_POINTS]
    steps = [entry["step"] for entry in train]
    panels = (
        ("loss", "loss (nats, weighted over steps)"),
        ("learning_rate", "learning rate"),
        ("grad_norm", "gradient norm before clipping"),
        ("tokens_per_second", "tokens / s"),
        ("wait_share", "share of time waiting for data"),
    )
    for ax, (name, label) in zip((axes[0, 0], *axes[2:].flat), panels, strict=True):
        ax.plot(steps, [entry[name] for entry in train], **(series(0) | {"marker": ""}))
        ax.set_ylabel(label)
    checked = [entry["step"] for entry in validation]
    for ax, at, entries, marks, what in (
        (axes[0, 1], checked, validation, {}, "validation"),
        (axes[1, 1], steps, train, {"markevery": max(1, len(train) // 8)}, "training"),
    ):
        for step in range(len(entries[0]["accuracy"]) if entries else 0):
            values = [entry["accuracy"][step] for entry in entries]
            ax.plot(at, values, label=f"step {step}", **(series(step) | marks))
        ax.set_ylabel(f"{what} accuracy by unroll step")
        legend(ax)
    axes[1, 0].plot(checked, [entry["accept_length"] for entry in validation], **series(0))
    axes[1, 0].set_ylabel("simulated accept length (with bonus)")
    return fig


class LiveCurves:
    """`training_curves` of a run at work, drawn anew in the place of the last drawing; nothing outside a notebook.

    read: entries of a kind so far, as `read_journal`. Drawing takes at most a fiftieth of the time.
    """

    def __init__(self, read: Callable[[str], Sequence[dict[str, Any]]], every_seconds: float = 20.0):
        self.read, self.every_seconds = read, every_seconds
        self._next, self._display = 0.0, None

    def __call__(self) -> None:
        """Draw if it is time to."""
        began = time.monotonic()
        if began < self._next or get_ipython() is None:
            return
        drawn = training_curves(self.read("train"), self.read("validation"))
        if self._display is None:
            self._display = display(drawn, display_id=True)
        else:
            self._display.update(drawn)
        ended = time.monotonic()
        self._next = ended + max(self.every_seconds, 50 * (ended - began))


def acceptance_by_step(validation: dict[str, Any]) -> Figure:
    """Bars of one `StepCounts.summary()`: accuracy, conditional acceptance, overlap, baseline."""
    steps = [f"step {step}" for step in range(len(validation["accuracy"]))]
    names = {
        "accuracy": "accuracy",
        "conditional": "accepted | all before accepted",
        "overlap": "Σ min(p, q)",
        "baseline": "most frequent token",
    }
    title = f"Best draft on validation: accept length {validation['accept_length']:.2f}"
    fig, ax = figure(title, y="share of supervised positions", width=max(7.2, 1.5 * len(steps)))
    grouped_bars(ax, steps, {label: validation[name] for name, label in names.items()})
    ax.set_xlabel("step of the unroll", fontsize=9)
    legend(ax)
    return fig
