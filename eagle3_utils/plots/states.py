"""Figures of notebook 03: what the codecs change, what they cost, and how fast the extraction ran."""

import numpy as np
from matplotlib.figure import Figure

from eagle3_utils.plots import style
from eagle3_utils.states.codec import CODECS, FINALS, CodecReport
from eagle3_utils.states.sizes import CorpusNumbers, state_bytes


def store_size(corpus: CorpusNumbers, hidden_size: int, num_aux: int, disk_free_bytes: int) -> Figure:
    """Bytes of the whole store for every codec, stacked by tensor, beside what the disk has free."""
    choices = [(codec, final) for codec in CODECS for final in FINALS]
    sizes = [state_bytes(corpus, hidden_size, num_aux, codec, final) for codec, final in choices]
    scale, unit = _unit(max(sum(size.values()) for size in sizes))
    fig, ax = style.figure("Size of the store by codec", "codec, rows with a final state", f"size ({unit})")
    bottom = np.zeros(len(choices))
    for index, name in enumerate(("aux", "final", "index")):
        heights = np.array([size[name] / scale for size in sizes])
        ax.bar(range(len(choices)), heights, 0.6, bottom=bottom, label=name, **style.bar(index))
        bottom += heights
    if disk_free_bytes / scale < 2 * bottom.max():
        ax.axhline(disk_free_bytes / scale, color=style.GREY, linestyle="--", label="free on disk")
    ax.set_xticks(range(len(choices)), [f"{codec}, {final}" for codec, final in choices])
    style.legend(ax)
    return fig


def codec_errors(report: CodecReport) -> Figure:
    """Relative error of every token, sorted, one line per captured state: the right end is the worst token."""
    fig, ax = style.figure(
        f"What {report.codec} changes", "tokens, best to worst (%)", "relative error ‖x′ − x‖ / ‖x‖ (%)"
    )
    for index, (name, errors) in enumerate(zip(report.layers, report.token_errors, strict=True)):
        if errors.size:
            look = style.series(index) | {"marker": None}
            ax.plot(np.linspace(0, 100, errors.size), 100 * np.sort(errors), label=name, **look)
    ax.set_ylim(bottom=0)
    style.legend(ax)
    return fig


def throughput(histories: dict[str, list[tuple[float, float]]]) -> Figure:
    """Tokens per second over time, one line per store."""
    fig, ax = style.figure("Extraction rate", "time since the start (s)", "tokens per second")
    for index, (name, history) in enumerate(histories.items()):
        if history:
            seconds, rates = zip(*history, strict=True)
            ax.plot(seconds, rates, label=name, **(style.series(index) | {"markersize": 2}))
    ax.set_ylim(bottom=0)
    style.legend(ax)
    return fig


def _unit(num_bytes: float) -> tuple[float, str]:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if num_bytes >= 2**power:
            return 2.0**power, unit
    return 2.0**10, "KiB"
