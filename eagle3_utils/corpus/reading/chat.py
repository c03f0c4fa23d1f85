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
from eagle3_utils.errors import UserError

Messages = list[dict[str, Any]]
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # Qwen, DeepSeek, Kimi; gpt-oss; others
_MAX_SHAPES = 4096  # kept at a time


def _mark(number: int, part: str) -> str:
    """Private-use characters: no template looks for them, no text holds them."""
    return f"\ue000{number}{part}\ue001"


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template and says which tokens are supervised.

    Parameters
    ----------
    tokenizer : a Hugging Face tokenizer with a chat template.
    supervise : every assistant turn, or the last one only.
    reasoning : keep it supervised, drop it from the text, or keep it unsupervised. Reasoning is a message's
        `reasoning_content`, or what stands between `<think>` and `</think>` at the start of its content.
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
        self._shapes: dict[tuple, list[tuple[str, tuple[int, str] | None]] | None] = {}
        self._reasoning_key: str | None = "reasoning_content"
        self._reasoning_key = self._key_that_shows_reasoning()

    def render(self, messages: Messages, tools: list | None = None, finished: bool = True) -> tuple[str, list[Span]]:
        """The conversation as text, and the supervised characters of it, in order.

        Parameters
        ----------
        finished : whether the last answer ended by itself; of one that was cut off the text ends with its last word,
            since its stop token was never generated.

        Raises
        ------
        Unusable
            When the template refuses the conversation, its turns cannot be located, or its own markers disagree.
        """
        messages = [self._with_reasoning(message) for message in messages]
        text = self._apply(messages, tools)
        found = self._spans_by_marks(messages, tools, text)
        spans, words = found or (self._spans_by_prefixes(messages, tools, text), [])
        check_markers(self.tokenizer, self._special, self._renamed(messages), tools, spans, words)
        spans = [span for span in (spans[-1:] if self.supervise == "last_turn" else spans) if span[0] < span[1]]
        if not finished and spans:
            start, end = spans[-1]
            stop = next((token for token in self._special if text.endswith(token, start, end)), "")
            text, spans = text[: end - len(stop)], [*spans[:-1], (start, end - len(stop))]
        return text, spans

    def prompt(self, messages: Messages, tools: list | None = None) -> str:
        """The text a model is given to answer: the conversation and the opening of an assistant turn."""
        return self._apply(messages, tools, add_generation_prompt=True)

    def _apply(self, messages: Messages, tools: list | None, **options) -> str:
        try:
            return self.tokenizer.apply_chat_template(self._renamed(messages), tools=tools, tokenize=False, **options)
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
        reasoning, content = split_reasoning(message)
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
            answer = {"role": "assistant", "content": "b", key: _mark(0, "r")}
            try:
                if _mark(0, "r") in self._apply([{"role": "user", "content": "a"}, answer], None):
                    return key
            except Unusable:  # a template that refuses this says nothing about the key
                return None
        return None

    def _spans_by_marks(
        self, messages: Messages, tools: list | None, text: str
    ) -> tuple[list[Span], list[Span]] | None:
        """The supervised span of each assistant turn and the words of all others; None when marks do not line up."""
        if any(message.get("tool_calls") for message in messages):
            return None
        about = [
            (m["role"], "reasoning_content" in m, str(m.get("name")), str(m.get("tool_call_id"))) for m in messages
        ]
        key = (*about, tools and json.dumps(tools, default=str))
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._shape(messages, tools)
        shape = self._shapes[key]
        places = shape and _walk(shape, messages, text)
        if not places:
            return None
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                if (number, "c") not in places:
                    return None
                spans.append(self._turn_span(text, places.get((number, "r")), places[number, "c"]))
        return spans, [span for (number, _), span in places.items() if messages[number]["role"] != "assistant"]

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

    def _shape(self, messages: Messages, tools: list | None) -> list[tuple[str, tuple[int, str] | None]] | None:
        """The template's own pieces of text, each with the (message, part) that follows it; None if it uses one twice.

        Parts are "c" for content, "r" for reasoning.
        """
        marked = []
        for number, message in enumerate(messages):
            marked.append(message | {"content": _mark(number, "c")})
            if "reasoning_content" in message:
                marked[-1]["reasoning_content"] = _mark(number, "r")
        text = self._apply(marked, tools)
        found = []
        for number, part in itertools.product(range(len(messages)), "cr"):
            mark = _mark(number, part)
            if text.count(mark) > 1:
                return None
            if mark in text:
                found.append((text.index(mark), mark, (number, part)))
        pieces, position = [], 0
        for start, mark, place in sorted(found):
            pieces.append((text[position:start], place))
            position = start + len(mark)
        return [*pieces, (text[position:], None)]

    def _spans_by_prefixes(self, messages: Messages, tools: list | None, text: str) -> list[Span]:
        """Each assistant turn is what the whole text has beyond the prompt for that turn, up to its last special token.

        Raises
        ------
        Unusable
            When a prompt is not the beginning of the whole text: the template rewrites earlier turns.
        """
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._apply(messages[:number], tools, add_generation_prompt=True)
            turn = _common_start(self._apply(messages[: number + 1], tools), text)
            if not text.startswith(prompt) or len(turn) <= len(prompt):
                if self.supervise == "last_turn" and number < len(messages) - 1:
                    continue
                raise Unusable("the template rewrites an earlier turn: its words cannot be located")
            ends = [turn.rfind(token) + len(token) for token in self._special if turn.rfind(token) >= len(prompt)]
            start, end = len(prompt), max(ends, default=len(turn))
            closed = text.find("</think>", start, end)
            if self.reasoning == "unsupervised" and closed >= 0:
                start = closed + len("</think>")
            spans.append((start, end))
        return spans


def _common_start(left: str, right: str) -> str:
    """The longest text both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def split_reasoning(message: dict[str, Any]) -> tuple[str | None, str]:
    """(reasoning, answer) of an assistant message; reasoning is None where there is none."""
    content = message["content"]
    if message.get("reasoning_content"):
        return message["reasoning_content"], content
    head, closing, tail = content.partition("</think>") if "</think>" in content else (content, "", "")
    if closing and head.lstrip().startswith("<think>"):
        return head.lstrip().removeprefix("<think>").strip("\n"), tail.lstrip("\n")
    return None, content


def _walk(shape: list, messages: Messages, text: str) -> dict[tuple[int, str], Span] | None:
    """Where each message's words stand in `text`, if it is the template's pieces with the words between them."""
    places: dict[tuple[int, str], Span] = {}
    position, place = 0, None
    for piece, next_place in shape:
        if place is not None:
            words = messages[place[0]]["content" if place[1] == "c" else "reasoning_content"]
            for strip in (None, str.strip, str.rstrip, str.lstrip, lambda words: words.strip("\n")):
                variant = strip(words) if strip else words
                end = position + len(variant)
                if text.startswith(variant, position) and text.startswith(piece, end):
                    break
            else:
                return None
            places[place] = (position, end)
            position = end + len(piece)
        elif text.startswith(piece):
            position = len(piece)
        else:
            return None
        place = next_place
    return places if position == len(text) else None
