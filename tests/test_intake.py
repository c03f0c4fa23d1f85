"""What of a source is taken, what is left out and why, and which ids and masks records get."""

from __future__ import annotations

import json

import chat_templates
import pytest
from merging import build, pair, question, write
from transformers import AutoTokenizer

from eagle3_utils.corpus.reading.intake import _chunks, last_turn_end
from eagle3_utils.corpus.reading.sources import RawRecord
from eagle3_utils.corpus.records import read_parquet
from eagle3_utils.errors import UserError


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
        pair(1) | {"response": pair(1)["response"].replace(" ", "  ")},  # the same but for spacing
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


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Good morning to you all."}
BAD = {
    "messages": [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (b"[" * 100_000, "not JSON"),
        (b'"text"', "not a JSON object"),
        ({"prompt": "hi"}, "not in the format messages"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an empty assistant turn"),
        ({"messages": [USER | {"role": "narrator"}, ANSWER]}, "unknown role"),
        ({"messages": [USER | {"role": None}, ANSWER]}, "unknown role"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}, ANSWER]}, "a part that is not text"),
        ({"messages": [USER, ANSWER | {"reasoning_content": ["x"]}]}, "a message's reasoning or tool_calls"),
        ({"messages": [USER, ANSWER | {"tool_calls": 3}]}, "a message's reasoning or tool_calls"),
        ({"messages": [USER, ANSWER], "tools": {"name": "x"}}, "tools is not a list"),
    ],
    "tokenized": [
        ({"input_ids": [1, 2, 3, 4, 10**12], "loss_mask": [1] * 5}, "token id outside the vocabulary"),
        ({"input_ids": [1, 2, 3, 4, -1], "loss_mask": [1] * 5}, "token id outside the vocabulary"),
        ({"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1] * 4}, "loss_mask of another length"),
        ({"input_ids": [1, 2, 3, 4, 5], "loss_mask": [2] * 5}, "loss_mask holds values other than 0 and 1"),
        ({"input_ids": [1, 2, 3, 4.5], "loss_mask": [1] * 4}, "input_ids or loss_mask is not a list of integers"),
        ({"input_ids": [], "loss_mask": []}, "no tokens"),
        ({"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1]}, "fewer than 4 supervised tokens"),
    ],
    "response": [
        ({"messages": [USER], "text": 3, "finish_reason": "stop"}, "the response is not text"),
        ({"messages": None, "text": "x", "finish_reason": "stop"}, "messages is not a list"),
        ({"messages": [USER], "text": "Hi.", "prompt_ids": [1], "output_ids": "2"}, "prompt_ids or output_ids"),
        ({"messages": [USER], "text": "Hi.", "prompt_ids": [1, 2], "output_ids": [3] * 4, "output_spans": [[1]]},
         "output_spans do not lie in the prompt"),
        ({"messages": [USER], "text": "Hi.", "prompt_ids": [1, 2], "output_ids": [3] * 4, "output_spans": [[1, 9]]},
         "output_spans do not lie in the prompt"),
    ],
}  # fmt: skip
GOOD = {
    "messages": [{"messages": [USER | {"content": question(i)}, ANSWER | {"content": question(-i)}]} for i in (1, 2)],
    "tokenized": [{"input_ids": [10 + i, 20, 30 + i, 40, 50], "loss_mask": [0, 1, 1, 1, 1]} for i in (1, 2)],
    "response": [{"messages": [USER | {"content": question(i)}], "text": question(-i)} for i in (3, 4)],
}


@pytest.mark.parametrize("format", BAD)
def test_every_kind_of_bad_record_is_counted_and_located(tmp_path, tokenizer, format):
    raw = [row if isinstance(row, bytes) else json.dumps(row).encode() for row, _ in BAD[format]]
    good = [json.dumps(row).encode() for row in GOOD[format]]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join([good[0], *raw, good[1]]) + b"\n")
    entry = {"name": "x", "path": str(tmp_path / "x.jsonl"), "format": format}
    report = build(tmp_path, tokenizer, [entry], max_rejected_fraction=1.0)
    assert report.sources[0].taken == 2
    found = {line["line"]: line["reason"] for line in rejected(tmp_path)}
    assert sorted(found) == list(range(2, 2 + len(raw)))
    for line, (_, reason) in enumerate(BAD[format], 2):
        assert found[line].startswith(reason), (line, found[line])
    assert report.sources[0].unusable.total() == len(raw)


def test_responses_that_are_only_text_are_rebuilt_and_checked(tmp_path, tokenizer):
    def response(seed: int, more_tokens: int = 0, **fields) -> dict:
        text = pair(seed)["response"]
        count = len(tokenizer.encode(text)) + 1 + more_tokens  # with the stop token
        row = {"id": f"r{seed}", "messages": [{"role": "user", "content": question(seed)}], "text": text}
        return row | {"finish_reason": "stop", "completion_tokens": count} | fields

    rows = [response(i) for i in range(6)] + [response(6, more_tokens=9), response(7, -1, finish_reason="length")]
    path = write(tmp_path / "x.jsonl", rows)
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact")
    assert report.sources[0].round_trip == {
        "as far as can be known, same ids": 7,
        "another number of tokens than the API counted": 1,
    }
    records = {r.id: r for s in ("train", "val") for r in read_parquet(tmp_path / "corpus" / f"{s}.parquet")}
    ends = {name: tokenizer.decode(records[name].input_ids[-2:]) for name in ("r5", "r7")}
    assert "<|im_end|>" in ends["r5"] and "<|im_end|>" not in ends["r7"]  # r7 was cut off: it never said the stop token
    assert records["r7"].loss_mask[-1] == 1


def test_last_turn_only_and_reasoning_with_generated_ids(tmp_path, tokenizer):
    def response(seed: int, text: str) -> dict:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        ids = {"prompt_ids": [seed, 11, 12, 13, 14], "output_ids": [15, 16, 17, 18], "output_spans": [[1, 3]]}
        return {"id": f"r{seed}", "messages": messages, "text": text, "finish_reason": "stop"} | ids

    rows = [
        response(1, "plain words"),
        response(2, "other words"),
        response(3, "<think>\nhm\n</think>\n\nsome more words"),
    ]
    path = write(tmp_path / "x.jsonl", rows)
    settings = {"dedupe": "none", "supervise": "last_turn", "reasoning": "unsupervised", "min_supervised_tokens": 2}
    build(tmp_path, tokenizer, [{"name": "x", "path": path}], **settings)
    records = {r.id: r for s in ("train", "val") for r in read_parquet(tmp_path / "corpus" / f"{s}.parquet")}
    assert records["r1"].loss_mask == [0] * 5 + [1] * 4 and records["r1"].input_ids[0] == 1
    supervised = [t for t, m in zip(records["r3"].input_ids, records["r3"].loss_mask, strict=True) if m]
    assert tokenizer.decode(supervised) == "some more words<|im_end|>"  # rebuilt: its reasoning carries no loss


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


def test_a_template_whose_own_markers_disagree_stops_the_run(tmp_path, tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    path = write(tmp_path / "x.jsonl", [pair(i) for i in range(3)])
    tokenizer.chat_template = chat_templates.CHATML_MARKED
    assert build(tmp_path, tokenizer, [{"name": "x", "path": path}]).sources[0].taken == 3
    tokenizer.chat_template = chat_templates.CHATML_MARKED.replace("m.role == 'assistant'", "m.role == 'user'")
    with pytest.raises(UserError, match="nothing of its 3 records"):
        build(tmp_path, tokenizer, [{"name": "x", "path": path}])
    assert all("markers say otherwise" in line["reason"] for line in rejected(tmp_path))


def test_five_files_without_ids_have_different_ones_that_do_not_depend_on_the_order(tmp_path, tokenizer):
    ids = []
    for name, numbers in (("all", range(5)), ("last", (0, 4))):
        (tmp_path / name).mkdir()
        for shard in numbers:
            write(tmp_path / name / f"part-{shard}.jsonl", [pair(10 * shard + i) for i in range(2)])
        build(tmp_path / name, tokenizer, [{"name": "x", "path": str(tmp_path / name)}])
        ids.append([r.id for s in ("train", "val") for r in read_parquet(tmp_path / name / "corpus" / f"{s}.parquet")])
    assert len(set(ids[0])) == 10 and set(ids[1]) < set(ids[0])
    assert "x-part-3.jsonl-0000002" in ids[0]


def test_any_number_of_records_with_one_id(tmp_path, tokenizer):
    for shard in range(5):
        write(tmp_path / f"part-{shard}.jsonl", [pair(shard, id="same")])
    build(tmp_path, tokenizer, [{"name": "x", "path": f"{tmp_path}/*.jsonl"}])
    ids = {r.id for s in ("train", "val") for r in read_parquet(tmp_path / "corpus" / f"{s}.parquet")}
    assert ids == {"same", "x/same", "x/same#1", "x/same#1#2", "x/same#1#3"}


def test_records_that_differ_in_an_operator_or_a_tool_call_are_no_exact_duplicates(tmp_path, tokenizer):
    def call(city: str) -> dict:
        function = {"name": "weather", "arguments": {"city": city}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    asked = {"role": "user", "content": question(1)}
    rows = [{"messages": [asked, call(city), ANSWER]} for city in ("Oslo", "Rome", "Oslo")]
    rows += [{"messages": [asked, ANSWER | {"content": f"return a {sign} b, I think."}]} for sign in "+-+"]
    path = write(tmp_path / "x.jsonl", rows)
    count = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact").sources[0]
    assert (count.taken, count.dropped) == (4, {"exact duplicate": 2})


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_an_evaluation_prompt_is_found_in_every_turn(tmp_path, tokenizer, role):
    write(tmp_path / "eval.jsonl", [{"question": question(900)}])
    turns = {name: {"role": name, "content": question(i)} for i, name in enumerate(("system", "user", "assistant"))}
    leaked = turns | {role: {"role": role, "content": f"As asked: {question(900)}"}}
    path = write(tmp_path / "x.jsonl", [{"messages": list(rows.values())} for rows in (turns, leaked, turns)])
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], [tmp_path / "eval.jsonl"], dedupe="none")
    assert report.sources[0].dropped == {"evaluation prompt": 1} and report.corpus["evaluation_prompts"] == 1


def test_a_format_that_was_seen_is_logged_with_its_place_and_one_that_was_named_is_not(tmp_path, tokenizer):
    path, lines, counts = write(tmp_path / "x.jsonl", [pair(i) for i in range(4)]), [], []
    for more in ({}, {"format": "prompt_response"}):
        report = build(tmp_path, tokenizer, [{"name": "x", "path": path} | more], log=lines.append)
        counts += report.sources
    assert [(count.format, count.detected) for count in counts] == [
        ("prompt_response", True),
        ("prompt_response", False),
    ]
    assert [line for line in lines if "format" in line] == [f"source x: format prompt_response, seen from {path}:1"]


def test_records_tokenised_together_are_limited_by_number_and_by_bytes(monkeypatch):
    for name, limit in (("_CHUNK", 3), ("_CHUNK_BYTES", 100)):
        monkeypatch.setattr(f"eagle3_utils.corpus.reading.intake.{name}", limit)
    raws = [RawRecord("x", 1, {}, size=size) for size in (1, 2, 3, 60, 61, 500, 4)]
    assert [[raw.size for raw in chunk] for chunk in _chunks(raws)] == [[1, 2, 3], [60, 61], [500], [4]]


def test_truncation_hard_or_at_the_end_of_a_turn(tmp_path, tokenizer):
    turns = [{"role": role, "content": question(i)} for i in range(3) for role in ("user", "assistant")]
    path = write(tmp_path / "x.jsonl", [{"messages": turns}, {"messages": [*turns[:1], *turns[3:]]}])
    whole = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="none").statistics.lengths()
    for truncate in ("hard", "turn"):
        settings = {"truncate": truncate, "max_seq_len": 100, "dedupe": "none"}
        report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], **settings)
        lengths = report.statistics.lengths()
        record = read_parquet(tmp_path / "corpus" / "train.parquet")[0]
        assert report.sources[0].truncated == 2
        assert report.sources[0].truncated_tokens == sum(whole) - lengths.sum()
        if truncate == "hard":
            assert lengths.tolist() == [100, 100]
        else:
            assert lengths.max() < 100 and tokenizer.decode(record.input_ids).endswith("<|im_end|>")


