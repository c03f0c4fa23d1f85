"""Rows on their way from a forward pass into a request's slab: at once on the CPU, on a side stream on a GPU.

N rows of a batch, L auxiliary layers, H hidden size.
"""

from collections import deque
from typing import Any

import torch

from .rows import Piece, RequestRows

Tensors = dict[str, torch.Tensor | list[torch.Tensor]]  # [N, …], or L tensors [N, H]
_MAX_PASSES_IN_FLIGHT = 4  # device memory held for copies; beyond it the scheduler waits for the oldest


class DirectTransfer:
    """On the CPU rows are copied at once: the next forward may overwrite what a `.cpu()` would only be a view of."""

    def drop_finished(self) -> None:
        return

    def hold(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        return tensors

    def copy(self, held: Tensors, rows: RequestRows, piece: Piece) -> None:
        copy_piece(held, rows, piece)

    def keep(self, held: Tensors) -> None:
        return


class StreamTransfer:
    """On a GPU: copies to page-locked memory on a side stream, so that the next forward does not wait for them.

    What the side stream reads is its own: stacked, cast or cloned on the forward's stream, and kept until an event says
    that the copies are done (so the caching allocator cannot hand it to a later forward). All copies go through one
    stream: when a slab changes hands, the copies of its last owner come before those of the next.

    Parameters
    ----------
    cuda : `torch.cuda`, or a stand-in in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda):
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._in_flight: deque[tuple[Any, Tensors]] = deque()
        self._last: Any = None

    def hold(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Each tensor as one of the side stream's own, [N, L, H] for a list; one request is then one plain copy."""
        held: Tensors = {}
        for name, value in tensors.items():
            own = torch.stack(value, 1) if isinstance(value, list) else value
            own_dtype = value.dtype if name == "input_ids" else dtype
            held[name] = own.to(own_dtype, copy=own is value)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        self._last = None
        return held

    def copy(self, held: Tensors, rows: RequestRows, piece: Piece) -> Any:
        """Start the copies of one piece; the event fires when they, and all before them, are done."""
        with self._cuda.stream(self._stream):
            copy_piece(held, rows, piece)
            self._last = self._cuda.Event()
            self._last.record()
        return self._last

    def keep(self, held: Tensors) -> None:
        """The pass is over: keep its tensors until its last copy is done."""
        if self._last is not None:
            self._in_flight.append((self._last, held))

    def drop_finished(self) -> None:
        """Let go of the tensors of passes whose copies are done; wait for the oldest when too many are not."""
        if len(self._in_flight) >= _MAX_PASSES_IN_FLIGHT:
            self._in_flight[0][0].synchronize()
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()


def copy_piece(tensors: Tensors, rows: RequestRows, piece: Piece) -> None:
    """Rows of each tensor into their place in the request's slab."""
    there = slice(piece.position, piece.position + piece.stop - piece.start)
    for name, view in rows.views.items():
        value = tensors[name]
        if isinstance(value, list):
            for number, layer in enumerate(value):
                view[there, number].copy_(layer[piece.start : piece.stop])
        else:
            view[there].copy_(value[piece.start : piece.stop], non_blocking=True)
