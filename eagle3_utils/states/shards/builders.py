"""Samples become a shard: read, checked, encoded, hashed and written, by threads or by processes of their own.

One process asks for hundreds of samples at a time; touching their states in it as well makes its threads wait for each
other (every page they touch first, every buffer they allocate goes through one lock of the address space), and takes
ten times what the requests take. So on machines with cores to spare it only passes on the names of staged files.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.shards.sample import Loader, Sample, StoreMeta, UnfitSample, encode_sample
from eagle3_utils.states.shards.shard import write_shard

_CORES_PER_PROCESS = 3  # the server, and the requests, need the others
_MOST_PROCESSES = 8
_ENOUGH_CORES = 8  # for any


def processes_for(shard_builders: int | None, num_cores: int | None = None) -> int:
    """How many processes build shards; where the parameter leaves it open (None) 0 on few cores: threads do it then."""
    if shard_builders is not None:
        return shard_builders
    num_cores = num_cores or len(os.sched_getaffinity(0))
    return min(_MOST_PROCESSES, num_cores // _CORES_PER_PROCESS) if num_cores >= _ENOUGH_CORES else 0


@dataclass
class BuiltShard:
    """A shard's bytes (0: no file), the ledger's row of each sample in it, and the problem of each sample asked for."""

    file_bytes: int
    rows: list[dict]
    problems: list[str | None]


def build_shard(path: Path, samples: Sequence[Sample | Loader], meta: StoreMeta) -> BuiltShard:
    """Load and check the samples and write one shard of the good ones. Raises `OSError`, on a full disk say."""
    encoded, problems = [], []
    for sample in samples:
        try:
            encoded.append(encode_sample(sample(meta) if callable(sample) else sample, meta))
            problems.append(None)
        except UnfitSample as error:
            problems.append(str(error))
        except FileNotFoundError:  # a server that dies takes its staged files with it
            problems.append("its dump went away before it was stored: did its server end?")
    if not encoded:
        return BuiltShard(0, [], problems)
    file_bytes = write_shard(path, encoded, meta.attributes())
    rows = [
        {"id": s.id, "source": s.source, "num_tokens": s.num_tokens, "row": row, "checksum": s.checksum}
        | {"num_bytes": s.num_bytes}
        for row, s in enumerate(encoded)
    ]
    return BuiltShard(file_bytes, rows, problems)


def remove_files(paths: Sequence[Path]) -> None:
    """Remove staged files. Giving back the memory of gigabytes in /dev/shm takes its time too."""
    for path in paths:
        path.unlink(missing_ok=True)  # a server that stops empties its folder


class BuilderProcesses:
    """Processes that run `build_shard`; they end with this one, also when it is killed.

    `cpu_seconds` is what they have used.
    """

    def __init__(self, num_processes: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(num_processes, context, initializer=_prepare)
        self.cpu_seconds, self._counting = 0.0, threading.Lock()
        for _ in range(num_processes):  # all of them start now, not when the first shard is full
            self._pool.submit(os.getpid)

    def build(self, path: Path, loaders: Sequence[Loader], meta: StoreMeta) -> BuiltShard:
        """As `build_shard`, elsewhere. Raises `UserError` when a process was killed."""
        return self._run(build_shard, path, loaders, meta)

    def remove(self, paths: Sequence[Path]) -> None:
        """As `remove_files`, elsewhere."""
        self._run(remove_files, paths)

    def _run(self, work: Callable, *arguments) -> Any:
        try:
            result, seconds = self._pool.submit(_timed, work, *arguments).result()
        except BrokenProcessPool:
            fix = "was memory short? start the stage again: it resumes; fewer shard_builders need less"
            raise UserError("a process that builds shards was killed", fix=fix) from None
        with self._counting:
            self.cpu_seconds += seconds
        return result

    def close(self) -> None:
        """Wait for what is being built, and end the processes."""
        self._pool.shutdown()


def _timed(work: Callable, *arguments) -> tuple[Any, float]:
    started = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - started


def _prepare() -> None:
    """In a new process: one thread, no signals meant for the parent's group, and the parent's end is its end."""
    os.setpgrp()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
