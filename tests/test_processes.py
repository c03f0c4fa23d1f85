"""Process groups: stopped whole, orphans recognised, a dead launcher's server killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest

from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch import processes

# A leader with a child that ignores SIGTERM, as a server with a busy scheduler does.
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)
"""  # noqa: E501


def start(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, env=os.environ | environment
    )


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_group_is_stopped_with_its_stubborn_children(monkeypatch):
    monkeypatch.setattr(processes, "_TERM_SECONDS", 0.5)
    leader = start(STUBBORN)
    child = int(leader.stdout.readline())
    processes.stop_group(leader)
    assert leader.returncode is not None
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_an_orphan_of_any_stage_of_the_run_is_stopped_and_forgotten(tmp_path):
    orphan = start("import time; print(flush=True); time.sleep(600)", **{processes.NONCE_VARIABLE: "abc"})
    orphan.stdout.readline()
    stages = [tmp_path / name for name in ("02_patch_and_probe", "03_extract_hidden_states")]
    processes.remember(stages[0], orphan.pid, "abc", ["python", "-m", "sglang.launch_server"])
    path = stages[0] / f"server-{orphan.pid}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"launcher_started": 1.0}))  # its launcher is dead
    assert processes.stop_orphans(stages[1]) == [f"pid {orphan.pid} (python -m sglang.launch_server)"]
    assert orphan.wait(10) is not None and not path.exists()


@pytest.mark.parametrize("launcher_is_dead", [True, False])
def test_a_stranger_with_the_pid_and_a_server_in_use_are_left_alone(tmp_path, launcher_is_dead):
    nonce = "another" if launcher_is_dead else "abc"
    other = start("import time; print(flush=True); time.sleep(600)", **{processes.NONCE_VARIABLE: nonce})
    other.stdout.readline()
    processes.remember(tmp_path / "stage", other.pid, "abc", ["python"])
    path = tmp_path / "stage" / f"server-{other.pid}.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"launcher_started": facts["launcher_started"] + 1.0}))  # the clock was set
    try:
        assert processes.stop_orphans(tmp_path / "stage") == []
        assert other.poll() is None
    finally:
        processes.stop_group(other)


def test_the_guard_kills_the_group_when_its_launcher_dies_and_clears_its_dumps(tmp_path):
    for name in ("hs-1.safetensors", "handshake.json", "notes.txt"):
        (tmp_path / name).touch()
    launcher = start(
        "import pathlib, subprocess, sys, time\n"
        "from eagle3_utils.serving.launch.processes import start_guard\n"
        "server = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"start_guard(server.pid, pathlib.Path({str(tmp_path)!r})); print(server.pid, flush=True); time.sleep(600)"
    )
    server = psutil.Process(int(launcher.stdout.readline()))
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["notes.txt"])


def test_only_our_own_files_are_cleared_from_a_dump_folder(tmp_path):
    for name in ("hs-1.safetensors", "hs-2.safetensors.tmp", "hs-3.error", "handshake.json", "notes.txt"):
        (tmp_path / name).write_text('{"pid": 999999999}')
    processes.empty_dump_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_a_live_server_dumps_into_is_refused(tmp_path):
    (tmp_path / "handshake.json").write_text(json.dumps({"pid": os.getpid()}))
    with pytest.raises(UserError, match=f"a live server .pid {os.getpid()}."):
        processes.empty_dump_folder(tmp_path)


@pytest.mark.parametrize("facts", [{"pid": os.getpid(), "started": 1e9}, {"pid": 999999999}, {}, None])
def test_the_handshake_of_a_server_that_ended_with_its_machine_refuses_nothing(tmp_path, facts):
    """Its pid may be another process's by now; a file that was not synced may be empty."""
    (tmp_path / "handshake.json").write_text(json.dumps(facts) if facts is not None else "")
    processes.empty_dump_folder(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("pids", "refused"), [([], False), ([None], True), ([1], True), (["ours", None], False),
                                               (["ours", 1], True)])  # fmt: skip
def test_who_answers_on_the_port_must_be_of_the_group(monkeypatch, pids, refused):
    """Also when its pid cannot be seen (another user's); a system that shows no sockets at all proves nothing."""
    address = SimpleNamespace(port=20_000)
    sockets = [
        SimpleNamespace(pid=os.getpid() if pid == "ours" else pid, laddr=address, status=psutil.CONN_LISTEN)
        for pid in pids
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda _kind: sockets)
    expected = pytest.raises(UserError, match="something else answers on port 20000") if refused else nullcontext()
    with expected:
        processes.check_listener(20_000, os.getpgid(0))


def test_a_handshake_of_another_process_group_is_refused():
    processes.check_member(os.getpid(), os.getpgid(0))
    with pytest.raises(UserError, match="not of the server just launched"):
        processes.check_member(os.getpid(), 1)
