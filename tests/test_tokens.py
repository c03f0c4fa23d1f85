"""Character spans become token masks, with and without offsets, and agree with a template's own markers."""

from __future__ import annotations

import chat_templates
from chat_templates import TALK, speaking
from transformers import AutoTokenizer

from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.tokens import RoundTrip, SpanTokenizer, marker_disagreement


class WithoutOffsets:
    """A tokenizer of the tiktoken kind: no offsets, special tokens recognised in the text."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, add_special_tokens=False):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_a_tokenizer_without_offsets_gives_the_same_ids_and_mask(tiny_llama):
    tokenizer = speaking(tiny_llama, "KIMI_K2")
    text, spans = ChatRenderer(tokenizer).render(TALK)
    assert SpanTokenizer(WithoutOffsets(tokenizer)).encode_batch([text], [spans]) == SpanTokenizer(
        tokenizer
    ).encode_batch([text], [spans])


def test_a_token_across_a_border_is_not_supervised_but_counted(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML")
    encoder = SpanTokenizer(tokenizer)
    text = "unbelievable"
    ids, mask = encoder.encode_batch([text], [[(1, len(text))]])[0]
    assert len(tokenizer.encode("u" + text[1:])) == len(ids)
    assert mask[0] == 0
    assert encoder.straddling == 1
    refused = SpanTokenizer(WithoutOffsets(tokenizer)).encode_batch([text], [[(1, len(text))]])[0]
    assert isinstance(refused, Unusable)


def test_round_trip_tells_causes_apart(tiny_llama):
    trip = RoundTrip(AutoTokenizer.from_pretrained(tiny_llama))
    hello = trip._tokenizer.encode("Hello world")
    pieces = [token for word in ("He", "llo", " wor", "ld") for token in trip._tokenizer.encode(word)]
    for generated in (hello, pieces, trip._tokenizer.encode("Goodbye")):
        trip.compare(generated, hello)
    assert trip.counts == {"same ids": 1, "same text, other token borders": 1, "other text": 1}


def test_generation_markers_agree_with_the_spans(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML", chat_templates.CHATML_MARKED)
    marked = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    text, spans = ChatRenderer(tokenizer).render(TALK)
    ids, mask = SpanTokenizer(tokenizer).encode_batch([text], [spans])[0]
    assert ids == marked["input_ids"]
    assert mask == marked["assistant_masks"]


def test_markers_that_say_otherwise_are_reported(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML", chat_templates.CHATML_MARKED)
    text, spans = ChatRenderer(tokenizer).render(TALK)
    encoder = SpanTokenizer(tokenizer)
    encoded = encoder.encode_batch([text], [spans])[0]
    assert marker_disagreement(tokenizer, TALK, None, encoded) is None
    without_stop = encoder.encode_batch([text], [[(start, end - len("<|im_end|>")) for start, end in spans]])[0]
    assert marker_disagreement(tokenizer, TALK, None, without_stop) is None
    found = marker_disagreement(tokenizer, TALK, None, encoder.encode_batch([text], [spans[:1]])[0])
    assert "is not supervised, the template's markers say otherwise" in found
