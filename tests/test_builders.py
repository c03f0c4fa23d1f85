"""Shards built by processes of their own: the same bytes, and nothing is left when the parent is killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.builders import BuilderProcesses, build_shard, processes_for
from eagle3_utils.states.shards.sample import Sample, StagedSample, StoreMeta, UnfitSample
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import StoreWriter

META = StoreMeta(hidden_size=16, aux_layers=[0, 1, 2], codec="fp8", final="supervised")


def make_sample(number: int) -> Sample:
    """The same sample in every process."""
    length, generator = 5 + number, torch.Generator().manual_seed(number)
    mask = np.arange(length) % 2 == 0
    aux, final = torch.randn(length, 3, 16, generator=generator), torch.randn(length, 16, generator=generator)
    return Sample(
        f"s{number}", np.arange(length, dtype=np.int32), mask.astype(np.uint8), aux.bfloat16(), final.bfloat16()
    )


def load(number: int, meta: StoreMeta) -> Sample:
    return make_sample(number)


def staged(number: int, folder: Path) -> StagedSample:
    path = folder / f"s{number}"
    path.touch()
    return StagedSample(f"s{number}", path, 0, make_sample(number).stored_bytes(META), partial(load, number), print)


def gone(meta: StoreMeta) -> Sample:
    raise FileNotFoundError("a dump that its server took along")


def unfit(meta: StoreMeta) -> Sample:
    raise UnfitSample("no good")


def no_room(meta: StoreMeta) -> Sample:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def builders():
    builders = BuilderProcesses(1)
    yield builders
    builders.close()


def test_few_cores_build_in_threads_and_many_leave_some_to_the_server():
    assert [processes_for(None, n) for n in (1, 2, 7, 8, 16, 64)] == [0, 0, 0, 2, 5, 8] and processes_for(3, 1) == 3


def test_a_store_built_by_processes_equals_one_built_by_threads(tmp_path):
    for name, num_processes in (("threads", 0), ("processes", 1)):
        with StoreWriter(tmp_path / name, META, shard_bytes=600, num_processes=num_processes) as writer:
            for number in range(6):
                writer.add_staged(staged(number, tmp_path))
            writer.flush()
            assert not list(tmp_path.glob("s?"))
            assert (writer.builders_cpu_seconds > 0) == bool(num_processes)
    a, b = StoreReader(tmp_path / "threads"), StoreReader(tmp_path / "processes")
    assert len(list((tmp_path / "processes").glob("shard-*.h5"))) > 1 and len(b) == 6
    for one, other in zip(map(a.read, range(6)), map(b.read, range(6)), strict=True):
        assert one.id == other.id and one.aux.equal(other.aux) and one.final.equal(other.final)
        assert np.array_equal(one.loss_mask, other.loss_mask) and np.array_equal(one.final_rows, other.final_rows)
    assert verify_store(tmp_path / "processes", deep=True).ok


def test_a_full_disk_comes_back_as_what_it_is(builders, tmp_path):
    with pytest.raises(OSError, match="No such file or directory"):
        builders.build(tmp_path / "no folder" / "shard-000000.h5", [partial(load, 0)], META)
    with pytest.raises(OSError, match="No space left") as full:
        builders.build(tmp_path / "shard-000000.h5", [no_room], META)
    assert full.value.errno == errno.ENOSPC


def test_a_builder_that_is_killed_is_an_error_that_says_how_to_go_on(tmp_path):
    builders = BuilderProcesses(1)
    os.kill(builders._pool.submit(os.getpid).result(), signal.SIGKILL)
    with pytest.raises(UserError, match="a process that builds shards was killed") as killed:
        builders.build(tmp_path / "shard-000000.h5", [partial(load, 0)], META)
    assert "resumes" in str(killed.value)
    builders.close()


def test_builders_are_in_a_group_of_their_own(builders):
    assert os.getpgid(builders._pool.submit(os.getpid).result()) != os.getpgrp()


def test_samples_that_are_no_good_or_gone_are_left_out_and_named(tmp_path):
    samples = [partial(load, 1), gone, make_sample(3), unfit]
    built = build_shard(tmp_path / "shard-000000.h5", samples, META)
    assert built.file_bytes and [row["id"] for row in built.rows] == ["s1", "s3"]
    assert built.problems == [None, "its dump went away before it was stored: did its server end?", None, "no good"]
    nothing = build_shard(tmp_path / "shard-000001.h5", [unfit], META)
    assert (nothing.file_bytes, nothing.rows, nothing.problems) == (0, [], ["no good"])
    assert not (tmp_path / "shard-000001.h5").exists()


def _hold_builders(pids) -> None:
    builders = BuilderProcesses(1)
    pids.send(builders._pool.submit(os.getpid).result())
    signal.pause()


def test_processes_end_with_a_parent_that_is_killed():
    here, there = multiprocessing.Pipe()
    parent = multiprocessing.get_context("forkserver").Process(target=_hold_builders, args=(there,))
    parent.start()
    builder = psutil.Process(here.recv())
    parent.kill()
    parent.join()
    psutil.wait_procs([builder], timeout=10)
    assert not builder.is_running()
