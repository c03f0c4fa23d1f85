"""The supervised text of a conversation is the assistants' words and their stop tokens, whatever the template."""

from __future__ import annotations

import asyncio
import json

import pytest
from chat_templates import TALK, speaking
from merging import build, write
from transformers import AutoTokenizer

from eagle3_utils.corpus.generation.endpoints import Reply, Sampling
from eagle3_utils.corpus.generation.generate import generate
from eagle3_utils.corpus.generation.responses import GenerateSettings
from eagle3_utils.corpus.reading.chat import ChatRenderer, split_reasoning
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.tokens import SpanTokenizer
from eagle3_utils.corpus.records import read_parquet

STOPS = {
    "CHATML": ["<|im_end|>"] * 2,
    "LLAMA3": ["<|eot_id|>"] * 2,
    "DEEPSEEK_V3": ["<｜end▁of▁sentence｜>"] * 2,
    "KIMI_K2": ["<|im_end|>"] * 2,
    "HARMONY": ["<|end|>", "<|return|>"],
}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def call(number: int) -> dict:
    function = {"name": "add", "arguments": {"a": number}}
    return {"id": f"functions.add:{number}", "type": "function", "function": function}


WITH_TOOLS = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [call(1)]},
    {"role": "tool", "content": 'it "is"\n2', "tool_call_id": "functions.add:1"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [call(2)], "reasoning_content": "Add."},
    {"role": "tool", "content": "4", "tool_call_id": "functions.add:2"},
    {"role": "assistant", "content": "Four."},
]
# What a call of each family's looks like, from the end of the prompt to the stop token, and what else the model writes.
CALLS = {
    "QWEN3": '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call><|im_end|>',
    "QWEN3_THINKING": '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call><|im_end|>',
    "LLAMA3": '{"name": "add", "parameters": {"a": %d}}<|eot_id|>',
    "DEEPSEEK_V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": %d}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "KIMI_K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:%d<|tool_call_argument_begin|>"
    '{"a": %d}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
    "HARMONY": ' to=functions.add<|channel|>commentary json<|message|>{"a": %d}<|call|>',
}
CALLS |= {"KIMI_K25": CALLS["KIMI_K2"], "DEEPSEEK_R1": CALLS["DEEPSEEK_V3"]}
STOPS |= {"QWEN3": ["<|im_end|>"] * 2, "QWEN3_THINKING": ["<|im_end|>"] * 2}
STOPS |= {"KIMI_K25": STOPS["KIMI_K2"], "DEEPSEEK_R1": STOPS["DEEPSEEK_V3"]}


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


@pytest.mark.parametrize("family", CALLS)
def test_calls_of_tools_are_supervised_whole_and_nothing_around_them(tiny_llama, family):
    tokenizer = speaking(tiny_llama, family)
    first, second = (CALLS[family].replace("%d", str(number)) for number in (1, 2))
    final = "<|channel|>final<|message|>" if family == "HARMONY" else ""  # located by the prompt: the model writes it
    expected = [first, f"{final}Two.{STOPS[family][0]}", second, f"{final}Four.{STOPS[family][1]}"]
    assert supervised_runs(tokenizer, WITH_TOOLS, TOOLS, reasoning="drop") == expected
    assert supervised_runs(tokenizer, WITH_TOOLS, TOOLS, reasoning="unsupervised") == expected
    text, _ = ChatRenderer(tokenizer).render(WITH_TOOLS, TOOLS)
    described = '"name": "add"' in text.split("1+1?")[0] and '"type": "object"' in text.split("1+1?")[0]
    assert described == ("DEEPSEEK" not in family)  # that template has no place for tools
    assert "Be exact." in text and text == ChatRenderer(tokenizer).render(WITH_TOOLS, TOOLS)[0]


@pytest.mark.parametrize("family, thought", [("QWEN3", "Add.\n</think>\n\n"), ("HARMONY", "")])
def test_reasoning_before_a_call_is_kept_where_the_template_shows_it(tiny_llama, family, thought):
    runs = supervised_runs(speaking(tiny_llama, family), WITH_TOOLS, TOOLS)
    assert runs[2] == thought + CALLS[family].replace("%d", "2")


def test_an_empty_think_block_before_a_call_is_a_header_and_not_supervised(tiny_llama):
    runs = supervised_runs(speaking(tiny_llama, "QWEN3"), WITH_TOOLS[:3], TOOLS)
    assert runs == [CALLS["QWEN3"] % 1]  # as the last answer it has an empty block in front


def test_a_default_system_turn_and_todays_date_are_the_templates(tiny_llama):
    talk = TALK[1:]
    for family, default in {"KIMI_K2": "You are Kimi.", "LLAMA3": "Today: ", "HARMONY": "You are ChatGPT."}.items():
        tokenizer = speaking(tiny_llama, family)
        assert default in ChatRenderer(tokenizer).render(talk)[0]
        assert supervised_runs(tokenizer, talk) == supervised_runs(tokenizer, TALK)


