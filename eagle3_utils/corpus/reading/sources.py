"""Where training data comes from: files and Hugging Face datasets, streamed record by record with their place.

    sources:
      - {name: responses, path: "{data}/responses.jsonl"}
      - {name: sharegpt, path: "/data/sharegpt/*.jsonl.zst", max_samples: 50000}
      - {name: ultrachat, hf: HuggingFaceH4/ultrachat_200k, split: train_sft, weight: 0.5}

A line that cannot be read is yielded with its reason, never skipped and never fatal.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_utils.corpus.reading.formats import Format
from eagle3_utils.errors import UserError
from eagle3_utils.runs import resolve_path

MAX_LINE_BYTES = 64 << 20
_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


class SourceSpec(BaseModel):
    """One entry of the `sources` parameter."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(min_length=1)
    path: str | None = (
        None  # a file, a folder or a pattern; relative to the repository; {data} is the run's data folder
    )
    hf: str | None = None  # a dataset's name on the hub, or a folder written by `save_to_disk`
    split: str = "train"  # of `hf`
    format: Format | None = None  # None: seen from the first usable record
    weight: float = Field(1.0, gt=0, le=100)  # share of the records that is kept; above 1 they repeat in training
    max_samples: int | None = Field(None, ge=1)  # different records, at most
    filters: dict[str, list[Any]] = {}  # keep only records whose field has one of these values

    @model_validator(mode="after")
    def _one_place(self):
        if (self.path is None) == (self.hf is None):
            raise ValueError("give either path or hf")
        return self


@dataclass(slots=True)
class RawRecord:
    """A record as read: `value`, or the `problem` that kept it from being read, and where it stands."""

    file: str
    line: int
    value: dict[str, Any] | None = None
    problem: str | None = None


def parse_sources(sources: list[dict[str, Any]], data_folder: Path) -> list[SourceSpec]:
    """Check the `sources` parameter; errors name the entry and the key."""
    specs = []
    for number, entry in enumerate(sources):
        try:
            spec = SourceSpec.model_validate(entry)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join([f"sources[{number}]", *map(str, problem["loc"])])
            words = problem["msg"].lower()
            if problem["type"] == "extra_forbidden":
                words = f"unknown key; a source has {', '.join(SourceSpec.model_fields)}"
            raise UserError(words, key, exit_code=2) from None
        if spec.path is not None:
            spec = spec.model_copy(update={"path": spec.path.replace("{data}", str(data_folder))})
        specs.append(spec)
    names = [spec.name for spec in specs]
    if not specs or len(set(names)) != len(names):
        raise UserError("sources need different names, at least one", "sources", exit_code=2)
    return specs


def source_files(spec: SourceSpec) -> list[Path]:
    """The files behind a `path`, in order of their names.

    Raises `UserError` when there is none, or one of a kind that is not read.
    """
    path = resolve_path(spec.path)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES))
    else:
        files = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not files:
        raise UserError("no such file", f"sources: {spec.name}: {spec.path}", exit_code=2)
    for file in files:
        if not file.name.endswith(_SUFFIXES):
            raise UserError(f"cannot read this kind; known are {', '.join(_SUFFIXES)}", str(file), exit_code=2)
    return files


def read_source(spec: SourceSpec) -> Iterator[RawRecord]:
    """All records of a source, in order, one at a time."""
    records = _read_hf(spec) if spec.hf else (raw for file in source_files(spec) for raw in read_file(file))
    for raw in records:
        if raw.problem is None and not isinstance(raw.value, dict):
            raw = RawRecord(raw.file, raw.line, problem="not a JSON object")
        yield raw


def read_file(path: Path) -> Iterator[RawRecord]:
    """The records of one JSONL (plain, .gz, .zst), JSON or Parquet file."""
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path)
    elif path.name.endswith(".json"):
        yield from _read_json(path)
    else:
        with open_bytes(path) as file:
            yield from _read_lines(str(path), file)


def open_bytes(path: Path) -> io.BufferedIOBase:
    """Open a plain, gzip or zstd file for reading."""
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(open(path, "rb"), closefd=True), 1 << 20)
    return open(path, "rb", buffering=1 << 20)


def _read_lines(name: str, file: io.BufferedIOBase) -> Iterator[RawRecord]:
    number = 0
    try:
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield RawRecord(name, number, problem=f"a line longer than {MAX_LINE_BYTES >> 20} MiB")
            elif line.strip():
                yield _parse_line(name, number, line)
    except (OSError, EOFError, zstandard.ZstdError) as error:
        yield RawRecord(name, number + 1, problem=f"the file cannot be read on: {error}")


def _parse_line(name: str, number: int, line: bytes) -> RawRecord:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return RawRecord(name, number, problem="not UTF-8")
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is valid JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
        return RawRecord(name, number, value)
    except UnicodeEncodeError:
        return RawRecord(name, number, problem="half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        return RawRecord(name, number, problem=f"not JSON: {getattr(error, 'msg', type(error).__name__)}")


def _read_json(path: Path) -> Iterator[RawRecord]:
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        yield RawRecord(str(path), getattr(error, "lineno", 1), problem=f"not JSON: {type(error).__name__}")
        return
    if isinstance(values, dict):  # {"data": […]} and the like: the only list in it
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else [values]
    for number, value in enumerate(values, 1):
        try:
            json.dumps(value, ensure_ascii=False).encode()
            yield RawRecord(str(path), number, value)
        except UnicodeEncodeError:
            yield RawRecord(str(path), number, problem="half of a surrogate pair")


def _read_parquet(path: Path) -> Iterator[RawRecord]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRecord(str(path), number, value)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        yield RawRecord(str(path), number + 1, problem=f"the file cannot be read on: {str(error).splitlines()[0]}")


def _read_hf(spec: SourceSpec) -> Iterator[RawRecord]:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    folder = resolve_path(spec.hf)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            dataset = load_from_disk(str(folder))
            dataset = dataset[spec.split] if isinstance(dataset, DatasetDict) else dataset
        else:
            dataset = load_dataset(str(folder) if folder.is_dir() else spec.hf, split=spec.split, streaming=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot load this dataset: {reason}", f"sources: {spec.name}: {spec.hf}") from None
    number = 0
    try:
        for number, value in enumerate(dataset, 1):
            yield RawRecord(f"{spec.hf}:{spec.split}", number, value)
    except (DatasetsError, OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield RawRecord(f"{spec.hf}:{spec.split}", number + 1, problem=f"the dataset cannot be read on: {reason[:200]}")
