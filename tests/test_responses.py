"""Responses on disk: going on after a kill, refusing other parameters, taking over earlier ones."""

from __future__ import annotations

import json

import pytest
import zstandard

from eagle3_utils.corpus.generation import responses
from eagle3_utils.corpus.generation.endpoints import Sampling
from eagle3_utils.corpus.generation.responses import GenerateSettings
from eagle3_utils.corpus.reading.sources import parse_sources, source_files
from eagle3_utils.errors import UserError

SETTINGS = GenerateSettings("model-1", Sampling(0.7, 1.0, 16))


def prompt(number: int, *turns: str, source: str = "chat") -> dict:
    messages = [{"role": "user", "content": turn} for turn in turns or (f"say {number}",)]
    return {"id": f"p{number}", "source": source, "split": "train", "messages": messages}


def response(number: int) -> dict:
    return prompt(number) | {"text": f"SAY {number}", "finish_reason": "stop"}


def test_a_half_written_last_line_is_cut_off(tmp_path):
    path = tmp_path / "responses.jsonl"
    assert responses.resume(path, SETTINGS) == {}
    whole = "".join(json.dumps(response(i)) + "\n" for i in range(4))
    path.write_bytes(whole.encode() + '{"id": "p4", "text": "hä'.encode()[:-1])
    assert set(responses.resume(path, SETTINGS)) == {"p0", "p1", "p2", "p3"}
    assert path.read_text() == whole


def test_a_file_without_a_whole_line_becomes_empty(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_bytes(b"x" * 200_000)
    assert responses.resume(path, SETTINGS) == {} and path.stat().st_size == 0


def test_going_on_with_other_parameters_is_refused(tmp_path):
    path = tmp_path / "responses.jsonl"
    responses.resume(path, SETTINGS)
    path.write_text(json.dumps(response(1)) + "\n")
    with pytest.raises(UserError, match="sampling"):
        responses.resume(path, GenerateSettings("model-1", Sampling(1.0, 1.0, 16)))
    with pytest.raises(UserError, match="model_fingerprint"):
        responses.resume(path, GenerateSettings("model-2", SETTINGS.sampling))


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{broken\n{"id": "b", "text": "y"}\n')
    with pytest.raises(UserError, match=r"responses\.jsonl:2"):
        responses.read_responses(path)


def earlier_file(folder, lines, model="model-1"):
    file = folder / "earlier.jsonl.zst"
    file.write_bytes(zstandard.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    (folder / "earlier.json").write_text(json.dumps({"model_fingerprint": model}))
    return file


def test_earlier_responses_are_taken_once_and_only_for_the_same_prompt(tmp_path):
    path = tmp_path / "responses.jsonl"
    lines = [prompt(i) | {"text": f"SAY {i}", "finish_reason": "stop"} for i in range(3)]
    file = earlier_file(tmp_path, lines)
    prompts = [prompt(0), prompt(1, "something else"), prompt(2), prompt(3)]
    for _ in range(2):  # the second time they are there already
        done = responses.resume(path, SETTINGS)
        assert responses.take_earlier(path, [file], prompts, done, "model-1") == {"p0", "p2"}
        assert set(done) == {"p0", "p2"} and len(path.read_text().splitlines()) == 2
    with pytest.raises(UserError, match="earlier_responses"):
        responses.take_earlier(path, [file], prompts, {}, "model-2")


def test_evaluation_prompts_are_left_alone_and_bad_prompts_are_located(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in (prompt(1), prompt(2) | {"split": "eval"})))
    assert [p["id"] for p in responses.read_prompts([file])] == ["p1"]
    assert len(responses.read_prompts([file], split=None)) == 2
    with pytest.raises(UserError, match="used twice"):
        responses.read_prompts([file, file])
    file.write_text('{"id": "a"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl:1"):
        responses.read_prompts([file])


def test_a_line_stays_only_while_it_answers_its_prompt_and_what_is_dropped_is_kept_aside(tmp_path):
    path = tmp_path / "responses.jsonl"
    responses.resume(path, SETTINGS)
    path.write_text("".join(json.dumps(response(i)) + "\n" for i in range(5)))
    prompts = [prompt(0), prompt(1, "something else"), prompt(2) | {"tools": [{"name": "add"}]}, prompt(4)]
    for expected in {"prompt changed": 2, "prompt removed or held out": 1}, {}:
        done = responses.resume(path, SETTINGS)
        assert responses.drop_stale(path, done, prompts) == expected
        assert set(done) == set(responses.read_responses(path)) == {"p0", "p4"}
    aside = tmp_path / "dropped" / "responses.jsonl"
    others = parse_sources([{"name": "x", "path": "{data}/*.jsonl"}], tmp_path)[0]
    assert source_files(others) == [path]
    assert list(responses.read_responses(aside)) == ["p1", "p2", "p3"]
    back = [prompt(number) for number in range(5)]  # as they were: the dropped lines can be had again
    assert responses.take_earlier(path, [aside], back, done, "model-1") == {"p1", "p2", "p3"}
    done = responses.resume(path, SETTINGS)
    assert responses.drop_stale(path, done, back[:1]) == {"prompt removed or held out": 4}
    assert len(aside.read_text().splitlines()) == 3 + 4


def test_a_conversation_that_ended_early_answers_its_prompt(tmp_path):
    asked = prompt(1, "one")
    cut = asked | {"text": "hm", "unasked_turns": 1}
    assert responses.answers(cut, prompt(1, "one", "two"))
    assert not responses.answers(cut, prompt(1, "one")) and not responses.answers(cut, prompt(1, "won", "two"))
    whole = asked | {"text": "hm", "unasked_turns": 0}
    assert responses.answers(whole, prompt(1, "one")) and not responses.answers(whole, prompt(1, "one", "two"))


def test_an_older_line_that_does_not_say_what_was_left_unasked_answers_the_prompt_it_begins(tmp_path):
    path, older = tmp_path / "responses.jsonl", prompt(1, "one") | {"text": "hm", "finish_reason": "length"}
    responses.resume(path, SETTINGS)
    path.write_text(json.dumps(older) + "\n")
    done = responses.resume(path, SETTINGS)
    assert not responses.drop_stale(path, done, [prompt(1, "one", "two")])
    assert done == responses.read_responses(path) == {"p1": older}
    assert responses.answers(prompt(1, "one", "two"), prompt(1, "one", "two"))
    assert not responses.answers(older, prompt(1, "won", "two"))
    assert not responses.answers(prompt(1, "one", "two"), prompt(1, "one"))


def test_a_prompt_without_a_source_has_its_files_name(tmp_path):
    file = tmp_path / "riddles.jsonl"
    lines = [{key: value for key, value in prompt(1).items() if key != "source"}, prompt(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [p["source"] for p in responses.read_prompts([file])] == ["riddles", "chat"]


def test_a_limit_takes_from_every_source_in_turn():
    prompts = [prompt(i, source="chat") for i in range(5)] + [prompt(9, source="code")]
    assert [p["id"] for p in responses.in_turns_by_source(prompts, 3)] == ["p0", "p9", "p1"]
    assert len(responses.in_turns_by_source(prompts)) == 6
