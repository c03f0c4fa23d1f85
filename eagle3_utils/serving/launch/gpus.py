"""GPU memory before a server and after it, as nvidia-smi sees it: asked from outside, no CUDA context is made here."""

from __future__ import annotations

import os
import shutil
import subprocess
import time

_TOLERANCE_BYTES = 256 << 20  # driver bookkeeping, a display
_POLL_SECONDS = 0.5


def free_bytes() -> list[int]:
    """Free memory of each GPU of `CUDA_VISIBLE_DEVICES`; [] without GPUs, or when nvidia-smi fails."""
    return [int(line) << 20 for line in _ask("--query-gpu=memory.free") if line.isdigit()]


def processes_on_gpus() -> list[str]:
    """Processes that hold GPU memory, as "pid 123 (456 MiB)". In a container the pids may be the host's."""
    rows = [line.split(", ") for line in _ask("--query-compute-apps=pid,used_memory")]
    return [f"pid {row[0]} ({row[1]} MiB)" for row in rows if len(row) == 2]


def memory_not_returned(before: list[int], wait_seconds: float = 20.0) -> str | None:
    """None once every GPU has as much free memory as it had `before`; else a line that says what is missing.

    The driver gives memory back a moment after a process has ended, so this waits for it.
    """
    deadline = time.monotonic() + wait_seconds
    while True:
        missing = [had - has for had, has in zip(before, free_bytes(), strict=False)]
        held = [f"{n / 2**30:.1f} GiB of GPU {i}" for i, n in enumerate(missing) if n > _TOLERANCE_BYTES]
        if not held:
            return None
        if time.monotonic() > deadline:
            others = ", ".join(processes_on_gpus()) or "no process is listed"
            return f"{', '.join(held)} free before the start are not free after the stop; on the GPUs: {others}"
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
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []
