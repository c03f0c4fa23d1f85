"""Bounded staging: it waits and loses nothing, gives up when waiting is useless, and reuses its memory."""

from __future__ import annotations

import threading
import time

import pytest
from capture_fakes import LARGE, FakeRun, assert_is_whole, request

from eagle3_utils.serving.capture.staging import Staging, StagingFull, slab_bytes


@pytest.mark.parametrize("num_bytes", [1, 65_536, 65_537, 1_000_003, 1 << 20, (1 << 20) + 1])
def test_slabs_hold_what_was_asked_and_waste_at_most_a_quarter(num_bytes):
    assert num_bytes <= slab_bytes(num_bytes) <= max(65_536, num_bytes * 1.25 + 1)


def test_staging_waits_until_a_dump_is_taken(tmp_path):
    run = FakeRun(tmp_path, max_bytes=2 * slab_bytes(1) + 100)
    requests = [request(f"hs-{i}", 4) for i in range(4)]

    def reader():
        for req in requests:
            assert_is_whole(run.dump(req.rid), int(req.rid[-1]), 4)
            (run.folder / f"{req.rid}.safetensors").unlink()
            time.sleep(0.02)

    thread = threading.Thread(target=reader)
    thread.start()
    run.forward([(req, 0, 4) for req in requests])
    thread.join(10)
    assert all(run.recorder.problem(req) is None for req in requests)


def test_staging_gives_up_when_nobody_takes_dumps(tmp_path):
    run = FakeRun(tmp_path, max_bytes=slab_bytes(1) + 100, wait_seconds=0.2)
    first, second = request("hs-1", 4), request("hs-2", 4)
    run.forward([(first, 0, 4)])
    run.dump("hs-1")
    started = time.monotonic()
    run.forward([(second, 0, 4)])
    assert 0.1 < time.monotonic() - started < 3
    assert "no dump was taken" in run.recorder.problem(second)


def test_after_giving_up_once_it_waits_again_as_soon_as_the_reader_is_back(tmp_path):
    size = slab_bytes(1)
    staging = Staging(2 * size + 100, 2 * size + 100, pin=False, wait_seconds=0.2)

    def dump(name):
        slab = staging.acquire(1000)
        staging.queued()
        (tmp_path / name).touch()
        staging.written(slab, str(tmp_path / name), size)

    for name in "ab":
        dump(name)
    with pytest.raises(StagingFull, match="no dump was taken"):
        dump("c")
    for name in "ab":
        (tmp_path / name).unlink()  # the reader is back
    for name in "de":
        dump(name)
    threading.Timer(0.05, (tmp_path / "d").unlink).start()
    dump("f")


def test_a_dump_larger_than_staging_is_refused_at_once():
    with pytest.raises(StagingFull, match="does not fit into staging"):
        Staging(100_000, 100_000, pin=False).acquire(100_001)


def test_a_dump_larger_than_the_pool_but_not_than_staging_finds_room(tmp_path):
    staging = Staging(LARGE, 100_000, pin=False, wait_seconds=0.2)
    small = staging.acquire(1000)
    staging.queued()
    (tmp_path / "dump").touch()
    staging.written(small, str(tmp_path / "dump"), 1000)  # one dump is there, and nobody takes it
    assert staging.acquire(500_000).numel() >= 500_000


def test_an_unfinished_request_cannot_block_the_others(tmp_path):
    run = FakeRun(tmp_path, max_bytes=slab_bytes(1) + 100, wait_seconds=5)
    slow, quick = request("hs-1", 40), request("hs-2", 4)
    run.forward([(slow, 0, 10)])
    run.forward([(slow, 10, 5), (quick, 0, 4)])
    assert_is_whole(run.dump("hs-2"), 2, 4)


def test_slabs_are_reused():
    staging = Staging(LARGE, LARGE, pin=False)
    slab = staging.acquire(100_000)
    staging.queued()
    staging.written(slab, None, 0)
    assert staging.acquire(90_000) is slab
