"""From files to a corpus: what goes in, what stays out and why, and that the same input gives the same corpus."""

from __future__ import annotations

import gzip
import json

import pytest
from merging import build, pair, question, write
from transformers import AutoTokenizer

from eagle3_utils.config import MergeConfig
from eagle3_utils.corpus.merge import merge, read_evaluation
from eagle3_utils.corpus.reading.sources import parse_sources
from eagle3_utils.corpus.records import CorpusDigest, read_parquet
from eagle3_utils.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def digest(records) -> str:
    made = CorpusDigest()
    for record in records:
        made.update(record)
    return made.hexdigest()


def test_a_corpus_from_two_sources(tmp_path, tokenizer):
    one = write(tmp_path / "one.jsonl", [pair(i) for i in range(40)])
    two = write(tmp_path / "two.jsonl", [{"messages": [{"role": "user", "content": question(i)},
                {"role": "assistant", "content": f"It is {i}, of course."}]} for i in range(100, 120)])  # fmt: skip
    report = build(tmp_path, tokenizer, [{"name": "one", "path": one}, {"name": "two", "path": two}])
    train, val = (read_parquet(tmp_path / "corpus" / f"{split}.parquet") for split in ("train", "val"))
    assert {(s, sum(r.source == s for r in train), sum(r.source == s for r in val)) for s in ("one", "two")} == {
        ("one", 32, 8),
        ("two", 16, 4),
    }
    assert len({record.id for record in train + val}) == 60
    about = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert about == json.loads(json.dumps(report.corpus))
    assert about["splits"] == {"train": digest(train), "val": digest(val)}
    assert about["counts"]["train"] == {
        "samples": 48,
        "tokens": sum(len(r.input_ids) for r in train),
        "supervised_tokens": sum(sum(r.loss_mask) for r in train),
    }
    assert about["longest"] == max(len(r.input_ids) for r in train + val)
    assert [source["format"] for source in about["sources"]] == ["prompt_response", "messages"]
    assert not (tmp_path / "corpus" / "spool.tmp").exists()
    sample = next(record for record in train if record.source == "two")
    words = tokenizer.decode([t for t, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m])
    assert words.startswith("It is ") and words.endswith("of course.<|im_end|>")


