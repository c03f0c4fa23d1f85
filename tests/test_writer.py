"""Dumps as files: plain safetensors, bit for bit, and a failure that reaches this client and the next."""

from __future__ import annotations

import time

import pytest
import torch
from capture_fakes import LARGE, FakeRun, H, L, assert_is_whole, request
from safetensors.torch import load_file

from eagle3_utils.serving.capture.rows import RequestRows
from eagle3_utils.serving.capture.staging import Staging
from eagle3_utils.serving.capture.writer import Writer


@pytest.fixture
def run(tmp_path) -> FakeRun:
    return FakeRun(tmp_path)


def test_dumps_are_plain_safetensors_with_metadata(run):
    run.forward([(request("hs-1", 5), 0, 5)])
    dump = run.dump("hs-1")
    tensors = load_file(run.folder / "hs-1.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "input_ids": (5,), "aux": (5, L, H), "final": (5, H),
    }  # fmt: skip
    assert dump.metadata == {
        "rid": "hs-1", "num_tokens": "5", "pieces": "[5]", "boundaries": "[2, 3]", "layers": "[1, 2]",
    }  # fmt: skip


def test_bfloat16_survives_bit_for_bit(tmp_path):
    staging = Staging(LARGE, LARGE, pin=False)
    rows = RequestRows(request("hs-1", 3))
    rows.open(staging, {"input_ids": (torch.int64, ()), "final": (torch.bfloat16, (5,))})
    values = torch.randn(3, 5).to(torch.bfloat16)
    rows.views["final"].copy_(values)
    rows.views["input_ids"].copy_(torch.tensor([7, 8, 9]))
    rows.num_filled = 3
    Writer(str(tmp_path), staging, 1).submit(rows, {}, None)
    path, deadline = tmp_path / "hs-1.safetensors", time.monotonic() + 5
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    loaded = load_file(path)
    assert torch.equal(loaded["final"].view(torch.int16), values.view(torch.int16))
    assert loaded["input_ids"].tolist() == [7, 8, 9]


def test_a_model_served_in_float32_is_rounded_to_bfloat16_once(tmp_path):
    run = FakeRun(tmp_path)
    run.recorder.dtype = torch.bfloat16
    run.forward([(request("hs-1", 300), 0, 300)])
    dump = run.dump("hs-1")
    expected = (torch.arange(300) + 1000)[:, None].float().expand(-1, H).to(torch.bfloat16)
    assert dump.final.dtype == dump.aux.dtype == torch.bfloat16 and torch.equal(dump.final, expected)
    assert dump.input_ids.tolist() == list(range(1000, 1300))


def test_a_writer_that_fails_reaches_this_client_and_the_next(tmp_path):
    run = FakeRun(tmp_path / "gone")
    first, second = request("hs-1", 4), request("hs-2", 4)
    run.forward([(first, 0, 4)])
    deadline = time.monotonic() + 5
    while run.writer.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "could not be written" in run.recorder.problem(first)
    run.forward([(second, 0, 4)])
    assert "hs-1 could not be written" in run.recorder.problem(second)
    assert run.staging._in_use_bytes == 0


def test_a_writer_recovers_when_there_is_room_again(tmp_path):
    run = FakeRun(tmp_path)
    run.writer.failure = "the dump of hs-0 could not be written: No space left on device"
    run.forward([(request("hs-1", 4), 0, 4)])
    assert_is_whole(run.dump("hs-1"), 1, 4)
