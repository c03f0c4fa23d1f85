"""The hidden-state store: a folder of immutable HDF5 shards, a ledger and `store.json`.

    with StoreWriter(folder, StoreMeta(hidden_size=576, aux_layers=[1, 14, 26])) as writer:
        writer.add(Sample(id="a", input_ids=ids, loss_mask=mask, aux=aux_TLH, final=final_TH))
    reader = StoreReader(folder)
    reader.read(0).aux          # bf16 [T, L, H]

A store is only ever whole shards: a shard is written beside its name, synced, renamed, and then committed to the
ledger, so a kill at any moment loses nothing that was reported as stored and doubles nothing.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle3_utils.errors import UserError
from eagle3_utils.locks import try_lock
from eagle3_utils.runs import sync, write_json
from eagle3_utils.states.shards.builders import BuilderProcesses, build_shard, remove_files
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.recover import recover, shards_on_disk
from eagle3_utils.states.shards.sample import Sample, StagedSample, StoreMeta
from eagle3_utils.states.shards.shard import FORMAT, VERSION, shard_name

_NUM_THREADS = 2  # shards built at a time without processes: one file takes one `pwrite` at a time, about 2 GB/s


def num_open_shards(num_processes: int) -> int:
    """Shards being built at a time, and one that fills."""
    return (num_processes or _NUM_THREADS) + 1


@dataclass
class _Batch:
    samples: list[Sample | StagedSample] = field(default_factory=list)
    num_bytes: int = 0
    held_bytes: int = 0

    def clear(self) -> None:
        """Let go of the states."""
        self.samples, self.num_bytes, self.held_bytes = [], 0, 0


class StoreWriter:
    """Adds samples to a store, one process at a time; opening an existing store resumes it.

    `add` and `add_staged` may be called from several threads. Shards are built in the background while the next one
    fills, by threads or by `num_processes` processes (builders.py).
    Raises `UserError` when the store belongs to another model or corpus, is open elsewhere, or its disk is full.
    """

    def __init__(
        self,
        folder: Path,
        meta: StoreMeta,
        shard_bytes: int = 2 << 30,
        max_held_bytes: int | None = None,
        num_processes: int = 0,
    ):
        self.folder, self.meta, self.shard_bytes = Path(folder), meta, shard_bytes
        self.max_held_bytes = max_held_bytes  # a shard is closed early when its samples hold this much elsewhere
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._folder_lock = _lock(self.folder)
            stack.callback(os.close, self._folder_lock)
            check_or_write_meta(self.folder, meta)
            self.ledger = stack.enter_context(Ledger(self.folder / "ledger.sqlite"))
            self.recovered = recover(self.folder, meta, self.ledger)
            stack.pop_all()  # nothing went wrong: both stay open until close or abort
        self._stored = self.ledger.ids("done")
        self._next_number = max([-1, *self.ledger.shards(), *shards_on_disk(self.folder)]) + 1
        self._batch = _Batch()
        self._adding, self._counting = threading.Lock(), threading.Lock()
        self._num_builders = num_open_shards(num_processes) - 1
        self._builders = BuilderProcesses(num_processes) if num_processes else None
        self._pool = ThreadPoolExecutor(self._num_builders, thread_name_prefix="shard-writer")
        self._writing: deque[tuple[Future, _Batch]] = deque()  # the oldest first
        self._closed = False
        self.stored_bytes = 0  # state bytes of the shards closed by this writer

    def register(self, records: Iterable) -> list:
        """Make records (id, source, input_ids) known as pending; returns those not stored yet, in order."""
        records = list(records)
        self.ledger.register((record.id, record.source, len(record.input_ids)) for record in records)
        return [record for record in records if record.id not in self._stored]

    @property
    def buffered_bytes(self) -> int:
        """State bytes taken but not yet in a closed shard."""
        return self._sum("num_bytes")

    @property
    def held_bytes(self) -> int:
        """Bytes of staged files that wait for their shard."""
        return self._sum("held_bytes")

    @property
    def builders_cpu_seconds(self) -> float:
        """What builder processes have used."""
        return self._builders.cpu_seconds if self._builders else 0.0

    def add(self, sample: Sample) -> None:
        """Take a sample; `ValueError` names what is wrong with it, or that it is stored already."""
        if problem := sample.problem(self.meta):
            raise ValueError(f"{sample.id}: {problem}")
        self._take(sample, sample.stored_bytes(self.meta))

    def add_staged(self, sample: StagedSample) -> None:
        """Take a sample that is checked when its shard is built; it may be added again when `settle` is told a problem.

        Raises `ValueError` when it is stored already.
        """
        self._take(sample, sample.stored_bytes, sample.held_bytes)

    def _take(self, sample: Sample | StagedSample, num_bytes: int, held_bytes: int = 0) -> None:
        with self._adding:
            if self._closed:
                raise ValueError(f"{sample.id}: the store is closed")
            if sample.id in self._stored:
                raise ValueError(f"{sample.id}: already in the store")
            self._stored.add(sample.id)
            self._batch.samples.append(sample)
            self._batch.num_bytes += num_bytes
            self._batch.held_bytes += held_bytes
            held_up = self.max_held_bytes is not None and self._batch.held_bytes >= self.max_held_bytes
            if self._batch.num_bytes >= self.shard_bytes or held_up:
                self._close_batch()

    def flush(self) -> None:
        """Write what is buffered as a shard of its own and wait until it is on disk and in the ledger."""
        with self._adding:
            self._close_batch()
            self._wait()

    def close(self) -> None:
        """Flush and leave the store as plain files."""
        try:
            self.flush()
        finally:
            self.abort()

    def abort(self) -> None:
        """Leave without writing what is buffered; finished shards stay."""
        with self._adding:
            if self._closed:
                return
            self._closed, self._batch = True, _Batch()
        self._pool.shutdown()
        if self._builders:
            self._builders.close()
        try:
            self.ledger.close()
        finally:
            os.close(self._folder_lock)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _close_batch(self) -> None:
        self._wait(self._num_builders - 1)
        if self._batch.samples:
            batch, self._batch = self._batch, _Batch()
            number, self._next_number = self._next_number, self._next_number + 1
            self._writing.append((self._pool.submit(self._write, number, batch), batch))

    def _wait(self, num_left: int = 0) -> None:
        """Wait until so few shards are being written; raises what went wrong with one."""
        while len(self._writing) > num_left:
            self._writing[0][0].result()
            self._writing.popleft()

    def _write(self, number: int, batch: _Batch) -> None:
        path = self.folder / shard_name(number)
        build = self._builders.build if self._builders else build_shard
        samples = [sample.load if isinstance(sample, StagedSample) else sample for sample in batch.samples]
        try:
            built = build(path, samples, self.meta)
        except OSError as error:
            path.with_suffix(".h5.tmp").unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"disk full while writing {path.name}; every earlier shard is whole",
                str(self.folder),
                "free space (or choose codec: fp8, final: supervised) and start the stage again: it resumes",
            ) from error
        if built.rows:
            self.ledger.commit_shard(number, built.file_bytes, built.rows)
        with self._counting:
            self.stored_bytes += sum(row["num_bytes"] for row in built.rows)
        self._settle(batch.samples, built.problems)
        batch.clear()

    def _settle(self, samples: list[Sample | StagedSample], problems: list[str | None]) -> None:
        """Tell what became of staged samples, their files removed: they are in the ledger, or no good."""
        staged = [pair for pair in zip(samples, problems, strict=True) if isinstance(pair[0], StagedSample)]
        remove = self._builders.remove if self._builders else remove_files
        remove([sample.path for sample, _ in staged])
        for sample, problem in staged:
            if problem is not None:
                self._stored.discard(sample.id)
            sample.settle(problem)

    def _sum(self, name: str) -> int:
        return sum(getattr(batch, name) for batch in (self._batch, *(batch for _, batch in list(self._writing))))


def check_or_write_meta(folder: Path, meta: StoreMeta) -> None:
    """Write `store.json`, or compare as `check_meta`."""
    check_meta(folder, meta)
    if not (folder / "store.json").exists():
        write_json(folder / "store.json", {"format": FORMAT, "version": VERSION, **asdict(meta)})
        sync(folder)


def check_meta(folder: Path, meta: StoreMeta) -> None:
    """Raise `UserError` when the folder holds other states: a store never mixes models, layers, codecs or corpora."""
    if not (folder / "store.json").exists():
        return
    present = read_meta(folder)
    for key, value in asdict(meta).items():
        if getattr(present, key) != value:
            raise UserError(
                f"the store was made with {key} = {getattr(present, key)!r}, now it is {value!r}",
                str(folder),
                "use another run_dir, or remove the old states: eagle3 clean RUN --states",
            )


def read_meta(folder: Path) -> StoreMeta:
    """Read `store.json`; raises `UserError` when the folder is no store of this version."""
    path = Path(folder) / "store.json"
    if not path.is_file():
        fix = "if the states were removed, extract them again: eagle3 run … --from 03 --force"
        raise UserError("not a hidden-state store: store.json is missing", str(folder), fix)
    content = json.loads(path.read_text())
    if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
        raise UserError(f"not an {FORMAT} version {VERSION} store", str(path))
    return StoreMeta(**content)


def _lock(folder: Path) -> int:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise UserError("another process is writing to this store", str(folder), "wait for it or stop it")
    return descriptor
