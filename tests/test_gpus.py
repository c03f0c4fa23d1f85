"""GPU memory seen through a stand-in for nvidia-smi: compared before and after, and what is missing is named."""

from __future__ import annotations

import os
import threading
import time

import pytest

from eagle3_utils.serving.launch import gpus

GIB = 1 << 30


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what `nvidia-smi` answers: free MiB of each GPU, and lines of compute processes."""
    tool = tmp_path / "nvidia-smi"
    answers = f"*memory.free*--id=1) sed -n 2p {tmp_path}/free;; *memory.free*) cat {tmp_path}/free;;"
    tool.write_text(f'#!/bin/sh\ncase "$*" in {answers} *) cat {tmp_path}/apps;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def answer(free_mib: list[int], apps: str = "") -> None:
        (tmp_path / "apps").write_text(apps)
        (tmp_path / "new").write_text("".join(f"{n}\n" for n in free_mib))
        (tmp_path / "new").rename(tmp_path / "free")

    return answer


def test_free_memory_is_read_per_gpu(nvidia_smi):
    nvidia_smi([1024, 2048])
    assert gpus.free_bytes() == [GIB, 2 * GIB]


def test_only_visible_gpus_count(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvidia_smi([1024, 2048])
    assert gpus.free_bytes() == [2 * GIB]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_gpu_is_visible_where_none_may_be(nvidia_smi, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvidia_smi([1024, 2048])
    assert gpus.free_bytes() == []


def test_without_gpus_nothing_is_missing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert gpus.usage() == ([], {}) and gpus.memory_not_returned(gpus.usage()) is None


def test_memory_that_comes_back_is_waited_for(nvidia_smi, monkeypatch):
    monkeypatch.setattr(gpus, "_POLL_SECONDS", 0.02)
    nvidia_smi([1024, 80_000])
    timer = threading.Timer(0.2, nvidia_smi, args=([79_900, 80_000],))
    timer.start()
    started = time.monotonic()
    assert gpus.memory_not_returned(before()) is None
    assert time.monotonic() - started >= 0.15
    timer.join()


def test_memory_that_stays_away_is_named_with_its_gpu_and_who_is_there(nvidia_smi):
    nvidia_smi([80_000, 40_000], "4711, 20000\n12, [N/A]\n")
    problem = gpus.memory_not_returned(before({4711: 19_000}), wait_seconds=0)
    assert "39.1 GiB of GPU 1" in problem and "GPU 0" not in problem and "pid 4711 (20000 MiB)" in problem


def test_memory_that_others_took_meanwhile_is_none_of_ours(nvidia_smi):
    """One that was there grew by 10,000 MiB, one on both GPUs is new."""
    nvidia_smi([74_900, 60_000], "4711, 29000\n4712, 10000\n4712, 5000\n")
    assert gpus.memory_not_returned(before({4711: 19_000}), wait_seconds=0) is None
    assert "19.5 GiB of GPU 1" in gpus.memory_not_returned(before({4711: 29_000}), wait_seconds=0)


def test_a_difference_of_less_than_a_gibibyte_is_nothing(nvidia_smi):
    nvidia_smi([80_000 - 1_000, 80_000 - 1_000])
    assert gpus.memory_not_returned(before(), wait_seconds=0) is None


def before(held: dict[int, int] = {}) -> gpus.Usage:  # noqa: B006
    """80,000 MiB free on both; what each process held, in MiB."""
    return gpus.Usage([80_000 << 20, 80_000 << 20], {pid: mebibytes << 20 for pid, mebibytes in held.items()})
