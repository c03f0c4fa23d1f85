"""Who is at work: lock files, of one process at a time in a folder, and whether a process of another time still lives.

The process at work holds the lock of the file, and its text says who that is. The kernel drops the lock when the
process dies, however it dies; the text stays.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

RUNNER = "runner.pid"  # of `eagle3 run`, in its run folder
TRAINING = "training.lock"  # of a training's first rank, in its draft's folder
CLOCK_SECONDS = 2.0  # by which a process's start, counted from the boot, and the wall clock may differ


def try_lock(file) -> bool:
    """Take the lock of an open file or descriptor, held until it is closed; False when another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock_file(path: Path, text: str | None = None) -> Iterator[str | None]:
    """Hold a lock file while the block runs, with `text` in it; without one it keeps the text it has.

    Gives None, or, when another process holds it, what that one wrote; the block then runs without the lock.
    """
    with open(path, "a+") as file:
        holder = None
        if not try_lock(file):
            file.seek(0)
            holder = file.read().strip()
        elif text is not None:
            file.truncate(0)
            file.write(text)
            file.flush()
        yield holder


def in_brackets(holder: str) -> str:
    """Who holds a lock, for a sentence: the first line of its text; nothing as long as it has written none."""
    return f" ({holder.splitlines()[0]})" if holder else ""


def is_same_process(pid: int, began: float, clock_seconds: float = CLOCK_SECONDS) -> bool:
    """Whether the process that had a pid at a time still has it: not one that was given its number later."""
    try:
        return psutil.Process(pid).create_time() <= began + clock_seconds
    except psutil.NoSuchProcess:
        return False
