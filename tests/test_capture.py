"""Capture without a server: rows placed by position, staging that waits and gives up, dumps that others can read."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eagle3_utils.serving.capture.layers import BoundaryTap, UnsupportedModel, switch_on, switched_on
from eagle3_utils.serving.capture.recorder import Forward, Recorder, boundaries_json
from eagle3_utils.serving.capture.rows import GapError, Piece, RequestRows, place
from eagle3_utils.serving.capture.staging import Staging, StagingFull, slab_bytes
from eagle3_utils.serving.capture.writer import Writer
from eagle3_utils.serving.client import read_dump

L, H = 2, 8
LARGE = 1 << 30


def request(rid: str, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, origin_input_ids=list(range(num_tokens)))


class FakeRun:
    """A recorder fed with forwards whose rows carry their own request and position as values."""

    def __init__(self, folder: Path, max_bytes: int = LARGE, wait_seconds: float = 5.0, num_aux: int = L):
        self.folder = folder
        self.staging = Staging(max_bytes, max_bytes, pin=False, wait_seconds=wait_seconds)
        self.writer = Writer(str(folder), self.staging, num_threads=1)
        self.recorder = Recorder(self.staging, self.writer, num_aux, boundaries_json([2, 3]), torch.float32)

    def forward(self, pieces: list[tuple[SimpleNamespace, int, int]], padding: int = 0) -> None:
        """One batch: (request, prefix, extend) each; row values are rid number * 1000 + position."""
        self.recorder.begin([req for req, _, _ in pieces])
        values = [int(req.rid[-1]) * 1000 + p for req, prefix, extend in pieces for p in range(prefix, prefix + extend)]
        ids = torch.tensor(values + [0] * padding)
        rows = ids[:, None].float().expand(-1, H)
        self.recorder.record(
            Forward(
                [req.rid for req, _, _ in pieces],
                [prefix for _, prefix, _ in pieces],
                [extend for _, _, extend in pieces],
                ids,
                rows.contiguous(),
                [(rows + 0.25 * (layer + 1)).contiguous() for layer in range(L)],
            )
        )

    def dump(self, rid: str, seconds: float = 5.0):
        path, deadline = self.folder / f"{rid}.safetensors", time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"no dump of {rid}"
            time.sleep(0.005)
        return read_dump(path)


def assert_is_whole(dump, number: int, num_tokens: int) -> None:
    expected = torch.arange(num_tokens) + 1000 * number
    assert dump.input_ids.tolist() == expected.tolist()
    assert torch.equal(dump.final, expected[:, None].float().expand(-1, H))
    for layer in range(L):
        assert torch.equal(dump.aux[:, layer], dump.final + 0.25 * (layer + 1))


@pytest.fixture
def run(tmp_path) -> FakeRun:
    return FakeRun(tmp_path)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "extend", "filled", "expected"),
    [
        (0, 10, 0, Piece(100, 110, 0)),  # whole prompt
        (4, 3, 4, Piece(100, 103, 4)),  # a chunk
        (7, 3, 7, Piece(100, 103, 7)),  # the last chunk
        (10, 1, 10, None),  # a decode step in a mixed batch
        (0, 14, 10, Piece(100, 110, 0)),  # prefilled again after a retraction: generated rows are left out
        (2, 3, 6, Piece(100, 103, 2)),  # rows that are there already are written again
    ],
)
def test_rows_are_placed_by_position(prefix, extend, filled, expected):
    assert place(100, prefix, extend, num_tokens=10, num_filled=filled) == expected


def test_rows_answered_by_a_prefix_cache_are_missed():
    with pytest.raises(GapError, match=r"rows 0…8 of 10 were never computed"):
        place(0, prefix=9, extend=1, num_tokens=10, num_filled=0)


def test_a_batch_of_many_requests_comes_apart_by_request(run):
    requests = [request(f"hs-{i}", n) for i, n in enumerate([5, 1, 7])]
    run.forward([(req, 0, len(req.origin_input_ids)) for req in requests], padding=3)
    for number, req in enumerate(requests):
        assert_is_whole(run.dump(req.rid), number, len(req.origin_input_ids))


def test_chunks_are_joined_whatever_the_split(run):
    one, two = request("hs-1", 9), request("hs-2", 6)
    run.forward([(one, 0, 4)])
    run.forward([(one, 4, 2), (two, 0, 1)])
    run.forward([(two, 1, 2), (one, 6, 3)])
    run.forward([(two, 3, 3)])
    assert_is_whole(run.dump("hs-1"), 1, 9)
    assert_is_whole(run.dump("hs-2"), 2, 6)


def test_ordinary_requests_in_the_batch_leave_nothing(run):
    ordinary, wanted, health = request("abc5", 4), request("hs-1", 3), request("HEALTH_CHECK_2", 1)
    run.forward([(ordinary, 0, 4), (wanted, 0, 3), (health, 0, 1)])
    assert_is_whole(run.dump("hs-1"), 1, 3)
    assert [path.name for path in run.folder.iterdir()] == ["hs-1.safetensors"]


def test_decode_rows_of_a_mixed_batch_are_left_out(run):
    decoding, prefilling = request("hs-1", 3), request("hs-2", 4)
    run.forward([(decoding, 0, 3)])
    run.forward([(decoding, 3, 1), (prefilling, 0, 4)])
    assert_is_whole(run.dump("hs-1"), 1, 3)
    assert_is_whole(run.dump("hs-2"), 2, 4)


def test_a_retracted_request_is_taken_from_its_second_prefill(run):
    req = request("hs-3", 6)
    run.forward([(req, 0, 4)])
    run.forward([(req, 0, 2)])
    run.forward([(req, 2, 4)])
    assert_is_whole(run.dump("hs-3"), 3, 6)


def test_a_request_retracted_after_its_dump_is_not_dumped_again(run):
    req = request("hs-3", 4)
    run.forward([(req, 0, 4)])
    assert_is_whole(run.dump("hs-3"), 3, 4)
    (run.folder / "hs-3.safetensors").unlink()
    run.forward([(req, 0, 6)])
    time.sleep(0.05)
    assert list(run.folder.iterdir()) == [] and run.recorder.problem(req) is None


def test_a_repeated_id_gives_the_later_requests_rows(run):
    run.forward([(request("hs-4", 5), 0, 5)])
    assert_is_whole(run.dump("hs-4"), 4, 5)
    (run.folder / "hs-4.safetensors").unlink()
    run.forward([(request("hs-4", 3), 0, 3)])
    assert_is_whole(run.dump("hs-4"), 4, 3)


def test_an_aborted_request_gives_its_memory_back(run):
    req = request("hs-5", 1000)
    run.forward([(req, 0, 10)])
    assert run.staging._in_use_bytes > 0
    del req
    gc.collect()
    run.forward([(request("hs-6", 2), 0, 2)])
    run.dump("hs-6")
    time.sleep(0.05)
    assert run.staging._in_use_bytes == 0
    assert [path.name for path in run.folder.iterdir()] == ["hs-6.safetensors"]


# --- what a client is told -------------------------------------------------------------------------------------------


def test_a_request_with_missing_rows_has_a_problem(run):
    cached, unseen, partial = request("hs-1", 8), request("hs-2", 8), request("hs-3", 8)
    run.forward([(cached, 7, 1), (partial, 0, 3)])
    assert "never computed" in run.recorder.problem(cached)
    assert "no forward pass" in run.recorder.problem(unseen)
    assert "only 3 of 8 rows" in run.recorder.problem(partial)


def test_a_model_that_hands_out_the_wrong_number_of_layers_is_a_problem(tmp_path):
    run = FakeRun(tmp_path, num_aux=3)
    req = request("hs-1", 4)
    run.forward([(req, 0, 4)])
    assert "not 3 times" in run.recorder.problem(req)


def test_a_request_the_server_has_refused_leaves_no_stub(run):
    req = request("hs-1", 1)
    req.to_finish = "aborted: the prompt is too long"
    run.forward([(req, 0, 1)])
    time.sleep(0.05)
    assert list(run.folder.iterdir()) == []


def test_an_attention_dp_rank_without_requests_is_left_alone(run):
    rows = torch.ones(5, H)
    run.recorder.record(Forward([], [0], [5], torch.zeros(5, dtype=torch.int64), rows, [rows] * L))
    assert list(run.folder.iterdir()) == []


def test_a_rid_that_is_no_file_name_is_refused(run):
    req = request("hs-../../etc/1", 4)
    run.forward([(req, 0, 4)])
    assert "a rid may hold" in run.recorder.problem(req)
    assert list(run.folder.iterdir()) == []


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


# --- staging ---------------------------------------------------------------------------------------------------------


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


def test_a_dump_larger_than_staging_is_refused_at_once():
    with pytest.raises(StagingFull, match="does not fit into staging"):
        Staging(100_000, 100_000, pin=False).acquire(100_001)


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


# --- files -----------------------------------------------------------------------------------------------------------


def test_dumps_are_plain_safetensors_with_metadata(run):
    run.forward([(request("hs-1", 5), 0, 5)])
    dump = run.dump("hs-1")
    tensors = load_file(run.folder / "hs-1.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "input_ids": (5,), "aux": (5, L, H), "final": (5, H),
    }  # fmt: skip
    assert dump.metadata == {"rid": "hs-1", "num_tokens": "5", "boundaries": "[2, 3]", "layers": "[1, 2]"}


def test_bfloat16_survives_bit_for_bit(tmp_path):
    staging = Staging(LARGE, LARGE, pin=False)
    rows = RequestRows("hs-1", 3)
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


# --- layers ----------------------------------------------------------------------------------------------------------


class FakeLayer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.ones_like(residual), residual


class FakeNorm(nn.Module):
    def forward(self, x, residual=None):
        return x if residual is None else x + residual


class FakeDecoder(nn.Module):
    """Each layer adds 1 to the sum of hidden and residual, so boundary b holds start + b."""

    def __init__(self, num_layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(FakeLayer() for _ in range(num_layers))
        self.norm = FakeNorm()
        self.layers_to_capture: list[int] = []

    def forward(self, hidden):
        residual, captured = None, []
        for number, layer in enumerate(self.layers):
            if number in self.layers_to_capture:
                captured.append(hidden + residual)
            hidden, residual = layer(None, hidden, None, residual)
        return self.norm(hidden, residual), captured


class LlamaLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = FakeDecoder()

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids]


class DeepseekLike(LlamaLike):
    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids] if ids[0] == 1 else list(ids)


class FlaggedLike(LlamaLike):
    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids]
        for boundary in self.model.layers_to_capture:
            self.model.layers[boundary]._is_layer_to_capture = True


@pytest.mark.parametrize("kind", [LlamaLike, DeepseekLike, FlaggedLike])
@pytest.mark.parametrize("boundaries", [[2, 3, 5], [1, 4], [3], [1, 2, 3, 4, 5]])
def test_boundaries_are_switched_on_by_value_whatever_the_class_adds(kind, boundaries):
    model = kind()
    assert switch_on(model, boundaries)
    assert switched_on(model) == boundaries
    if kind is not FlaggedLike:
        _, captured = model.model(torch.zeros(4, H))
        assert [int(tensor[0, 0]) for tensor in captured] == boundaries


def test_a_model_without_capture_says_so():
    assert not switch_on(FakeDecoder(), [2])


def test_the_tap_takes_every_boundary_from_embedding_to_norm():
    decoder = FakeDecoder()
    tap = BoundaryTap(decoder, 6, list(range(7)))
    tap.attach()
    decoder(torch.zeros(4, H))
    taken = tap.take(4)
    assert [int(tensor[0, 0]) for tensor in taken] == [0, 1, 2, 3, 4, 5, 6]
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_the_tap_refuses_rows_that_are_not_all_there():
    decoder = FakeDecoder()
    tap = BoundaryTap(decoder, 6, [2, 6])
    tap.attach()
    decoder(torch.zeros(4, H))
    with pytest.raises(UnsupportedModel, match=r"\[2, 6\] are not there in full"):
        tap.take(8)


def test_metadata_names_layers_and_boundaries():
    assert json.loads(boundaries_json([2, 15, 27])["layers"]) == [1, 14, 26]
