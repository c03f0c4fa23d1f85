"""Starts of a real server that must fail, each with its own line, and a normal one that must end whole."""

from __future__ import annotations

import dataclasses
import socket
import stat
import sys
from types import SimpleNamespace

import capture_faults
import psutil
import pytest
from server_helpers import failed, record, trials
from serving_fakes import FakeSGLang

from eagle3_utils.config import ProbeConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.launch import checks, gpus, processes
from eagle3_utils.serving.server import AttachedServer, CaptureSpec, Server
from eagle3_utils.target import load_target

pytestmark = pytest.mark.server


@pytest.fixture
def tiny(tiny_llama):
    return load_target(str(tiny_llama))


@pytest.fixture
def config(tmp_path) -> ProbeConfig:
    return ProbeConfig(run_dir=str(tmp_path), device="cpu", max_seq_len=64, num_probe_samples=2, num_concurrent=2)


def capture_environment(folder, fault: str = "none") -> dict[str, str]:
    """What a server needs to capture when it is launched without our flags, as a user might."""
    (folder / "fault").write_text(fault)
    (folder / "dumps").mkdir()
    return {
        "PYTHONPATH": capture_faults.install(folder / "plugin"),
        "EAGLE3_TEST_FAULT_FILE": str(folder / "fault"),
        "SGLANG_HS_DUMP_DIR": str(folder / "dumps"),
        "SGLANG_HS_LAYERS": "[1, 3]",
    }


def test_an_interpreter_without_sglang_is_named_before_anything_is_launched(tiny, config, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    other = config.model_copy(update={"server_python": str(python)})
    with pytest.raises(UserError, match="has no SGLang"), Server(other, tiny, tmp_path / "server.log", tmp_path):
        pass
    assert not (tmp_path / "server.log").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("no weights", "no weights"),
        ("little memory", "GB of memory available"),
        ("no GPU", "1 GPUs asked for, 0 here"),
        ("little staging", "staging may hold"),
        ("a full disk", "only 5 MB are free on this disk"),
        ("a taken port", r"is taken by pid \d+ \("),
    ],
)
def test_what_would_make_a_start_fail_ends_it_before_anything_is_launched(
    tiny, config, tmp_path, monkeypatch, found, words
):
    spec = CaptureSpec([1, 3], tmp_path / "dumps", max_bytes=1 << (60 if found == "little staging" else 20))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", checks.check_port(0)))
        listener.listen()
        if found == "no weights":
            tiny = dataclasses.replace(tiny, path=tmp_path)
        elif found == "little memory":
            monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
        elif found == "no GPU":
            monkeypatch.setattr(gpus, "free_bytes", lambda: [])
            config = config.model_copy(update={"device": "cuda"})
        elif found == "a full disk":
            monkeypatch.setattr(checks.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=5_000_000))
        elif found == "a taken port":
            config = config.model_copy(update={"port": listener.getsockname()[1]})
        with pytest.raises(UserError, match=words), Server(config, tiny, tmp_path / "server.log", tmp_path, spec):
            pass
    assert not (tmp_path / "server.log").exists() and not spec.dump_dir.exists()