OPENED = {  # the end of the prompt, and an answer as it is generated
    "KIMI_K25": ("<|im_middle|><think>", " Count.</think>Six."),
    "DEEPSEEK_R1": ("<｜Assistant｜><think>\n", "Count.\n</think>\n\nSix."),
    "QWEN3_THINKING": ("assistant\n<think>\n", "Count.\n</think>\n\nSix."),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("family", OPENED)
def test_reasoning_that_the_prompt_opens(tiny_llama, family, apart):
    tokenizer, (opening, generated) = speaking(tiny_llama, family), OPENED[family]
    asked, stop = [*THINKING[:2], THINKING[2]], STOPS[family][1]
    answer = THINKING[3] if apart else {"role": "assistant", "content": generated}
    thought = "Count.</think>Six." if apart and family == "KIMI_K25" else generated
    renderer = ChatRenderer(tokenizer)
    text, spans = renderer.render([*asked, answer])
    prompt = renderer.prompt([renderer._with_reasoning(message) for message in asked])
    assert prompt.endswith(opening) and text.rstrip("\n") == prompt + thought + stop
    assert [text[start:end] for start, end in spans] == ["Four." + stop, thought + stop]
    assert supervised_runs(tokenizer, [*asked, answer], reasoning="unsupervised") == ["Four." + stop, "Six." + stop]
    assert supervised_runs(tokenizer, [*asked, answer], reasoning="drop") == ["Four." + stop, "Six." + stop]
    assert "Count." not in ChatRenderer(tokenizer, reasoning="drop").render([*asked, answer])[0]


class Server:
    """Answers as a thinking model does, whose prompt has opened the reasoning."""

    num_retries = 0

    def __init__(self, tokenizer, *answers: str, stop: str, ids: bool = True):
        self.tokenizer, self.answers, self.stop, self.ids, self.seen = tokenizer, list(answers), stop, ids, []

    async def ask(self, request) -> Reply:
        self.seen.append(request)
        text = self.answers.pop(0)
        ids = [*self.tokenizer.encode(text), self.tokenizer.convert_tokens_to_ids(self.stop)]
        return Reply(text, ids if self.ids else None, "stop")


def conversation(folder, tokenizer, *answers: str, ids: bool = True, **options):
    """What stage 00 writes for a conversation of two questions, and what the server was asked."""
    path = folder / "responses.jsonl"
    path.unlink(missing_ok=True)
    prompt = {"id": "p", "messages": [{"role": "user", "content": question} for question in ("2+2?", "3+3?")]}
    settings = GenerateSettings("m", Sampling(), **options)
    server = Server(tokenizer, *answers, stop=STOPS["KIMI_K25"][0], ids=ids)
    asyncio.run(generate([prompt], path, server, tokenizer, settings))
    return json.loads(path.read_text()), server.seen


def test_the_next_question_is_asked_without_the_reasoning_that_the_prompt_opened(tiny_llama, tmp_path):
    tokenizer = speaking(tiny_llama, "KIMI_K25")
    line, seen = conversation(tmp_path, tokenizer, "Easy.</think>Four.", "Count.</think>Six.")
    asked = tokenizer.decode(seen[1].prompt_ids)
    assert "Easy." not in asked and "<think></think>Four.<|im_end|>" in asked and asked.endswith("<think>")
    assert line["messages"][1] == {"role": "assistant", "content": "Four.", "reasoning_content": "Easy."}
    assert tokenizer.decode(line["prompt_ids"]) == asked and line["text"] == "Count.</think>Six."
    line, seen = conversation(tmp_path, tokenizer, "Easy.</think>Four.", "Six.", ids=False, api="openai")
    assert seen[1].messages[1] == {"role": "assistant", "content": "Four."} and line["text"] == "Six."
    line, seen = conversation(tmp_path, tokenizer, "I never come to an end", "unasked")
    assert len(seen) == 1 and line["text"] == "I never come to an end" and len(line["messages"]) == 1


@pytest.mark.parametrize("reasoning", ["keep", "drop", "unsupervised"])
def test_generated_ids_with_reasoning_that_the_prompt_opened(tiny_llama, tmp_path, reasoning):
    tokenizer = speaking(tiny_llama, "KIMI_K25")
    line, _ = conversation(tmp_path, tokenizer, "Easy.</think>Four.", "Count to it. </think>\n\nSix is the answer.")
    endless, _ = conversation(tmp_path, tokenizer, "I never come to an end", "unasked")
    path = write(tmp_path / "x.jsonl", [line | {"id": "a"}, line | {"id": "c"}, endless | {"id": "b"}])
    options = {"reasoning": reasoning, "dedupe": "none", "max_rejected_fraction": 0.5}
    build(tmp_path, tokenizer, [{"name": "x", "path": path}], max_seq_len=512, **options)
    files = [tmp_path / "corpus" / f"{split}.parquet" for split in ("train", "val")]
    records = {record.id: record for file in files for record in read_parquet(file)}
    assert set(records) == ({"a", "b", "c"} if reasoning == "keep" else {"a", "c"})  # nothing but reasoning
    ids, mask = records["a"].input_ids, records["a"].loss_mask
    supervised = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    answer = "Six is the answer.<|im_end|>"
    if reasoning == "keep":
        assert ids == line["prompt_ids"] + line["output_ids"]
        assert supervised == "Count to it. </think>\n\n" + answer
    else:
        assert supervised == "Four.<|im_end|>" + answer
        assert ("Count to it. </think>\n\n" in tokenizer.decode(ids)) == (reasoning == "unsupervised")


def test_an_answer_cut_off_within_its_reasoning_is_refused(tiny_llama):
    talk = [THINKING[0], {"role": "assistant", "content": "Let me see"}]
    with pytest.raises(Unusable, match="cut off within its reasoning"):
        ChatRenderer(speaking(tiny_llama, "KIMI_K25")).render(talk, finished=False)
    assert ChatRenderer(speaking(tiny_llama, "KIMI_K2")).render(talk, finished=False)[0].endswith("Let me see")


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
    assert split_reasoning({"content": "a\n</think>\n\nb"}, opened=True) == ("a", "b")
    assert split_reasoning({"content": "b"}, opened=True) == (None, "b")
