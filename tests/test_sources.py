"""Every kind of file is read record by record, and a broken place is named, not skipped."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from eagle3_utils.corpus.reading import sources
from eagle3_utils.corpus.reading.sources import file_labels, parse_sources, read_file, read_source, source_files
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


def test_a_dataset_that_breaks_off_stops_the_run_by_its_place(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(LINES + b'{"id": "c", "text": \n')
    spec = parse_sources([{"name": "x", "hf": str(tmp_path)}], tmp_path)[0]
    with pytest.raises(UserError, match=rf"{tmp_path}:train:\d: cannot be read on"):
        list(read_source(spec))


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


def test_a_wrong_encoding_is_a_problem_not_a_crash(tmp_path):
    (tmp_path / "utf16.jsonl").write_bytes(LINES.decode().encode("utf-16"))
    assert {raw.problem for raw in read_file(tmp_path / "utf16.jsonl")} <= {"not UTF-8", "not JSON: Expecting value"}


def test_files_that_break_off_stop_the_run_by_file_and_line(tmp_path):
    many = LINES * 20000
    for kind, compress in (("gz", gzip.compress), ("zst", zstandard.compress)):
        (tmp_path / f"cut.jsonl.{kind}").write_bytes(compress(many)[:-20])
    (tmp_path / "no.jsonl.zst").write_bytes(b"nonsense" * 9)
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nonsense")
    for name in ("cut.jsonl.gz", "cut.jsonl.zst", "no.jsonl.zst", "no.parquet"):
        with pytest.raises(UserError, match=rf"{name}:\d+: cannot be read on"):
            list(read_file(tmp_path / name))


def test_a_json_array_is_read_element_by_element(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BLOCK", 7)
    rows = [*ROWS, {"n": 1234567}, 12345, None, [1], {"text": 'a "]," b' * 9}]
    path = tmp_path / "r.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=3, ensure_ascii=False) + "\n "):
        path.write_text(text)
        assert values(path) == rows
    for text, num_whole in (('[{"a": 1}, {"a": ', 1), ('[{"a": 1}', 0), ('[{"a": 1} {"a": 2}]', 1), ('[{"a": 1}]]', 1)):
        path.write_text(text)
        whole = []
        with pytest.raises(UserError, match=rf"r\.json:{num_whole + 1}: cannot be read on: not JSON: "):
            whole.extend(raw.value for raw in read_file(path))
        assert whole == [{"a": 1}] * num_whole, text
    path.write_text(" [ ] ")
    assert values(path) == []
    path.write_text('[{"a": "\\ud800"}, {"a": "\\ud83d\\ude00"}]')
    assert [raw.problem for raw in read_file(path)] == ["half of a surrogate pair", None]


def test_a_json_file_that_is_cut_stops_the_run_by_file_and_place(tmp_path):
    talk = [{"messages": [{"role": "user", "content": f"say {number:03}"}]} for number in range(1000)]
    path = tmp_path / "cut.json"
    for whole, place in ((json.dumps(talk), 501), (json.dumps({"data": talk}), 1), (LINES.decode(), 1), (" ", 1)):
        path.write_text(whole[: len(whole) // 2] if len(whole) > 1000 else whole)
        spec = parse_sources([{"name": "x", "path": str(path)}], tmp_path)[0]
        with pytest.raises(UserError, match=rf"cut\.json:{place}: cannot be read on: not JSON: \w+"):
            list(read_source(spec))


def test_a_json_file_of_another_encoding_stops_the_run(tmp_path):
    (tmp_path / "latin.json").write_bytes('[{"text": "Grüße"}]'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.json:1: cannot be read on: 'utf-8' codec can't decode"):
        list(read_file(tmp_path / "latin.json"))


def test_a_large_json_array_is_not_held_as_a_whole(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 20000))
    tracemalloc.start()
    assert sum(raw.size for raw in read_file(path)) > 20_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


@pytest.mark.parametrize("text", ["3", "null", '"text"', '{"a": [3, null]}'])
def test_json_that_holds_no_records_is_a_problem_not_a_crash(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    spec = parse_sources([{"name": "x", "path": str(tmp_path / "r.json")}], tmp_path)[0]
    assert {raw.problem for raw in read_source(spec)} == {"not a JSON object"}


def test_a_configuration_reaches_the_hub_and_a_dataset_that_is_a_script_is_refused(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, config=None, **options):
        asked.append((name, config, options["split"]))
        if name == "some/script":
            raise RuntimeError("Dataset scripts are no longer supported, but found script.py")
        return iter(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    entry = {"name": "x", "hf": "openai/gsm8k", "config": "main", "split": "test"}
    assert [raw.value for raw in read_source(parse_sources([entry], tmp_path)[0])] == ROWS
    assert asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(UserError, match=r"some/script.*scripts are no longer supported"):
        list(read_source(parse_sources([{"name": "x", "hf": "some/script"}], tmp_path)[0]))


def test_files_of_a_source_are_told_apart_by_their_paths(tmp_path):
    for name in ("en", "de"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_bytes(LINES)
    spec = parse_sources([{"name": "x", "path": str(tmp_path)}], tmp_path)[0]
    assert list(file_labels(spec).values()) == ["de/train.jsonl", "en/train.jsonl"]
    assert file_labels(parse_sources([{"name": "x", "path": str(tmp_path / "en")}], tmp_path)[0]) == {}


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


def test_no_source_is_called_all(tmp_path):
    entries = [{"name": "x", "path": "a"}, {"name": "all", "path": "b"}]
    with pytest.raises(UserError, match=r"sources\[1\]\.name: no source can be called 'all'") as raised:
        parse_sources(entries, tmp_path)
    assert raised.value.exit_code == 2


def test_source_names_are_unique(tmp_path):
    with pytest.raises(UserError, match="different names"):
        parse_sources([{"name": "x", "path": "a"}, {"name": "x", "path": "b"}], tmp_path)


def test_a_misspelt_key_of_a_source_is_named_with_those_there_are(tmp_path):
    with pytest.raises(UserError, match=r"sources\[0\]\.pth: unknown key; a source has name, path, hf"):
        parse_sources([{"name": "x", "pth": "notes.jsonl"}], tmp_path)
