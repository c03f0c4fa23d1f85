"""One runner per run folder: the lock, who holds it, and how to end it.

`runner.pid` (locks.py) has the pid of the runner at work, then the command that goes on with the run
(`runs.read_runner`); nothing once all of it is done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3_utils import runs
from eagle3_utils.errors import UserError
from eagle3_utils.locks import RUNNER, lock_file


@contextmanager
def hold(run_folder: Path, command: str) -> Iterator[None]:
    """Hold a run folder while the block runs; `command` goes on with the run if it does not reach its end.

    Raises `UserError` when another runner is at work there.
    """
    with _taken(run_folder, f"{os.getpid()}\n{command}\n"):
        yield
        (run_folder / RUNNER).write_text("")


def require_free(run_folder: Path) -> None:
    """Raise `UserError` when a runner is at work in a run folder."""
    with _taken(run_folder):
        pass


@contextmanager
def _taken(run_folder: Path, text: str | None = None) -> Iterator[None]:
    run_folder.mkdir(parents=True, exist_ok=True)
    with lock_file(run_folder / RUNNER, text) as holder:
        if holder is not None:
            raise UserError(f"another runner (pid {_pid(holder)}) is at work here", str(run_folder))
        yield


def _pid(holder: str) -> int | None:
    """The pid in a runner's text; None before it has written it."""
    return int(holder.partition("\n")[0] or 0) or None


def stop(run_folder: Path, timeout_seconds: float) -> int:
    """Ask the runner of a run folder to end, and wait until it has; returns its pid.

    Raises `UserError` when it is no run folder, none is at work there, or it does not end in time.
    """
    runs.require_run_folder(run_folder)
    holder = _holder(run_folder)
    pid = None if holder is None else _pid(holder)
    if pid is None:
        raise UserError("no runner is at work here", str(run_folder))
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while _holder(run_folder) is not None:
        if time.monotonic() > deadline:
            raise UserError(f"pid {pid} has not ended after {timeout_seconds:.0f} s", str(run_folder))
        time.sleep(0.5)
    return pid


def _holder(run_folder: Path) -> str | None:
    with lock_file(run_folder / RUNNER) as holder:
        return holder
