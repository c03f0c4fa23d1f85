"""Counts, lengths and coverage of a corpus, by hand."""

from __future__ import annotations

from eagle3_utils.corpus.records import Record
from eagle3_utils.corpus.statistics import CorpusStatistics


def of(*records: Record) -> CorpusStatistics:
    statistics = CorpusStatistics(6)
    for number, record in enumerate(records):
        statistics.add(record, "val" if number == 0 else "train")
    return statistics


def test_coverage_of_draft_vocabularies():
    statistics = of(Record("a", "s", [0, 1, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 1, 1]))
    assert statistics.token_counts.tolist() == [0, 3, 2, 1, 0, 0]
    assert statistics.coverage((1, 2, 3, 6)) == {"1": 0.5, "2": round(5 / 6, 6), "3": 1.0}


def test_rows_and_splits():
    records = [Record(str(i), "x" if i < 3 else "y", [1] * (i + 2), [0] * (i + 1) + [1]) for i in range(4)]
    statistics = of(*records)
    x, y, everything = statistics.table()
    assert (x["source"], x["samples"], x["tokens"], x["supervised_share"]) == ("x", 3, 9, 0.3333)
    assert (y["samples"], y["length_p50"], y["length_max"]) == (1, 5, 5)
    assert (everything["source"], everything["tokens"], everything["length_p50"]) == ("all", 14, 3)
    assert statistics.split_counts() == {
        "train": {"samples": 3, "tokens": 12, "supervised_tokens": 3},
        "val": {"samples": 1, "tokens": 2, "supervised_tokens": 1},
    }
    assert statistics.sources == ["x", "y"] and statistics.supervised("x").tolist() == [1, 1, 1]
