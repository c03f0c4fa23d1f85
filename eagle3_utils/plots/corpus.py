"""Figures of a corpus: how long its samples are, how much of each source is supervised, what a draft vocabulary covers.

`coloured_samples` is no figure but HTML: conversations whose supervised tokens are coloured, for a person to look at.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from IPython.display import HTML
from matplotlib.figure import Figure

from eagle3_utils.corpus.records import Record
from eagle3_utils.corpus.statistics import DRAFT_VOCAB_SIZES, CorpusStatistics, largest_sources
from eagle3_utils.plots import style

_SUPERVISED_BACKGROUND = "#cfe8f7"  # style.COLOURS[0], paled, so that black text stays readable


def length_histogram(statistics: CorpusStatistics, max_seq_len: int) -> Figure:
    """Samples by length in tokens, with the length at which they are cut.

    One stacked series for each of the sources with the most samples, one for the rest together.
    """
    fig, ax = style.figure("Sample lengths", x="tokens per sample", y="samples")
    longest = int(statistics.lengths().max())
    edges = np.linspace(0, longest + 1, 41)
    bottom = np.zeros(len(edges) - 1)
    lengths = {source: statistics.lengths(source) for source in statistics.sources}
    for index, (name, values) in enumerate(_largest(lengths)):
        counts, _ = np.histogram(values, edges)
        look = style.bar(index) | {"label": f"{name} ({counts.sum():,})"}
        ax.bar(edges[:-1], counts, np.diff(edges), bottom=bottom, align="edge", **look)
        bottom += counts
    if longest >= 0.8 * max_seq_len:
        ax.axvline(max_seq_len, color="black", linestyle="--", linewidth=1.0, label=f"max_seq_len {max_seq_len}")
    style.legend(ax)
    return fig


def response_lengths(lengths: dict[str, list[int]], max_new_tokens: int) -> Figure:
    """Share of a source's responses that are at most so many tokens long.

    One line for each of the sources with the most responses, one for the rest together.
    """
    fig, ax = style.figure("Response lengths", x="generated tokens", y="share of responses, cumulated")
    for index, (name, values) in enumerate(_largest(lengths)):
        values = np.sort(values)
        look = style.series(index) | {"markevery": max(1, len(values) // 8), "label": f"{name} ({len(values):,})"}
        ax.step(values, np.arange(1, len(values) + 1) / len(values), where="post", **look)
    ax.axvline(max_new_tokens, color="black", linestyle=":", linewidth=1.0, label=f"limit {max_new_tokens} (this run)")
    ax.set_ylim(0, 1.02)
    style.legend(ax)
    return fig


def _largest(lengths: dict[str, Sequence[int]]) -> list[tuple[str, np.ndarray]]:
    """(name, lengths) of as many sources as have looks of their own; the last stands for all that are left."""
    series = largest_sources({source: len(values) for source, values in lengths.items()}, len(style.COLOURS) - 1)
    return [(name, np.concatenate([np.asarray(lengths[source]) for source in members])) for name, members in series]


def supervised_share(statistics: CorpusStatistics) -> Figure:
    """Supervised tokens over all tokens, of the largest sources."""
    fig, ax = style.figure("Supervised share by source", x="source", y="supervised tokens / tokens")
    rows = statistics.table(top=12)[:-1]
    style.grouped_bars(ax, [row["source"] for row in rows], {"share": [row["supervised_share"] for row in rows]})
    ax.set_ylim(0, 1)
    return fig


def vocabulary_coverage(statistics: CorpusStatistics, sizes: tuple[int, ...] = DRAFT_VOCAB_SIZES) -> Figure:
    """Share of supervised tokens covered by the D best ids of training, over D; `sizes` are marked on the held-out."""
    fig, ax = style.figure("What a draft vocabulary covers", x="draft vocabulary size D", y="supervised tokens covered")
    ranked = statistics.ranked_tokens()
    places = np.unique(np.geomspace(1, len(ranked), 400).astype(int))
    for index, (split, label) in enumerate((("train", "training text"), ("val", "held-out text"))):
        counts = statistics.token_counts(split)[ranked]
        covered = np.cumsum(counts) / max(1, counts.sum())
        look = style.series(index) | {"marker": ""}
        ax.plot(places, covered[places - 1], label=label, **look)
    for index, size in enumerate(size for size in sizes if size < len(ranked)):
        label = f"{size:,}: {covered[size - 1]:.2%}"
        ax.plot(size, covered[size - 1], **style.series(index + 2) | {"linestyle": ""}, label=label)
    ax.set_xscale("log")
    ax.set_ylim(0, 1.03)
    style.legend(ax)
    return fig


def missed_by_source(statistics: CorpusStatistics, sizes: tuple[int, ...] = DRAFT_VOCAB_SIZES) -> Figure:
    """Share of each source's held-out supervised tokens that one draft vocabulary for all lacks, a bar per size."""
    fig, ax = style.figure("Tokens outside the draft vocabulary", x="source", y="share of held-out supervised tokens")
    shares = statistics.coverage_by_source("val", sizes)
    largest = [row["source"] for row in statistics.table(top=8) if row["source"] in shares]
    known = [str(size) for size in sizes if all(str(size) in shares[source] for source in largest)]
    groups = {f"D = {int(size):,}": [1 - shares[source][size] for source in largest] for size in known}
    style.grouped_bars(ax, largest, groups, text_format="{:.1%}")
    style.legend(ax)
    return fig


def token_frequencies(statistics: CorpusStatistics) -> Figure:
    """How often tokens are supervised in training, by rank, both axes logarithmic."""
    fig, ax = style.figure("Token frequency", x="rank of the token", y="times supervised")
    counts = np.sort(statistics.token_counts())[::-1]
    seen = counts[counts > 0]
    label = f"{len(seen):,} of {len(counts):,} tokens occur"
    ax.step(np.arange(1, len(seen) + 1), seen, where="mid", color=style.COLOURS[0], label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.legend(frameon=False, fontsize=style.TEXT_SIZE - 1)
    return fig


def coloured_samples(records: list[Record], tokenizer, max_tokens: int = 400) -> HTML:
    """Records as text, one under the other, the supervised tokens on a coloured ground."""
    return HTML("<br>".join(coloured_sample(record, tokenizer, max_tokens) for record in records))


def coloured_sample(record: Record, tokenizer, max_tokens: int = 400) -> str:
    """HTML of a record's text; supervised tokens on a coloured ground, the rest grey.

    Runs of one kind are decoded together, so characters of several tokens stay whole.
    """
    parts, start = [], 0
    ids, mask = record.input_ids[:max_tokens], record.loss_mask[:max_tokens]
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = html.escape(tokenizer.decode(ids[start:end]))
            look = f"background:{_SUPERVISED_BACKGROUND};color:black" if mask[start] else f"color:{style.GREY}"
            parts.append(f'<span style="{look}">{text}</span>')
            start = end
    more = "" if len(record.input_ids) <= max_tokens else f" … {len(record.input_ids) - max_tokens} more tokens"
    title = f"<b>{html.escape(record.source)}</b> · {html.escape(record.id)} · {record.num_tokens} tokens, "
    title += f"{record.num_supervised} supervised"
    body = "white-space:pre-wrap;font-family:monospace;font-size:85%;border-left:3px solid #ccc;padding-left:8px"
    return f'<div>{title}<div style="{body}">{"".join(parts)}{more}</div></div>'
