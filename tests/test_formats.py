"""Every format becomes the same messages; what cannot be used has a reason."""

from __future__ import annotations

import pytest

from eagle3_utils.corpus.reading.formats import Unusable, detect_format, text_of, to_item

ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "Four."}

SAME = {
    "messages": {"messages": [ASKED, ANSWERED]},
    "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "Four."}]},
    "alpaca": {"instruction": "2+2?", "input": "", "output": "Four."},
    "prompt_response": {"prompt": "2+2?", "response": "Four."},
    "response": {"messages": [ASKED], "text": "Four.", "finish_reason": "stop"},
}


@pytest.mark.parametrize("format", SAME)
def test_formats_are_told_apart_and_give_the_same_messages(format):
    record = SAME[format]
    assert detect_format(record) == format
    assert to_item(record, format).messages == [ASKED, ANSWERED]


def test_other_spellings():
    for record in ({"question": "2+2?", "answer": "Four."}, {"query": "2+2?", "completion": "Four."}):
        assert to_item(record, detect_format(record)).messages == [ASKED, ANSWERED]
    turns = {"conversations": [ASKED | {"role": "Human"}, ANSWERED], "system": "Be brief."}
    item = to_item(turns, detect_format(turns))
    assert item.messages == [{"role": "system", "content": "Be brief."}, ASKED, ANSWERED]
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]}, ANSWERED]}
    assert to_item(parts, "messages").messages == [ASKED, ANSWERED]
    assert to_item(SAME["alpaca"] | {"input": "Say it."}, "alpaca").messages[0]["content"] == "2+2?\n\nSay it."


def test_a_response_keeps_its_generated_ids():
    record = SAME["response"] | {"id": 7, "source": "maths", "prompt_ids": [1, 2, 3], "output_ids": [4, 5]}
    item = to_item(record, "response")
    assert (item.id, item.source) == ("7", "maths")
    assert (item.input_ids, item.loss_mask) == ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    earlier = to_item(record | {"output_spans": [[1, 2]]}, "response")
    assert earlier.loss_mask == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("given", [{"a": "é"}, '{"a": "é"}', '{"a": "\\u00e9"}'])
def test_arguments_of_a_tool_call_become_an_object(given):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    (kept,) = to_item({"messages": [ASKED, answer]}, "messages").messages[1]["tool_calls"]
    assert kept == call | {"function": {"name": "add", "arguments": {"a": "é"}}}
    flat = ANSWERED | {"tool_calls": [call["function"]]}
    assert to_item({"messages": [ASKED, flat]}, "messages").messages[1]["tool_calls"] == [kept["function"]]
    made = SAME["response"] | {"tool_calls": [call]}
    assert to_item(made, "response").messages[1]["tool_calls"] == [kept]


def test_tokenized_and_text():
    item = to_item({"input_ids": [1, 2], "loss_mask": [False, True]}, "tokenized")
    assert (item.input_ids, item.loss_mask) == ([1, 2], [0, 1])
    assert text_of(to_item({"text": "Once."}, detect_format({"text": "Once."}))) == "Once."


def calling(call) -> dict:
    return {"messages": [ASKED, ANSWERED | {"tool_calls": [call]}]}


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"foo": 1}, "unknown format"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": "hi"}, "not a list"),
        ({"messages": [ASKED]}, "no assistant turn"),
        ({"messages": [ASKED, {"role": "assistant", "content": "  "}]}, "empty assistant turn"),
        ({"messages": [ASKED, {"role": "narrator", "content": "x"}, ANSWERED]}, "unknown role: narrator"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWERED]},
            "a part that is not text: image_url",
        ),
        ({"messages": [{"role": "user", "content": None}, ANSWERED]}, "not text"),
        ({"messages": ["hi"]}, "not an object"),
        ({"conversations": [3]}, "not an object"),
        ({"prompt": "a", "response": 3}, "not text"),
        ({"input_ids": [1, "2"], "loss_mask": [0, 1]}, "not a list of integers"),
        ({"input_ids": [1.5], "loss_mask": [0]}, "not a list of integers"),
        ({"text": " "}, "no text"),
        ({"messages": [ASKED], "text": None, "finish_reason": "stop"}, "the response is not text"),
        ({"messages": [ASKED, ANSWERED], "tools": "calculator"}, "tools is not a list"),
        (calling("add"), "a tool call is not an object"),
        (calling({"function": {"name": "add", "arguments": "{a: 1"}}), "arguments of a tool call are not JSON"),
        (calling({"function": {"name": "add", "arguments": "[1]"}}), "arguments of a tool call are not an object"),
    ],
)
def test_unusable_records_have_a_reason(record, reason):
    with pytest.raises(Unusable, match=reason):
        to_item(record, detect_format(record))
