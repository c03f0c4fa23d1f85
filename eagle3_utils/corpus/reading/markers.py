"""A chat template's own `{% generation %}` markers, compared with the spans found without them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from eagle3_utils.corpus.reading.formats import Unusable

Span = tuple[int, int]  # characters [start, end) of the rendered text
_MARKER = re.compile(r"\{%-?\s*generation\b")


def check_markers(
    tokenizer,
    special: list[str],
    messages: list[dict[str, Any]],
    tools: list | None,
    spans: list[Span],
    words: list[Span],
) -> None:
    """Where a template has markers, the assistants' words must lie in them and nobody else's may.

    Stop tokens, blanks and the template's own headers may differ: some templates mark them, some do not.

    Parameters
    ----------
    special : the tokenizer's special tokens as text.
    spans : of all assistant turns.
    words : where the words of the other roles stand, as far as is known.

    Raises
    ------
    Unusable
        When they disagree, with the words in question.
    """
    template = tokenizer.get_chat_template(None, tools)
    if not _has_markers(template):
        return
    options = {"chat_template": template, "tools": tools, "return_assistant_tokens_mask": True}
    (text,), (marked,) = render_jinja_template([messages], **options, **tokenizer.special_tokens_map)
    pieces = [text[start:end] for span in spans for start, end in _outside(span, marked)]
    pieces += [text[max(a, c) : min(b, d)] for a, b in words for c, d in marked]
    for piece in pieces:
        for token in special:
            piece = piece.replace(token, "")
        if piece.strip():
            raise Unusable(f"the template's generation markers say otherwise: {piece.strip()[:40]!r}")


@cache
def _has_markers(template: str) -> bool:
    return bool(_MARKER.search(template))


def _outside(span: Span, others: list[Span]) -> list[Span]:
    """The parts of a span that lie in none of the others, which are in order."""
    pieces, (start, end) = [], span
    for left, right in others:
        if left < end and right > start:
            pieces.append((start, left))
            start = max(start, right)
    return [(first, last) for first, last in [*pieces, (start, end)] if first < last]
