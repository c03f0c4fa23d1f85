"""What of a source is taken, what is left out and why, and which ids and masks records get."""

from __future__ import annotations

import json

import chat_templates
import pytest
from merging import build, pair, question, write
from transformers import AutoTokenizer

from eagle3_utils.corpus.reading.intake import last_turn_end
from eagle3_utils.corpus.records import read_parquet


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


def rejected(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "corpus" / "rejected.jsonl").read_text().splitlines()]


def test_every_record_left_out_has_file_line_and_reason(tmp_path, tokenizer):
    evaluation = write(tmp_path / "eval.jsonl", [
        {"id": "e1", "split": "eval", "messages": [{"role": "user", "content": question(900)}]},
        {"id": "t1", "split": "train", "messages": [{"role": "user", "content": question(1)}]},
    ])  # fmt: skip
    rows = [
        pair(1),
        "{broken",
        pair(1) | {"response": pair(1)["response"].upper()},  # the same words
        pair(2) | {"prompt": f"Please tell me. {question(900)}"},
        {"prompt": "hi", "response": ""},
        {"nothing": 1},
        pair(3, finish_reason="length"),
        pair(4, finish_reason="stop"),
        pair(5, finish_reason="stop"),
    ]
    rows = [row if isinstance(row, str) else {"finish_reason": "stop"} | row for row in rows]
    path = write(tmp_path / "x.jsonl", rows)
    entry = {"name": "x", "path": path, "filters": {"finish_reason": ["stop"]}}
    report = build(tmp_path, tokenizer, [entry], [tmp_path / "eval.jsonl"], max_rejected_fraction=0.5)
    found = {(line["line"], line["kind"], line["reason"].split(":")[0]) for line in rejected(tmp_path)}
    assert found == {
        (2, "unusable", "not JSON"),
        (3, "dropped", "exact duplicate"),
        (4, "dropped", "evaluation prompt"),
        (5, "unusable", "an empty assistant turn"),
        (6, "unusable", "no pair of prompt and response"),
        (7, "dropped", "filter finish_reason"),
    }
    assert all(line["file"] == path and line["source"] == "x" for line in rejected(tmp_path))
    assert evaluation and report.sources[0].taken == 3 and report.sources[0].read == 9


def test_near_duplicates_are_dropped_and_kept_when_asked(tmp_path, tokenizer):
    rows = [pair(i) | {"response": " ".join(question(20 * i + j) for j in range(10))} for i in (1, 1, 2, 3)]
    rows[1]["prompt"] += " Thanks"
    path = write(tmp_path / "x.jsonl", rows)
    assert build(tmp_path, tokenizer, [{"name": "x", "path": path}]).sources[0].dropped == {"near duplicate": 1}
    assert build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact").sources[0].taken == 4


def test_generated_ids_are_kept_and_compared_with_rebuilt_ones(tmp_path, tokenizer):
    def response(seed: int, cut: bool) -> dict:
        messages = [{"role": "user", "content": question(seed)}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        words = [tokenizer.encode(piece) for piece in (["yes", "ter", "day", f" {seed}"] if cut else [f"today {seed}"])]
        output = [token for word in words for token in word] + [tokenizer.convert_tokens_to_ids("<|im_end|>")]
        return {"id": f"r{seed}", "source": "maths", "messages": messages, "prompt_ids": prompt, "output_ids": output,
                "text": tokenizer.decode(output[:-1]), "finish_reason": "stop"}  # fmt: skip

    rows = [response(i, cut=i == 3) for i in range(8)]
    path = write(tmp_path / "x.jsonl", rows)
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact")
    records = {r.id: r for s in ("train", "val") for r in read_parquet(tmp_path / "corpus" / f"{s}.parquet")}
    assert records["r3"].input_ids == rows[3]["prompt_ids"] + rows[3]["output_ids"]
    assert records["r3"].loss_mask == [0] * len(rows[3]["prompt_ids"]) + [1] * len(rows[3]["output_ids"])
    assert records["r3"].source == "maths"
    assert report.sources[0].round_trip == {"same ids": 7, "same text, other token borders": 1}


@pytest.mark.parametrize("template, disagreements", [("CHATML_MARKED", 0), ("WRONGLY_MARKED", 3)])
def test_a_templates_own_markers_are_compared(tmp_path, tiny_llama, template, disagreements):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    marked = chat_templates.CHATML_MARKED
    wrong = marked.replace("m.role == 'assistant'", "m.role == 'user'")
    tokenizer.chat_template = marked if template == "CHATML_MARKED" else wrong
    path = write(tmp_path / "x.jsonl", [pair(i) for i in range(3)])
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}])
    assert report.sources[0].marker_disagreements == disagreements


def test_truncation_hard_or_at_the_end_of_a_turn(tmp_path, tokenizer):
    turns = [{"role": role, "content": question(i)} for i in range(3) for role in ("user", "assistant")]
    path = write(tmp_path / "x.jsonl", [{"messages": turns}, {"messages": [*turns[:1], *turns[3:]]}])
    for truncate in ("hard", "turn"):
        settings = {"truncate": truncate, "max_seq_len": 100, "dedupe": "none"}
        report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], **settings)
        lengths = report.statistics.lengths()
        record = read_parquet(tmp_path / "corpus" / "train.parquet")[0]
        assert report.sources[0].truncated == 2
        if truncate == "hard":
            assert lengths.tolist() == [100, 100]
        else:
            assert lengths.max() < 100 and tokenizer.decode(record.input_ids).endswith("<|im_end|>")


def test_last_turn_end():
    assert last_turn_end([0, 1, 1, 0, 0, 1, 1, 1], 8) == 8
    assert last_turn_end([0, 1, 1, 0, 0, 1, 1, 1], 7) == 3
    assert last_turn_end([0, 1, 1, 0], 3) == 3
    assert last_turn_end([0, 1, 1, 0], 2) == 0


def test_ids_outside_the_vocabulary_are_unusable(tmp_path, tokenizer):
    rows = [{"input_ids": [1, 2, 3, 4, 5 + i, 6 + i], "loss_mask": [0, 0, 1, 1, 1, 1]} for i in range(30)]
    rows.append({"input_ids": [1, len(tokenizer)] * 3, "loss_mask": [0, 1] * 3})
    path = write(tmp_path / "x.jsonl", rows)
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact")
    assert list(report.sources[0].unusable) == ["token id outside the vocabulary"]
