"""Figures of the probe: which boundary each captured tensor is, and what the pilot's rate means for a corpus."""

import numpy as np
from matplotlib.figure import Figure

from eagle3_utils.plots import style


def layer_match(layer_cosines: dict[str, list[float]], expected: list[int]) -> Figure:
    """Distance of each captured tensor from every boundary of the model, on a log scale.

    Parameters
    ----------
    layer_cosines : captured tensor → mean cosine with boundary 0…n.
    expected : the boundary each tensor should be; marked by a vertical line.
    """
    title, label = "Captured tensors against every boundary", "boundary (0: embedding; vertical: expected)"
    fig, ax = style.figure(title, label, "1 − mean cosine")
    for number, (name, cosines) in enumerate(layer_cosines.items()):
        look = style.series(number)
        ax.plot(np.maximum(1e-7, 1 - np.asarray(cosines)), label=name, **look)
        ax.axvline(expected[number], color=style.GREY, linewidth=0.8, alpha=0.5, zorder=1)
    ax.set_yscale("log")
    style.legend(ax)
    return fig


def extraction_time(pilot: dict[str, float], num_tokens: int) -> Figure:
    """Hours of extraction against tokens, from the pilot's rate and its range; the corpus at hand is marked."""
    fig, ax = style.figure("Extraction time at the pilot's rate", "tokens", "hours")
    tokens = np.geomspace(max(1, num_tokens / 100), num_tokens * 100, 50)
    rates = [pilot[name] for name in ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high")]
    middle, low, high = (tokens / rate / 3600 for rate in rates)
    ax.fill_between(tokens, high, low, color=style.COLOURS[0], alpha=0.2, label="range over the pilot")
    ax.plot(tokens, middle, color=style.COLOURS[0], label=f"{rates[0]:,.0f} tokens/s")
    ax.plot([num_tokens], [num_tokens / rates[0] / 3600], style.MARKERS[0], color=style.COLOURS[1], label="this corpus")
    ax.set_xscale("log")
    ax.set_yscale("log")
    style.legend(ax)
    return fig
