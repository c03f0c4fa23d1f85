"""Preflight: each thing that would make a launch fail is named before it."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import socket
import stat
import sys
import tempfile
import typing
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3_utils.doctor import PINNED
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch import checks


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind(("127.0.0.1", checks.check_port(0)))
        server.listen()
        yield server.getsockname()[1]


def test_this_interpreter_has_sglang_and_sees_the_plugin():
    facts = checks.ask_interpreter(sys.executable)
    assert facts.sglang == "0.5.14" and facts.plugin


def test_a_version_capture_was_not_tested_with_is_said(caplog):
    assert PINNED["sglang"] == checks.SGLANG_VERSION
    facts = checks.Interpreter("/env/python", "3.12", "0.5.14+cu130", None, plugin=True, plugins=[])
    checks.warn_of_version(facts)
    assert not caplog.records
    checks.warn_of_version(dataclasses.replace(facts, sglang="0.5.15"))
    assert "SGLang 0.5.15 in /env/python: capture is tested with 0.5.14" in caplog.text


def test_an_interpreter_without_sglang_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match="has no SGLang"):
        checks.ask_interpreter(str(python))


def test_an_interpreter_that_does_not_run_is_named():
    with pytest.raises(UserError, match="does not run"):
        checks.ask_interpreter("/no/such/python")


def test_a_relative_interpreter_counts_from_the_repository_and_its_link_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(checks, "repo_root", lambda: tmp_path)
    python = checks.interpreter_path("env/../env/python")
    assert python == str(tmp_path / "env" / "python")
    assert checks.interpreter_path(None) == sys.executable and checks.interpreter_path("python3") == "python3"
    assert checks.interpreter_path(sys.executable) == sys.executable


def test_a_taken_port_is_refused_with_pid_and_command(listener):
    with pytest.raises(UserError, match=rf"port {listener} is taken by pid {os.getpid()} \("):
        checks.check_port(listener)


def test_port_zero_means_a_free_one_that_no_connection_is_given():
    ports = [checks.check_port(0) for _ in range(50)]
    assert checks.port_is_free(ports[-1]) and min(ports) >= 20_000 and max(ports) + 239 < 32_768


def test_the_ports_that_attention_data_parallelism_adds_must_be_free_too(listener):
    base = listener - 236
    assert checks.check_port(base) == base
    with pytest.raises(UserError, match=rf"port {listener} is taken by pid {os.getpid()} .*takes it beside {base}"):
        checks.check_port(base, attention_data_parallel=True)


def test_a_free_port_is_one_whose_derived_ports_are_free(listener, monkeypatch):
    candidates = [listener, listener - 235, listener - 13, listener + 300]
    monkeypatch.setattr(checks.random, "SystemRandom", lambda: SimpleNamespace(sample=lambda *_: candidates))
    assert checks.check_port(0, attention_data_parallel=True) == listener + 300
    assert checks.check_port(0) == listener - 235


def test_the_derived_ports_are_those_of_sglang():
    """Its own `PortArgs`, read from the source: to import the module takes ten seconds."""
    source = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "server_args.py"
    names = ("ZMQ_TCP_PORT_DELTA", "DP_ATTENTION_HANDSHAKE_PORT_DELTA", "PortArgs")
    nodes = [
        node for node in ast.parse(source.read_text()).body
        if getattr(node, "name", None) in names or getattr(getattr(node, "targets", [None])[0], "id", None) in names
    ]  # fmt: skip
    space = vars(typing) | {"dataclasses": dataclasses, "uuid": uuid}
    space["wait_port_available"] = lambda _port, _name: None
    space["NetworkAddress"] = lambda _host, port: SimpleNamespace(host="", port=port, to_tcp=lambda: port)
    exec(compile(ast.Module(nodes, []), "<sglang>", "exec", flags=annotations.compiler_flag), space)
    arguments = SimpleNamespace(
        port=20_000, nccl_port=40_000, tokenizer_worker_num=1, enable_dp_attention=True, nnodes=1, dist_init_addr=None
    )
    taken = {value for value in vars(space["PortArgs"].init_new(arguments)).values() if isinstance(value, int)}
    taken |= {20_000 + delta for delta in (0, space["ZMQ_TCP_PORT_DELTA"], space["DP_ATTENTION_HANDSHAKE_PORT_DELTA"])}
    assert taken - {40_000} == set(checks.ports_of(20_000, attention_data_parallel=True))


def test_a_port_too_high_for_sglangs_grpc_port_is_refused():
    with pytest.raises(UserError, match="port 60000 is above 55535"):
        checks.check_port(60000)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UserError, match="no weights"):
        checks.check_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert checks.check_model(tmp_path) == 10
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.Q4.gguf"):
        (tmp_path / name).write_bytes(b"x" * 10)
    assert checks.check_model(tmp_path) == 10, "the same weights in other formats are not loaded too"


def test_weights_that_do_not_fit_are_refused():
    checks.check_memory(1000, "cpu", 1)
    with pytest.raises(UserError, match="of memory available"):
        checks.check_memory(1 << 50, "cpu", 1)


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(checks.gpus, "free_bytes", lambda: [80 << 30])
    with pytest.raises(UserError, match="2 GPUs asked for, 1 here"):
        checks.check_memory(1000, "cuda", 2)
    with pytest.raises(UserError, match="free on 1 GPUs"):
        checks.check_memory(200 << 30, "cuda", 1)


def test_every_copy_of_the_weights_needs_its_room(monkeypatch):
    monkeypatch.setattr(checks.gpus, "free_bytes", lambda: [10 << 30] * 8)
    checks.check_memory(16 << 30, "cuda", 8)
    with pytest.raises(UserError, match=r"137\.4 GB of weights"):
        checks.check_memory(16 << 30, "cuda", 8, num_copies=8)


def test_staging_larger_than_the_disk_is_refused(tmp_path):
    checks.check_staging(tmp_path, 1)
    with pytest.raises(UserError, match="are free"):
        checks.check_staging(tmp_path, 1 << 60)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_staging_in_dev_shm_must_fit_into_memory_too(monkeypatch):
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.raises(UserError, match="of memory are available"),
    ):
        checks.check_staging(Path(folder), 1001)


def test_a_full_disk_is_said_before_the_start(tmp_path, monkeypatch):
    checks.check_disk(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=5_000_000))
    with pytest.raises(UserError, match="only 5 MB are free"):
        checks.check_disk(tmp_path)


def test_a_start_faster_than_a_load_can_be_is_reported():
    assert checks.suspicious_start(600_000_000_000, 10.0) is not None
    assert "another server" in checks.suspicious_start(1_000, 0.5)
    assert checks.suspicious_start(600_000_000_000, 60.0) is None and checks.suspicious_start(1_000, 9.0) is None


def test_a_port_is_waited_for_and_its_holder_named(listener):
    assert checks.wait_for_port(checks.check_port(0)) is None
    assert f"pid {os.getpid()}" in checks.wait_for_port(listener, seconds=0.2)
