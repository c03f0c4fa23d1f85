"""The rows of one request: where each piece of its prompt lands, and the file they become.

A prompt may be prefilled in one piece, in chunks, again after a retraction, or inside a batch that also decodes.
Every piece says where it starts (`prefix`) and how long it is, so rows are placed by position and never appended.

T tokens of the prompt, L auxiliary layers, H hidden size.
"""

import json
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .staging import Staging

RID_PREFIX = "hs-"
ALL_BOUNDARIES_PREFIX = "hs-all-"
_TYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of a batch belong at [position, position + stop - start) of a prompt."""

    start: int
    stop: int
    position: int


class GapError(ValueError):
    """Rows of a prompt were never computed: a prefix cache answered for them, or a graph ran in our place."""


def place(row: int, prefix: int, extend: int, num_tokens: int, num_filled: int) -> Piece | None:
    """Where a batch's rows [row, row + extend) belong in a prompt of `num_tokens`, `num_filled` of them present.

    None when the rows are past the prompt: a decode step inside a mixed batch, or generated tokens prefilled again.
    Raises `GapError` when rows before `prefix` are missing.
    """
    stop = min(prefix + extend, num_tokens)
    if prefix >= num_tokens:
        return None
    if prefix > num_filled:
        raise GapError(f"rows {num_filled}…{prefix - 1} of {num_tokens} were never computed (is the prefix cache on?)")
    return Piece(row, row + stop - prefix, prefix)


class RequestRows:
    """One request's dump while it fills: `input_ids` [T], `aux` [T, L, H], `final` [T, H], views of one host slab."""

    def __init__(self, request: Any):
        self.rid, self.num_tokens = request.rid, len(request.origin_input_ids)
        self._request = weakref.ref(request)  # which holds these rows
        self.num_filled = 0
        self.pieces: list[int] = []  # lengths, as they came
        self.error: str | None = None
        self.submitted = False
        self.num_bytes = 0
        self.slab: torch.Tensor | None = None
        self.views: dict[str, torch.Tensor] = {}

    @property
    def wants_all(self) -> bool:
        """Whether every boundary is dumped too (`hidden` [T, n + 1, H])."""
        return self.rid.startswith(ALL_BOUNDARIES_PREFIX)

    @property
    def complete(self) -> bool:
        return self.num_filled == self.num_tokens

    def open(self, staging: Staging, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Take a slab and lay the tensors out in it, one after the other. `shapes` are without the leading T."""
        full = {name: (dtype, (self.num_tokens, *shape)) for name, (dtype, shape) in shapes.items()}
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in full.items()}
        slab = staging.acquire(sum(sizes.values()))
        self.slab, offset = slab, 0
        self.num_bytes = sum(sizes.values())
        for name, (dtype, shape) in full.items():
            self.views[name] = slab[offset : offset + sizes[name]].view(dtype).view(shape)
            offset += sizes[name]
        self._abandon = weakref.finalize(self, staging.abandon, slab)
        self._abandon.atexit = False

    def drop_if_aborted(self) -> None:
        """Give the slab back as soon as the request is over: SGLang may hold on to it for another batch."""
        over = getattr(self._request(), "finished_reason", None) is not None
        if over and self.slab is not None and not self.submitted:
            self._abandon()
            self.slab, self.views, self.error = None, {}, "aborted"

    def hand_over(self) -> torch.Tensor:
        """The slab, now the writer's: it no longer returns to the pool when the request is dropped."""
        self._abandon.detach()
        self.submitted = True
        return self.slab

    def header(self, metadata: dict[str, str]) -> bytes:
        """The head of a safetensors file whose data is the slab: 8 bytes of length, then JSON, padded to 8 bytes."""
        entries: dict = {"__metadata__": metadata}
        offset = 0
        for name, view in self.views.items():
            end = offset + view.numel() * view.dtype.itemsize
            entries[name] = {
                "dtype": _TYPE_NAMES[view.dtype],
                "shape": list(view.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
