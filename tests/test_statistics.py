"""Counts, lengths and coverage of a corpus, by hand."""

from __future__ import annotations

from eagle3_utils.corpus.records import Record
from eagle3_utils.corpus.statistics import CorpusStatistics, largest_sources


def of(*records: Record) -> CorpusStatistics:
    statistics = CorpusStatistics(6)
    for number, record in enumerate(records):
        statistics.add(record, "val" if number == 0 else "train")
    return statistics


def test_coverage_of_draft_vocabularies():
    held_out = Record("v", "s", [0, 1, 5, 4], [0, 1, 1, 1])
    statistics = of(held_out, Record("a", "s", [5, 5, 1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 1, 1, 1]))
    assert statistics.token_counts().tolist() == [0, 3, 2, 1, 0, 0]
    assert statistics.ranked_tokens().tolist() == [1, 2, 3, 5, 0, 4]  # 5 stands in a prompt
    assert statistics.coverage("train", (1, 2, 3, 6)) == {"1": 0.5, "2": round(5 / 6, 6), "3": 1.0}
    assert statistics.coverage("val", (3, 4)) == {"3": round(1 / 3, 6), "4": round(2 / 3, 6)}


def test_coverage_by_source_is_of_the_vocabulary_of_all():
    statistics = CorpusStatistics(6)
    for record in (Record("a", "x", [1, 1, 1, 2], [1] * 4), Record("b", "y", [3, 3, 2, 1], [1, 1, 1, 0])):
        statistics.add(record, "train")
    assert statistics.token_counts().tolist() == [0, 3, 2, 2, 0, 0]
    assert statistics.coverage_by_source("train", (1, 2, 9)) == {
        "x": {"1": 0.75, "2": 1.0},
        "y": {"1": 0.0, "2": round(1 / 3, 6)},
    }


def test_sources_beyond_the_largest_share_a_row():
    statistics = of(*(Record(str(i), f"s{i:03d}", [1] * (200 - i), [1] * (200 - i)) for i in range(100)))
    rows = statistics.table(top=3)
    assert [row["source"] for row in rows] == ["s000", "s001", "s002", "97 other sources", "all"]
    assert sum(row["tokens"] for row in rows[:-1]) == rows[-1]["tokens"]
    assert statistics.token_counts().tolist()[1] + statistics.token_counts("val").tolist()[1] == rows[-1]["tokens"]
    assert len(statistics.coverage_by_source("train")) == 65


def test_a_rest_of_one_source_has_its_name():
    sizes = {"c": 1, "a": 3, "b": 3}
    assert largest_sources(sizes, 2) == [("a", ["a"]), ("b", ["b"]), ("c", ["c"])]
    assert largest_sources(sizes, 1) == [("a", ["a"]), ("2 other sources", ["b", "c"])]
    assert largest_sources({}, 1) == []


def test_percentiles_of_lengths():
    statistics = of(*(Record(str(i), "s", [1] * i, [1] * i) for i in range(1, 102)))
    row = statistics.table()[-1]
    assert (row["length_p50"], row["length_p95"], row["length_p99"], row["length_max"]) == (51, 96, 100, 101)


def test_rows_and_splits():
    records = [Record(str(i), "x" if i < 3 else "y", [1] * (i + 2), [0] * (i + 1) + [1]) for i in range(4)]
    statistics = of(*records)
    x, y, everything = statistics.table()
    assert (x["source"], x["samples"], x["tokens"], x["supervised_share"]) == ("x", 3, 9, 0.3333)
    assert (x["token_share"], y["token_share"], everything["token_share"]) == (0.6429, 0.3571, 1.0)
    assert (y["samples"], y["length_p50"], y["length_max"]) == (1, 5, 5)
    assert (everything["source"], everything["tokens"], everything["length_p50"]) == ("all", 14, 3)
    assert statistics.split_counts() == {
        "train": {"samples": 3, "tokens": 12, "supervised_tokens": 3},
        "val": {"samples": 1, "tokens": 2, "supervised_tokens": 1},
    }
    assert statistics.sources == ["x", "y"] and statistics.supervised("x").tolist() == [1, 1, 1]
