"""Figures of notebook 06: what the captured hidden states look like."""

import itertools

import numpy as np
from matplotlib.figure import Figure

from eagle3_utils.plots import style
from eagle3_utils.stats import StateStatistics


def norms_by_position(statistics: StateStatistics) -> Figure:
    """Mean norm per bucket of positions, one line per captured state."""
    values = [layer.norm_by_position for layer in statistics.layers]
    return _by_position(statistics, values, "Norm of the hidden state by position", "mean L2 norm")


def peaks_by_position(statistics: StateStatistics) -> Figure:
    """Largest entry per bucket of positions over the state's median one; "massive" begins at the dotted line."""
    values = [layer.peak_by_position for layer in statistics.layers]
    fig = _by_position(statistics, values, "Largest activation by position", "largest |entry| / median |entry|")
    look = {"color": style.GREY, "linewidth": 0.9, "linestyle": ":"}
    fig.axes[0].axhline(statistics.massive_ratio, label=f"massive: {statistics.massive_ratio:,.0f}", **look)
    style.legend(fig.axes[0])
    return fig


def norm_distribution(statistics: StateStatistics) -> Figure:
    """Median, quartiles and 1 % … 99 % of the norms, per captured state."""
    fig, ax = style.figure("Distribution of norms", "captured state", "L2 norm (box: quartiles; whiskers: 1–99 %)")
    boxes = [
        {"whislo": q[0], "q1": q[1], "med": q[2], "q3": q[3], "whishi": q[4], "fliers": []}
        for q in (layer.norm_quantiles for layer in statistics.layers)
    ]
    ax.bxp(boxes, showfliers=False, medianprops={"color": style.COLOURS[1], "linewidth": 1.6})
    ax.set_xticks(range(1, len(boxes) + 1), [layer.name for layer in statistics.layers])
    ax.set_yscale("log")
    return fig


def variance_by_dimension(statistics: StateStatistics) -> Figure:
    """Variance of every dimension, largest first: a steep start means that few dimensions carry the scale."""
    fig, ax = style.figure("Variance by dimension", "dimension, largest first", "variance")
    for index, layer in enumerate(statistics.layers):
        look = style.series(index) | {"marker": None}
        ax.plot(np.arange(1, len(layer.variance_H) + 1), np.sort(layer.variance_H)[::-1], label=layer.name, **look)
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.legend(ax)
    return fig


def spectrum(statistics: StateStatistics) -> Figure:
    """Share of the variance held by the leading directions, massive rows left out; effective rank in the legend."""
    title = "Spectrum of the covariance (massive rows left out)"
    fig, ax = style.figure(title, "leading directions", "share of the variance (cumulative)")
    for index, layer in enumerate(statistics.layers):
        shares = np.cumsum(layer.eigenvalues)
        look = style.series(index) | {"marker": None}
        name = f"{layer.name}: effective rank {layer.effective_rank:.0f}"
        ax.plot(np.arange(1, len(shares) + 1), shares, label=name, **look)
    ax.axhline(0.9, color=style.GREY, linewidth=0.8, linestyle=":", label="90 %")
    ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    style.legend(ax)
    return fig


def cosine_between_states(statistics: StateStatistics) -> Figure:
    """Mean cosine of the same token in two captured states."""
    names = [layer.name for layer in statistics.layers]
    fig, ax = style.figure("Cosine between captured states", width=4.2, height=3.6)
    image = ax.imshow(statistics.cosine_KK, cmap=style.SEQUENTIAL, vmin=min(0.0, statistics.cosine_KK.min()), vmax=1.0)
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    ax.grid(False)
    style.annotate_heatmap(ax, statistics.cosine_KK, middle=0.5)
    fig.colorbar(image, label="mean cosine", shrink=0.8)
    return fig


def _by_position(statistics: StateStatistics, values: list[list[float]], title: str, label: str) -> Figure:
    pairs = itertools.pairwise(statistics.position_edges)
    labels = [str(low) if high - low == 1 else f"{low}–{high - 1}" for low, high in pairs]
    fig, ax = style.figure(title, "position in the sequence (tokens)", label)
    for index, (layer, line) in enumerate(zip(statistics.layers, values, strict=True)):
        ax.plot(range(len(labels)), line, label=layer.name, **style.series(index))
    ax.set_xticks(range(len(labels)), labels, rotation=30)
    ax.set_yscale("log")
    style.legend(ax)
    return fig
