"""Every kind of file is read record by record, and a broken place is named, not skipped."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from eagle3_utils.corpus.reading import sources
from eagle3_utils.corpus.reading.sources import parse_sources, read_file, read_source, source_files
from eagle3_utils.errors import UserError

ROWS = [{"id": "a", "text": "Grüße"}, {"id": "b", "text": "世界"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def values(path):
    return [raw.value for raw in read_file(path)]


def test_all_kinds_of_files_give_the_same_records(tmp_path):
    (tmp_path / "r.jsonl").write_bytes(LINES)
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "r.jsonl.zst").write_bytes(zstandard.compress(LINES))
    (tmp_path / "r.json").write_text(json.dumps(ROWS))
    (tmp_path / "wrapped.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "r.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert values(path) == ROWS, path.name


def test_a_hugging_face_dataset_folder_is_read(tmp_path):
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "plain"))
    DatasetDict({"train_sft": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_bytes(LINES)
    for folder, split in (("plain", "train"), ("splits", "train_sft"), ("files", "train")):
        spec = parse_sources([{"name": "x", "hf": str(tmp_path / folder), "split": split}], tmp_path)[0]
        assert [raw.value for raw in read_source(spec)] == ROWS, folder
    with pytest.raises(UserError, match="cannot load"):
        list(read_source(parse_sources([{"name": "x", "hf": str(tmp_path / "splits"), "split": "no"}], tmp_path)[0]))


def test_a_dataset_that_breaks_off_is_a_problem_not_a_crash(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(LINES + b'{"id": "c", "text": \n')
    spec = parse_sources([{"name": "x", "hf": str(tmp_path)}], tmp_path)[0]
    assert "cannot be read on" in [raw.problem or "" for raw in read_source(spec)][-1]


def test_broken_lines_are_located_and_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 64)
    path = tmp_path / "r.jsonl"
    good = b'{"text": "x"}\n'
    lines = [
        b"\xef\xbb\xbf" + good,
        b'{"text": \n',
        b'{"text": "\xff"}\n',
        b"\n",
        b'{"t": "' + b"y" * 200 + b'"}\n',
        b"[1]\n",
    ]
    path.write_bytes(b"".join([*lines, good, b'{"text": "cut']))
    spec = parse_sources([{"name": "x", "path": str(path)}], tmp_path)[0]
    found = {raw.line: raw.problem for raw in read_source(spec)}
    assert found.pop(1) is None and found.pop(7) is None
    assert "not JSON" in found.pop(2)
    assert found.pop(3) == "not UTF-8"
    assert "longer than" in found.pop(5)
    assert found.pop(6) == "not a JSON object"
    assert "not JSON" in found.pop(8)
    assert not found  # the empty line is no record


def test_a_wrong_encoding_and_a_cut_archive_are_problems_not_crashes(tmp_path):
    (tmp_path / "utf16.jsonl").write_bytes(LINES.decode().encode("utf-16"))
    assert {raw.problem for raw in read_file(tmp_path / "utf16.jsonl")} <= {"not UTF-8", "not JSON: Expecting value"}
    many = LINES * 20000
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(many)[:-200])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(many)[:-200])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nonsense")
    for name in ("cut.jsonl.gz", "no.parquet"):
        assert any("cannot be read on" in (raw.problem or "") for raw in read_file(tmp_path / name)), name


def test_patterns_folders_and_the_data_placeholder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_bytes(LINES)
    for path in ("{data}", "{data}/*.jsonl"):
        spec = parse_sources([{"name": "x", "path": path}], tmp_path)[0]
        assert [file.name for file in source_files(spec)] == ["a.jsonl", "b.jsonl"]
    with pytest.raises(UserError, match="cannot read this kind"):
        source_files(parse_sources([{"name": "x", "path": "{data}/notes.txt"}], tmp_path)[0])
    with pytest.raises(UserError, match="no such file"):
        source_files(parse_sources([{"name": "x", "path": "{data}/none*.jsonl"}], tmp_path)[0])


@pytest.mark.parametrize(
    "entry, key",
    [
        ({"name": "x"}, "give either path or hf"),
        ({"name": "x", "path": "a", "hf": "b"}, "give either path or hf"),
        ({"name": "x", "path": "a", "wieght": 0.5}, r"sources\[0\]\.wieght"),
        ({"name": "x", "path": "a", "weight": 0.0}, r"sources\[0\]\.weight"),
        ({"name": "x", "path": "a", "format": "xml"}, r"sources\[0\]\.format"),
    ],
)
def test_wrong_source_entries_name_the_key(entry, key, tmp_path):
    with pytest.raises(UserError, match=key) as raised:
        parse_sources([entry], tmp_path)
    assert raised.value.exit_code == 2


def test_source_names_are_unique(tmp_path):
    with pytest.raises(UserError, match="different names"):
        parse_sources([{"name": "x", "path": "a"}, {"name": "x", "path": "b"}], tmp_path)


def test_a_misspelt_key_of_a_source_is_named_with_those_there_are(tmp_path):
    with pytest.raises(UserError, match=r"sources\[0\]\.pth: unknown key; a source has name, path, hf"):
        parse_sources([{"name": "x", "pth": "notes.jsonl"}], tmp_path)
