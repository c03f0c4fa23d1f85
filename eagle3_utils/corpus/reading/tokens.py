"""Text with supervised character spans → token ids with a loss mask, in batches, at the tokenizer's own speed."""

from __future__ import annotations

from collections import Counter

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3_utils.corpus.reading.chat import Span
from eagle3_utils.corpus.reading.formats import Unusable


class SpanTokenizer:
    """Tokenises rendered text and carries character spans over to tokens.

    A token is supervised when all its characters lie in a span. One that reaches across a span's border is not (a
    served model could not have produced it there); such tokens are counted in `straddling`. A tokenizer without
    offsets (the tiktoken kind: Kimi's) gets them from its tokens' bytes, proven by putting the text together from them.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._bytes = _TokenBytes(tokenizer)
        self._fast = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
        self.straddling = 0

    def encode_batch(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[list[int], list[int]] | Unusable]:
        """(input_ids [T], loss_mask [T]) for every text; an `Unusable` in place of one that cannot be masked."""
        if self._fast is None:
            return [self._encode_without_offsets(text, mine) for text, mine in zip(texts, spans, strict=True)]
        encodings = self._fast.encode_batch(texts, add_special_tokens=False)
        pairs = zip(encodings, texts, spans, strict=True)
        return [(encoding.ids, self._mask(encoding, len(text), mine)) for encoding, text, mine in pairs]

    def _mask(self, encoding, num_characters: int, spans: list[Span]) -> list[int]:
        num_tokens = len(encoding)
        mask = bytearray(num_tokens)
        for start, end in spans:
            first = _token_at(encoding, start, num_characters, num_tokens)
            last = _token_at(encoding, end, num_characters, num_tokens)  # the first token after the span
            if first < last and encoding.token_to_chars(first)[0] < start:
                first, self.straddling = first + 1, self.straddling + 1
            if last < num_tokens and encoding.token_to_chars(last)[0] < end and start < end < num_characters:
                self.straddling += 1
            if first < last:
                mask[first:last] = b"\1" * (last - first)
        return list(mask)

    def _encode_without_offsets(self, text: str, spans: list[Span]) -> tuple[list[int], list[int]] | Unusable:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        pieces = [*map(self._bytes.__getitem__, ids)]
        if None in pieces or b"".join(pieces) != text.encode():
            return self._mask_by_pieces(ids, text, spans)
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        mask = bytearray(len(ids))
        characters = at = 0  # borders in bytes, counted on from the last one
        for start, end in spans:
            first_byte = at + len(text[characters:start].encode())
            characters, at = end, first_byte + len(text[start:end].encode())
            first = int(ends.searchsorted(first_byte, "right"))  # the token that holds the span's first byte
            last = int(ends.searchsorted(at, "left"))  # the one that holds its last
            whole = first < len(ids) and ends[first] - len(pieces[first]) == first_byte
            cut_off = last < len(ids) and ends[last] != at
            self.straddling += int(start < end and not whole) + int(start < end and cut_off)
            first, last = first + (not whole), last + (not cut_off)
            mask[first:last] = b"\1" * (last - first)
        return ids, list(mask)

    def _mask_by_pieces(self, whole: list[int], text: str, spans: list[Span]) -> tuple[list[int], list[int]] | Unusable:
        """Where tokens are not bytes: the pieces between borders, tokenised alone, must add up to the whole."""
        ids, mask, position = [], [], 0
        for start, end in [*spans, (len(text), len(text))]:
            for piece, supervised in ((text[position:start], 0), (text[start:end], 1)):
                tokens = self._tokenizer.encode(piece, add_special_tokens=False) if piece else []
                ids += tokens
                mask += [supervised] * len(tokens)
            position = end
        if ids != whole:
            return Unusable("a token reaches across the border of an assistant turn (tokenizer without offsets)")
        return ids, mask


class _TokenBytes(dict):
    """Token id → the bytes it stands for, where a tokenizer writes its tokens in GPT-2's letters for bytes; else None.

    Looked up once per id. The letters: https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """

    def __init__(self, tokenizer):
        super().__init__()
        self._tokenizer, self._added = tokenizer, getattr(tokenizer, "added_tokens_decoder", {})
        self._byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def __missing__(self, token: int) -> bytes | None:
        if token in self._added:
            self[token] = str(self._added[token]).encode()
        else:
            letters = [self._byte_of.get(letter) for letter in self._tokenizer.convert_ids_to_tokens(token) or "\ue000"]
            self[token] = None if None in letters else bytes(letters)
        return self[token]


def _token_at(encoding, character: int, num_characters: int, num_tokens: int) -> int:
    """The first token at or after a character; blanks that belong to no token are passed over."""
    while character < num_characters:
        token = encoding.char_to_token(character)
        if token is not None:
            return token
        character += 1
    return num_tokens


class RoundTrip:
    """Counts by cause how ids rebuilt from text compare with what is known of the ids a model really generated."""

    def __init__(self, tokenizer):
        self._tokenizer, self.counts = tokenizer, Counter()

    def compare(self, generated: list[int], rebuilt: list[int]) -> None:
        """One record: ids from the API beside ids from rendering its text."""
        if rebuilt[: len(generated)] == generated:
            self.counts["same ids"] += 1
        elif self._decode(rebuilt)[: len(self._decode(generated))] == self._decode(generated):
            self.counts["same text, other token borders"] += 1
        else:
            self.counts["other text"] += 1

    def check(
        self, prompt: str, answer: str, num_generated: int, text: str, encoded: tuple[list[int], list[int]]
    ) -> None:
        """One record of an API that returns only text: everything about rebuilt ids that can be checked.

        Parameters
        ----------
        prompt : the conversation with the opening of an answer, as the model was given it.
        answer : the words that came back.
        num_generated : how many tokens the API counted; 0 when it did not say.
        text, encoded : the conversation with the answer, rendered; its (input_ids, loss_mask).
        """
        ids, mask = encoded
        prompt_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        num_rebuilt = sum(mask[len(prompt_ids) :])
        if not text.startswith(prompt):
            cause = "the template rewrites the prompt"
        elif answer not in text[len(prompt) :]:
            cause = "the template rewrites the answer"
        elif ids[: len(prompt_ids)] != prompt_ids:
            cause = "a token reaches across the end of the prompt"
        elif self._decode(ids) != text:
            cause = "the tokenizer rewrites the text"
        elif num_generated and num_generated not in (num_rebuilt, num_rebuilt - 1):  # with the stop token or without
            cause = "another number of tokens than the API counted"
        else:
            cause = "as far as can be known, same ids"
        self.counts[cause] += 1

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
