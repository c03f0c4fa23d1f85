"""Capture's way out of a real GPU: right bits while later forwards overwrite every buffer; memory comes back."""

from __future__ import annotations

import gc

import pytest
import torch
from capture_fakes import FakeRun, L, request

from eagle3_utils.serving.capture.recorder import Forward, Recorder, boundaries_json
from eagle3_utils.serving.capture.staging import Staging
from eagle3_utils.serving.capture.transfer import StreamTransfer
from eagle3_utils.serving.capture.writer import Writer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TOKENS, HIDDEN, PASSES = 4096, 1024, 40


@pytest.fixture
def run(tmp_path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.staging = Staging(4 << 30, 1 << 30, pin=True)
    run.writer = Writer(str(tmp_path), run.staging, 2, torch.cuda.current_device())
    way = StreamTransfer(torch.device("cuda", torch.cuda.current_device()))
    run.recorder = Recorder(run.staging, run.writer, L, boundaries_json([2, 3]), torch.bfloat16, transfer=way)
    return run


def test_bits_are_right_while_later_forwards_overwrite_every_buffer(run):
    """Two requests share each pass; their states are the pass's number plus layer and request, in reused buffers."""
    device = "cuda"
    ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    final = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    aux = [torch.zeros_like(final) for _ in range(L)]
    half = TOKENS // 2
    which = torch.tensor([0] * half + [1] * half, device=device)
    forward_stream = torch.cuda.Stream()
    forward_stream.wait_stream(torch.cuda.current_stream())
    requests = []
    for number in range(PASSES):
        pair = [request(f"hs-{number}-{i}", half) for i in range(2)]
        requests.append(pair)
        with torch.cuda.stream(forward_stream):
            torch.cuda._sleep(2_000_000)  # a millisecond: the host is ahead of the device
            ids.copy_(which + number)
            final.copy_((which + number)[:, None].expand(-1, HIDDEN))
            for layer, tensor in enumerate(aux):
                tensor.copy_((which + number + 100 * (layer + 1))[:, None].expand(-1, HIDDEN))
            run.recorder.begin(pair)
            rids = [req.rid for req in pair]
            run.recorder.record(Forward(rids, [0, 0], [half, half], ids, final, aux))
    for number, pair in enumerate(requests):
        for i, req in enumerate(pair):
            assert run.recorder.problem(req) is None
            dump = run.dump(req.rid, seconds=30)
            (run.folder / f"{req.rid}.safetensors").unlink()
            assert dump.input_ids.eq(number + i).all() and dump.final.eq(number + i).all()
            for layer in range(L):
                assert dump.aux[:, layer].eq(number + i + 100 * (layer + 1)).all()


def test_device_memory_of_finished_passes_comes_back(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(10):
        req = request(f"hs-{number}", TOKENS)
        tensor = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        run.recorder.begin([req])
        ids = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        run.recorder.record(Forward([req.rid], [0], [TOKENS], ids, tensor, [tensor] * L))
        run.dump(req.rid, seconds=30)
    del tensor, req, ids
    torch.cuda.synchronize()
    run.recorder.transfer.drop_finished()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert all(slab.is_pinned() for slab in run.staging._free)
