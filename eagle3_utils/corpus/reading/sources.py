"""Where training data comes from: files and Hugging Face datasets, streamed record by record with their place.

    sources:
      - {name: responses, path: "{data}/responses.jsonl"}
      - {name: sharegpt, path: "/data/sharegpt/*.jsonl.zst", max_samples: 50000}
      - {name: ultrachat, hf: HuggingFaceH4/ultrachat_200k, split: train_sft, weight: 0.5}
      - {name: gsm8k, hf: openai/gsm8k, config: main}

A line that cannot be read is yielded with its reason, never skipped and never fatal. Where a file breaks off, so that
nobody knows how much is lost, `UserError` names the place.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eagle3_utils.corpus.reading.compressed import READ_ERRORS, open_bytes
from eagle3_utils.corpus.reading.formats import Format
from eagle3_utils.corpus.statistics import ALL
from eagle3_utils.errors import UserError, first_line
from eagle3_utils.runs import resolve_path

MAX_LINE_BYTES = 64 << 20
_BLOCK = 1 << 20  # read at once
_SPACE, _SURROGATE = re.compile(r"[ \t\n\r]*"), re.compile(r"\\u[dD]")
_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


class SourceSpec(BaseModel):
    """One entry of the `sources` parameter."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(min_length=1)
    path: str | None = None  # a file, folder or pattern, relative to the repository; {data}: the run's data folder
    hf: str | None = None  # a dataset's name on the hub, or a folder written by `save_to_disk`
    config: str | None = None  # of `hf`: the configuration's name, where the dataset has several
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
    """A record as read: `value`, or the `problem` that keeps it from being taken, and where it stands."""

    file: str
    line: int
    value: dict[str, Any] | None = None
    problem: str | None = None
    size: int = 0  # about how many bytes the value had in the file

    def __post_init__(self):
        if self.problem is None and not isinstance(self.value, dict):
            self.problem = "not a JSON object"


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
        check_label(spec.name, f"sources[{number}].name")
        specs.append(spec)
    names = [spec.name for spec in specs]
    if not specs or len(set(names)) != len(names):
        raise UserError("sources need different names, at least one", "sources", exit_code=2)
    return specs


def check_label(label: str | None, where: str) -> None:
    """Raise `UserError` for a source whose name stands for all sources together in tables and figures."""
    if label == ALL:
        raise UserError(f"no source can be called {ALL!r}: it means all sources together", where, exit_code=2)


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
    if unknown := [file for file in files if not file.name.endswith(_SUFFIXES)]:
        raise UserError(f"cannot read this kind; known are {', '.join(_SUFFIXES)}", str(unknown[0]), exit_code=2)
    return files


def file_labels(spec: SourceSpec) -> dict[str, str]:
    """What tells the files of a source of several apart: their paths below the folder all are in, by full path."""
    files = [] if spec.hf else source_files(spec)
    if len(files) < 2:
        return {}
    root = os.path.commonpath([file.parent for file in files])
    return {str(file): file.relative_to(root).as_posix() for file in files}


def read_source(spec: SourceSpec) -> Iterator[RawRecord]:
    """All records of a source, in order, one at a time."""
    yield from _read_hf(spec) if spec.hf else (raw for file in source_files(spec) for raw in read_file(file))


def read_file(path: Path) -> Iterator[RawRecord]:
    """The records of one JSONL (plain, .gz, .zst), JSON or Parquet file."""
    if path.name.endswith(".parquet"):
        yield from _read_parquet(path)
    elif path.name.endswith(".json"):
        yield from _read_json(path)
    else:
        with open_bytes(path) as file:
            yield from _read_lines(str(path), file)


def read_whole(path: Path) -> Iterator[RawRecord]:
    """The JSON objects of a file that must be sound: `UserError`, with file and line, for anything else in it."""
    for raw in read_file(path):
        if raw.problem:
            raise UserError(raw.problem, f"{raw.file}:{raw.line}")
        yield raw


