"""What a corpus holds: samples, tokens, supervised share, lengths, and how many tokens a draft vocabulary covers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from eagle3_utils.corpus.records import Record

SPLITS = ("train", "val")
DRAFT_VOCAB_SIZES = (8192, 16384, 32768, 65536)


class CorpusStatistics:
    """Gathered record by record; memory grows by 8 bytes a record and with the vocabulary, V."""

    def __init__(self, vocab_size: int):
        self.token_counts = np.zeros(vocab_size, np.int64)  # of supervised tokens [V]
        self._lengths: dict[str, list[int]] = {}
        self._supervised: dict[str, list[int]] = {}
        self._splits = {split: Counter(samples=0, tokens=0, supervised_tokens=0) for split in SPLITS}

    def add(self, record: Record, split: str) -> None:
        """Count one record."""
        mask = np.asarray(record.loss_mask, bool)
        supervised = np.asarray(record.input_ids, np.int64)[mask]
        np.add.at(self.token_counts, supervised, 1)
        self._lengths.setdefault(record.source, []).append(record.num_tokens)
        self._supervised.setdefault(record.source, []).append(len(supervised))
        self._splits[split].update(samples=1, tokens=record.num_tokens, supervised_tokens=len(supervised))

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

    def table(self) -> list[dict[str, Any]]:
        """One row per source and one for all: samples, tokens, supervised share, p50 / p95 / p99 / longest length."""
        rows = []
        for source in [*self.sources, None]:
            lengths, supervised = self.lengths(source), self.supervised(source)
            p50, p95, p99 = (int(np.percentile(lengths, q)) for q in (50, 95, 99))
            rows.append(
                {
                    "source": source or "all",
                    "samples": len(lengths),
                    "tokens": int(lengths.sum()),
                    "supervised_share": round(float(supervised.sum() / lengths.sum()), 4),
                    "length_p50": p50,
                    "length_p95": p95,
                    "length_p99": p99,
                    "length_max": int(lengths.max()),
                }
            )
        return rows

    def coverage(self, sizes: tuple[int, ...] = DRAFT_VOCAB_SIZES) -> dict[str, float]:
        """Share of supervised tokens among the D most frequent ids, for every D below the vocabulary's size."""
        counts = np.sort(self.token_counts)[::-1]
        total = max(1, int(counts.sum()))
        return {str(size): round(float(counts[:size].sum() / total), 6) for size in sizes if size < len(counts)}

    @staticmethod
    def _gather(values: dict[str, list[int]], source: str | None) -> np.ndarray:
        chosen = values.get(source, []) if source else [count for counts in values.values() for count in counts]
        return np.asarray(chosen, np.int64)
