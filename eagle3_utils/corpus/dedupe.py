"""Duplicates and leaks: exact and near duplicates of a text, and overlap with evaluation prompts.

Near duplicates share most of their five-word shingles: MinHash with banded locality-sensitive hashing (datasketch),
so a corpus of a million records needs one pass and about 5 kB per record. Decontamination is by word n-grams, as in
GPT-3 (Brown et al. 2020, appendix C): a record that contains a run of n words of an evaluation prompt is dropped.
"""

from __future__ import annotations

import re

import numpy as np
import xxhash
from datasketch import MinHash, MinHashLSH

_WORD = re.compile(r"\w+")
_NUM_PERMUTATIONS = 128
_SHINGLE_WORDS = 5
_SEED = 1


def words_of(text: str) -> list[str]:
    """Lower-case words; punctuation and spacing do not count."""
    return _WORD.findall(text.lower())


def exact_key(text: str) -> int:
    """64-bit hash of a text up to case, punctuation and spacing (texts without a word: of the text itself)."""
    return _hash(" ".join(words_of(text)) or text)


def ngram_hashes(words: list[str], n: int) -> set[int]:
    """Hashes of all runs of n words; of the whole when there are fewer than n words."""
    if len(words) <= n:
        return {_hash(" ".join(words))} if words else set()
    return {_hash(" ".join(words[i : i + n])) for i in range(len(words) - n + 1)}


class NearDuplicates:
    """An index of texts that answers "have I seen nearly this?".

    Parameters
    ----------
    threshold : Jaccard similarity of the five-word shingle sets from which two texts count as the same.
    """

    def __init__(self, threshold: float = 0.8):
        self.threshold = threshold
        self._index = MinHashLSH(threshold=threshold, num_perm=_NUM_PERMUTATIONS)
        self._signatures: dict[str, np.ndarray] = {}

    def find_or_add(self, key: str, text: str) -> str | None:
        """The key of an earlier text at least as similar as the threshold; else None, and the text is added."""
        shingles = ngram_hashes(words_of(text), _SHINGLE_WORDS)
        if not shingles:
            return None
        signature = MinHash(num_perm=_NUM_PERMUTATIONS, seed=_SEED, hashfunc=_fold)
        signature.update_batch(list(shingles))
        candidates = self._index.query(signature)
        for candidate in sorted(candidates):
            if np.mean(self._signatures[candidate] == signature.hashvalues) >= self.threshold:
                return candidate
        self._index.insert(key, signature)
        self._signatures[key] = signature.hashvalues.astype(np.uint32)
        return None


class Decontaminator:
    """Evaluation texts as word n-grams; `leak` says which of them a training text contains.

    An evaluation text shorter than n words counts as leaked only where it is the whole training text's user turn,
    so that "Hello" in the evaluation set does not empty the corpus.
    """

    def __init__(self, n: int = 13):
        self.n = n
        self._owners: dict[int, str] = {}

    def add(self, key: str, text: str) -> None:
        """Register an evaluation text under its id."""
        for value in ngram_hashes(words_of(text), self.n):
            self._owners.setdefault(value, key)

    def __len__(self) -> int:
        return len(self._owners)

    def leak(self, texts: list[str]) -> str | None:
        """The id of an evaluation text that one of these texts repeats, or None."""
        for text in texts:
            for value in ngram_hashes(words_of(text), self.n):
                if value in self._owners:
                    return self._owners[value]
        return None


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _fold(value: int) -> int:
    """64 to 32 bits, the width of MinHash's hash range."""
    return (value ^ (value >> 32)) & 0xFFFFFFFF
