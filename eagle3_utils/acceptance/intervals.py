"""Figures with 95 % confidence intervals: a bootstrap over prompts. NumPy only, so a report needs no torch for it.

    ratio_interval(tokens_per_prompt, verifications_per_prompt)      # Interval(value=2.31, low=2.19, high=2.44)

Whole prompts are drawn anew with replacement, because tokens of one answer are not independent.

Legend: S items, R resamples, C counted quantities, I figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ALL = "all"
NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % confidence interval (percentiles of the bootstrap)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


_KEYS = set(Interval.__dataclass_fields__)


def bootstrap_sums(items_SC: np.ndarray, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> np.ndarray:
    """Sums over S items in row 0, then over S items drawn with replacement, R times: float64 [1 + R, C]."""
    num_items = len(items_SC)
    generator = np.random.default_rng(seed)
    weights_RS = generator.multinomial(num_items, np.full(num_items, 1 / num_items), size=num_resamples)
    return np.concatenate([np.ones((1, num_items)), weights_RS]) @ items_SC


def intervals(values_RI: np.ndarray) -> list[Interval]:
    """Row 0 the figure, the rest its resamples [1 + R, I] → one Interval per column."""
    low_I, high_I = np.percentile(values_RI[1:], [2.5, 97.5], axis=0)
    return [Interval(*map(float, triple)) for triple in zip(values_RI[0], low_I, high_I, strict=True)]


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Elementwise, 0 where nothing was counted."""
    return np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators > 0)


def ratio_interval(
    numerators_S: Sequence[float], denominators_S: Sequence[float], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Σ numerators / Σ denominators with its interval over items, such as tokens / verifications over prompts."""
    sums_R2 = bootstrap_sums(np.array([numerators_S, denominators_S], dtype=np.float64).T, num_resamples, seed)
    return intervals(ratio(sums_R2[:, :1], sums_R2[:, 1:]))[0]


def to_json(value: Any) -> Any:
    """The same nesting with every Interval as {"value", "low", "high"}."""
    if isinstance(value, Interval):
        return asdict(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list) else value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict):
        return Interval(**value) if value.keys() == _KEYS else {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value