def test_the_corpus_does_not_depend_on_the_order_of_the_input_but_on_the_seed(tmp_path, tokenizer):
    rows = [pair(i, id=f"r{i}") for i in range(30)]
    hashes = []
    for name, order, seed in (("a", rows, 0), ("b", rows[::-1], 0), ("c", rows, 1)):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name / "x.jsonl", order)
        hashes.append(build(tmp_path / name, tokenizer, [{"name": "x", "path": path}], seed=seed).corpus["hash"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_weights_limits_and_repeated_ids(tmp_path, tokenizer):
    half = write(tmp_path / "half.jsonl", [pair(i, id=str(i)) for i in range(20)])
    few = write(tmp_path / "few.jsonl", [pair(i, id=str(i)) for i in range(50, 70)] + [pair(80, id="51")])
    entries = [{"name": "half", "path": half, "weight": 0.5}, {"name": "few", "path": few, "max_samples": 6}]
    report = build(tmp_path, tokenizer, entries)
    assert {row["source"]: row["samples"] for row in report.corpus["statistics"]} == {"half": 10, "few": 6, "all": 16}
    report = build(tmp_path, tokenizer, [entries[0] | {"weight": 3.0}, entries[1]], dedupe="exact")
    assert report.corpus["counts"]["val"]["samples"] == 4 + 1
    assert {row["source"]: row["samples"] for row in report.corpus["statistics"]} == {"half": 52, "few": 6, "all": 58}
    train = read_parquet(tmp_path / "corpus" / "train.parquet")
    assert len({record.id for record in train}) == len(train) == 16 * 3 + 5


def test_records_that_each_have_a_source_of_their_own_validate_too(tmp_path, tokenizer):
    rows = [{"input_ids": [10 + i, 20, 30 + i, 40, 50], "loss_mask": [0, 1, 1, 1, 1]} for i in range(20)]
    path = write(tmp_path / "x.jsonl", [row | {"source": f"label {i}"} for i, row in enumerate(rows)])
    settings = {"val_fraction": 0.1, "dedupe": "none"}
    counts = build(tmp_path, tokenizer, [{"name": "x", "path": path}], **settings).corpus["counts"]
    assert (counts["train"]["samples"], counts["val"]["samples"]) == (18, 2)


def test_a_record_cannot_name_all_as_its_source(tmp_path, tokenizer):
    row = {"input_ids": [10, 20, 30, 40, 50], "loss_mask": [0, 1, 1, 1, 1]}
    path = write(tmp_path / "x.jsonl", [row | {"source": name} for name in ("chat", "all")])
    with pytest.raises(UserError, match=r"x\.jsonl:2: no source can be called 'all'"):
        build(tmp_path, tokenizer, [{"name": "x", "path": path}])


def test_a_corpus_of_one_record_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "x.jsonl", [pair(1), pair(2)])
    for entry, left in (({"max_samples": 1}, 1), ({"weight": 0.01}, 0)):
        with pytest.raises(UserError, match=f"sources: {left} of 2 records are left; it takes one to train and one to"):
            build(tmp_path, tokenizer, [{"name": "x", "path": path} | entry])
        assert not list((tmp_path / "corpus").glob("corpus.json")) + list((tmp_path / "corpus").glob("*.parquet"))


def test_a_damaged_archive_stops_the_run_by_file_and_line(tmp_path, tokenizer):
    packed = bytearray(gzip.compress("".join(json.dumps(pair(i)) + "\n" for i in range(2000)).encode()))
    packed[len(packed) // 2] ^= 0xFF
    packed[len(packed) // 2 + 1 : len(packed) // 2 + 40] = b"\xff" * 39
    (tmp_path / "x.jsonl.gz").write_bytes(packed)
    with pytest.raises(UserError, match=r"x\.jsonl\.gz:\d+: cannot be read on") as raised:
        build(tmp_path, tokenizer, [{"name": "x", "path": str(tmp_path / "x.jsonl.gz")}])
    assert "fetch it again" in str(raised.value) and not (tmp_path / "corpus" / "spool.tmp").exists()


def test_too_many_broken_records_stop_the_run(tmp_path, tokenizer):
    path = write(tmp_path / "x.jsonl", [pair(i) for i in range(8)] + ["{", "{"])
    with pytest.raises(UserError, match=r"2 of 10 records are unusable.*not JSON") as raised:
        build(tmp_path, tokenizer, [{"name": "bad", "path": path}])
    assert "bad" in str(raised.value) and not (tmp_path / "corpus" / "corpus.json").exists()


def test_duplicates_and_frequent_tokens_stand_in_the_description(tmp_path, tokenizer):
    rows = [pair(i) for i in range(12)] + [pair(1), pair(2)]
    path = write(tmp_path / "x.jsonl", rows)
    about = build(tmp_path, tokenizer, [{"name": "x", "path": path}]).corpus
    assert about["duplicates"] == {"exact duplicate": 2, "near duplicate": 0, "evaluation prompt": 0}
    stop = next(row for row in about["most_frequent_tokens"] if row["text"] == "<|im_end|>")
    assert stop["count"] == 10 and 0 < stop["share"] < 0.1
    assert about["draft_vocab_coverage_by_source"]["x"].keys() == about["draft_vocab_coverage"].keys()


USER = {"role": "user", "content": question(7)}


@pytest.mark.parametrize(
    "row, num",
    [
        ({"messages": [USER, {"role": "assistant", "content": "x"}, USER]}, 2),
        ({"messages": [USER | {"content": [{"type": "text", "text": question(7)}]}]}, 1),
        ({"conversations": [{"from": "human", "value": question(7)}]}, 1),
        ({"prompt": [USER]}, 1),
        ({"turns": [question(7), "And then?"]}, 2),
        *(({column: question(7)}, 1) for column in ("prompt", "question", "problem", "instruction", "query", "text")),
    ],
)
def test_evaluation_prompts_are_read_from_every_usual_column(tmp_path, row, num):
    write(tmp_path / "eval.jsonl", [row])
    evaluation = read_evaluation([tmp_path / "eval.jsonl"], 13)
    assert evaluation.num_texts == num
    assert evaluation.leak([f"Well, {question(7)}"]) == f"{tmp_path / 'eval.jsonl'}:1"


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"words": question(7)}, "1: no prompt in it; looked for in messages"),
        ({"messages": []}, "1: no prompt in it"),
        ({"messages": [{"role": "system", "content": "x"}]}, "1: no prompt in it"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "1: a part that is not text"),
        ({"prompt": question(7), "split": "train"}, "no evaluation prompt in it"),
    ],
)
def test_evaluation_files_without_prompts_stop_the_run(tmp_path, row, problem):
    write(tmp_path / "eval.jsonl", [row])
    with pytest.raises(UserError, match=problem):
        read_evaluation([tmp_path / "eval.jsonl"], 13)


def test_the_sizes_of_draft_vocabularies_stand_in_the_description(tmp_path, tokenizer):
    path = write(tmp_path / "x.jsonl", [pair(i) for i in range(12)])
    specs, settings = parse_sources([{"name": "x", "path": path}], tmp_path), MergeConfig(max_seq_len=256)
    about = merge(specs, settings, tokenizer, 100_000, tmp_path / "corpus").corpus  # as of a target with many tokens
    sizes = ["4096", "8192", "16384", "32768", "65536"]
    for key in ("draft_vocab_coverage", "draft_vocab_coverage_held_out"):
        assert list(about[key]) == sizes
        assert all(0 < about[key][size] <= 1 for size in sizes)
    assert set(about["draft_vocab_coverage"].values()) == {1.0}


@pytest.mark.parametrize("mask, share", [([0] * 99 + [1], "1.0%"), ([1] * 20, "100.0%")], ids=["zeros", "ones"])
def test_masks_of_almost_all_zeros_or_all_ones_are_refused_by_the_sources_name(tmp_path, tokenizer, mask, share):
    rows = [{"input_ids": list(range(100 * i, 100 * i + len(mask))), "loss_mask": mask} for i in range(1, 9)]
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match="source odd") as raised:
        build(tmp_path, tokenizer, [{"name": "odd", "path": path}], min_supervised_tokens=1)
    assert share in str(raised.value)


def test_raw_text_may_be_all_ones_when_it_is_named_text(tmp_path, tokenizer):
    path = write(tmp_path / "x.jsonl", [{"text": question(i)} for i in range(8)])
    with pytest.raises(UserError, match="supervised"):
        build(tmp_path, tokenizer, [{"name": "x", "path": path}])
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path, "format": "text"}])
    assert report.corpus["statistics"][-1]["supervised_share"] == 1.0
