"""The corpus figures show every source, and the coloured samples colour what is supervised."""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer

from eagle3_utils.corpus.records import Record
from eagle3_utils.corpus.statistics import CorpusStatistics
from eagle3_utils.plots import corpus as figures


@pytest.fixture
def statistics() -> CorpusStatistics:
    statistics = CorpusStatistics(100)
    for number, source in enumerate(["chat", "code", "code"]):
        statistics.add(Record(str(number), source, list(range(10 + 10 * number)), [0, 1] * (5 + 5 * number)), "train")
    statistics.add(Record("v", "code", list(range(21)), [0] * 11 + [1] * 10), "val")
    return statistics


def texts(figure) -> str:
    figure.canvas.draw()
    return " ".join(text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text")))


def test_every_figure_names_the_sources_and_units(statistics):
    histogram = texts(figures.length_histogram(statistics, 30))
    assert "chat" in histogram and "tokens per sample" in histogram and "max_seq_len 30" in histogram
    shares = texts(figures.supervised_share(statistics))
    assert "code" in shares and "0.50" in shares
    assert "10: 50.00%" in texts(figures.vocabulary_coverage(statistics, (10, 20)))
    missed = texts(figures.missed_by_source(statistics, (10, 20)))
    assert "D = 10" in missed and "D = 20" in missed and "code" in missed and "50.0%" in missed  # 11, 13, … of 11 to 20
    assert "15 of 100 tokens occur" in texts(figures.token_frequencies(statistics))
    assert "limit 16" in texts(figures.response_lengths({"chat": [1, 2], "code": [16]}, 16))


def test_histogram_counts_every_sample_once(statistics):
    figure = figures.length_histogram(statistics, 30)
    assert sum(patch.get_height() for patch in figure.axes[0].patches) == pytest.approx(4)


def test_length_figures_of_many_sources_show_the_largest_and_the_rest_together():
    statistics = CorpusStatistics(10)
    for number in range(300):
        for _ in range(2 if number < 6 else 1):
            statistics.add(Record(str(number), f"s{number:03d}", [1] * 5, [1] * 5), "train")
    lengths = {source: statistics.lengths(source).tolist() for source in statistics.sources}
    figure = figures.length_histogram(statistics, 30)
    assert sum(patch.get_height() for patch in figure.axes[0].patches) == pytest.approx(306)
    for shown in (texts(figure), texts(figures.response_lengths(lengths, 16))):
        assert "s005 (2)" in shown and "294 other sources (294)" in shown and "s006" not in shown


def test_supervised_tokens_are_coloured_and_markup_is_escaped(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    asked, answered = tokenizer.encode("<b>hi"), tokenizer.encode("世界 & all")
    record = Record("r", "chat", asked + answered, [0] * len(asked) + [1] * len(answered))
    html = figures.coloured_sample(record, tokenizer)
    grey, coloured = re.findall(r"<span[^>]*>(.*?)</span>", html)
    assert (grey, coloured) == ("&lt;b&gt;hi", "世界 &amp; all")
    assert f"{len(record.input_ids)} tokens, {len(answered)} supervised" in html
    assert "more tokens" in figures.coloured_sample(record, tokenizer, max_tokens=3)
    assert figures.coloured_samples([record, record], tokenizer).data.count("<b>chat</b>") == 2
