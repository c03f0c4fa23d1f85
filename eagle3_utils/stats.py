"""Statistics of captured hidden states, in one pass over a sample of the store.

    statistics = state_statistics(StoreReader(folder), num_samples=200)
    print(statistics.table())

What they are for: a layer whose norms dwarf the others drowns them in `fc`; massive activations (a few tokens and
dimensions thousands of times the median) dominate variance and break 8-bit scales; two layers with cosine near 1 tell
the draft the same thing twice; an effective rank near 1 or any non-finite value means that the capture is wrong.

Legend: T tokens of a sample, H hidden size, L auxiliary layers, K = L + 1 captured states, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from eagle3_utils.errors import UserError

FINAL = "final"
NORM_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


@dataclass
class MassiveToken:
    """A token with an entry far above the state's usual ones (Sun et al. 2024, "Massive Activations")."""

    state: str  # which captured state: "layer 14" or "final"
    sample_id: str
    position: int
    token_id: int
    dimension: int
    value: float
    ratio: float  # |value| / median |entry| of the whole state


@dataclass
class LayerStatistics:
    """One captured state over all sampled rows; figures leave out rows with a non-finite entry, which are counted."""

    name: str
    num_rows: int
    num_nonfinite_rows: int
    num_nonfinite_values: int
    num_massive_rows: int
    median_entry: float  # median over rows of the row's median |entry|
    norm_quantiles: list[float]  # at NORM_QUANTILES
    norm_by_position: list[float]  # mean L2 norm per bucket; NaN where a bucket is empty
    peak_by_position: list[float]  # largest |entry| / median_entry per bucket; NaN where a bucket is empty
    variance_H: np.ndarray
    eigenvalues: np.ndarray  # of the covariance without massive rows, falling; as shares of their sum
    effective_rank: float  # of `eigenvalues`
    effective_rank_with_massive: float  # massive rows counted: near 1 when one direction holds all variance
    dimensions_for_90_percent: int  # leading eigenvalues that hold 90 % of the variance
    massive: list[MassiveToken]  # the largest


