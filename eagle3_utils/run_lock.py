"""One runner per run folder: the lock, who holds it, and how to end it.

`runner.pid` is locked by the runner at work; the kernel drops the lock when that process dies, however it dies. The
file has the pid, then the command that goes on with the run (`runs.read_runner`); nothing once all of it is done.
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

_FILE = "runner.pid"


@contextmanager
def hold(run_folder: Path, command: str) -> Iterator[None]:
    """Hold a run folder while the block runs; `command` goes on with the run if it does not reach its end.

    Raises `UserError` when another runner is at work there.
    """
    with _taken(run_folder) as file:
        file.truncate(0)
        file.write(f"{os.getpid()}\n{command}\n")
        file.flush()
        yield
        file.truncate(0)


def require_free(run_folder: Path) -> None:
    """Raise `UserError` when a runner is at work in a run folder."""
    with _taken(run_folder):
        pass


@contextmanager
def _taken(run_folder: Path) -> Iterator:
    run_folder.mkdir(parents=True, exist_ok=True)
    with open(run_folder / _FILE, "a+") as file:
        if not runs.try_lock(file):
            raise UserError(f"another runner (pid {_pid(file)}) is at work here", str(run_folder))
        yield file


def _pid(file) -> int | None:
    file.seek(0)
    return int(file.readline().strip() or 0) or None


def stop(run_folder: Path, timeout_seconds: float) -> int:
    """Ask the runner of a run folder to end, and wait until it has; returns its pid.

    Raises `UserError` when it is no run folder, none is at work there, or it does not end in time.
    """
    runs.require_run_folder(run_folder)
    with open(run_folder / _FILE, "a+") as file:
        pid = None if runs.try_lock(file) else _pid(file)
        if pid is None:
            raise UserError("no runner is at work here", str(run_folder))
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while not runs.try_lock(file):
            if time.monotonic() > deadline:
                raise UserError(f"pid {pid} has not ended after {timeout_seconds:.0f} s", str(run_folder))
            time.sleep(0.5)
    return pid
