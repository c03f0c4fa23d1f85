"""One sample with its states, what a store says of all its samples, and how a sample becomes stored bytes.

Legend: T tokens, L auxiliary layers, H hidden, M rows with a final state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from eagle3_utils.states.codec import CODECS, FINALS, count_not_finite, encode, supervised_rows
from eagle3_utils.states.shards.shard import EncodedSample
from eagle3_utils.states.sizes import INDEX_BYTES_PER_TOKEN, bytes_per_row


@dataclass(frozen=True)
class StoreMeta:
    """What is the same for every sample of a store. `fingerprint` names the model, layers and server settings."""

    hidden_size: int
    aux_layers: list[int]  # 0-based decoder layers whose output is stored, ascending
    codec: str = "bf16"  # bf16 or fp8
    final: str = "all"  # rows that keep a final state: all, or supervised
    fingerprint: str = ""
    corpus: str = ""  # hash of the corpus the samples come from
    final_is_post_norm: bool = True
    model: str = ""

    def __post_init__(self):
        if self.codec not in CODECS or self.final not in FINALS:
            raise ValueError(f"codec {self.codec!r} / final {self.final!r}: choose from {CODECS} and {FINALS}")

    def attributes(self) -> dict:
        """What every shard repeats in its HDF5 attributes."""
        dtype = "bfloat16 bits in uint16" if self.codec == "bf16" else "float8_e4m3fn bits in uint8, times scale"
        return asdict(self) | {"dtype": dtype}


@dataclass
class Sample:
    """One sequence with its states. `final` has one row for each true entry of `final_rows` (default: every row)."""

    id: str
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    aux: torch.Tensor  # bf16 [T, L, H]
    final: torch.Tensor  # bf16 [M, H], post-norm
    final_rows: np.ndarray | None = None  # bool [T]
    source: str = ""

    def __post_init__(self):
        if self.final_rows is None:
            self.final_rows = np.ones(len(self.input_ids), dtype=bool)

    def stored_bytes(self, meta: StoreMeta) -> int:
        """Bytes of its arrays in the store."""
        wanted = supervised_rows(self.loss_mask) if meta.final == "supervised" else self.final_rows
        return stored_bytes(len(self.input_ids), int(np.count_nonzero(wanted)), meta)

    def problem(self, meta: StoreMeta) -> str | None:
        """What makes this sample unfit for a store, or None."""
        length, shape = len(self.input_ids), (len(self.input_ids), len(meta.aux_layers), meta.hidden_size)
        if length == 0 or len(self.loss_mask) != length or len(self.final_rows) != length:
            return f"{length} tokens, {len(self.loss_mask)} mask entries, {len(self.final_rows)} final_rows"
        if tuple(self.aux.shape) != shape or self.aux.dtype != torch.bfloat16:
            return f"aux is {self.aux.dtype} {list(self.aux.shape)}, expected bfloat16 {list(shape)}"
        expected = (int(self.final_rows.sum()), meta.hidden_size)
        if tuple(self.final.shape) != expected or self.final.dtype != torch.bfloat16:
            return f"final is {self.final.dtype} {list(self.final.shape)}, expected bfloat16 {list(expected)}"
        if not self.final_rows[supervised_rows(self.loss_mask)].all():
            return "a supervised row has no final state"
        for name, states in (("aux", self.aux), ("final", self.final)):
            if bad := count_not_finite(states):
                return f"{name} has {bad} values that are not finite"
        return None


Loader = Callable[[StoreMeta], Sample]


class UnfitSample(Exception):
    """A sample that a store must not take; the message is the reason."""


@dataclass(frozen=True)
class StagedSample:
    """A sample in a file of its own, which is read and checked only where its shard is built.

    `load` does that, maybe in another process (so it can be pickled). It raises `UnfitSample`, or `FileNotFoundError`
    when the file has gone. `settle` is told None once the sample is on disk and in the ledger, or what was wrong with
    it; by then its file is removed.
    """

    id: str
    path: Path
    held_bytes: int  # of the file
    stored_bytes: int  # in the store
    load: Loader
    settle: Callable[[str | None], None]


def stored_bytes(num_tokens: int, num_final: int, meta: StoreMeta) -> int:
    """Bytes of a sample's arrays in the store; `num_final` rows keep a final state."""
    row = bytes_per_row(meta.hidden_size, meta.codec)
    return num_tokens * INDEX_BYTES_PER_TOKEN + (num_tokens * len(meta.aux_layers) + num_final) * row


def select_rows(states: torch.Tensor, wanted: np.ndarray) -> torch.Tensor:
    """The rows of `states` [M, H] where `wanted` bool [M]; without a copy when they lie side by side."""
    rows = np.flatnonzero(wanted)
    if rows.size and rows[-1] - rows[0] + 1 == rows.size:
        return states[rows[0] : rows[-1] + 1]
    return states[torch.from_numpy(rows)]


def encode_sample(sample: Sample, meta: StoreMeta) -> EncodedSample:
    """Apply the store's codec. Arrays of a bf16 store stay views of the sample's tensors."""
    final, final_rows = sample.final, np.asarray(sample.final_rows, bool)
    if meta.final == "supervised":
        wanted = supervised_rows(sample.loss_mask)
        final, final_rows = select_rows(final, wanted[final_rows]), wanted
    arrays = {
        "input_ids": np.asarray(sample.input_ids, "<i4"),
        "loss_mask": np.asarray(sample.loss_mask, "u1"),
        "final_rows": final_rows.astype("u1"),
    }
    for name, states in (("aux", sample.aux), ("final", final)):
        arrays[name], scale = encode(states, meta.codec)
        if scale is not None:
            arrays[f"{name}_scale"] = scale
    return EncodedSample(sample.id, sample.source, arrays)
