"""What is looked at before a server is launched: each finding is one clear line, and costs less than a failed start."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3_utils.config import ServingOptions
from eagle3_utils.errors import UserError
from eagle3_utils.runs import repo_root
from eagle3_utils.serving.launch import gpus

logger = logging.getLogger(__name__)
SGLANG_VERSION = "0.5.14"  # whose source capture was read against
PLUGIN_GROUP, PLUGIN_NAME = "sglang.srt.plugins", "eagle3_capture"
_ASK = f"""
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
names = [p.name for p in m.entry_points(group={PLUGIN_GROUP!r})]
print(json.dumps({{"python": sys.version.split()[0], "sglang": version("sglang"), "torch": version("torch"),
                  "plugin": {PLUGIN_NAME!r} in names, "plugins": sorted(set(names))}}))
"""

_LEAST_DISK_BYTES = 100 << 20
_FASTEST_START_SECONDS = 3.0  # Python and SGLang's imports alone take longer
_FASTEST_LOAD_BYTES_PER_SECOND = 20e9  # several GPUs, from the page cache
HIGHEST_PORT = 65535 - 10000  # SGLang's gRPC port is its port + 10000 (server_args.py)
_OWN_PORTS = range(20_000, 30_000)  # below those that systems give to connections and to whoever asks for any port
_ATTENTION_DATA_PARALLEL_PORTS = (13, *range(233, 240))  # further ones (`PortArgs`, data_parallel_controller.py)


@dataclass(frozen=True)
class Interpreter:
    """What a Python says about itself."""

    path: str
    python: str
    sglang: str
    torch: str | None
    plugin: bool  # sees our capture plugin
    plugins: list[str]


def interpreter_path(python: str | None) -> str:
    """The Python to run: this one for None; a relative path counts from the repository root, a plain name from PATH.

    A link is not followed: a virtual environment's Python is one, and finds its packages beside the link.
    """
    if python is None:
        return sys.executable
    return os.path.abspath(repo_root() / Path(python).expanduser()) if os.sep in python else python


def ask_interpreter(path: str, environment: dict[str, str] | None = None) -> Interpreter:
    """Ask a Python whether it has SGLang, which version, and whether it sees the capture plugin (0.1 s).

    Raises
    ------
    UserError
        When it does not run, or has no SGLang.
    """
    try:
        answer = subprocess.run(
            [path, "-c", _ASK], capture_output=True, text=True, timeout=120, env=environment, cwd=os.sep
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"this Python does not run: {error}", f"server_python: {path}") from None
    if answer.returncode:
        raise UserError(f"this Python fails: {answer.stderr.strip().splitlines()[-1:]}", f"server_python: {path}")
    facts = json.loads(answer.stdout)
    if facts["sglang"] is None:
        raise UserError(
            f"Python {facts['python']} has no SGLang",
            f"server_python: {path}",
            "install sglang there, or name the Python of the environment that has it",
        )
    return Interpreter(path=path, **facts)


def warn_of_version(interpreter: Interpreter) -> None:
    """Say so when capture is about to run inside an SGLang it was not tested with; the probe has the last word."""
    if interpreter.sglang.split("+")[0] != SGLANG_VERSION:
        found, path = interpreter.sglang, interpreter.path
        logger.warning("SGLang %s in %s: capture is tested with %s, trust the probe", found, path, SGLANG_VERSION)


def port_holder(port: int) -> str | None:
    """Who listens on a local TCP port, as "pid 123 (command)"; None when nobody does."""
    pid = min((found := listeners(port)) - {None}, default=None)
    if pid is None:
        return "a process that cannot be seen (of another user, or in another container)" if found else None
    try:
        return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})"
    except psutil.Error:
        return "a process of another user"


def listeners(port: int) -> set[int | None]:
    """Pids of the processes that listen on a local TCP port; None stands for any that cannot be seen."""
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    }


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Bind for a moment: the only proof that a server will be able to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def wait_for_port(port: int, seconds: float = 10.0) -> str | None:
    """None once a port is free again, a moment after its server has ended; else who holds it."""
    deadline = time.monotonic() + seconds
    while not port_is_free(port):
        if time.monotonic() > deadline:
            return port_holder(port) or "a process that cannot be seen"
        time.sleep(0.1)
    return None


def ports_of(port: int, attention_data_parallel: bool = False) -> list[int]:
    """Every port an SGLang server derives from its own; the one for NCCL it chooses itself."""
    return [port, *(port + delta for delta in _ATTENTION_DATA_PARALLEL_PORTS if attention_data_parallel)]


def _taken_port(ports: list[int]) -> int | None:
    """The first of a server's ports that cannot be bound; SGLang wants the derived ones free on every interface."""
    return next((port for port in ports if not port_is_free(port, "127.0.0.1" if port == ports[0] else "")), None)


