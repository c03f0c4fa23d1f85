"""One look for every figure: readable on screen, in a report and printed in grey.

    fig, ax = figure("Accept length by source", x="source", y="accept length (tokens per verification)")
    fig, axes = figure("Norms", columns=2)          # axes: array [rows, columns] when there is more than one

Every series gets a colour **and** a marker or a hatch, so that nothing depends on colour alone. The colours are the
Okabe-Ito set: distinct for the common kinds of colour blindness. Figures are made without pyplot: no global state,
nothing to close, no window; a notebook shows one as the last expression of a cell or through ``display``.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "viridis"  # prints from dark to light
GREY = "#666666"
TEXT_SIZE = 9
DOTS_PER_INCH = 110  # on screen; files hold twice as many, for print


class NotebookFigure(Figure):
    """A Figure that draws itself in a notebook without pyplot being imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=2 * DOTS_PER_INCH)
        width, height = (round(inches * DOTS_PER_INCH) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


def figure(
    title: str = "",
    x: str = "",
    y: str = "",
    rows: int = 1,
    columns: int = 1,
    width: float | None = None,
    height: float | None = None,
) -> tuple[Figure, Axes | np.ndarray]:
    """An empty figure in the house style; ``x`` and ``y`` label every axis (give the unit).

    ``width`` and ``height`` are inches for the whole figure (default 4.6 × 3.0 per panel, 7.2 × 3.4 for a single one).
    Returns ``(figure, axes)``: one Axes, or an array [rows, columns] of them when there are several.
    """
    panels = rows * columns
    width = width or (7.2 if panels == 1 else 4.6 * columns)
    height = height or (3.4 if panels == 1 else 3.0 * rows)
    fig = NotebookFigure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(fig)
    grid = fig.subplots(rows, columns, squeeze=False)
    for ax in grid.flat:
        _dress(ax, x, y)
    if title and panels == 1:
        grid[0, 0].set_title(title, fontsize=TEXT_SIZE + 1, loc="left")
    elif title:
        fig.suptitle(title, fontsize=TEXT_SIZE + 2, x=0.01, ha="left")
    return fig, grid[0, 0] if panels == 1 else grid


def series(index: int) -> dict:
    """Keyword arguments of line number ``index`` for ``ax.plot``: colour, marker and line style together."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
        "markersize": 4,
        "linewidth": 1.4,
    }


def bar(index: int) -> dict:
    """Keyword arguments of bar group number ``index`` for ``ax.bar`` and ``ax.hist``: colour, hatch, edge."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[index % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.6,
    }


def grouped_bars(
    ax: Axes,
    categories: Sequence[str],
    groups: dict[str, Sequence[float]],
    intervals: dict[str, Sequence[tuple[float, float]]] | None = None,
    text_format: str = "{:.2f}",
) -> None:
    """Bars side by side: one cluster per category, one bar per group, its value above it.

    ``intervals`` gives (low, high) per bar of a group, in the data's unit, drawn as a whisker.
    """
    intervals = intervals or {}
    width = 0.8 / max(1, len(groups))
    base = np.arange(len(categories))
    whisker = {"ecolor": "black", "elinewidth": 0.9, "capsize": 2.5}
    for index, (name, values) in enumerate(groups.items()):
        values = np.asarray(values, dtype=float)
        centre = base + (index - (len(groups) - 1) / 2) * width
        bounds = np.asarray(intervals.get(name, [(v, v) for v in values]), dtype=float).reshape(-1, 2)
        errors = np.abs(bounds.T - values) if name in intervals else None
        ax.bar(centre, values, width * 0.94, yerr=errors, error_kw=whisker, label=name, **bar(index))
        for position, value, high in zip(centre, values, bounds[:, 1], strict=True):
            place = (position, max(value, high))
            ax.annotate(text_format.format(value), place, (0, 2), textcoords="offset points", ha="center", fontsize=7)
    ax.set_xticks(base, categories)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.14)


def legend(ax: Axes) -> None:
    """A frameless legend beside the axes, where it hides nothing; left out when there is a single series or none."""
    handles, _ = ax.get_legend_handles_labels()
    if len(handles) > 1:
        ax.legend(frameon=False, fontsize=TEXT_SIZE - 1, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def annotate_heatmap(ax: Axes, values_RC: np.ndarray, text_format: str = "{:.2f}", middle: float | None = None) -> None:
    """Write each cell's value into an ``imshow`` of the same [rows, columns]; white on dark cells, black on light."""
    middle = float(np.nanmean(values_RC)) if middle is None else middle
    for (row, column), value in np.ndenumerate(values_RC):
        colour = "white" if value < middle else "black"
        ax.text(column, row, text_format.format(value), ha="center", va="center", fontsize=7, color=colour)


def save(figures: Iterable[tuple[str, Figure]], folder: Path | str) -> list[Path]:
    """Write each ``(name, figure)`` as ``folder/name.png`` (for the report); returns the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, fig in figures:
        path = folder / f"{name}.png"
        fig.savefig(path, dpi=2 * DOTS_PER_INCH)
        paths.append(path)
    return paths


def svg_uri(fig: Figure) -> str:
    """The figure as a `data:` address of an SVG: vectors, so a page that holds it prints sharply."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def _dress(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=TEXT_SIZE)
    ax.set_ylabel(y, fontsize=TEXT_SIZE)
    ax.tick_params(which="both", labelsize=TEXT_SIZE - 1)
    ax.grid(True, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
