"""An SGLang server that can be trusted: checked before launch, identified after it, stopped whole.

    with Server(config, target, log_path=stage.folder / "server.log", run_folder=stage.folder) as server:
        server.url                                      # normal serving

    with Server(config, target, log_path, run_folder, capture=capture_spec(config, target)) as server:
        dump, answer = server.client.capture(input_ids, rid="hs-probe-0")

Ready means: the process lives, the process that listens on the port is ours, `/model_info` names our model,
`/health_generate` answers, and, when capturing, the handshake carries our nonce and the boundaries asked for.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from eagle3_utils.config import ServingOptions
from eagle3_utils.errors import UserError
from eagle3_utils.runs import resolve_path
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.launch import checks, flags, gpus, processes
from eagle3_utils.serving.launch.identity import check_handshake, check_model_name, last_error
from eagle3_utils.serving.launch.plugin_folder import make_plugin_folder
from eagle3_utils.serving.spec import CaptureSpec, capture_spec
from eagle3_utils.target import Target

__all__ = ["AttachedServer", "CaptureSpec", "RunningServer", "Server", "capture_spec", "open_servers"]

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.5


class RunningServer:
    """A ready server, ours or a user's: `url`, `client`, and for a capturing one `dump_dir` and `handshake`."""

    url: str
    client: Client
    dump_dir: Path | None = None
    handshake: dict[str, Any] | None = None
    pid: int | None = None
    log_path: Path | None = None
    suspicion: str | None = None  # what is odd about its start; the probe's first gate repeats it

    def alive(self) -> bool:
        """Whether the server still answers for itself."""
        return self.client.is_healthy()


