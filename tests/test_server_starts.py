"""Starts of a real server that must fail, each with its own line, and a normal one that must end whole."""

from __future__ import annotations

import stat
import sys

import capture_faults
import psutil
import pytest
from server_helpers import failed, record, trials
from serving_fakes import FakeSGLang

from eagle3_utils.config import ProbeConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch import checks
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


def test_a_radix_cache_that_is_on_all_the_same_fails_invariance(tiny, config, tmp_path):
    environment = capture_environment(tmp_path, "allow_unsafe")
    with Server(config, tiny, tmp_path / "server.log", tmp_path, environment=environment) as server:
        attached = AttachedServer(server.url, tmp_path / "dumps", tiny, CaptureSpec([1, 3], tmp_path / "dumps"))
        assert len(attached.handshake["nonce"]) == 16, "none was given: it made one"
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
