"""Chat templates → token ids + loss mask, by character spans carried through the tokenizer's offsets.

The target's own template renders the whole conversation. Where each message's words stand in the rendered text is
found without knowing the template: the same conversation is rendered once more with marks in place of the words (once
per shape of conversation, kept), which gives the template's own pieces of text; between them stand the words.
An assistant turn is supervised from its first character to the end of its stop token. Headers (role names, an empty
`<think>` block) are the template's, so they are not. Where a template rewrites what it is given, the turns are found
by rendering the conversation up to each of them; if that does not line up either, the record is refused with a reason.
A template's own `{% generation %}` markers, where it has them, must agree: every record is compared.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.markers import Span, check_markers
from eagle3_utils.corpus.reading.shapes import Shape, mark, shape_of, walk
from eagle3_utils.errors import UserError

Messages = list[dict[str, Any]]
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # Qwen, DeepSeek, Kimi; gpt-oss; others
_NO_THOUGHT = re.compile(r"\s*(?:<think>)?\s*</think>\s*")  # a header, like role names
_THOUGHT = re.compile(r".*?</think>\s*", re.DOTALL)
_MAX_SHAPES = 4096  # kept at a time


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template and says which tokens are supervised.

    Parameters
    ----------
    tokenizer : a Hugging Face tokenizer with a chat template.
    supervise : every assistant turn, or the last one only.
    reasoning : keep it supervised, drop it from the text, or keep it unsupervised. Reasoning is a message's
        `reasoning_content`, or what stands between `<think>` and `</think>` at the start of its content; where the
        template's prompt opens `<think>` itself (`opens_reasoning`), whatever stands before `</think>`.
    """

    def __init__(
        self,
        tokenizer,
        supervise: Literal["all_turns", "last_turn"] = "all_turns",
        reasoning: Literal["keep", "drop", "unsupervised"] = "keep",
    ):
        if not tokenizer.chat_template:
            raise UserError("the target's tokenizer has no chat template", "model")
        self.tokenizer, self.supervise, self.reasoning = tokenizer, supervise, reasoning
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted(special - {""}, key=len, reverse=True)
        self._stop = re.compile(r"\s*(?:" + ("|".join(map(re.escape, self._special)) or "(?!)") + ")")
        self._shapes: dict[tuple, Shape | None] = {}
        self._reasoning_key: str | None = "reasoning_content"
        self._reasoning_key = self._key_that_shows_reasoning()
        self.opens_reasoning = self._prompt_opens_reasoning()
        if self.opens_reasoning and self._reasoning_key is None:
            self._reasoning_key = "reasoning_content"  # not shown in the last answer: `_with_last_reasoning` adds it

    def render(self, messages: Messages, tools: list | None = None, finished: bool = True) -> tuple[str, list[Span]]:
        """The conversation as text, and the supervised characters of it, in order.

        Parameters
        ----------
        finished : whether the last answer ended by itself; of one that was cut off the text ends with its last word,
            since its stop token was never generated.

        Raises
        ------
        Unusable
            When the template refuses the conversation, its turns cannot be located, its own markers disagree, or the
            last answer was cut off within the reasoning that the prompt opened.
        """
        answer, messages = messages[-1], [self._with_reasoning(message) for message in messages]
        if self.opens_reasoning and not finished and self.split(answer)[0] is None:
            raise Unusable("an answer that was cut off within its reasoning")
        text, spans = self._located(messages, tools)
        if self.opens_reasoning and messages[-1].get("reasoning_content", "").strip():
            text, spans = self._with_last_reasoning(answer, messages, tools, text, spans)
        spans = [span for span in (spans[-1:] if self.supervise == "last_turn" else spans) if span[0] < span[1]]
        if not finished and spans:
            start, end = spans[-1]
            stop = next((token for token in self._special if text.endswith(token, start, end)), "")
            text, spans = text[: end - len(stop)], [*spans[:-1], (start, end - len(stop))]
        return text, spans

    def prompt(self, messages: Messages, tools: list | None = None) -> str:
        """The text a model is given to answer: the conversation and the opening of an assistant turn."""
        return self._apply(messages, tools, add_generation_prompt=True)

    def split(self, message: dict[str, Any]) -> tuple[str | None, str]:
        """`split_reasoning` for answers to this template's prompts."""
        return split_reasoning(message, self.opens_reasoning)

    def _apply(self, messages: Messages, tools: list | None, **options) -> str:
        messages, options = self._renamed(messages), {"tools": tools, "tokenize": False} | options
        try:
            try:
                return self.tokenizer.apply_chat_template(messages, **options)
            except TypeError:  # DeepSeek's templates put the arguments of a call into the text as they are
                return self.tokenizer.apply_chat_template(_with_text_arguments(messages), **options)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Unusable(f"the template refuses the conversation: {str(error)[:80]}") from None

    def _renamed(self, messages: Messages) -> Messages:
        """Messages whose reasoning stands under the template's own key."""
        if self._reasoning_key in (None, "reasoning_content"):
            return messages
        return [{self._reasoning_key if k == "reasoning_content" else k: m[k] for k in m} for m in messages]

    def _with_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template wants it: reasoning in its own field where the template shows that."""
        if message["role"] != "assistant":
            return message
        reasoning, content = self.split(message)
        if reasoning is None:
            return message
        others = {key: value for key, value in message.items() if key not in ("reasoning_content", "content")}
        if self.reasoning == "drop":
            return others | {"content": content}
        if self._reasoning_key is not None:
            return others | {"content": content, "reasoning_content": reasoning}
        if "reasoning_content" in message:
            return others | {"content": f"<think>\n{reasoning}\n</think>\n\n{content}"}
        return message

    def _key_that_shows_reasoning(self) -> str | None:
        """Under which key the template looks for an answer's reasoning; None when it has no place for it."""
        for key in _REASONING_KEYS:
            answer = {"role": "assistant", "content": "b", key: mark(0, "r")}
            try:
                if mark(0, "r") in self._apply([{"role": "user", "content": "a"}, answer], None):
                    return key
            except Unusable:  # a template that refuses this says nothing about the key
                return None
        return None

    def _prompt_opens_reasoning(self) -> bool:
        try:
            return self.prompt([{"role": "user", "content": "a"}]).rstrip().endswith("<think>")
        except Unusable:  # a template that wants more than one question
            return False

    def _located(self, messages: Messages, tools: list | None) -> tuple[str, list[Span]]:
        """The conversation as the template renders it, and the span of every assistant turn."""
        text = self._apply(messages, tools)
        found = self._spans_by_marks(messages, tools, text)
        spans, words = found or (self._spans_by_prefixes(messages, tools, text), [])
        check_markers(self.tokenizer, self._special, self._renamed(messages), tools, spans, words)
        return text, spans

    def _with_last_reasoning(
        self, answer: dict[str, Any], messages: Messages, tools: list | None, text: str, spans: list[Span]
    ) -> tuple[str, list[Span]]:
        """Text and spans with the last answer's reasoning after the prompt that opens it, if the template left it out.

        Kimi-K2.5's and DeepSeek-R1's do; what the model saw and wrote is the prompt, reasoning, `</think>`, answer.
        `answer` is the last message as it came.
        """
        prompt, last = self.prompt(messages[:-1], tools), messages[-1]
        opening = prompt.rstrip()
        shown = text[len(opening) :].lstrip().startswith(last["reasoning_content"].strip())
        if (text.startswith(opening) and shown) or not opening.endswith("<think>"):  # not opened after a tool's result
            return text, spans
        earlier, earlier_spans = self._located(messages[:-1], tools)
        if not prompt.startswith(earlier):
            raise Unusable("the template rewrites an earlier turn: its words cannot be located")
        blank = "\n" if prompt.endswith("\n") else ""
        thought = f"{last['reasoning_content']}{blank}</think>{2 * blank}"
        if not answer.get("reasoning_content"):  # letter for letter as it was generated
            thought = answer["content"].removesuffix(last["content"])
            thought = thought.lstrip().removeprefix("<think>").lstrip("\n") if "<think>" in thought else thought
        (start, end), words = spans[-1], len(prompt) + len(thought)
        first = len(prompt) if self.reasoning == "keep" else words
        return prompt + thought + text[start:], [*earlier_spans, (first, words + end - start)]

    def _spans_by_marks(
        self, messages: Messages, tools: list | None, text: str
    ) -> tuple[list[Span], list[Span]] | None:
        """The supervised span of each assistant turn and the words of all others; None when marks do not line up."""
        about = [
            (m["role"], "reasoning_content" in m, str(m.get("name")), str(m.get("tool_call_id"))) for m in messages
        ]
        key = (*about, tools and json.dumps(tools, default=str))
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._shape(messages, tools)
        shape = self._shapes[key]
        places = shape and walk(shape, messages, text)
        if not places:
            return None
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if (number, "c") not in places:
                    return None
                spans.append(self._turn_span(text, places.get((number, "r")), places[number, "c"]))
        return spans, [span for (number, _), span in places.items() if messages[number]["role"] != "assistant"]

    def _shape(self, messages: Messages, tools: list | None) -> Shape | None:
        try:
            return shape_of(messages, lambda marked: self._apply(marked, tools))
        except Unusable:  # some templates want a call before a tool's result
            return None

    def _turn_span(self, text: str, reasoning: Span | None, content: Span) -> Span:
        start, end = content
        stop = self._end_of_stop_token(text, end)
        if reasoning is not None and self.reasoning == "keep":
            start = reasoning[0]
        elif self.reasoning == "unsupervised" and text.startswith("<think>", start):
            closed = text.find("</think>", start, end)
            start = start if closed < 0 else closed + len("</think>")
            start += len(text[start:end]) - len(text[start:end].lstrip())
        return start, stop

    def _end_of_stop_token(self, text: str, end: int) -> int:
        """Where the special token right after an answer ends (blanks between are part of it), else `end` itself."""
        stop = self._stop.match(text, end)
        return stop.end() if stop else end

    def _spans_by_prefixes(self, messages: Messages, tools: list | None, text: str) -> list[Span]:
        """Each assistant turn is what the whole text has beyond the prompt for that turn, up to its last special token.

        Raises
        ------
        Unusable
            When a prompt is not the beginning of the whole text: the template rewrites earlier turns.
        """
        spans = []
        bare = [{k: m[k] for k in m if k != "reasoning_content"} for m in messages]  # some show it for a while only
        forms = [messages] if bare == messages else [messages, bare]
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            pasts = [form[:number] for form in forms]
            turns = [[*past, form[number]] for past in pasts for form in forms]
            prompts = [self._apply(past, tools, add_generation_prompt=True) for past in pasts]
            start = max((len(prompt) for prompt in prompts if text.startswith(prompt)), default=len(text))
            end = max(self._end_of_turn(turn, tools, text) for turn in turns)
            if end <= start:
                if self.supervise == "last_turn" and number < len(messages) - 1:
                    continue
                raise Unusable("the template rewrites an earlier turn: its words cannot be located")
            thought = message.get("reasoning_content", "").strip()
            if self.reasoning == "unsupervised" and thought in text[start:end]:
                start = text.index(thought, start) + len(thought)
            header = (_THOUGHT if self.reasoning == "unsupervised" else _NO_THOUGHT).match(text, start, end)
            spans.append((header.end() if header else start, end))
        return spans

    def _end_of_turn(self, messages: Messages, tools: list | None, text: str) -> int:
        """Where the last of `messages` ends in `text`, which goes on after it; 0 if the two differ before that."""
        alone = self._apply(messages, tools)
        stop = max((alone.rfind(token) for token in self._special), default=-1)
        if stop >= 0:  # another stop token may stand there: gpt-oss ends earlier answers with another one
            return self._end_of_stop_token(text, stop) if text.startswith(alone[:stop]) else 0
        return len(_common_start(alone, text))


def _common_start(left: str, right: str) -> str:
    """The longest text both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def split_reasoning(message: dict[str, Any], opened: bool = False) -> tuple[str | None, str]:
    """(reasoning, answer) of an assistant message; reasoning is None where there is none.

    `opened`: the prompt ended in `<think>`, so that an answer's text begins within the reasoning.
    """
    content = message["content"]
    if message.get("reasoning_content"):
        return message["reasoning_content"], content
    head, closing, tail = content.partition("</think>")
    if closing and (opened or head.lstrip().startswith("<think>")):
        return head.lstrip().removeprefix("<think>").strip("\n"), tail.lstrip("\n")
    return None, content


def _with_text_arguments(messages: Messages) -> Messages:
    """Messages whose tool calls have their arguments as JSON text."""
    copies = json.loads(json.dumps(messages))
    for call in itertools.chain.from_iterable(message.get("tool_calls") or [] for message in copies):
        function = call.get("function", call)
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return copies
