"""Where a conversation's words stand in its rendered text: the template's own pieces of text, and a walk along them.

The conversation is rendered with marks in place of its words; what stands between the marks is the template's. Where
the same pieces stand in the same order in the real text, the words are what lies between them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

Place = tuple[int, str]  # number of the message; "c": its content, or content and calls of tools; "r": its reasoning
Shape = list[tuple[str, Place | None]]  # a piece of the template's text, and whose words follow it
_CHANGES = [  # what templates do to words: nothing, blanks cut off, a tool's result written as JSON
    str,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda words: words.strip("\n"),
    lambda words: json.dumps(words, ensure_ascii=False)[1:-1],
]


def mark(number: int, part: str) -> str:
    """Private-use characters: no template looks for them, no text holds them."""
    return f"\ue000{number}{part}\ue001"


def shape_of(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> Shape | None:
    """The template's own pieces of text, each with the place of the words that follow; None if it uses words twice.

    A message that calls tools is rendered as one that only says something: its mark stands for words and calls.
    """
    marked = []
    for number, message in enumerate(messages):
        marked.append({k: message[k] for k in message if k != "tool_calls"} | {"content": mark(number, "c")})
        if "reasoning_content" in message:
            marked[-1]["reasoning_content"] = mark(number, "r")
    text = render(marked)
    found = []
    for number, part in itertools.product(range(len(messages)), "cr"):
        words = mark(number, part)
        if text.count(words) > 1:
            return None
        if words in text:
            found.append((text.index(words), words, (number, part)))
    pieces, position = [], 0
    for start, words, place in sorted(found):
        pieces.append((text[position:start], place))
        position = start + len(words)
    return [*pieces, (text[position:], None)]


def walk(shape: Shape, messages: list[dict[str, Any]], text: str) -> dict[Place, tuple[int, int]] | None:
    """Characters [start, end) of each message's words in `text`; None if it is not the pieces with the words between.

    Calls of tools are not looked at: they reach to where the template's next piece begins.
    """
    places: dict[Place, tuple[int, int]] = {}
    position, place = 0, None
    for piece, next_place in shape:
        if place is None:
            end = 0 if text.startswith(piece) else -1
        else:
            end = _end_of_words(text, position, messages[place[0]], place[1], piece, last=next_place is None)
            places[place] = (position, end)
        if end < 0:
            return None
        position, place = end + len(piece), next_place
    return places if position == len(text) else None


def _end_of_words(text: str, start: int, message: dict[str, Any], part: str, piece: str, last: bool) -> int:
    """Where the words that begin at `start` end and `piece` begins; -1 if they are not there."""
    if part == "c" and message.get("tool_calls"):
        end = len(text) - len(piece) if last else text.find(piece, start)
        return end if end > start and text.startswith(piece, end) else -1
    words = message["content" if part == "c" else "reasoning_content"]
    for change in _CHANGES:
        variant = change(words)
        if text.startswith(variant, start) and text.startswith(piece, start + len(variant)):
            return start + len(variant)
    return -1
