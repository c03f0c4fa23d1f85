"""Bounded staging: host memory for rows on their way out, and a limit on dumps that nobody has taken yet.

When staging is full, `acquire` waits: the scheduler stands still and no row is lost. It gives up with `StagingFull`
(which becomes the request's error) only when one dump is larger than the limit, or when nothing was taken for
`wait_seconds`: then the reader of the dumps is gone.

While the scheduler waits here, no answer leaves the server. A reader that takes a dump only after its request was
answered must therefore keep less in flight than staging holds: else both wait for each other until `wait_seconds` are
over. A reader that takes dumps as they appear may keep any number in flight.
"""

import os
import threading
import time
from collections import deque

import torch

_POLL_SECONDS = 0.002
_SMALLEST_SLAB_BYTES = 1 << 16


class StagingFull(RuntimeError):
    """There is no room for a dump, and waiting does not help."""


def slab_bytes(num_bytes: int) -> int:
    """Round up to a quarter step between powers of two, so that slabs fit many requests and waste at most 25 %."""
    num_bytes = max(num_bytes, _SMALLEST_SLAB_BYTES)
    step = 1 << max(0, (num_bytes - 1).bit_length() - 3)
    return -(-num_bytes // step) * step


class Staging:
    """A pool of reusable host slabs and the account of published dumps.

    Parameters
    ----------
    max_bytes : limit on slabs in use plus dumps on disk.
    pool_bytes : limit on host memory in slabs.
    pin : page-locked slabs, for asynchronous copies from a GPU.
    wait_seconds : how long `acquire` waits without any progress.
    """

    def __init__(self, max_bytes: int, pool_bytes: int, pin: bool, wait_seconds: float = 120.0):
        self.max_bytes, self.pool_bytes = max_bytes, min(pool_bytes, max_bytes)
        self.pin, self.wait_seconds = pin, wait_seconds
        self.peak_bytes = 0
        self._free: list[torch.Tensor] = []
        self._in_use_bytes = 0
        self._queued = 0  # slabs handed to the writer: these come back by themselves
        self._on_disk: dict[str, int] = {}
        self._abandoned: deque[torch.Tensor] = deque()  # filled by finalizers, which must not take the lock
        self._lock = threading.Lock()
        self._starving = False

    def acquire(self, num_bytes: int) -> torch.Tensor:
        """A uint8 slab of at least `num_bytes`. Waits for room; raises `StagingFull` when waiting is useless."""
        if num_bytes > self.max_bytes:
            raise StagingFull(
                f"a dump of {num_bytes:,} bytes does not fit into staging of {self.max_bytes:,} bytes "
                "(staging_max_bytes, SGLANG_HS_MAX_BYTES)"
            )
        size = min(slab_bytes(num_bytes), self.max_bytes)
        if self._has_room(size):
            self._starving = False
        else:
            self._wait(size)
        return self._take(size)

    def abandon(self, slab: torch.Tensor) -> None:
        """Give back a slab that never went to the writer (its request was aborted). Safe in a finalizer."""
        self._abandoned.append(slab)

    def queued(self) -> None:
        """A slab was handed to the writer."""
        with self._lock:
            self._queued += 1

    def written(self, slab: torch.Tensor, path: str | None, num_bytes: int) -> None:
        """The writer is done with a slab; `path` is the published dump, or None when writing failed."""
        with self._lock:
            self._queued -= 1
            self._give_back(slab)
            if path is not None:
                self._on_disk[path] = num_bytes

    def _has_room(self, size: int) -> bool:
        with self._lock:
            while self._abandoned:
                self._give_back(self._abandoned.popleft())
            if self._fits(size):
                return True
            self._on_disk = {path: n for path, n in self._on_disk.items() if os.path.exists(path)}
            if self._fits(size):
                return True
            # Only unfinished requests hold slabs: nothing will come back before this one gets on.
            return self._queued == 0 and not self._on_disk

    def _fits(self, size: int) -> bool:
        used = self._in_use_bytes + sum(self._on_disk.values())
        in_pool = self._in_use_bytes + size <= self.pool_bytes or self._in_use_bytes == 0  # one larger than the pool
        return used + size <= self.max_bytes and in_pool

    def _give_back(self, slab: torch.Tensor) -> None:
        self._in_use_bytes -= slab.numel()
        self._free.append(slab)

    def _wait(self, size: int) -> None:
        patience = 0.0 if self._starving else self.wait_seconds
        last_used, deadline = None, time.monotonic() + patience
        while not self._has_room(size):
            with self._lock:
                used = (self._in_use_bytes, len(self._on_disk), self._queued)
            now = time.monotonic()
            if used != last_used:
                last_used, deadline = used, now + patience
            if now > deadline:
                self._starving = True
                raise StagingFull(
                    f"staging is full ({sum(self._on_disk.values()):,} bytes in {len(self._on_disk)} dumps, limit "
                    f"{self.max_bytes:,}) and no dump was taken for {self.wait_seconds:.0f} s"
                )
            time.sleep(_POLL_SECONDS)
        self._starving = False

    def _take(self, size: int) -> torch.Tensor:
        with self._lock:
            fitting = [slab for slab in self._free if size <= slab.numel() <= 2 * size]
            slab = min(fitting, key=torch.Tensor.numel, default=None)
            if slab is not None:
                self._free = [other for other in self._free if other is not slab]
            else:
                while self._free and self._allocated() + size > self.pool_bytes:
                    self._free.pop(0)
                slab = torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)
            self._in_use_bytes += slab.numel()
            self.peak_bytes = max(self.peak_bytes, self._in_use_bytes)
            return slab

    def _allocated(self) -> int:
        return self._in_use_bytes + sum(slab.numel() for slab in self._free)