@dataclass
class StateStatistics:
    """All captured states of a store, auxiliary layers in order and the final state last."""

    layers: list[LayerStatistics]
    cosine_KK: np.ndarray  # mean cosine of the same token in two states
    position_edges: list[int]  # bucket p holds positions edges[p] … edges[p + 1] - 1
    num_samples: int
    num_tokens: int
    massive_ratio: float

    def massive_table(self) -> list[dict[str, Any]]:
        """The listed massive tokens by state, position and dimension: how many, and the largest ratio."""
        groups: dict[tuple, list[float]] = {}
        for token in (token for layer in self.layers for token in layer.massive):
            groups.setdefault((token.state, token.position, token.dimension), []).append(token.ratio)
        return [
            {"state": state, "position": position, "dimension": dimension, "listed": len(found), "ratio": max(found)}
            for (state, position, dimension), found in groups.items()
        ]

    @property
    def num_nonfinite_values(self) -> int:
        return sum(layer.num_nonfinite_values for layer in self.layers)

    def table(self) -> list[dict[str, Any]]:
        """One row per captured state, the figures a reader compares."""
        return [
            {
                "state": layer.name,
                "rows": layer.num_rows,
                "norm (median)": layer.norm_quantiles[2],
                "norm (99 %)": layer.norm_quantiles[4],
                "massive rows": layer.num_massive_rows,
                "effective rank": layer.effective_rank,
                "… with massive rows": layer.effective_rank_with_massive,
                "dimensions for 90 %": layer.dimensions_for_90_percent,
                "non-finite values": layer.num_nonfinite_values,
            }
            for layer in self.layers
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything but the per-dimension arrays, as JSON values (for metrics.json)."""
        values = asdict(self) | {
            "cosine_KK": self.cosine_KK.tolist(),
            "num_nonfinite_values": self.num_nonfinite_values,
        }
        for layer in values["layers"]:
            for name in ("variance_H", "eigenvalues"):
                del layer[name]
            for name in ("norm_by_position", "peak_by_position"):
                layer[name] = [None if np.isnan(value) else value for value in layer[name]]
        return values


class _Layer:
    """What is kept of one captured state while samples are read: sums, a few numbers per row, some whole rows."""

    def __init__(self, name: str, hidden_size: int):
        self.name = name
        self.num_nonfinite_rows = self.num_nonfinite_values = 0
        self.sum_H, self.square_sum_H = np.zeros(hidden_size), np.zeros(hidden_size)
        self.rows: list[np.ndarray] = []  # [N, 6]: norm, median |entry|, peak entry, its dimension, position, token
        self.sample_ids: list[str] = []  # per row
        self.kept_rows: list[np.ndarray] = []
        self.is_kept: list[np.ndarray] = []

    def add(self, sample: Any, rows_NH: np.ndarray, positions_N: np.ndarray, keep_T: np.ndarray) -> None:
        """One sample's rows and their positions; rows with a non-finite entry are only counted."""
        finite_N = np.isfinite(rows_NH).all(axis=1)
        self.num_nonfinite_rows += int((~finite_N).sum())
        self.num_nonfinite_values += int((~np.isfinite(rows_NH)).sum())
        rows_NH, positions_N = rows_NH[finite_N], positions_N[finite_N]
        size_NH = np.abs(rows_NH)
        peaks_N = size_NH.argmax(axis=1)
        values_N = rows_NH[np.arange(len(peaks_N)), peaks_N]
        tokens_N = np.asarray(sample.input_ids)[positions_N]
        figures = (
            np.linalg.norm(rows_NH, axis=1),
            np.median(size_NH, axis=1),
            values_N,
            peaks_N,
            positions_N,
            tokens_N,
        )
        self.rows.append(np.stack(figures, axis=1).astype(np.float64))
        self.sample_ids += [sample.id] * len(peaks_N)
        self.sum_H += rows_NH.sum(0, dtype=np.float64)
        self.square_sum_H += np.square(rows_NH, dtype=np.float64).sum(0)
        self.kept_rows.append(rows_NH[keep_T[positions_N]])
        self.is_kept.append(keep_T[positions_N])

    def result(self, edges: list[int], massive_ratio: float, num_massive: int) -> LayerStatistics:
        """Everything that can be said once all rows were seen."""
        norms_N, medians_N, values_N, _, positions_N, _ = np.concatenate(self.rows).T
        kept_NH, is_kept_N = np.concatenate(self.kept_rows), np.concatenate(self.is_kept)
        median = float(np.median(medians_N)) if len(medians_N) else 0.0
        ratios_N = np.abs(values_N) / max(median, 1e-30)
        massive_N = ratios_N >= massive_ratio
        largest = np.argsort(-ratios_N, kind="stable")[: min(num_massive, int(massive_N.sum()))].tolist()
        buckets_N = np.searchsorted(edges, positions_N, side="right") - 1
        buckets = [buckets_N == bucket for bucket in range(len(edges) - 1)]
        eigenvalues = spectrum(kept_NH[~massive_N[is_kept_N]])
        count = max(1, len(norms_N))
        return LayerStatistics(
            name=self.name,
            num_rows=len(norms_N),
            num_nonfinite_rows=self.num_nonfinite_rows,
            num_nonfinite_values=self.num_nonfinite_values,
            num_massive_rows=int(massive_N.sum()),
            median_entry=median,
            norm_quantiles=np.quantile(norms_N, NORM_QUANTILES).tolist() if len(norms_N) else [0.0] * 5,
            norm_by_position=[float(norms_N[inside].mean()) if inside.any() else np.nan for inside in buckets],
            peak_by_position=[float(ratios_N[inside].max()) if inside.any() else np.nan for inside in buckets],
            variance_H=np.maximum(self.square_sum_H / count - (self.sum_H / count) ** 2, 0.0),
            eigenvalues=eigenvalues,
            effective_rank=effective_rank(eigenvalues),
            effective_rank_with_massive=effective_rank(spectrum(kept_NH)),
            dimensions_for_90_percent=int(np.searchsorted(np.cumsum(eigenvalues), 0.9) + 1) if len(eigenvalues) else 0,
            massive=[self._token(row, float(ratios_N[row])) for row in largest],
        )

    def _token(self, row: int, ratio: float) -> MassiveToken:
        _, _, value, dimension, position, token_id = np.concatenate(self.rows)[row].tolist()
        return MassiveToken(self.name, self.sample_ids[row], int(position), int(token_id), int(dimension), value, ratio)


def state_statistics(
    reader: Any,
    num_samples: int = 200,
    massive_ratio: float = 1000.0,
    spectrum_rows: int = 4096,
    num_massive: int = 10,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> StateStatistics:
    """Read ``num_samples`` samples of a store, chosen by ``seed``, and describe their hidden states.

    Parameters
    ----------
    reader : a ``states.reader.StoreReader`` (anything with ``len``, ``lengths``, ``meta.aux_layers`` and ``read(i)``).
    massive_ratio : a row is massive when its largest |entry| is this many times the state's median |entry|.
    spectrum_rows : rows kept per state for the covariance spectrum; memory is spectrum_rows · H · 4 bytes per state.
    num_massive : how many massive tokens are listed, of each state.
    progress : called with (done, total) after each sample.

    Only the final states that the store holds (supervised rows, unless it keeps all) enter the figures of "final".
    """
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.permutation(len(reader))[:num_samples])
    lengths = np.asarray(reader.lengths)[chosen]
    edges = position_edges(int(lengths.max(initial=1)))
    names = [f"layer {layer}" for layer in reader.meta.aux_layers] + [FINAL]
    layers = [_Layer(name, reader.meta.hidden_size) for name in names]
    keep_share = min(1.0, spectrum_rows / max(1, int(lengths.sum())))
    cosine_sums, cosine_counts = np.zeros((len(names),) * 2), np.zeros((len(names),) * 2)
    for done, index in enumerate(chosen, start=1):
        sample = reader.read(int(index))
        keep_T = generator.random(len(sample.input_ids)) < keep_share
        states = sample_states(sample)
        for layer, (rows_NH, positions_N) in zip(layers, states, strict=True):
            layer.add(sample, rows_NH, positions_N, keep_T)
        _add_cosines(cosine_sums, cosine_counts, states)
        if progress:
            progress(done, len(chosen))
    return StateStatistics(
        layers=[layer.result(edges, massive_ratio, num_massive) for layer in layers],
        cosine_KK=cosine_sums / np.maximum(cosine_counts, 1),
        position_edges=edges,
        num_samples=len(chosen),
        num_tokens=int(lengths.sum()),
        massive_ratio=massive_ratio,
    )


def require_finite(statistics: StateStatistics, allowed: int = 0) -> None:
    """Raise `UserError` when more than ``allowed`` values are NaN or Inf; says in which state."""
    if statistics.num_nonfinite_values > allowed:
        where = ", ".join(f"{layer.name}: {layer.num_nonfinite_values}" for layer in statistics.layers)
        raise UserError(
            f"{statistics.num_nonfinite_values} values are not finite ({where})", fix="probe the capture again"
        )


def sample_states(sample: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each captured state of a sample as (rows float32 [N, H], their positions [N]): auxiliary layers, then final."""
    aux_TLH, final_MH = float_rows(sample.aux), float_rows(sample.final)
    every = np.arange(len(aux_TLH))
    states = [(aux_TLH[:, layer], every) for layer in range(aux_TLH.shape[1])]
    return [*states, (final_MH, np.flatnonzero(np.asarray(sample.final_rows)))]


def float_rows(values: np.ndarray | torch.Tensor) -> np.ndarray:
    """bf16 states, as a torch tensor or as raw uint16 bits, to float32 NumPy of the same shape."""
    if isinstance(values, np.ndarray) and values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return torch.as_tensor(values).to(torch.float32).numpy()


def position_edges(longest: int) -> list[int]:
    """Bucket edges 0, 1, 2, 4, 8, … up to ``longest``: the first tokens apart, later ones by powers of two."""
    edges = [0, 1]
    while edges[-1] < longest:
        edges.append(edges[-1] * 2)
    return edges


def spectrum(rows_NH: np.ndarray) -> np.ndarray:
    """Eigenvalues of the covariance of the rows, falling, as shares of their sum; empty for fewer than two rows."""
    if len(rows_NH) < 2:
        return np.zeros(0)
    centred_NH = torch.from_numpy(rows_NH - rows_NH.mean(0, dtype=np.float64).astype(np.float32)).double()
    small = centred_NH.T @ centred_NH if centred_NH.shape[0] >= centred_NH.shape[1] else centred_NH @ centred_NH.T
    values = torch.linalg.eigvalsh(small).flip(0).clamp_min(0).numpy()
    return values / values.sum() if values.sum() > 0 else np.zeros(0)


def effective_rank(shares: Sequence[float] | np.ndarray) -> float:
    """exp(−Σ s log s) of the eigenvalue shares: n for n equal ones, 1 when one holds everything."""
    shares = np.asarray(shares)[np.asarray(shares) > 0]
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def _add_cosines(sums_KK: np.ndarray, counts_KK: np.ndarray, states: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Cosine of the same token in every pair of states, over the tokens both hold and both finite."""
    units = []
    for rows_NH, positions_N in states:
        norms_N = np.linalg.norm(rows_NH, axis=1)
        good_N = np.isfinite(norms_N) & (norms_N > 0)
        units.append((rows_NH[good_N] / norms_N[good_N, None], positions_N[good_N]))
    for first, (rows_a, positions_a) in enumerate(units):
        for second, (rows_b, positions_b) in enumerate(units):
            _, in_a, in_b = np.intersect1d(positions_a, positions_b, assume_unique=True, return_indices=True)
            sums_KK[first, second] += float((rows_a[in_a] * rows_b[in_b]).sum())
            counts_KK[first, second] += len(in_a)