@pytest.fixture
def loads_forever(config, tmp_path) -> ProbeConfig:
    """Its Python answers what it is asked; what it starts as a server is two processes that only sleep."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\nsleep 600 &\nexec sleep 600\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return config.model_copy(update={"server_python": str(python), "startup_timeout_seconds": 0.3})


def test_an_interrupt_while_the_server_loads_leaves_nothing(tiny, loads_forever, tmp_path, monkeypatch):
    server = Server(loads_forever, tiny, tmp_path / "server.log", tmp_path, CaptureSpec([1, 3], tmp_path / "dumps"))
    loading = []

    def interrupt(*_args, **_kwargs):
        loading.extend(processes.group_members(server.pid))
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "get_json", interrupt)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert loading and processes.group_members(server.pid) == []
    assert not list(tmp_path.glob("server-*.json")) and not (tmp_path / "dumps").exists()


def test_a_server_that_is_never_ready_is_stopped_and_what_it_does_not_give_back_is_said(
    tiny, loads_forever, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(checks, "wait_for_port", lambda _port: "pid 7 (of another)")
    monkeypatch.setattr(gpus, "memory_not_returned", lambda _before: "3.0 GiB of GPU 0 are not free after the stop")
    server = Server(loads_forever, tiny, tmp_path / "server.log", tmp_path)
    with pytest.raises(UserError, match=r"the server is not ready after 0 s"), server:
        pass
    assert processes.group_members(server.pid) == []
    assert "is still held by pid 7 (of another)" in caplog.text and "3.0 GiB of GPU 0" in caplog.text


def test_a_foreign_server_that_takes_the_port_meanwhile_is_not_taken_for_ours(tiny, config, tmp_path, monkeypatch):
    """It says everything right: the model's name, and 200 to every question about health. It is another process."""
    with FakeSGLang(None, tiny, tmp_path, [2, 4]) as impostor:
        port = int(impostor.url.rsplit(":", 1)[1])
        monkeypatch.setattr(checks, "check_port", lambda *_: port)  # it came after the check
        server = Server(config, tiny, tmp_path / "server.log", tmp_path)
        monkeypatch.setattr(checks, "wait_for_port", lambda _port: None)
        with pytest.raises(UserError, match=rf"something else answers on port {port}: pid \d+"), server:
            pass
    assert not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE


def test_with_the_radix_cache_on_the_server_refuses_to_capture_and_leaves_nothing(tiny, config, tmp_path):
    environment = capture_environment(tmp_path)
    with (
        pytest.raises(UserError, match=r"capture refuses to start: the radix cache is on: .*--disable-radix-cache"),
        Server(config, tiny, tmp_path / "server.log", tmp_path, environment=environment),
    ):
        pass
    assert not list(tmp_path.glob("server-*.json")) and not list((tmp_path / "dumps").iterdir())


def test_layer_hooks_find_the_same_layers_and_a_radix_cache_that_is_on_all_the_same_fails_invariance(
    tiny, config, tmp_path, monkeypatch
):
    """The server takes its model for one of a class without EAGLE-3 capture; its start is said to be too fast."""
    environment = capture_environment(tmp_path, "allow_unsafe no_setter")
    monkeypatch.setattr(checks, "_FASTEST_START_SECONDS", 3600.0)
    with Server(config, tiny, tmp_path / "server.log", tmp_path, environment=environment) as server:
        attached = AttachedServer(server.url, tmp_path / "dumps", tiny, CaptureSpec([1, 3], tmp_path / "dumps"))
        assert len(attached.handshake["nonce"]) == 16, "none was given: it made one"
        assert "is it another server?" in server.suspicion
        assert attached.handshake["method"] == "layer hooks"
        by_value = config.model_copy(update={"reference": "huggingface"})
        tapped = trials(attached, tiny, by_value, [record(list(range(200, 250)))])
        tapped.layers()
        assert failed(tapped) == [] and [row["found_boundary"] for row in tapped.layer_rows] == [2, 4, 6]
        examined = trials(attached, tiny, config, [record(list(range(100, 150)))])
        examined.invariance()
        attached.client.close()
    assert failed(examined) == ["invariance"]
    assert "were never computed (is the prefix cache on?)" in examined.gates[0].detail


def test_normal_mode_captures_nothing_and_stops_whole(tiny, config, example_target, tmp_path):
    with Server(config, tiny, tmp_path / "server.log", tmp_path) as server:
        answer = server.client.generate([5, 6, 7], rid="hs-nothing", max_new_tokens=3)
        assert len(answer["output_ids"]) == 3 and server.handshake is None and server.suspicion is None
        with pytest.raises(UserError, match="the plugin is absent"):
            AttachedServer(server.url, tmp_path, tiny, CaptureSpec([1], tmp_path))
        with pytest.raises(UserError, match="serves"):
            AttachedServer(server.url, None, load_target(str(example_target)), None)
        members = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        port = int(server.url.rsplit(":", 1)[1])
    zombie = psutil.STATUS_ZOMBIE  # ended too, where no init collects it
    assert len(members) >= 3
    assert not any(process.is_running() and process.status() != zombie for process in members)
    assert checks.port_is_free(port)
    assert not list(tmp_path.glob("server-*.json")), "the pid file is gone"
