"""`eagle3 doctor`: is this machine ready? One finding a line, before anything long is started."""

from __future__ import annotations

import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from eagle3_utils.runs import repo_root
from eagle3_utils.serving.launch import gpus
from eagle3_utils.serving.launch.checks import PLUGIN_GROUP, PLUGIN_NAME, SGLANG_VERSION

PINNED = {"sglang": SGLANG_VERSION, "torch": "2.11.0", "transformers": "5.8.1"}


class Finding(NamedTuple):
    """One check: its name, `ok`, `warn` or `fail`, and what was found."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    detail: str


def checkup() -> list[Finding]:
    """Every check of `eagle3 doctor`, in order; nothing is changed and no server is started."""
    return [
        Finding(
            "python", "ok" if sys.version_info >= (3, 11) else "fail", f"{sys.version.split()[0]} {sys.executable}"
        ),
        *(_package(name, version) for name, version in PINNED.items()),
        _plugin(),
        *_gpus(),
        _room("/dev/shm", Path("/dev/shm"), wanted_gib=4),
        _room("disk", repo_root(), wanted_gib=20),
        _ports(),
    ]


def _package(name: str, pinned: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", f"not installed; wanted {pinned} (make setup)")
    if version.split("+")[0] != pinned:
        return Finding(name, "warn", f"{version}; tested with {pinned}")
    return Finding(name, "ok", version)


def _plugin() -> Finding:
    names = [point.name for point in metadata.entry_points(group=PLUGIN_GROUP)]
    if PLUGIN_NAME not in names:
        return Finding("plugin", "fail", f"SGLang would not see {PLUGIN_NAME} (it sees {names or 'none'}): make setup")
    return Finding("plugin", "ok", f"{PLUGIN_NAME} is registered with {PLUGIN_GROUP}")


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available() and (seen := gpus.free_bytes()):
        why = f"nvidia-smi sees {len(seen)}, torch none: is the driver older than CUDA {torch.version.cuda}?"
        return [Finding("gpu", "fail", why)]
    if not torch.cuda.is_available():
        return [Finding("gpu", "warn", "none: the pipeline runs on the CPU, served evaluation is left out")]
    findings = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        findings.append(Finding(f"gpu {index}", "ok" if free > total // 2 else "warn", detail))
    return findings


def _room(name: str, path: Path, wanted_gib: int) -> Finding:
    if not path.is_dir():
        return Finding(name, "warn", f"no {path}")
    free = shutil.disk_usage(path).free / 2**30
    return Finding(name, "ok" if free >= wanted_gib else "warn", f"{free:.0f} GiB free at {path}")


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("ports", "ok", f"127.0.0.1 can be bound (tried {probe.getsockname()[1]})")
    except OSError as error:
        return Finding("ports", "fail", f"cannot bind 127.0.0.1: {error}")
