"""The training record: token ids and which of them the model must predict; Parquet files of records.

A record is `{"id", "source", "input_ids", "loss_mask"}`. `loss_mask[t]` is 1 where token t is one the model must
predict, that is an assistant token. Files have the same columns (int32 / int8 lists, zstd).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eagle3_utils.errors import UserError

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
    ]
)
_ROWS_PER_GROUP = 2048


@dataclass(slots=True)
class Record:
    """One training sample of T tokens: `input_ids` [T] and `loss_mask` [T] of 0 or 1."""

    id: str
    source: str
    input_ids: list[int]
    loss_mask: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)


def problem_with(input_ids: list[int], loss_mask: list[int], vocab_size: int) -> str | None:
    """What makes ids and mask unusable, in a few words; None when they are fine."""
    if not input_ids:
        return "no tokens"
    if len(loss_mask) != len(input_ids):
        return f"loss_mask of another length: {len(loss_mask)} for {len(input_ids)} tokens"
    if min(input_ids) < 0 or max(input_ids) >= vocab_size:
        bad = next(token for token in input_ids if not 0 <= token < vocab_size)
        return f"token id outside the vocabulary: {bad} of {vocab_size}"
    if not set(loss_mask) <= {0, 1}:
        return "loss_mask holds values other than 0 and 1"
    return None


class CorpusDigest:
    """xxh3-128 over records in order (ids, sources, tokens and masks), as `corpus.json` holds it for each split."""

    def __init__(self):
        self._digest = xxhash.xxh3_128()

    def update(self, record: Record) -> None:
        self._digest.update(f"{record.id}\0{record.source}\0{record.num_tokens}\0".encode())
        self._digest.update(np.asarray(record.input_ids, "<i4").tobytes())
        self._digest.update(np.asarray(record.loss_mask, "i1").tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class ParquetRecords:
    """Writes records to one Parquet file as they come; the file appears under its name only when complete.

    with ParquetRecords(path) as out:
        out.write(record)
    """

    def __init__(self, path: Path):
        self.path, self.count = path, 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._waiting: list[Record] = []

    def __enter__(self) -> ParquetRecords:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        return self

    def write(self, record: Record) -> None:
        self._waiting.append(record)
        self.count += 1
        if len(self._waiting) >= _ROWS_PER_GROUP:
            self._flush()

    def __exit__(self, kind, _error, _traceback) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is not None:
            self._temporary.unlink()
            return
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)

    def _flush(self) -> None:
        if self._waiting:
            columns = {name: [getattr(record, name) for record in self._waiting] for name in SCHEMA.names}
            self._writer.write_table(pa.table(columns, schema=SCHEMA))
            self._waiting = []


def write_parquet(records: Iterable[Record], path: Path) -> int:
    """Write all records to a Parquet file, atomically; returns how many."""
    with ParquetRecords(path) as out:
        for record in records:
            out.write(record)
    return out.count


def iter_parquet(path: Path) -> Iterator[Record]:
    """The records of a Parquet file, one row group in memory at a time."""
    if not path.is_file():
        raise UserError("no such corpus file", str(path), "run notebooks/01_merge_data.ipynb first")
    with pq.ParquetFile(path) as file:
        missing = set(SCHEMA.names) - set(file.schema_arrow.names)
        if missing:
            raise UserError(f"not a corpus: no column {', '.join(sorted(missing))}", str(path))
        for batch in file.iter_batches(batch_size=_ROWS_PER_GROUP, columns=SCHEMA.names):
            for row in batch.to_pylist():
                yield Record(**row)


def read_parquet(path: Path) -> list[Record]:
    """All records of a Parquet file."""
    return list(iter_parquet(path))


def read_samples(path: Path, num_sources: int) -> list[Record]:
    """The first record of each of the first `num_sources` sources in a Parquet file, in the order of their names."""
    chosen: dict[str, Record] = {}
    for record in iter_parquet(path):
        chosen.setdefault(record.source, record)
        if len(chosen) == num_sources:
            break
    return [chosen[source] for source in sorted(chosen)]
