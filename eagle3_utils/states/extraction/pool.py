"""The work of an extraction: which sample goes to which server next, and what happens when something fails.

All servers draw from one pool, so a slow server gets less work and the work of a dead one goes to the others.
In flight is bounded by tokens per server, not by requests.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)
BUCKET_SAMPLES = 512  # records sorted by length together: batches of like lengths, corpus order at large
POLL_SECONDS = 0.25  # how late a waiting thread may notice that a retry is due or a server is back
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.5, 30.0
SICK_AFTER_FAILURES = 20  # in a row, of a server beside others: it fails faster than they answer, and uses up all tries


def in_buckets(records: list) -> list:
    """The order of extraction: corpus order in buckets, the longest first within a bucket. Deterministic."""
    ordered = []
    for start in range(0, len(records), BUCKET_SAMPLES):
        ordered += sorted(records[start : start + BUCKET_SAMPLES], key=lambda r: (-len(r.input_ids), r.id))
    return ordered


def backoff_seconds(tries: int) -> float:
    """Seconds to wait after the given number of failures: 0.5, 1, 2, … at most 30."""
    return min(LAST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** max(0, tries - 1))


@dataclass(order=True)
class Task:
    """One sample to extract; `tries` counts the attempts that failed because of the sample."""

    order: int
    record: object = field(compare=False)
    tries: int = field(default=0, compare=False)
    attempts: int = field(default=0, compare=False)  # of any kind: makes every rid unique
    failed_at: set[str] = field(default_factory=set, compare=False)  # urls of servers that tried it in vain

    @property
    def num_tokens(self) -> int:
        return len(self.record.input_ids)


@dataclass
class Worker:
    """One server as the pool sees it."""

    url: str
    dump_dir: Path
    nonce: str | None = None
    in_flight_tokens: int = 0
    in_flight: int = 0
    failing_since: float | None = None
    failures: int = 0
    retry_at: float = 0.0
    dead: bool = False
    failed_in_a_row: Counter[str] = field(default_factory=Counter)  # answers, and dumps when their shard is built
    last_success: float = 0.0
    watched: bool = False  # one of its waiting threads looks from time to time


class Pool:
    """Tasks in order, shared by the threads of all servers.

    Parameters
    ----------
    max_tokens : tokens in flight per server; a longer sample goes alone.
    max_tries : attempts after which a sample is given up.
    patience_seconds : how long a server may fail before it is taken for dead.
    """

    def __init__(self, records: list, workers: list[Worker], max_tokens: int, max_tries: int, patience_seconds: float):
        self.workers, self.max_tokens, self.max_tries = workers, max_tokens, max_tries
        self.patience_seconds = patience_seconds
        self._ready = [Task(order, record) for order, record in enumerate(records)]  # sorted: already a heap
        self._delayed: list[tuple[float, Task]] = []
        self._lock = threading.Lock()
        self._room = {worker.url: threading.Condition(self._lock) for worker in workers}
        self._unfinished = len(self._ready)
        self.unfinished_tokens = sum(task.num_tokens for task in self._ready)
        self.stopped = False

    @property
    def unfinished(self) -> int:
        """Samples neither stored nor given up."""
        return self._unfinished

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers)

    @property
    def all_arrived(self) -> bool:
        """Whether what is unfinished waits for its shard only."""
        with self._lock:
            return self._unfinished > 0 and not (self._ready or self._delayed or self.in_flight)

    def take(self, worker: Worker) -> Task | None:
        """The next task for a server, waiting for room; None when there is nothing left to do for it."""
        with self._lock:
            while not (self.stopped or worker.dead or self._unfinished == 0):
                now = time.monotonic()
                while self._delayed and self._delayed[0][0] <= now:
                    heapq.heappush(self._ready, heapq.heappop(self._delayed)[1])
                task = self._next_for(worker) if now >= worker.retry_at else None
                if task is not None:
                    task.attempts += 1
                    worker.in_flight_tokens += task.num_tokens
                    worker.in_flight += 1
                    more = self._ready and self._has_room(worker, self._ready[0])
                    if more or not worker.watched:
                        self._room[worker.url].notify()  # one thread at a time finds out
                    return task
                self._wait(worker)
            return None

    def _next_for(self, worker: Worker) -> Task | None:
        """The first ready task, if there is room for it; one that failed at this server is left to another one."""
        left = []
        while self._ready and self._has_room(worker, self._ready[0]):
            task = heapq.heappop(self._ready)
            if worker.url not in task.failed_at or not self._is_untried(task):
                break
            left.append(task)
        else:
            task = None
        for other in left:
            heapq.heappush(self._ready, other)
        return task

    def _is_untried(self, task: Task) -> bool:
        return any(not worker.dead and worker.url not in task.failed_at for worker in self.workers)

    def arrived(self, worker: Worker, task: Task) -> None:
        """A server has answered: the task's sample is in the writer's hands."""
        with self._lock:
            self._leave(worker, task)
            worker.failing_since, worker.failures, worker.last_success = None, 0, time.monotonic()
            worker.failed_in_a_row["answers"] = 0

    def stored(self, worker: Worker, task: Task) -> None:
        """What had arrived is on disk."""
        with self._lock:
            worker.failed_in_a_row["dumps"] = 0
            self._finish(task)

    def rejected(self, worker: Worker, task: Task) -> bool:
        """What had arrived was no good: tried again, or given up (True)."""
        with self._lock:
            return self._blame(worker, task, "dumps")

    def sample_failed(self, worker: Worker, task: Task) -> bool:
        """An attempt failed because of the sample; returns True when the sample is now given up.

        After `SICK_AFTER_FAILURES` in a row it is the server that is at fault, if another one is well: it is dead.
        """
        with self._lock:
            self._leave(worker, task)
            return self._blame(worker, task, "answers")

    def server_failed(self, worker: Worker, task: Task, blame_sample: bool) -> bool:
        """A server broke off or did not answer: the task goes back to the pool, the server rests or is dead.

        With `blame_sample` (the connection broke while this sample was in work) the attempt counts against the
        sample too, so that one that kills servers is given up in the end; returns True when it is.
        """
        with self._lock:
            self._leave(worker, task)
            now = time.monotonic()
            if now >= worker.retry_at:  # else one of many requests that failed together
                worker.failing_since = worker.failing_since or now
                worker.failures += 1
                worker.retry_at = now + backoff_seconds(worker.failures)
                worker.dead = now - worker.failing_since >= self.patience_seconds
                if worker.dead:
                    self._wake_all()
            task.tries += blame_sample
            task.failed_at.add(worker.url)
            if task.tries >= self.max_tries:
                self._finish(task)
                return True
            heapq.heappush(self._ready, task)
            return False

    def timed_out(self, worker: Worker, task: Task, asked_at: float) -> bool:
        """No answer came in time: the sample's fault when the server has answered others since (`sample_failed`).

        Else the server hangs: it is dead, and the task goes back to the pool. Returns True when the sample is given up.
        """
        if worker.last_success > asked_at:
            return self.sample_failed(worker, task)
        with self._lock:
            self._leave(worker, task)
            worker.dead = True
            heapq.heappush(self._ready, task)
            self._wake_all()
            return False

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self.stopped = True
            self._wake_all()

    def _wait(self, worker: Worker) -> None:
        """Sleep until there may be work; one thread per server looks from time to time, hundreds would cost a core."""
        watching = not worker.watched
        worker.watched = True
        self._room[worker.url].wait(POLL_SECONDS if watching else None)
        if watching:
            worker.watched = False

    def _has_room(self, worker: Worker, task: Task) -> bool:
        return worker.in_flight == 0 or worker.in_flight_tokens + task.num_tokens <= self.max_tokens

    def _blame(self, worker: Worker, task: Task, what: str) -> bool:
        worker.failed_in_a_row[what] += 1
        number, few = worker.failed_in_a_row[what], SICK_AFTER_FAILURES // 4  # where all fail, no server is at fault
        others = any(not other.dead and other.failed_in_a_row[what] < few for other in self.workers)
        if others and number >= SICK_AFTER_FAILURES and not worker.dead:
            log.warning("%d %s in a row of %s were no good: the others go on without it", number, what, worker.url)
            worker.dead = True
            self._wake_all()
        if worker.dead:
            heapq.heappush(self._ready, task)
            return False
        task.tries += 1
        task.failed_at.add(worker.url)
        if task.tries >= self.max_tries:
            self._finish(task)
            return True
        heapq.heappush(self._delayed, (time.monotonic() + backoff_seconds(task.tries), task))
        return False

    def _finish(self, task: Task) -> None:
        self._unfinished -= 1
        self.unfinished_tokens -= task.num_tokens
        if self._unfinished == 0:
            self._wake_all()

    def _leave(self, worker: Worker, task: Task) -> None:
        """Make room; the thread that does so comes for the next task itself."""
        worker.in_flight_tokens -= task.num_tokens
        worker.in_flight -= 1

    def _wake_all(self) -> None:
        for condition in self._room.values():
            condition.notify_all()