def test_only_records_that_are_taken_count_as_truncated(tmp_path, tokenizer):
    row, other = ({"input_ids": list(range(i, i + 20)), "loss_mask": [0] * 4 + [1] * 16} for i in (10, 40))
    rows = [row, row, other, row | {"loss_mask": [0] * 10 + [1] * 10}, {key: values[:8] for key, values in row.items()}]
    path = write(tmp_path / "x.jsonl", rows)
    settings = {"dedupe": "exact", "max_seq_len": 10, "max_rejected_fraction": 0.5}
    [count] = build(tmp_path, tokenizer, [{"name": "x", "path": path}], **settings).sources
    assert (count.unusable.total(), count.dropped.total()) == (1, 1)  # nothing supervised left; a copy
    assert (count.taken, count.truncated, count.truncated_tokens) == (3, 2, 20)


def test_last_turn_end():
    assert [last_turn_end([0, 1, 1, 0, 0, 1, 1, 1], limit) for limit in (8, 7)] == [8, 3]
    assert [last_turn_end([0, 1, 1, 0], limit) for limit in (3, 2)] == [3, 0]


def test_ids_outside_the_vocabulary_are_unusable(tmp_path, tokenizer):
    rows = [{"input_ids": [1, 2, 3, 4, 5 + i, 6 + i], "loss_mask": [0, 0, 1, 1, 1, 1]} for i in range(30)]
    rows.append({"input_ids": [1, len(tokenizer)] * 3, "loss_mask": [0, 1] * 3})
    path = write(tmp_path / "x.jsonl", rows)
    report = build(tmp_path, tokenizer, [{"name": "x", "path": path}], dedupe="exact")
    assert list(report.sources[0].unusable) == ["token id outside the vocabulary"]
