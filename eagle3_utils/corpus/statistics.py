"""What a corpus holds: samples, tokens, supervised share, lengths, and how many tokens a draft vocabulary covers."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from eagle3_utils.corpus.records import Record

SPLITS = ("train", "val")
DRAFT_VOCAB_SIZES = (4096, 8192, 16384, 32768, 65536)
TOP_SOURCES = 20  # with rows of their own
OTHERS = "other sources"
ALL = "all"  # sources together; none may have this name
_MAX_COUNTED_SOURCES = 64  # with token counts of their own, 8 V bytes each


class CorpusStatistics:
    """Gathered record by record; memory grows by 16 bytes a record, and by 8 V for each of the first sources."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._token_counts: dict[str, dict[str, np.ndarray]] = {split: {} for split in SPLITS}  # supervised, int64 [V]
        self._all_counts = np.zeros(vocab_size, np.int64)  # of all tokens of training samples
        self._lengths: dict[str, array] = {}
        self._supervised: dict[str, array] = {}
        self._splits = {split: Counter(samples=0, tokens=0, supervised_tokens=0) for split in SPLITS}

    def add(self, record: Record, split: str) -> None:
        """Count one record."""
        mask = np.asarray(record.loss_mask, bool)
        supervised = np.asarray(record.input_ids, np.int64)[mask]
        by_source = self._token_counts[split]
        name = record.source if record.source in by_source or len(by_source) < _MAX_COUNTED_SOURCES else OTHERS
        if name not in by_source:
            by_source[name] = np.zeros(self._vocab_size, np.int64)
        np.add.at(by_source[name], supervised, 1)
        if split == "train":
            np.add.at(self._all_counts, np.asarray(record.input_ids, np.int64), 1)
        self._lengths.setdefault(record.source, array("q")).append(record.num_tokens)
        self._supervised.setdefault(record.source, array("q")).append(len(supervised))
        self._splits[split].update(samples=1, tokens=record.num_tokens, supervised_tokens=len(supervised))

    def token_counts(self, split: str = "train") -> np.ndarray:
        """How often each token is supervised in a split, int64 [V]."""
        return sum(self._token_counts[split].values(), np.zeros(self._vocab_size, np.int64))

    def ranked_tokens(self) -> np.ndarray:
        """All ids [V], best for a draft vocabulary first: by training's supervised counts, then by all its tokens."""
        return np.lexsort((np.arange(self._vocab_size), -self._all_counts, -self.token_counts()))

    @property
    def sources(self) -> list[str]:
        return sorted(self._lengths)

    def lengths(self, source: str | None = None) -> np.ndarray:
        """Tokens per sample [S], of one source or all."""
        return self._gather(self._lengths, source)

    def supervised(self, source: str | None = None) -> np.ndarray:
        """Supervised tokens per sample [S], of one source or all."""
        return self._gather(self._supervised, source)

    def split_counts(self) -> dict[str, dict[str, int]]:
        """{split: {samples, tokens, supervised_tokens}}."""
        return {split: dict(counts) for split, counts in self._splits.items()}

    def table(self, top: int = TOP_SOURCES) -> list[dict[str, Any]]:
        """A row per source, most tokens first (the rest beyond `top` as one), and one for all.

        Columns: samples, tokens, share of all tokens, supervised share, p50 / p95 / p99 / longest length.
        """
        sizes = {source: int(self.lengths(source).sum()) for source in self.sources}
        return [self._row(name, members) for name, members in [*largest_sources(sizes, top), (ALL, list(sizes))]]

    def _row(self, name: str, sources: list[str]) -> dict[str, Any]:
        lengths = np.concatenate([self.lengths(source) for source in sources])
        supervised = sum(int(self.supervised(source).sum()) for source in sources)
        p50, p95, p99 = (int(np.percentile(lengths, q)) for q in (50, 95, 99))
        return {
            "source": name,
            "samples": len(lengths),
            "tokens": int(lengths.sum()),
            "token_share": round(float(lengths.sum() / sum(split["tokens"] for split in self._splits.values())), 4),
            "supervised_share": round(float(supervised / lengths.sum()), 4),
            "length_p50": p50,
            "length_p95": p95,
            "length_p99": p99,
            "length_max": int(lengths.max()),
        }

    def coverage(self, split: str = "train", sizes: tuple[int, ...] = DRAFT_VOCAB_SIZES) -> dict[str, float]:
        """Share of a split's supervised tokens among the D best ids of training, for every D below V.

        Of `train` it is too good to be true, since the vocabulary was chosen on it; `val` says what to expect.
        """
        return _covered(self.token_counts(split), self.ranked_tokens(), sizes)

    def coverage_by_source(
        self, split: str = "val", sizes: tuple[int, ...] = DRAFT_VOCAB_SIZES
    ) -> dict[str, dict[str, float]]:
        """`coverage` of each source by the one vocabulary for all: {source: {D: share}}."""
        ranked = self.ranked_tokens()
        return {name: _covered(counts, ranked, sizes) for name, counts in sorted(self._token_counts[split].items())}

    def most_frequent_tokens(self, tokenizer, num: int = 20) -> list[dict[str, Any]]:
        """The tokens supervised most often in training: id, text, count, share of all supervised tokens."""
        counts = self.token_counts()
        ids = [int(token) for token in np.argsort(-counts, kind="stable")[:num] if counts[token]]
        total = int(counts.sum())
        texts = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in ids]
        rows = [(token, text, int(counts[token])) for token, text in zip(ids, texts, strict=True)]
        return [{"id": i, "text": text, "count": n, "share": round(n / total, 5)} for i, text, n in rows]

    @staticmethod
    def _gather(values: dict[str, array], source: str | None) -> np.ndarray:
        chosen = [values.get(source, array("q"))] if source else list(values.values())
        return np.concatenate([np.zeros(0, np.int64), *(np.asarray(counts, np.int64) for counts in chosen)])


def largest_sources(sizes: dict[str, int], top: int) -> list[tuple[str, list[str]]]:
    """(name, its sources): the `top` largest one by one, then the rest as "n other sources"; a rest of one by name."""
    ranked = sorted(sizes, key=lambda source: (-sizes[source], source))
    rest = ranked[top:] if len(ranked) > top + 1 else []
    series = [(source, [source]) for source in ranked[: len(ranked) - len(rest)]]
    return [*series, (f"{len(rest)} {OTHERS}", rest)] if rest else series


def _covered(counts: np.ndarray, ranked: np.ndarray, sizes: tuple[int, ...]) -> dict[str, float]:
    cumulated, total = np.cumsum(counts[ranked]), max(1, int(counts.sum()))
    return {str(size): round(float(cumulated[size - 1] / total), 6) for size in sizes if size < len(counts)}
