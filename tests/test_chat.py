"""The supervised text of a conversation is the assistants' words and their stop tokens, whatever the template."""

from __future__ import annotations

import pytest
from chat_templates import TALK, speaking
from transformers import AutoTokenizer

from eagle3_utils.corpus.reading.chat import ChatRenderer, split_reasoning
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.tokens import SpanTokenizer

STOPS = {
    "CHATML": ["<|im_end|>"] * 2,
    "LLAMA3": ["<|eot_id|>"] * 2,
    "DEEPSEEK_V3": ["<｜end▁of▁sentence｜>"] * 2,
    "KIMI_K2": ["<|im_end|>"] * 2,
    "HARMONY": ["<|end|>", "<|return|>"],
}


def supervised_runs(tokenizer, messages, tools=None, **options) -> list[str]:
    """The text of each run of supervised tokens."""
    text, spans = ChatRenderer(tokenizer, **options).render(messages, tools)
    ids, mask = SpanTokenizer(tokenizer).encode_batch([text], [spans])[0]
    assert tokenizer.decode(ids) == text
    runs, current = [], []
    for token, supervised in [*zip(ids, mask, strict=True), (None, 0)]:
        if supervised:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return runs


@pytest.mark.parametrize("family", STOPS)
def test_every_assistant_turn_and_its_stop_token_is_supervised_and_nothing_else(tiny_llama, family):
    expected = [TALK[2]["content"] + STOPS[family][0], TALK[4]["content"] + STOPS[family][1]]
    assert supervised_runs(speaking(tiny_llama, family), TALK) == expected


@pytest.mark.parametrize("family", STOPS)
def test_last_turn_only(tiny_llama, family):
    runs = supervised_runs(speaking(tiny_llama, family), TALK, supervise="last_turn")
    assert runs == [TALK[4]["content"] + STOPS[family][1]]


def test_the_example_targets_own_template_with_its_default_system_prompt(example_target):
    tokenizer = AutoTokenizer.from_pretrained(example_target)
    messages = [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": " Paris."}]
    assert supervised_runs(tokenizer, messages) == [" Paris.<|im_end|>"]


def test_a_template_that_trims_still_lines_up(tiny_llama):
    talk = [{"role": "user", "content": " hi \n"}, {"role": "assistant", "content": "\n Well. \n"}]
    assert supervised_runs(speaking(tiny_llama, "LLAMA3"), talk) == ["Well.<|eot_id|>"]


THINKING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nFour."},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "Six.", "reasoning_content": "Count."},
]


@pytest.mark.parametrize(
    "reasoning, last",
    [
        ("keep", "Count.\n</think>\n\nSix.<|im_end|>"),
        ("unsupervised", "Six.<|im_end|>"),
        ("drop", "Six.<|im_end|>"),
    ],
)
def test_reasoning_kept_unsupervised_or_dropped(tiny_llama, reasoning, last):
    tokenizer = speaking(tiny_llama, "QWEN3")
    assert supervised_runs(tokenizer, THINKING, reasoning=reasoning) == ["Four.<|im_end|>", last]
    text, _ = ChatRenderer(tokenizer, reasoning=reasoning).render(THINKING)
    assert ("Count." in text) == (reasoning != "drop")


def test_an_empty_think_block_is_a_header_and_not_supervised(tiny_llama):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]
    assert supervised_runs(speaking(tiny_llama, "QWEN3"), talk) == ["Hello.<|im_end|>"]


@pytest.mark.parametrize("reasoning, start", [("keep", "<think>\nCount.\n</think>\n\n"), ("unsupervised", "")])
def test_reasoning_goes_into_the_text_where_the_template_has_no_field_for_it(tiny_llama, reasoning, start):
    runs = supervised_runs(speaking(tiny_llama, "CHATML"), THINKING[2:], reasoning=reasoning)
    assert runs == [start + "Six.<|im_end|>"]


@pytest.mark.parametrize("reasoning", ["keep", "unsupervised", "drop"])
def test_reasoning_stands_under_the_templates_own_key(tiny_llama, reasoning):
    tokenizer = speaking(tiny_llama, "HARMONY")  # `thinking`, in a channel of its own
    runs = supervised_runs(tokenizer, THINKING[2:], reasoning=reasoning)
    thought = "Count.<|end|><|start|>assistant<|channel|>final<|message|>" if reasoning == "keep" else ""
    assert runs == [thought + "Six.<|return|>"]
    text, _ = ChatRenderer(tokenizer, reasoning=reasoning).render(THINKING[2:])
    assert ("<|channel|>analysis<|message|>Count." in text) == (reasoning != "drop")


def test_tool_calls_are_supervised_and_tool_results_are_not(tiny_llama):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    runs = supervised_runs(speaking(tiny_llama, "QWEN3"), talk)
    assert len(runs) == 2
    assert runs[0].endswith("</tool_call><|im_end|>") and '"name": "add"' in runs[0]
    assert runs[1].endswith("Two.<|im_end|>") and "2<|im_end|>" not in runs[1]


def test_a_template_that_refuses_a_conversation_makes_it_unusable(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Unusable, match="roles must alternate"):
        ChatRenderer(tokenizer).render(TALK)


def test_a_template_that_rewrites_earlier_turns_is_refused_not_guessed(tiny_llama):
    template = "{% for m in messages %}{{ m.content | upper }}{% if loop.last %}!{% endif %}{% endfor %}"
    with pytest.raises(Unusable, match="rewrites"):
        ChatRenderer(speaking(tiny_llama, "CHATML", template)).render(TALK)


def test_split_reasoning():
    assert split_reasoning(THINKING[1]) == ("Easy.", "Four.")
    assert split_reasoning(THINKING[3]) == ("Count.", "Six.")
    assert split_reasoning({"content": "a </think> b"}) == (None, "a </think> b")
