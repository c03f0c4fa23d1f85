"""Is the server that answers the one we mean?"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from serving_fakes import FakeSGLang

from eagle3_utils.config import ServingOptions
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch.identity import check_handshake, is_same_model, last_error, read_handshake
from eagle3_utils.serving.server import AttachedServer, CaptureSpec, open_servers
from eagle3_utils.target import load_target


@pytest.fixture
def fake(tiny_llama, tmp_path):
    with FakeSGLang(None, load_target(str(tiny_llama)), tmp_path, [2, 4]) as fake:
        yield fake


def spec(fake, layers=(1, 3)) -> CaptureSpec:
    return CaptureSpec(list(layers), fake.dump_dir)


def test_a_server_the_user_started_is_used_after_the_same_checks(fake):
    server = AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake))
    assert server.handshake["boundaries"] == [2, 4]


def test_several_servers_of_a_user_are_used_as_one_stage_and_never_stopped(fake, tiny_llama, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    with FakeSGLang(None, load_target(str(tiny_llama)), folder, [2, 4]) as other:
        options = ServingOptions(server_urls=[fake.url, other.url], server_dump_dirs=[str(tmp_path), str(folder)])
        arguments = (fake.target, tmp_path / "server.log", tmp_path / "run", spec(fake))
        with open_servers(options, *arguments) as servers:
            assert [server.dump_dir for server in servers] == [tmp_path, folder]
        assert not (tmp_path / "server.log").exists(), "none was launched"
        for url in options.server_urls:
            AttachedServer(url, None, fake.target, None).client.close()  # it answers still
        fewer = options.model_copy(update={"server_dump_dirs": [str(folder)]})
        with pytest.raises(UserError, match="as many dump folders as servers"), open_servers(fewer, *arguments):
            pass


def test_a_wrong_model_on_the_right_port_is_refused(fake):
    fake.model_path = "/models/other"
    with pytest.raises(UserError, match="serves /models/other"):
        AttachedServer(fake.url, fake.dump_dir, fake.target, None)


def test_nobody_on_the_port_is_said(fake):
    with pytest.raises(UserError, match="no SGLang server answers"):
        AttachedServer("http://127.0.0.1:9", fake.dump_dir, fake.target, None)


def test_a_missing_handshake_means_that_the_plugin_did_not_load(tmp_path):
    with pytest.raises(UserError, match="the plugin is absent"):
        read_handshake(tmp_path)


@pytest.mark.parametrize(
    ("changes", "nonce", "words"),
    [
        ({"boundaries": [3, 5]}, None, r"boundaries \[3, 5\], expected \[2, 4\]"),
        ({"hidden_size": 1}, None, "hidden_size 1"),
        ({"num_layers": 61}, None, "num_layers 61"),
        ({"nonce": "old"}, "new", "nonce old, expected new"),
        ({"model_path": "/models/other"}, None, "is for /models/other"),
        ({"ranks": {"tp": 2, "attn_tp": 1, "writers": 2}}, None, r"no handshake from data-parallel ranks \[1\]"),
    ],
)
def test_a_handshake_that_differs_is_refused(fake, changes, nonce, words):
    fake.write_handshake(**changes)
    with pytest.raises(UserError, match=words):
        check_handshake(fake.dump_dir, spec(fake), fake.target, nonce)


@pytest.mark.parametrize(
    ("served", "folder", "same"),
    [
        ("moonshotai/Kimi-K2.5", "models--moonshotai--Kimi-K2.5/snapshots/abc", True),  # the hub's cache
        ("moonshotai/Kimi-K2.5", "kimi-k2.5", True),  # a copy of it
        ("moonshotai/Kimi-K2.5", "Kimi-K2-Instruct", False),
        ("moonshotai/Kimi-K2.5", "models--moonshotai--Kimi-K2/snapshots/abc", False),
        ("/elsewhere/Kimi-K2.5", "Kimi-K2.5", False),
    ],
)
def test_a_hub_name_means_a_copy_of_that_model(tmp_path, served, folder, same):
    assert is_same_model(served, SimpleNamespace(path=tmp_path / folder)) is same


def test_a_folder_means_itself_however_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert is_same_model(str(tmp_path / "link"), SimpleNamespace(path=tmp_path / "org" / "model"))
    assert not is_same_model("org/model", SimpleNamespace(path=tmp_path / "other" / "model")), "a folder, not a name"


def test_the_handshake_of_a_process_that_does_not_answer_there_is_refused(fake):
    """After a restart without capture the old handshake stays, and its pid may be someone else's now."""
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"]
    )  # a child of what listens: one of it
    fake.write_handshake(pid=other.pid)
    AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake)).client.close()
    other.kill()
    other.wait()
    fake.write_handshake(pid=psutil.Process().ppid())  # alive, and no child of what listens
    with pytest.raises(UserError, match=rf"of pid {os.getppid()}, but {fake.url} is answered by pid {os.getpid()} "):
        AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake))


def test_a_dead_servers_handshake_is_refused(fake):
    fake.write_handshake(pid=2**22 - 1)
    with pytest.raises(UserError, match="a dead server's"):
        AttachedServer(fake.url, fake.dump_dir, fake.target, spec(fake))


def test_the_line_that_says_why_a_server_ended_is_found(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "loading\nTraceback\n  File x\neagle3_capture.hooks.CaptureRefused: capture refuses to start: radix\n\nkilled\n"
    )
    assert last_error(log).endswith("capture refuses to start: radix")
    log.write_text("one\ntwo\n")
    assert last_error(log) == "two"


CRASHED = """\
$ python -m sglang.launch_server
[2026-11-30 02:00:00] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: of an earlier start
$ python -m sglang.launch_server
[2026-11-30 03:00:00] Ignore import error when loading sglang.srt.models.x: No module named 'vllm'
[2026-11-30 03:00:09 DP1 TP1] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 4211, in run_scheduler_process
    raise OSError("first")
OSError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "model_runner.py", line 1280, in init_torch_distributed
    raise RuntimeError(msg)
RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.
Exception raised from: c10::Error (the rest of the message)

[2026-11-30 03:00:10 DP0 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "distributed.py", line 1, in wait
torch.distributed.DistBackendError: connection closed by peer

Traceback (most recent call last):
  File "engine.py", line 1368, in _wait_for_scheduler_ready
    raise _scheduler_died_error(i, scheduler_procs[i])
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code is -9 (SIGKILL), …
"""


def test_what_ended_the_first_scheduler_is_the_reason_not_what_followed_from_it(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(CRASHED)
    assert last_error(log).startswith("RuntimeError: The memory capacity is unbalanced.")
    log.write_text(
        CRASHED.replace("RuntimeError: The memory capacity is unbalanced. Some GPUs", "AssertionError\nSome")
    )
    assert last_error(log) == "AssertionError"


def test_a_scheduler_that_left_no_traceback_was_killed(tmp_path):
    log = tmp_path / "server.log"
    start, end = CRASHED.index("$ python", 9), CRASHED.index("[2026-11-30 03:00:09")
    log.write_text(CRASHED[start:end] + CRASHED[CRASHED.index("Traceback", CRASHED.index("closed by peer")) :])
    assert last_error(log).startswith("RuntimeError: Rank 0 scheduler died")
    log.write_text(CRASHED[start:end])
    assert "Ignore import error" in last_error(log), "the last line, where none names an error"


def test_capture_specs_count_boundaries_from_layer_outputs():
    assert CaptureSpec([1, 14, 26], SimpleNamespace()).boundaries == [2, 15, 27]
