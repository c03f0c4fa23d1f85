"""Character spans become token masks, with and without offsets, and agree with a template's own markers."""

from __future__ import annotations

import random

import pytest
from chat_templates import TALK, speaking
from transformers import AutoTokenizer

from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.corpus.reading.tokens import RoundTrip, SpanTokenizer


class WithoutOffsets:
    """A tokenizer of the tiktoken kind: no offsets, special tokens recognised in the text."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, add_special_tokens=False):
        self.encoded = [*getattr(self, "encoded", []), text]
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


class WithoutBytes(WithoutOffsets):
    """One whose tokens are not written in letters for bytes (the sentencepiece kind)."""

    def convert_ids_to_tokens(self, token):
        return self._tokenizer.convert_ids_to_tokens(token).replace("Ġ", "▁")


@pytest.mark.parametrize("kind", [WithoutOffsets, WithoutBytes])
def test_a_tokenizer_without_offsets_gives_the_same_ids_and_mask(tiny_llama, kind):
    tokenizer = speaking(tiny_llama, "KIMI_K2")
    text, spans = ChatRenderer(tokenizer).render(TALK)
    without = kind(tokenizer)
    expected = SpanTokenizer(tokenizer).encode_batch([text, ""], [spans, []])
    assert SpanTokenizer(without).encode_batch([text, ""], [spans, []]) == expected
    assert (without.encoded == [text, ""]) == (kind is WithoutOffsets)  # everything once, or pieces, too


def test_masks_by_bytes_are_those_by_offsets_wherever_the_borders_are(tiny_llama):
    tokenizer, chooser = speaking(tiny_llama, "KIMI_K2"), random.Random(0)
    text, _ = ChatRenderer(tokenizer).render(TALK)
    with_offsets, without = SpanTokenizer(tokenizer), SpanTokenizer(WithoutOffsets(tokenizer))
    for _ in range(50):
        borders = sorted(chooser.choices(range(len(text) + 1), k=4))
        spans = [tuple(borders[:2]), tuple(borders[2:])]
        for (ids, mask), (same_ids, by_bytes) in zip(
            with_offsets.encode_batch([text], [spans]), without.encode_batch([text], [spans]), strict=True
        ):
            assert ids == same_ids
            assert all(a >= b for a, b in zip(mask, by_bytes, strict=True))  # half a letter is no letter's token
            assert sum(mask) - sum(by_bytes) <= 8


def test_a_token_across_a_border_is_not_supervised_but_counted(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML")
    encoder = SpanTokenizer(tokenizer)
    text = "unbelievable"
    ids, mask = encoder.encode_batch([text], [[(1, len(text))]])[0]
    assert len(tokenizer.encode("u" + text[1:])) == len(ids)
    assert mask[0] == 0
    assert encoder.straddling == 1
    without = SpanTokenizer(WithoutOffsets(tokenizer))
    assert without.encode_batch([text], [[(1, len(text))]])[0] == (ids, mask) and without.straddling == 1
    text = "say " + text  # has a blank, which these tokens write in another way
    refused = SpanTokenizer(WithoutBytes(tokenizer)).encode_batch([text], [[(5, len(text))]])[0]
    assert isinstance(refused, Unusable)


def test_round_trip_tells_causes_apart(tiny_llama):
    trip = RoundTrip(AutoTokenizer.from_pretrained(tiny_llama))
    hello = trip._tokenizer.encode("Hello world")
    pieces = [token for word in ("He", "llo", " wor", "ld") for token in trip._tokenizer.encode(word)]
    for generated in (hello, pieces, trip._tokenizer.encode("Goodbye")):
        trip.compare(generated, hello)
    assert trip.counts == {"same ids": 1, "same text, other token borders": 1, "other text": 1}


def checked(tokenizer, answer: str, num_generated: int = 0, finished: bool = True, template_answer: str | None = None):
    """The cause counted for one text-only response."""
    asked, trip = [{"role": "user", "content": "hi"}], RoundTrip(tokenizer)
    renderer = ChatRenderer(tokenizer)
    text, spans = renderer.render([*asked, {"role": "assistant", "content": answer}], finished=finished)
    encoded = SpanTokenizer(tokenizer).encode_batch([text], [spans])[0]
    trip.check(renderer.prompt(asked), answer, num_generated, text, encoded)
    ((cause, times),) = trip.counts.items()
    assert times == 1
    return cause


def test_the_round_trip_of_text_alone_is_checked_and_mismatches_have_a_cause(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML")
    num = len(tokenizer.encode("Hello world"))
    same = "as far as can be known, same ids"
    assert [checked(tokenizer, "Hello world", n) for n in (0, num, num + 1)] == [same] * 3  # with and without the stop
    assert checked(tokenizer, "Hello world", num, finished=False) == same
    assert checked(tokenizer, "Hello world", num + 5) == "another number of tokens than the API counted"
    assert checked(speaking(tiny_llama, "LLAMA3"), " Hello") == "the template rewrites the answer"
    header = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    glued = speaking(tiny_llama, "CHATML", header + "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}")
    assert checked(glued, "Hello") == "a token reaches across the end of the prompt"
    other = speaking(
        tiny_llama, "CHATML", header + "{% if add_generation_prompt %}<|im_start|>assistant:<think>{% endif %}"
    )
    assert checked(other, "Hello") == "the template rewrites the prompt"


def test_an_answer_that_was_cut_off_has_no_stop_token(tiny_llama):
    tokenizer = speaking(tiny_llama, "CHATML")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello wor"}]
    text, spans = ChatRenderer(tokenizer).render(talk, finished=False)
    assert text.endswith("Hello wor") and spans == [(len(text) - len("Hello wor"), len(text))]
