"""Figures of draft training: the corpus under a draft vocabulary, curves, and what the best draft does by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eagle3_utils.plots.style import figure, grouped_bars, legend, series


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
    """Six panels over optimiser steps, from the entries of `read_journal`."""
    fig, axes = figure("Training", x="optimiser step", rows=2, columns=3)
    steps = [entry["step"] for entry in train]
    panels = (
        ("loss", "loss (nats, weighted over steps)"),
        ("learning_rate", "learning rate"),
        ("grad_norm", "gradient norm before clipping"),
        ("tokens_per_second", "tokens / s"),
    )
    for ax, (name, label) in zip((axes[0, 0], axes[1, 0], axes[1, 1], axes[1, 2]), panels, strict=True):
        ax.plot(steps, [entry[name] for entry in train], **(series(0) | {"marker": ""}))
        ax.set_ylabel(label)
    checked = [entry["step"] for entry in validation]
    num_steps = len(validation[0]["accuracy"]) if validation else 0
    for step in range(num_steps):
        values = [entry["accuracy"][step] for entry in validation]
        axes[0, 1].plot(checked, values, label=f"step {step}", **series(step))
    axes[0, 1].set_ylabel("validation accuracy by unroll step")
    legend(axes[0, 1])
    axes[0, 2].plot(checked, [entry["accept_length"] for entry in validation], **series(1))
    axes[0, 2].set_ylabel("simulated accept length (with bonus)")
    return fig


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
    fig, ax = figure(title, y="share of supervised positions", width=max(6.4, 1.5 * len(steps)))
    grouped_bars(ax, steps, {label: validation[name] for name, label in names.items()})
    ax.set_xlabel("step of the unroll", fontsize=9)
    ax.set_ylim(0, 1.25 * max(0.1, *(value for name in names for value in validation[name])))
    legend(ax, ncols=2, loc="upper right")
    return fig
