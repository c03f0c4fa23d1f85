"""Duplicates and leaks: exact and near duplicates of a text, and overlap with evaluation prompts.

Near duplicates share most of their five-word shingles: MinHash signatures (datasketch) in banded locality-sensitive
hashing, in one pass and with about 2 kB of memory per record. Decontamination is by word n-grams, as in
GPT-3 (Brown et al. 2020, appendix C): a record that contains a run of n words of an evaluation prompt is dropped. In
scripts without spaces between words (Chinese, Japanese, Thai, …) each letter counts as a word.
"""

from __future__ import annotations

import re
from array import array

import numpy as np
import xxhash
from datasketch import MinHash, MinHashLSH

# scripts without spaces between words: Thai and Lao, Burmese, Khmer, then kana and Chinese characters
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    r"\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|(?=\w)[{_UNSPACED}]")
_NUM_PERMUTATIONS = 128
_SHINGLE_WORDS = 5
_SEED = 1
_ERROR_WEIGHTS = (0.1, 0.9)  # of candidates too many and too few, when bands are chosen: candidates are compared anyway
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """Lower-case words, single letters where a script has no spaces between words; punctuation does not count."""
    return _WORD.findall(text.lower())


def text_key(text: str) -> int:
    """64-bit hash of a text up to spacing: another one where only an operator or a letter's case differs."""
    return _hash(" ".join(text.split()))


def exact_key(text: str) -> int:
    """64-bit hash of a text up to case, punctuation and spacing (texts without a word: of the text itself)."""
    return _hash(" ".join(words_of(text)) or text)


def ngram_hashes(words: list[str], n: int) -> set[int]:
    """Hashes of all runs of n words; of the whole when there are fewer than n words."""
    return set(_run_hashes(words, n).tolist())


class NearDuplicates:
    """An index of texts that answers "have I seen nearly this?".

    A signature is cut into bands; texts that agree in a whole band are compared. Of a band, only the first text that
    had it is kept: later ones are found through their other bands.

    Parameters
    ----------
    threshold : Jaccard similarity of the five-word shingle sets from which two texts count as the same.
    """

    def __init__(self, threshold: float = 0.8):
        self.threshold = threshold
        bands = MinHashLSH(threshold=threshold, num_perm=_NUM_PERMUTATIONS, weights=_ERROR_WEIGHTS)
        self._num_bands, self._band_rows = bands.b, bands.r
        self._minhash = MinHash(num_perm=_NUM_PERMUTATIONS, seed=_SEED, hashfunc=int)
        self._first: dict[int, int] = {}  # hash of a band → number of the first text that had it
        self._keys: list[str] = []
        self._signatures = array("I")  # of all texts, one after the other

    def find_or_add(self, key: str, text: str) -> str | None:
        """The key of an earlier text at least as similar as the threshold; else None, and the text is added."""
        shingles = _run_hashes(words_of(text), _SHINGLE_WORDS)
        if not len(shingles):
            return None
        signature = self._signature(shingles)
        rows = signature[: self._num_bands * self._band_rows].reshape(self._num_bands, self._band_rows)
        bands = [xxhash.xxh3_64_intdigest(row.tobytes(), band) for band, row in enumerate(rows)]
        for number in sorted({self._first[band] for band in bands if band in self._first}):
            start = number * _NUM_PERMUTATIONS
            earlier = np.asarray(self._signatures[start : start + _NUM_PERMUTATIONS], np.uint32)
            if np.mean(earlier == signature) >= self.threshold:
                return self._keys[number]
        for band in bands:
            self._first.setdefault(band, len(self._keys))
        self._keys.append(key)
        self._signatures.frombytes(signature.tobytes())
        return None

    def _signature(self, shingles: np.ndarray) -> np.ndarray:
        folded = (shingles ^ (shingles >> np.uint64(32))) & np.uint64(0xFFFFFFFF)  # the width of MinHash's hashes
        self._minhash.clear()
        self._minhash.update_batch(folded.tolist())
        return self._minhash.hashvalues.astype(np.uint32)


class Decontaminator:
    """Evaluation texts as word n-grams; `leak` says which of them a training text contains.

    An evaluation text shorter than n words counts as leaked only where it is a whole turn, so that "Hello" in the
    evaluation set does not empty the corpus.
    """

    def __init__(self, n: int = 13):
        self.n = n
        self.num_texts = 0  # evaluation texts registered
        self._owners: dict[int, str] = {}

    def add(self, key: str, text: str) -> None:
        """Register an evaluation text under its id."""
        self.num_texts += 1
        for value in ngram_hashes(words_of(text), self.n):
            self._owners.setdefault(value, key)

    def __len__(self) -> int:
        return len(self._owners)

    def leak(self, texts: list[str]) -> str | None:
        """The id of an evaluation text that one of these texts repeats, or None."""
        for text in texts:
            for value in _run_hashes(words_of(text), self.n).tolist():
                if value in self._owners:
                    return self._owners[value]
        return None


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def _run_hashes(words: list[str], n: int) -> np.ndarray:
    """uint64: a hash per run of n words (polynomial in the words' hashes), of the whole when there are fewer."""
    n = min(n, len(words))
    of_words = np.fromiter(map(_hash, words), np.uint64, len(words))
    hashes = np.zeros(len(words) - n + 1 if words else 0, np.uint64)
    for offset in range(n):
        hashes = hashes * _MULTIPLIER + of_words[offset : offset + len(hashes)]
    return hashes