def check_port(port: int, attention_data_parallel: bool = False) -> int:
    """The port to use: the one asked for if it and those derived from it are free, any such one for 0.

    Raises `UserError` when SGLang cannot use it, or naming who holds it.
    """
    if port == 0:
        for candidate in random.SystemRandom().sample(_OWN_PORTS, 1000):
            if _taken_port(ports_of(candidate, attention_data_parallel)) is None:
                return candidate
        raise UserError(f"no port of {_OWN_PORTS[0]}…{_OWN_PORTS[-1]} is free", "port: 0", "name a free one")
    if port > HIGHEST_PORT:
        raise UserError(f"port {port} is above {HIGHEST_PORT}: SGLang adds 10000 for its gRPC port", "port")
    taken = _taken_port(ports_of(port, attention_data_parallel))
    if taken is not None:
        holder = port_holder(taken) or "a process that cannot be seen"
        derived = "" if taken == port else f" (with attention data parallelism SGLang takes it beside {port})"
        fix = "stop it, or set port: 0 for a free one"
        raise UserError(f"port {taken} is taken by {holder}{derived}", f"port: {port}", fix)
    return port


def check_model(path: Path) -> int:
    """Bytes of weights in a checkpoint folder. Raises `UserError` when there are none."""
    for pattern in ("*.safetensors", "*.bin", "*.gguf"):  # a hub's folder may hold the same weights in several formats
        weights = [file for file in path.glob(pattern) if not file.name.startswith("consolidated")]
        if weights := weights or list(path.glob(pattern)):
            return sum(file.stat().st_size for file in weights)
    raise UserError("no weights (*.safetensors) in the model's folder", str(path))


def num_gpus_of(options: ServingOptions) -> int:
    """GPUs a server takes: its tensor-parallel ranks (attention data parallelism shares them), else one per copy."""
    return options.tp_size if options.tp_size > 1 else options.dp_size


def check_memory(weight_bytes: int, device: str, num_gpus: int, num_copies: int = 1) -> None:
    """Raise `UserError` when the weights alone, of all copies, are more than the device can hold."""
    weight_bytes *= num_copies
    if device == "cpu":
        available = psutil.virtual_memory().available
        if weight_bytes > available:
            raise UserError(f"{weight_bytes / 1e9:.1f} GB of weights, {available / 1e9:.1f} GB of memory available")
        return
    free = gpus.free_bytes()
    if len(free) < num_gpus:
        raise UserError(f"{num_gpus} GPUs asked for, {len(free)} here", "tp_size")
    if sum(sorted(free)[-num_gpus:]) < weight_bytes:
        raise UserError(f"{weight_bytes / 1e9:.1f} GB of weights, {sum(free) / 1e9:.1f} GB free on {len(free)} GPUs")


def check_staging(folder: Path, max_bytes: int) -> None:
    """Raise `UserError` when the dump folder cannot hold what staging may grow to; /dev/shm counts as memory."""
    free, where = shutil.disk_usage(folder).free, "are free"
    if Path("/dev/shm") in folder.resolve().parents:
        memory = psutil.virtual_memory().available
        if memory < free:
            free, where = memory, "of memory are available (/dev/shm is memory)"
    if free < max_bytes:
        raise UserError(
            f"staging may hold {max_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB {where}",
            f"staging_dir: {folder}",
            "lower staging_max_bytes, or set staging_dir to a larger disk",
        )


def check_disk(folder: Path) -> None:
    """Raise `UserError` when there is no room for the server's log and the files the stage writes beside it."""
    free = shutil.disk_usage(folder).free
    if free < _LEAST_DISK_BYTES:
        raise UserError(f"only {free / 1e6:.0f} MB are free on this disk", str(folder), "free some, or set run_dir")


def suspicious_start(weight_bytes: int, seconds: float) -> str | None:
    """A line when a server was ready sooner than it can have loaded its weights; None when there is nothing to say."""
    fastest = _FASTEST_START_SECONDS + weight_bytes / _FASTEST_LOAD_BYTES_PER_SECOND
    if seconds >= fastest:
        return None
    return f"suspicious: ready after {seconds:.1f} s with {weight_bytes / 1e9:.1f} GB of weights; is it another server?"