class Server(RunningServer):
    """A server launched here, in a process group of its own, and stopped when the block ends.

    Parameters
    ----------
    options : the stage's parameters.
    target : the model to serve.
    log_path : where the server's output goes.
    run_folder : where its pid file goes, so that the next start finds an orphan.
    capture : what to capture; None serves normally, with nothing wrapped.
    extra_args : further SGLang flags, after `options.extra_server_args`.
    environment : further environment variables.

    Raises
    ------
    UserError
        On entry, when something is missing or the server does not become ready; the message says why.
    """

    def __init__(
        self,
        options: ServingOptions,
        target: Target,
        log_path: Path,
        run_folder: Path,
        capture: CaptureSpec | None = None,
        extra_args: list[str] = (),
        environment: dict[str, str] | None = None,
    ):
        self.options, self.target, self.capture = options, target, capture
        self.log_path, self.run_folder, self.extra_args = Path(log_path), Path(run_folder), list(extra_args)
        self.python = checks.interpreter_path(options.server_python)
        self.nonce = secrets.token_hex(8)
        self.ready_seconds = 0.0
        self.command: list[str] = []
        self._environment = environment or {}
        self._gpus_before = gpus.Usage([], {})
        self._process: subprocess.Popen | None = None
        self._guard: subprocess.Popen | None = None
        self._plugin_folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:  # also KeyboardInterrupt: a half-started server must not stay
            self.stop()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Check, launch, and wait until ready."""
        self.run_folder.mkdir(parents=True, exist_ok=True)
        checks.check_disk(self.run_folder)
        for orphan in processes.stop_orphans(self.run_folder):
            kept = "one that is to stay is started by you and named in server_urls"
            logger.warning("stopped a server that a dead run of this folder left behind: %s; %s", orphan, kept)
        weight_bytes = checks.check_model(self.target.path)
        device = flags.resolve_device(self.options)
        num_gpus = checks.num_gpus_of(self.options)
        if not any(word.startswith(("--quantization", "--cpu-offload-gb")) for word in self.options.extra_server_args):
            checks.check_memory(weight_bytes, device, num_gpus, num_copies=num_gpus // self.options.tp_size)
        self._gpus_before = gpus.usage() if device == "cuda" else gpus.Usage([], {})
        environment = self._prepare_environment(device)
        port = checks.check_port(self.options.port, flags.attention_data_parallel(self.options))
        self.url = f"http://127.0.0.1:{port}"
        self.command = flags.server_command(
            self.python, self.options, self.target, port, self.capture is not None, self.extra_args
        )
        self._launch(environment)
        started = time.monotonic()
        self._wait_until_ready(port, started + self.options.startup_timeout_seconds)
        self.ready_seconds = time.monotonic() - started
        self.suspicion = checks.suspicious_start(weight_bytes, self.ready_seconds)
        if self.suspicion:
            logger.warning(self.suspicion)

    def stop(self) -> None:
        """Stop the whole group and wait until its processes are gone, its port free and its GPU memory returned."""
        if hasattr(self, "client"):
            self.client.close()
        if self._process is not None:
            processes.stop_group(self._process)
            port = int(self.url.rsplit(":", 1)[1])
            holder, missing = checks.wait_for_port(port), gpus.memory_not_returned(self._gpus_before)
            if holder:
                logger.warning("port %d is still held by %s", port, holder)
            if missing:
                logger.warning(missing)
            self._process = None
        if self._guard is not None:
            self._guard.communicate(b"stopped\n")
            self._guard = None
        processes.forget(self.run_folder, self.pid)
        if self.capture is not None:
            processes.empty_dump_folder(self.capture.dump_dir, remove=True)
        if self._plugin_folder is not None:
            self._plugin_folder.cleanup()

    def _prepare_environment(self, device: str) -> dict[str, str]:
        """The server's environment; for capture also a clean dump folder and a plugin that its Python can see."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_HS_")}
        environment |= {processes.NONCE_VARIABLE: self.nonce} | self._environment
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # uncompiled, SGLang's imports take minutes
        if device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"  # without it SGLang looks for a GPU's kernels
            # Threads that wait for each other sleep soon: on shared cores spinning costs a time slice per operator.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        interpreter = checks.ask_interpreter(self.python, environment)
        if self.capture is None:
            return environment
        checks.warn_of_version(interpreter)
        self.dump_dir = self.capture.dump_dir
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        processes.empty_dump_folder(self.dump_dir)
        checks.check_staging(self.dump_dir, self.capture.max_bytes)
        environment |= {
            "SGLANG_HS_DUMP_DIR": str(self.dump_dir),
            "SGLANG_HS_LAYERS": json.dumps(self.capture.aux_layers),
            "SGLANG_HS_MAX_BYTES": str(self.capture.max_bytes),
            "SGLANG_HS_NONCE": self.nonce,
        } | self._environment
        if flags.longer_context(self.options, self.target):
            environment[flags.LONGER_CONTEXT_VARIABLE] = "1"
        if environment.get("SGLANG_PLUGINS"):
            environment["SGLANG_PLUGINS"] += f",{checks.PLUGIN_NAME}"
        if not interpreter.plugin:
            self._plugin_folder = tempfile.TemporaryDirectory(prefix="eagle3-plugin-")
            make_plugin_folder(Path(self._plugin_folder.name))
            paths = [self._plugin_folder.name, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if not checks.ask_interpreter(self.python, environment).plugin:
                raise UserError("this Python does not see the capture plugin", f"server_python: {self.python}")
        return environment

    def _launch(self, environment: dict[str, str]) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            log.write(f"$ {' '.join(self.command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                cwd=self.log_path.parent,
            )
        self.pid = self._process.pid
        self._guard = processes.start_guard(self.pid, self.dump_dir)
        processes.remember(self.run_folder, self.pid, self.nonce, self.command)
        self.client = Client(self.url, self.dump_dir)

    def _wait_until_ready(self, port: int, deadline: float) -> None:
        while True:
            if self._process.poll() is not None:
                raise UserError(
                    f"the server ended with code {self._process.returncode}: {last_error(self.log_path)}",
                    str(self.log_path),
                )
            if time.monotonic() > deadline:
                seconds = self.options.startup_timeout_seconds
                raise UserError(f"the server is not ready after {seconds:.0f} s", str(self.log_path))
            try:
                self.client.get_json("/model_info", timeout_seconds=5.0)
            except (httpx.HTTPError, ValueError):
                time.sleep(_POLL_SECONDS)
                continue
            processes.check_listener(port, self.pid)
            if self.client.is_healthy():
                break
            time.sleep(_POLL_SECONDS)
        check_model_name(self.client, self.target)
        if self.capture is not None:
            self.handshake = check_handshake(self.dump_dir, self.capture, self.target, self.nonce)
            processes.check_member(self.handshake["pid"], self.pid)


class AttachedServer(RunningServer):
    """A server the user started: identified like our own, never stopped.

    For extraction it is started with the plugin visible to its Python (this package installed there, or
    `make_plugin_folder` on its PYTHONPATH) and

        SGLANG_HS_DUMP_DIR=/dev/shm/dumps SGLANG_HS_LAYERS='[2, 30, 58]' SGLANG_HS_MAX_BYTES=17179869184 \\
            python -m sglang.launch_server … --disable-radix-cache --cuda-graph-backend-prefill disabled \\
            --enforce-disable-flashinfer-allreduce-fusion
    """

    def __init__(self, url: str, dump_dir: Path | None, target: Target, capture: CaptureSpec | None):
        self.url, self.dump_dir = url.rstrip("/"), dump_dir
        self.client = Client(self.url, dump_dir)
        try:
            self._identify(target, capture)
        except BaseException:
            self.client.close()
            raise

    def _identify(self, target: Target, capture: CaptureSpec | None) -> None:
        """Raise `UserError` unless a live server of this target, with the wanted capture, answers."""
        try:
            check_model_name(self.client, target)
        except httpx.HTTPError as error:
            raise UserError(f"no SGLang server answers: {error}", self.url) from None
        if not self.client.is_healthy():
            raise UserError("the server answers /model_info but does not generate", self.url)
        if capture is None:
            return
        if self.dump_dir is None:
            raise UserError("a server that captures needs its dump folder", "server_dump_dirs")
        self.handshake = check_handshake(self.dump_dir, capture, target, nonce=None)
        self.pid = self.handshake["pid"]
        processes.check_answers(self.url, self.pid, self.dump_dir)


@contextmanager
def open_servers(
    options: ServingOptions, target: Target, log_path: Path, run_folder: Path, capture: CaptureSpec | None = None
) -> Iterator[list[RunningServer]]:
    """The servers of a stage: those the user names in `server_urls`, else one launched here and stopped after."""
    if not options.server_urls:
        with Server(options, target, log_path, run_folder, capture) as server:
            yield [server]
        return
    folders = [resolve_path(folder) for folder in options.server_dump_dirs]
    if capture is not None and len(folders) != len(options.server_urls):
        raise UserError("as many dump folders as servers are needed", "server_dump_dirs", exit_code=2)
    attached = [
        AttachedServer(url, folder, target, capture)
        for url, folder in zip(options.server_urls, folders or [None] * len(options.server_urls), strict=True)
    ]
    try:
        yield attached
    finally:
        for server in attached:
            server.client.close()
