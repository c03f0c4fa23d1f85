"""GPU memory before a server and after it, as nvidia-smi sees it: asked from outside, no CUDA context is made here."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from typing import NamedTuple

logger = logging.getLogger(__name__)
_TOLERANCE_BYTES = 1 << 30  # driver bookkeeping, a display, contexts of others that come and go
_POLL_SECONDS = 0.5


def free_bytes() -> list[int]:
    """Free memory of each GPU of `CUDA_VISIBLE_DEVICES`; [] without GPUs, or when nvidia-smi fails."""
    return [int(line) << 20 for line in _ask("--query-gpu=memory.free") if line.isdigit()]


class Usage(NamedTuple):
    """Bytes at one moment: `free` of each GPU, `held` by each process (in a container the pids may be the host's)."""

    free: list[int]
    held: dict[int, int]


def usage() -> Usage:
    """What is free on the visible GPUs now, and who holds the rest as far as nvidia-smi names them."""
    held: dict[int, int] = {}
    for line in _ask("--query-compute-apps=pid,used_memory"):
        pid, _, mebibytes = line.partition(", ")
        if pid.isdigit() and mebibytes.isdigit():
            held[int(pid)] = held.get(int(pid), 0) + (int(mebibytes) << 20)
    return Usage(free_bytes(), held)


def memory_not_returned(before: Usage, wait_seconds: float = 20.0) -> str | None:
    """None once every GPU has as much free memory as it had `before`; else a line that says what is missing.

    Our processes have ended when this is asked, so what a listed process took since `before` is not ours: nothing is
    said where that explains the difference. The driver gives memory back a moment after an end, so this waits for it.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        now = usage()
        missing = [had - has for had, has in zip(before.free, now.free, strict=False)]
        gone = {f"GPU {i}": n for i, n in enumerate(missing) if n > _TOLERANCE_BYTES}
        taken = sum(max(0, bytes_now - before.held.get(pid, 0)) for pid, bytes_now in now.held.items())
        if sum(gone.values()) - taken <= _TOLERANCE_BYTES:
            return None
        if time.monotonic() > deadline:
            told = ", ".join(f"{n / 2**30:.1f} GiB of {name}" for name, n in gone.items())
            others = ", ".join(f"pid {pid} ({n >> 20} MiB)" for pid, n in now.held.items()) or "no process is listed"
            return f"{told} free before the start are not free after the stop; on the GPUs: {others}"
        time.sleep(_POLL_SECONDS)


def _ask(query: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if visible.strip() in ("", "-1"):
            return []
        if not visible.startswith("MIG"):  # nvidia-smi finds whole GPUs only
            command.append(f"--id={visible}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("nvidia-smi fails, so no GPU is seen: %s", error)
        return []
    if answer.returncode:
        logger.warning("nvidia-smi fails, so no GPU is seen: %s", (answer.stderr or answer.stdout).strip()[:200])
        return []
    return answer.stdout.strip().splitlines()
