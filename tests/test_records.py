"""Records survive the way to disk and back, and what is no record is said to be none."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from eagle3_utils.corpus.records import (
    CorpusDigest,
    ParquetRecords,
    Record,
    problem_with,
    read_parquet,
    read_samples,
    write_parquet,
)
from eagle3_utils.errors import UserError

RECORDS = [Record("a", "chat", [5, 6, 7], [0, 1, 1]), Record("b-ü", "maths", [1, 163839], [0, 1])]


def test_parquet_round_trip_and_its_types(tmp_path):
    path = tmp_path / "corpus" / "train.parquet"
    assert write_parquet(RECORDS, path) == 2
    assert read_parquet(path) == RECORDS
    schema = pq.read_schema(path)
    assert str(schema.field("input_ids").type.value_type) == "int32"
    assert str(schema.field("loss_mask").type.value_type) == "int8"
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"


def digest(records) -> str:
    made = CorpusDigest()
    for record in records:
        made.update(record)
    return made.hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        Record("A", "chat", [5, 6, 7], [0, 1, 1]),
        Record("a", "code", [5, 6, 7], [0, 1, 1]),
        Record("a", "chat", [5, 6, 8], [0, 1, 1]),
        Record("a", "chat", [5, 6, 7], [0, 0, 1]),
    ],
)
def test_the_hash_sees_ids_sources_tokens_and_masks(other):
    assert digest([other, RECORDS[1]]) != digest(RECORDS)


def test_the_hash_sees_the_order():
    assert digest(RECORDS[::-1]) != digest(RECORDS)


def test_a_failed_write_leaves_no_file(tmp_path):
    path = tmp_path / "train.parquet"
    with pytest.raises(RuntimeError), ParquetRecords(path) as out:
        out.write(RECORDS[0])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_many_records_come_back_in_order(tmp_path):
    records = [Record(str(i), "s", [i % 7, i % 5], [0, 1]) for i in range(5000)]
    write_parquet(records, tmp_path / "r.parquet")
    assert read_parquet(tmp_path / "r.parquet") == records


def test_samples_to_look_at_are_one_of_each_source_and_of_so_many_sources(tmp_path):
    write_parquet([Record(str(i), "dacb"[i % 4], [i], [1]) for i in range(12)], tmp_path / "r.parquet")
    assert [(r.id, r.source) for r in read_samples(tmp_path / "r.parquet", 3)] == [("1", "a"), ("2", "c"), ("0", "d")]
    assert [r.source for r in read_samples(tmp_path / "r.parquet", 9)] == ["a", "b", "c", "d"]


def test_a_missing_file_is_named_with_the_notebook_that_makes_it(tmp_path):
    with pytest.raises(UserError, match=r"01_merge_data"):
        read_parquet(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    "ids, mask, problem",
    [
        ([1, 2], [0, 1], None),
        ([], [], "no tokens"),
        ([1, 2], [1], "loss_mask of another length: 1 for 2"),
        ([1, 100], [0, 1], "token id outside the vocabulary: 100 of 100"),
        ([-1, 1], [0, 1], "outside the vocabulary: -1 of"),
        ([1, 2], [0, 2], "values other than 0 and 1"),
    ],
)
def test_problems_with_ids_and_masks(ids, mask, problem):
    found = problem_with(ids, mask, vocab_size=100)
    assert found is None if problem is None else problem in found
