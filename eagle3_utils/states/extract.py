"""Records in, hidden states on disk: sends every record to an SGLang server and stores what the capture plugin dumps.

    report = extract([server], records, folder, meta, config, progress=print)

A dump is checked against what was sent when its shard is built, and is deleted only when that shard is on disk and in
the ledger; a sample whose dump was no good is asked for again. Whatever is killed, and whenever, starting again stores
exactly the samples that are missing.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from eagle3_utils.config import ExtractConfig
from eagle3_utils.devices import one_torch_thread
from eagle3_utils.errors import UserError
from eagle3_utils.locks import try_lock
from eagle3_utils.states.extraction.connection import Connection, ServerBrokeOff, ServerUnreachable, generate_body
from eagle3_utils.states.extraction.dump import BadDump, file_name_of, share_staging, staged_sample, sweep, wait_for
from eagle3_utils.states.extraction.pool import Pool, Task, Worker, in_buckets
from eagle3_utils.states.extraction.report import ExtractReport
from eagle3_utils.states.shards.builders import processes_for
from eagle3_utils.states.shards.sample import StoreMeta
from eagle3_utils.states.store import StoreWriter

SERVER_PATIENCE_SECONDS = 60.0  # of failing before a server counts as dead
STOP_PATIENCE_SECONDS = 10.0  # for requests in flight when the run is interrupted
MAX_THREADS = 192  # requests in flight per server
PROGRESS_SECONDS = 1.0
MAX_FAILURES_IN_A_ROW = 200  # without one success between them it is not the samples


def extract(
    servers: list,
    records: list,
    folder: Path,
    meta: StoreMeta,
    config: ExtractConfig,
    progress: Callable[[dict], None] | None = None,
) -> ExtractReport:
    """Store the hidden states of all records; resumes what an earlier run left.

    Parameters
    ----------
    servers : anything with `url`, `dump_dir` and `handshake` (dict or None).
    records : `corpus.records.Record`s; ids must be unique.
    progress : called about once a second with done, total, rates, ETA, staging, disk, failures.

    Raises
    ------
    UserError
        No server answers any more, or the disk is about to be full: what was stored is kept, and starting again
        resumes. Also when more than `config.max_failed` samples failed.
    """
    if len({record.id for record in records}) != len(records):
        raise UserError("the corpus holds the same sample id twice", str(folder))
    with ExitStack() as stack:
        workers = [_attach(server, stack) for server in servers]
        processes = processes_for(config.shard_builders)
        dump_dirs = [worker.dump_dir for worker in workers]
        handshakes = [server.handshake for server in servers]
        held_bytes, max_tokens = share_staging(dump_dirs, records, meta, config, processes, handshakes)
        writer = StoreWriter(folder, meta, config.shard_bytes, held_bytes, processes)
        stack.callback(writer.abort)  # does nothing after close
        run = _Run(writer, workers, records, config, max_tokens, progress or (lambda _: None))
        report = run.run()
    if len(report.failures) > config.max_failed:
        first, reason = next(iter(report.failures.items()))
        raise UserError(
            f"{len(report.failures)} samples failed, max_failed is {config.max_failed}; the first: {first}: {reason}",
            str(folder),
            "start the stage again to retry them, or raise max_failed",
        )
    return report


class _Run:
    """One run: threads that send requests and hand on what arrives, and a main thread that watches them."""

    def __init__(self, writer: StoreWriter, workers: list[Worker], records: list, config, max_tokens: int, progress):
        self.writer, self.workers, self.config, self.progress = writer, workers, config, progress
        self.num_records, self.dump_dirs = len(records), [worker.dump_dir for worker in workers]
        writer.ledger.retry_failed()
        missing = writer.register(in_buckets(records))
        self.report = ExtractReport(num_resumed=len(records) - len(missing))
        self.pool = Pool(missing, workers, max_tokens, config.max_retries + 1, SERVER_PATIENCE_SECONDS)
        shortest = min((len(record.input_ids) for record in missing), default=1)
        self.num_threads = min(MAX_THREADS, max(1, max_tokens // shortest), max(1, len(missing)))
        self.token = os.urandom(4).hex()  # tells this run's dumps from those of a dead one
        self.connections = [
            Connection(worker.url, config.request_timeout_seconds)
            for _ in range(self.num_threads)
            for worker in workers
        ]
        self._counting = threading.Lock()
        self._failed_in_a_row: Counter[str] = Counter()  # answers, and dumps when their shard is built
        self._error: Exception | None = None
        self._started, self._cpu_before = time.monotonic(), time.process_time()
        self._recent: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=20)

    def run(self) -> ExtractReport:
        sweep(self.dump_dirs)
        places = zip(self.workers * self.num_threads, self.connections, strict=True)
        with one_torch_thread():
            threads = [threading.Thread(target=self._serve, args=place, daemon=True) for place in places]
            for thread in threads:
                thread.start()
            try:
                self._watch(threads)
            finally:
                self._end(threads)
        self.progress(self._figures())
        return self.report

    def _end(self, threads: list[threading.Thread]) -> None:
        """Let requests in flight arrive, store what has, and leave the dump folders clean."""
        self.pool.stop()
        deadline = time.monotonic() + STOP_PATIENCE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for connection in self.connections:
            connection.abandon()
        try:
            if self._error is None:  # what has arrived is stored, also when the run is interrupted
                self.writer.flush()
                self._finish_report()
                self.writer.close()
        finally:
            sweep(self.dump_dirs)

    def _finish_report(self) -> None:
        report = self.report
        report.seconds, report.state_bytes = time.monotonic() - self._started, self.writer.stored_bytes
        report.client_cpu_seconds = time.process_time() - self._cpu_before
        report.builders_cpu_seconds = self.writer.builders_cpu_seconds
        self._note_run()
        report.num_runs, report.total_tokens, report.total_seconds = self.writer.ledger.run_totals()

    def _note_run(self) -> None:
        if self.report.num_samples:
            seconds = time.monotonic() - self._started
            self.writer.ledger.note_run(self.token, self.report.num_tokens, seconds)

    def _watch(self, threads: list[threading.Thread]) -> None:
        """Report until the threads are done; raises what ended them early."""
        last = 0.0
        while any(thread.is_alive() for thread in threads) and self._error is None:
            time.sleep(0.05)
            if self.pool.all_arrived:  # the last shard is as full as it gets; what is no good in it comes back
                self.writer.flush()
            if time.monotonic() - last < PROGRESS_SECONDS:
                continue
            last = time.monotonic()
            self._recent.append((last, self.report.num_tokens))
            self.progress(self._figures())
            self._note_run()
            sweep(self.dump_dirs, keep=self.token)
            free = shutil.disk_usage(self.writer.folder).free
            if free < self.config.min_free_bytes + self.writer.buffered_bytes:
                raise UserError(
                    f"stopped before the disk is full: {free:,} bytes free, {self.pool.unfinished} samples to go",
                    str(self.writer.folder),
                    "free space and start the stage again: it resumes (min_free_bytes sets the reserve)",
                )
        if self._error is not None:
            raise self._error
        self.writer.flush()
        if self.pool.unfinished:
            raise UserError(
                f"no server answers any more; {self.pool.unfinished} samples to go",
                ", ".join(worker.url for worker in self.workers),
                "see the server's log, then start the stage again: it resumes",
            )

    def _serve(self, worker: Worker, connection: Connection) -> None:
        """One thread: takes tasks for one server until there are none."""
        try:
            while (task := self.pool.take(worker)) is not None:
                self._extract_one(worker, task, connection)
        except Exception as error:  # noqa: BLE001 handed to the main thread, which raises it
            if not self.pool.stopped:
                self._error = error

    def _extract_one(self, worker: Worker, task: Task, connection: Connection) -> None:
        rid = f"hs-{self.token}-{file_name_of(task.record.id)}-{task.attempts}"
        path = worker.dump_dir / f"{rid}.safetensors"
        asked_at = time.monotonic()
        try:
            self._ask(task, connection, rid)
            held_bytes = wait_for(path)
        except (ServerUnreachable, ServerBrokeOff) as error:
            path.unlink(missing_ok=True)
            given_up = self.pool.server_failed(worker, task, blame_sample=isinstance(error, ServerBrokeOff))
            self._count_failure(worker, task, str(error), given_up)
            return
        except TimeoutError:
            path.unlink(missing_ok=True)
            given_up = self.pool.timed_out(worker, task, asked_at)
            self._count_failure(worker, task, f"no answer within {self.config.request_timeout_seconds:.0f} s", given_up)
            return
        except BadDump as error:
            path.unlink(missing_ok=True)
            self._count_failure(worker, task, str(error), self.pool.sample_failed(worker, task))
            return
        settle = partial(self._settle, worker, task)
        sample = staged_sample(path, held_bytes, task.record, rid, self.writer.meta, worker.nonce, settle)
        with self._counting:
            self.report.num_samples += 1
            self.report.num_tokens += task.num_tokens
            self._failed_in_a_row["answers"] = 0
        self.writer.add_staged(sample)
        self.pool.arrived(worker, task)

    def _settle(self, worker: Worker, task: Task, problem: str | None) -> None:
        """What became of a sample that had arrived: stored, or no good."""
        if problem is None:
            self._failed_in_a_row["dumps"] = 0
            self.pool.stored(worker, task)
            return
        with self._counting:
            self.report.num_samples -= 1
            self.report.num_tokens -= task.num_tokens
        self._count_failure(worker, task, problem, self.pool.rejected(worker, task), "dumps")

    def _ask(self, task: Task, connection: Connection, rid: str) -> None:
        status, content = connection.post("/generate", generate_body(rid, task.record.input_ids))
        if status != 200:
            raise BadDump(f"HTTP {status}: {' '.join(content.decode(errors='replace').split())[:300]}")

    def _count_failure(self, worker: Worker, task: Task, reason: str, given_up: bool, what: str = "answers") -> None:
        with self._counting:
            self._failed_in_a_row[what] += not worker.dead  # what a dead server had in work says nothing of the others
            self.report.num_retries += not given_up
            if given_up:
                self.report.failures[task.record.id] = reason
        if given_up:
            self.writer.ledger.fail(task.record.id, reason, task.tries)
        if (number := self._failed_in_a_row[what]) >= MAX_FAILURES_IN_A_ROW:
            self._error = UserError(
                f"{number} {what} in a row were no good; the last: {reason}",
                task.record.id,
                "see the server's log, then start the stage again: it resumes",
            )

    def _figures(self) -> dict:
        """What `progress` is told."""
        report, now = self.report, time.monotonic()
        then, tokens_then = self._recent[0]
        mean = report.num_tokens / max(1e-9, now - self._started)
        left = self.pool.unfinished_tokens
        return {
            "seconds": now - self._started,
            "done": report.num_resumed + report.num_samples,
            "total": self.num_records,
            "failed": len(report.failures),
            "retries": report.num_retries,
            "in_flight": self.pool.in_flight,
            "tokens_per_second": mean,
            "tokens_per_second_now": (report.num_tokens - tokens_then) / max(1e-9, now - then),
            "bytes_per_second": self.writer.stored_bytes / max(1e-9, now - self._started),
            "eta_seconds": left / mean if mean and left else 0.0 if not left else None,
            "staged_bytes": self.writer.held_bytes,
            "staging_max_bytes": self.config.staging_max_bytes,
            "disk_free_bytes": shutil.disk_usage(self.writer.folder).free,
            "servers_alive": sum(not worker.dead for worker in self.workers),
        }


def _attach(server, stack: ExitStack) -> Worker:
    """Take a server's dump folder for this process alone."""
    dump_dir = Path(server.dump_dir)
    if not dump_dir.is_dir():
        raise UserError("the server's dump folder does not exist", str(dump_dir))
    folder = os.open(dump_dir, os.O_RDONLY)
    stack.callback(os.close, folder)
    if not try_lock(folder):
        raise UserError("another extraction uses this dump folder", str(dump_dir), "stop it first")
    handshake = getattr(server, "handshake", None) or {}
    return Worker(server.url.rstrip("/"), dump_dir, handshake.get("nonce"))
