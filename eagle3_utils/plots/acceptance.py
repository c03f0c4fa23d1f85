"""Figures of notebook 05: how much of a draft is accepted, by step, by source and by shape of the tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eagle3_utils.acceptance.intervals import ALL, Interval
from eagle3_utils.plots import style


def by_step(summary: dict[str, dict[str, Any]], figure: str = "conditional", baseline: bool = False) -> Figure:
    """One teacher-forced figure by drafting step, one line per source, with 95 % intervals.

    ``summary`` is `offline.summarise`'s; ``figure`` one of its lists by step. ``baseline`` adds the line of always
    drafting the most frequent token.
    """
    titles = {
        "conditional": ("Acceptance by position", "accepted, given the steps before"),
        "accuracy": ("Accuracy by step", "correct / all supervised positions"),
        "overlap": ("Acceptance under sampling", "mean Σ min(p, q)"),
        "out_of_vocab": ("Outside the draft vocabulary", "share of supervised positions"),
    }
    title, label = titles[figure]
    fig, ax = style.figure(f"{title} (teacher-forced)", "drafting step", label)
    for index, (source, figures) in enumerate(summary.items()):
        label = f"{source} ({figures['num_samples']:,} samples)"
        _line(ax, figures[figure], label, index, shift=0.06 * (index - (len(summary) - 1) / 2))
    if baseline:
        values = [interval.value for interval in summary[ALL]["baseline"]]
        look = {"color": style.GREY, "linestyle": ":", "linewidth": 1.2}
        ax.plot(range(len(values)), values, label="most frequent token", **look)
    ax.set_ylim(bottom=0)
    ax.set_xticks(range(len(next(iter(summary.values()))[figure])))
    style.legend(ax)
    return fig


def accept_length_by_source(figures: dict[str, dict[str, Interval]], title: str = "Accept length by source") -> Figure:
    """Bars by source, one group per way of finding it: {"decoded": {"all": Interval, …}, "simulated": {…}}."""
    sources = list(dict.fromkeys(source for by_source in figures.values() for source in by_source))
    missing = Interval(np.nan, np.nan, np.nan)
    found = {name: [by_source.get(source, missing) for source in sources] for name, by_source in figures.items()}
    fig, ax = style.figure(title, "source", "tokens per verification (1: none accepted)")
    style.grouped_bars(
        ax,
        sources,
        {name: [interval.value for interval in row] for name, row in found.items()},
        {name: [(interval.low, interval.high) for interval in row] for name, row in found.items()},
    )
    ax.axhline(1.0, color=style.GREY, linewidth=0.9, linestyle=":")
    style.legend(ax)
    return fig


def accepted_histogram(counts: Sequence[int], title: str = "Draft tokens accepted per verification") -> Figure:
    """Share of verifications that accepted 0, 1, … draft tokens."""
    fig, ax = style.figure(f"{title} (n = {sum(counts):,})", "draft tokens accepted", "share of verifications")
    shares = np.asarray(counts) / max(1, sum(counts))
    style.grouped_bars(ax, [str(number) for number in range(len(counts))], {"verifications": shares.tolist()})
    return fig


def accept_length_by_shape(lengths: dict[str, Interval], title: str = "Accept length by shape of the tree") -> Figure:
    """One bar per (steps, topk, draft tokens), with 95 % intervals."""
    fig, ax = style.figure(title, "steps · topk · draft tokens", "tokens per verification")
    bounds = {"replayed": [(interval.low, interval.high) for interval in lengths.values()]}
    style.grouped_bars(ax, list(lengths), {"replayed": [interval.value for interval in lengths.values()]}, bounds)
    return fig


def served_speed(rows: Sequence[dict[str, Any]]) -> Figure:
    """Output tokens/s by concurrency, without the draft and for every shape of it (rows of `served.table`)."""
    fig, ax = style.figure(
        "Served speed (drafts: steps · topk · draft tokens)", "requests in flight", "output tokens/s"
    )
    for index, name in enumerate(dict.fromkeys(row["draft"] for row in rows)):
        points = [(row["concurrency"], row["tokens/s"]) for row in rows if row["draft"] == name]
        ax.plot(*zip(*points, strict=True), label=name, **style.series(index))
    ax.set_xscale("log", base=2)
    ax.set_xticks(levels := sorted({row["concurrency"] for row in rows}), map(str, levels))
    ax.set_ylim(bottom=0)
    if not rows:
        ax.text(0.5, 0.5, "nothing was served", transform=ax.transAxes, ha="center", fontsize=style.TEXT_SIZE)
    style.legend(ax)
    return fig


def _line(ax, values: Sequence[Interval], name: str, index: int, shift: float) -> None:
    """A line with whiskers, moved aside by `shift` so that the whiskers of several stand side by side."""
    steps = np.arange(len(values)) + shift
    look = style.series(index)
    ax.plot(steps, [interval.value for interval in values], label=name, **look)
    ax.vlines(steps, [v.low for v in values], [v.high for v in values], color=look["color"], linewidth=0.9)
