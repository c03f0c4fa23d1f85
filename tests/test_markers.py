"""A template's own generation markers agree with the spans found without them, or the record is refused."""

from __future__ import annotations

import chat_templates
import pytest
from chat_templates import TALK, speaking

from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.tokens import SpanTokenizer


def test_agreeing_markers_give_the_same_mask_as_the_spans(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML", chat_templates.CHATML_MARKED)
    marked = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    text, spans = ChatRenderer(tokenizer).render(TALK)
    ids, mask = SpanTokenizer(tokenizer).encode_batch([text], [spans])[0]
    assert ids == marked["input_ids"]
    assert mask == marked["assistant_masks"]


MARKED = chat_templates.CHATML_MARKED


@pytest.mark.parametrize(
    "template, refused",
    [
        (MARKED, None),
        (MARKED.replace("m.content + '<|im_end|>' }}{% endg", "m.content }}{% endg"), None),  # no stop token at all
        (MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{{ '<think></think>' + m.content }}{% endg"), None),
        (MARKED.replace("m.role == 'assistant'", "m.role == 'user'"), "'user'"),  # the assistant's words not marked
        (MARKED.replace("m.role == 'assistant'", "m.role != 'system'"), "'assistant user'"),  # the user's words, too
    ],
)  # fmt: skip
def test_markers_around_other_words_are_refused(tiny_llama, template, refused):
    renderer = ChatRenderer(speaking(tiny_llama, "CHATML", template), supervise="last_turn")
    if refused is None:
        assert len(renderer.render(TALK)[1]) == 1
    else:
        with pytest.raises(Unusable, match=f"markers say otherwise: {refused}"):
            renderer.render(TALK)


def test_half_an_answer_marked_is_refused(tiny_llama):
    half = MARKED.replace("{{ m.content + '<|im_end|>' }}", "{{ m.content[:3] }}").replace(
        "{% endgeneration %}", "{% endgeneration %}{{ m.content[3:] + '<|im_end|>' }}"
    )
    with pytest.raises(Unusable, match="say otherwise: 'r'"):
        ChatRenderer(speaking(tiny_llama, "CHATML", half)).render(TALK)
