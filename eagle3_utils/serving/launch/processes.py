"""Processes of a server: who belongs to it, who was left behind by a run that died, and stopping all of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from eagle3_utils.errors import UserError
from eagle3_utils.locks import CLOCK_SECONDS, is_same_process
from eagle3_utils.runs import write_json
from eagle3_utils.serving.launch import guard
from eagle3_utils.serving.launch.checks import listeners, port_holder

NONCE_VARIABLE = "EAGLE3_SERVER_NONCE"
_TERM_SECONDS, _KILL_SECONDS = 1.0, 30.0  # SGLang drains in steps of 5 s; there is nothing to drain
_DUMP_PATTERNS = ("hs-*.safetensors", "hs-*.tmp", "hs-*.error", "handshake*.json", "handshake*.tmp")


def group_members(group: int) -> list[psutil.Process]:
    """Every live process of a process group."""
    members = []
    for process in psutil.process_iter(["pid"]):
        try:
            if os.getpgid(process.pid) == group and _is_running(process):
                members.append(process)
        except ProcessLookupError:
            continue
    return members


def stop_group(leader: subprocess.Popen | psutil.Process) -> None:
    """Stop a server: SIGTERM to the leader, which ends its children, then SIGKILL to all; returns when all are gone.

    Also removes the shared-memory files of killed processes, which nobody else would.
    Raises `UserError` when a process survives SIGKILL.
    """
    group = leader.pid
    members = {process.pid: process for process in group_members(group)}
    with contextlib.suppress(psutil.NoSuchProcess):  # the leader may be gone while its group is not
        members |= {process.pid: process for process in psutil.Process(group).children(recursive=True)}
    shared = shared_memory_files(members)
    for sign, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        for process in members.values():
            if sign == signal.SIGKILL or process.pid == group:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if isinstance(leader, subprocess.Popen):
                leader.poll()  # reaps it
            members |= {process.pid: process for process in group_members(group)}
            members = {pid: process for pid, process in members.items() if _is_running(process)}
            if not members:
                for path in shared:
                    path.unlink(missing_ok=True)
                return
            time.sleep(0.05)
    raise UserError(f"processes {sorted(members)} of the server do not end", f"process group {group}")


def shared_memory_files(pids: Iterable[int]) -> set[Path]:
    """SGLang's own files in /dev/shm that these processes have mapped or open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"/dev/shm/sglang_[\w.-]+", maps)}
            links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
            found |= {Path(link) for link in links if link.startswith("/dev/shm/sglang_")}
    return found


def _is_running(process: psutil.Process) -> bool:
    """False for a zombie too, but not for a zombie leader whose threads still end: these hold files and ports."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.is_running()
        return process.is_running() and process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False


def start_guard(group: int, dump_dir: Path | None = None) -> subprocess.Popen:
    """A process that kills the server's group, and clears its dumps, when this one dies without having stopped it."""
    command = [sys.executable, "-S", "-E", guard.__file__, str(group), *([str(dump_dir)] if dump_dir else [])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def remember(folder: Path, pid: int, nonce: str, command: list[str]) -> None:
    """Write the pid file by which the next start recognises an orphan."""
    launcher = psutil.Process()
    facts = {"pid": pid, "nonce": nonce, "launcher_pid": launcher.pid, "launcher_started": launcher.create_time()}
    write_json(folder / f"server-{pid}.json", facts | {"command": command})


def forget(folder: Path, pid: int | None) -> None:
    if pid is not None:
        (folder / f"server-{pid}.json").unlink(missing_ok=True)


def stop_orphans(folder: Path) -> list[str]:
    """Stop servers that any stage of this run launched and did not outlive; each as "pid 1 (command)".

    `folder` is one stage's; those of the others lie beside it. A process counts only when its environment still carries
    the nonce of the pid file and its launcher is dead.
    """
    stopped = []
    for path in folder.parent.glob("*/server-*.json"):
        try:
            facts = json.loads(path.read_text())
        except (ValueError, FileNotFoundError):  # cut by a crash; or its server has just been stopped
            continue
        try:
            process = psutil.Process(facts["pid"])
            is_ours = process.environ().get(NONCE_VARIABLE) == facts["nonce"]
        except psutil.Error:
            is_ours = False
        if is_ours and _launcher_lives(facts):
            continue
        if is_ours:
            stop_group(process)
            stopped.append(f"pid {facts['pid']} ({' '.join(facts['command'])[:120]})")
        path.unlink(missing_ok=True)
    return stopped


def _launcher_lives(facts: dict) -> bool:
    try:
        started = psutil.Process(facts["launcher_pid"]).create_time()  # moves when the wall clock is set
        return abs(started - facts["launcher_started"]) <= CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False


def check_listener(port: int, group: int) -> None:
    """Raise `UserError` when the process that listens on the port is not one of the server's, or cannot be seen."""
    found = listeners(port)
    if found == {None} or found - {None, *(process.pid for process in group_members(group))}:
        raise UserError(
            f"something else answers on port {port}: {port_holder(port)}", "port", "stop it, or set port: 0"
        )


def check_answers(url: str, pid: int, dump_dir: Path) -> None:
    """Raise `UserError` unless a handshake's process lives and descends from what listens at a server's local url.

    Of another machine's server nothing can be said here: its dumps carry the handshake's nonce.
    """
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost", "::1"):
        return
    try:
        family = {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
    except psutil.NoSuchProcess:
        raise UserError(
            f"the handshake is a dead server's (pid {pid})", str(dump_dir),
            "a server in a container must share this machine's process ids (docker run --pid=host)",
        ) from None  # fmt: skip
    found = listeners(address.port) - {None}
    if found and not found & family:
        raise UserError(
            f"the handshake is of pid {pid}, but {url} is answered by {port_holder(address.port)}", str(dump_dir),
            "was the server restarted? each server needs its own SGLANG_HS_DUMP_DIR",
        )  # fmt: skip


def check_member(pid: int, group: int) -> None:
    """Raise `UserError` when a handshake's pid is not of the server's process group."""
    try:
        is_ours = os.getpgid(pid) == group
    except ProcessLookupError:
        is_ours = False
    if not is_ours:
        raise UserError(f"the handshake's pid {pid} is not of the server just launched (process group {group})")


def empty_dump_folder(folder: Path, remove: bool = False) -> None:
    """Delete stale dumps and handshakes of capture, and nothing else; with `remove` the folder too if that empties it.

    Raises `UserError` when a live server still writes there.
    """
    if not folder.is_dir():
        return
    handshake = folder / "handshake.json"
    if not remove and handshake.is_file() and (pid := _writer_of(handshake)) is not None:
        raise UserError(f"a live server (pid {pid}) dumps into this folder", str(folder), "set staging_dir")
    for pattern in _DUMP_PATTERNS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    if remove and not any(folder.iterdir()):
        folder.rmdir()


def _writer_of(handshake: Path) -> int | None:
    """The pid of the live process that wrote a handshake; None when it has ended, whoever has its pid now.

    A file that a crash of the machine left empty has no writer either.
    """
    try:
        facts = json.loads(handshake.read_text())
        written = facts.get("started", handshake.stat().st_mtime)
        return facts["pid"] if is_same_process(facts["pid"], written) else None
    except (ValueError, LookupError, TypeError):
        return None
