"""The template's pieces of text are found by marks, and the words between them by a walk."""

from __future__ import annotations

from eagle3_utils.corpus.reading.shapes import mark, shape_of, walk

TALK = [
    {"role": "user", "content": " 1+1? "},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
    {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."},
]


def rendered(messages, calls: str = "") -> str:
    turns = []
    for message in messages:
        thought = f"({message['reasoning_content']})" if "reasoning_content" in message else ""
        turns.append(
            f"<{message['role']}>{thought}{message['content'].strip()}{calls if 'tool_calls' in message else ''}"
        )
    return "".join(turns) + "<end>"


def test_pieces_are_the_templates_and_words_lie_between_them():
    shape = shape_of(TALK, rendered)
    assert shape == [("<user>", (0, "c")), ("<assistant>", (1, "c")), ("<assistant>(", (2, "r")), (")", (2, "c")),
                     ("<end>", None)]  # fmt: skip
    text = rendered(TALK, calls="[add]")
    words = {place: text[start:end] for place, (start, end) in walk(shape, TALK, text).items()}
    assert words == {(0, "c"): "1+1?", (1, "c"): "[add]", (2, "r"): "Hm.", (2, "c"): "Two."}


def test_a_text_that_is_not_made_of_the_pieces_is_not_walked():
    shape, text = shape_of(TALK, rendered), rendered(TALK, calls="[add]")
    for other in (text + "!", "!" + text, text.replace("Two", "Three"), text.replace("(", "["), rendered(TALK), ""):
        assert walk(shape, TALK, other) is None


def test_words_used_twice_have_no_shape():
    assert shape_of(TALK, lambda messages: 2 * rendered(messages)) is None
    assert mark(1, "c") not in rendered(TALK)
