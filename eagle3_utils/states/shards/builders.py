"""Samples become a shard: encoded, hashed and written, by a thread of this process or by processes of their own.

One process reads, checks and answers for hundreds of requests at a time; encoding in it as well makes its threads wait
for each other (every page they touch first, every buffer they allocate goes through one lock of the address space).
So on machines with cores to spare, shards are built elsewhere, from the staged files themselves.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.shards.sample import Sample, StoreMeta, encode_sample
from eagle3_utils.states.shards.shard import write_shard

_CORES_PER_PROCESS = 4  # the server, and the requests, need the others
_MOST_PROCESSES = 8
Loader = Callable[[], Sample]  # can be sent to another process


def processes_for(shard_builders: int | None, num_cores: int | None = None) -> int:
    """How many processes build shards; where the parameter leaves it open (None) 0 on few cores: threads do it then."""
    if shard_builders is not None:
        return shard_builders
    num_cores = num_cores or len(os.sched_getaffinity(0))
    return min(_MOST_PROCESSES, num_cores // _CORES_PER_PROCESS) if num_cores >= 2 * _CORES_PER_PROCESS else 0


def build_shard(path: Path, samples: Sequence[Sample | Loader], meta: StoreMeta) -> tuple[int, list[dict]]:
    """Write one shard; returns its bytes and the ledger's row of each sample. Raises `OSError`, on a full disk say.

    A loader whose file has gone is left out: a server that dies takes its staged files with it.
    """
    encoded = [encode_sample(sample, meta) for sample in map(_loaded, samples) if sample is not None]
    if not encoded:
        return 0, []
    file_bytes = write_shard(path, encoded, meta.attributes())
    rows = [
        {"id": s.id, "source": s.source, "num_tokens": s.num_tokens, "row": row, "checksum": s.checksum}
        | {"num_bytes": s.num_bytes}
        for row, s in enumerate(encoded)
    ]
    return file_bytes, rows


def _loaded(sample: Sample | Loader) -> Sample | None:
    if not callable(sample):
        return sample
    try:
        return sample()
    except FileNotFoundError:
        return None


class BuilderProcesses:
    """Processes that run `build_shard`; they end with this one, also when it is killed."""

    def __init__(self, num_processes: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(num_processes, context, initializer=_prepare)
        for _ in range(num_processes):  # all of them start now, not when the first shard is full
            self._pool.submit(os.getpid)

    def build(self, path: Path, loaders: Sequence[Loader], meta: StoreMeta) -> tuple[int, list[dict]]:
        """As `build_shard`, elsewhere. Raises `UserError` when a process was killed."""
        try:
            return self._pool.submit(build_shard, path, loaders, meta).result()
        except BrokenProcessPool:
            fix = "was memory short? start the stage again: it resumes; fewer shard_builders need less"
            raise UserError("a process that builds shards was killed", str(path.parent), fix) from None

    def close(self) -> None:
        """Wait for what is being built, and end the processes."""
        self._pool.shutdown()


def _prepare() -> None:
    """In a new process: one thread, no signals meant for the parent's group, and the parent's end is its end."""
    os.setpgrp()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