def _broken_off(where: str, error: Exception) -> UserError:
    fix = "fetch it again, or keep what stands before this place as a file of its own"
    reason = f"not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else first_line(error)[:200]
    return UserError(f"cannot be read on: {reason}", where, fix)


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
    except READ_ERRORS as error:
        raise _broken_off(f"{name}:{number + 1}", error) from None


def _parse_line(name: str, number: int, line: bytes) -> RawRecord:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        return RawRecord(name, number, problem="not UTF-8")
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a surrogate pair is valid JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
        return RawRecord(name, number, value, size=len(line))
    except UnicodeEncodeError:
        return RawRecord(name, number, problem="half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        return RawRecord(name, number, problem=f"not JSON: {getattr(error, 'msg', type(error).__name__)}")


def _read_json(path: Path) -> Iterator[RawRecord]:
    """An array is read element by element; an object, with or without a list of records in it, as a whole.

    Raises `UserError` where it is no JSON: unlike a broken line, that hides how many records follow.
    """
    name, number = str(path), 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_BLOCK).lstrip()
            values = _elements(text, file) if text.startswith("[") else _members(json.loads(text + file.read()))
            for number, (value, length, escaped) in enumerate(values, 1):
                try:
                    if escaped:
                        json.dumps(value, ensure_ascii=False).encode()
                    yield RawRecord(name, number, value, size=length)
                except UnicodeEncodeError:
                    yield RawRecord(name, number, problem="half of a surrogate pair")
    except (OSError, ValueError, RecursionError) as error:
        raise _broken_off(f"{name}:{number + 1}", error) from None


def _members(value: Any) -> Iterator[tuple[Any, int, bool]]:
    lists = [member for member in value.values() if isinstance(member, list)] if isinstance(value, dict) else []
    yield from ((member, 0, True) for member in (lists[0] if len(lists) == 1 else [value]))


def _elements(text: str, file: TextIO) -> Iterator[tuple[Any, int, bool]]:
    """(value, length, whether it may hold half a surrogate pair) of each element of the array that `text` begins.

    `file` goes on where `text` ends; no more than one block, or twice the longest element, is held.
    """
    decode, start, closed = json.JSONDecoder().raw_decode, 1, False
    if text[1:].lstrip().startswith("]"):
        start, closed = text.index("]") + 1, True
    while not closed:
        start = _SPACE.match(text, start).end()
        try:
            value, end = decode(text, start)
            after, problem = _SPACE.match(text, end).end(), None
        except json.JSONDecodeError as error:  # broken, or going on behind the block
            after, problem = len(text), error
        if after == len(text):
            block = file.read(max(_BLOCK, len(text) - start)) if len(text) - start < MAX_LINE_BYTES else ""
            if not block:
                raise problem or json.JSONDecodeError("the array is not closed", text, after)
            text, start = text[start:] + block, 0
            continue
        yield value, end - start, bool(_SURROGATE.search(text, start, end))
        if text[after] not in ",]":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, after)
        start, closed = after + 1, text[after] == "]"
    if text[start:].strip() or file.read(_BLOCK).strip():
        raise json.JSONDecodeError("Extra data", text, start)


def _read_parquet(path: Path) -> Iterator[RawRecord]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRecord(str(path), number, value, size=batch.nbytes // len(batch))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise _broken_off(f"{path}:{number + 1}", error) from None


def _read_hf(spec: SourceSpec) -> Iterator[RawRecord]:
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    folder = resolve_path(spec.hf)
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            dataset = load_from_disk(str(folder))
            dataset = dataset[spec.split] if isinstance(dataset, DatasetDict) else dataset
        else:
            name = str(folder) if folder.is_dir() else spec.hf
            dataset = load_dataset(name, spec.config, split=spec.split, streaming=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: a dataset that is a script
        raise UserError(f"cannot load this dataset: {first_line(error)}", f"sources: {spec.name}: {spec.hf}") from None
    where, number = f"{spec.hf}:{spec.split}", 0
    try:
        for number, value in enumerate(dataset, 1):
            yield RawRecord(where, number, value, size=len(repr(value)))
    except (DatasetsError, OSError, ValueError, TypeError) as error:
        raise _broken_off(f"{where}:{number + 1}", error) from None
