"""The GPU's way out on a stand-in for torch.cuda: the order of streams and events, and who keeps what alive."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from capture_fakes import FakeRun, H, L, assert_is_whole, request

from eagle3_utils.serving.capture import transfer
from eagle3_utils.serving.capture.recorder import Recorder, boundaries_json


class FakeCuda:
    """Streams and events that log what happens to them; an event fires when the test, or a wait for it, says so."""

    def __init__(self):
        self.log: list[str] = []
        self.events: list[SimpleNamespace] = []

    def current_stream(self, _device):
        return "forward's stream"

    def Stream(self, _device):
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"side stream waits for {other}"))

    @contextmanager
    def stream(self, _stream):
        self.log.append("copies on the side stream")
        yield

    def Event(self):
        event = SimpleNamespace(done=False)
        event.record = lambda: self.log.append("event")
        event.query = lambda: event.done
        event.synchronize = lambda: (self.log.append("wait"), setattr(event, "done", True))
        self.events.append(event)
        return event


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def run(tmp_path, cuda) -> FakeRun:
    run = FakeRun(tmp_path)
    way = transfer.StreamTransfer(torch.device("cpu"), cuda)
    run.recorder = Recorder(run.staging, run.writer, L, boundaries_json([2, 3]), torch.float32, transfer=way)
    return run


def tensors(num_rows: int = 4) -> dict:
    return {
        "input_ids": torch.arange(num_rows),
        "final": torch.randn(num_rows, H),
        "aux": [torch.randn(num_rows, H) for _ in range(L)],
    }


def test_what_the_side_stream_reads_is_its_own(cuda):
    given = tensors()
    held = transfer.StreamTransfer(torch.device("cpu"), cuda).hold(given, torch.float32)
    expected = {"input_ids": given["input_ids"].clone(), "final": given["final"].clone(),
                "aux": torch.stack(given["aux"], 1)}  # fmt: skip
    for tensor in (given["input_ids"], given["final"], *given["aux"]):
        tensor.zero_()  # the next forward overwrites its buffers
    assert all(torch.equal(held[name], value) for name, value in expected.items())


def test_states_are_cast_and_ids_are_not(cuda):
    held = transfer.StreamTransfer(torch.device("cpu"), cuda).hold(tensors(), torch.bfloat16)
    assert held["final"].dtype == held["aux"].dtype == torch.bfloat16 and held["input_ids"].dtype == torch.int64


def test_copies_wait_for_the_forward_and_each_is_followed_by_its_event(run, cuda):
    one, two = request("hs-1", 3), request("hs-2", 4)
    run.forward([(one, 0, 3), (two, 0, 4)])
    piece = ["copies on the side stream", "event"]
    assert [line for line in cuda.log if line != "wait"] == ["side stream waits for forward's stream", *piece, *piece]
    assert_is_whole(run.dump("hs-1"), 1, 3)
    assert_is_whole(run.dump("hs-2"), 2, 4)


def test_the_writer_waits_for_the_event_of_its_own_request(run, cuda):
    run.forward([(request("hs-1", 3), 0, 3)])
    run.dump("hs-1")
    assert cuda.log[-1] == "wait" and cuda.events[0].done


def test_a_chunk_that_completes_nothing_still_keeps_its_tensors(run, cuda):
    req = request("hs-1", 9)
    run.forward([(req, 0, 4)])
    assert len(run.recorder.transfer._in_flight) == 1 and not cuda.events[0].done
    run.forward([(req, 4, 5)])
    assert_is_whole(run.dump("hs-1"), 1, 9)


def test_tensors_live_until_the_last_copy_of_their_pass_is_done(cuda):
    way = transfer.StreamTransfer(torch.device("cpu"), cuda)
    held = way.hold(tensors(), torch.float32)
    alive = weakref.ref(held["final"])
    way.copy(held, SimpleNamespace(views={}), SimpleNamespace(position=0, start=0, stop=2))
    way.copy(held, SimpleNamespace(views={}), SimpleNamespace(position=0, start=2, stop=4))
    way.keep(held)
    del held
    cuda.events[0].done = True  # the first piece's
    way.drop_finished()
    gc.collect()
    assert alive() is not None
    cuda.events[1].done = True
    way.drop_finished()
    gc.collect()
    assert alive() is None


def test_only_so_many_passes_hold_device_memory(cuda):
    way = transfer.StreamTransfer(torch.device("cpu"), cuda)
    for _ in range(transfer._MAX_PASSES_IN_FLIGHT + 3):
        way.drop_finished()
        held = way.hold(tensors(), torch.float32)
        way.copy(held, SimpleNamespace(views={}), SimpleNamespace(position=0, start=0, stop=4))
        way.keep(held)
        assert len(way._in_flight) <= transfer._MAX_PASSES_IN_FLIGHT
    assert cuda.log.count("wait") == 3


def test_a_pass_none_of_whose_rows_found_room_holds_nothing(run, cuda):
    run.staging.max_bytes = 10
    req = request("hs-1", 4)
    run.forward([(req, 0, 4)])
    assert "does not fit" in run.recorder.problem(req)
    assert not run.recorder.transfer._in_flight and run.staging._in_use_bytes == 0


def test_a_slab_that_changes_hands_is_filled_by_copies_of_the_same_stream(run, cuda):
    """An aborted request's copies may still run when its slab is taken: one stream keeps them in order."""
    gone = request("hs-1", 1000)
    run.forward([(gone, 0, 10)])
    del gone
    gc.collect()
    run.forward([(request("hs-2", 1000), 0, 1000)])
    assert_is_whole(run.dump("hs-2"), 2, 1000)
    assert cuda.log.count("side stream waits for forward's stream") == 2 and len(run.staging._free) <= 1
