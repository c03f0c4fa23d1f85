"""Taking rows out of forward passes: every kind of batch, and what a client is told when rows are missing."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest
import torch
from capture_fakes import FakeRun, H, L, assert_is_whole, request

from eagle3_utils.serving.capture.recorder import Forward


@pytest.fixture
def run(tmp_path) -> FakeRun:
    return FakeRun(tmp_path)


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
    assert run.dump("hs-1").metadata["pieces"] == "[4, 2, 3]" and run.dump("hs-2").metadata["pieces"] == "[1, 2, 3]"


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
    assert run.dump("hs-3").metadata["pieces"] == "[2, 4]"


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


def test_an_aborted_request_that_the_server_still_holds_does_not_fill_staging(tmp_path):
    """The scheduler waits for room inside a batch; what it let go of before that batch must not be in its way."""
    run = FakeRun(tmp_path, max_bytes=200_000, wait_seconds=0.2)
    aborted, taken, other = request("hs-5", 1500), request("hs-6", 2), request("hs-7", 1000)  # 156 and 104 kB
    run.forward([(aborted, 0, 10)])
    aborted.finished_reason = "abort"
    run.forward([(taken, 0, 2), (other, 0, 1000)])
    assert_is_whole(run.dump("hs-7"), 7, 1000)
    assert run.recorder.problem(other) is None and "aborted" in run.recorder.problem(aborted)


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


def batch(**changes) -> SimpleNamespace:
    fields = {"rids": ["hs-1"], "extend_prefix_lens_cpu": [0], "extend_seq_lens_cpu": [3], "padded_static_len": -1,
              "input_ids": torch.tensor([7, 8, 9])}  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def test_token_ids_are_the_batchs_since_multimodal_classes_hand_on_none():
    forward = Forward.of(batch(), torch.ones(3, H), None)
    assert forward.input_ids.tolist() == [7, 8, 9] and forward.aux == [] and forward.extend_lens == [3]


def test_batches_of_graphs_and_warm_ups_are_no_forwards():
    assert Forward.of(batch(rids=None), torch.ones(3, H), None) is None
    assert Forward.of(batch(padded_static_len=8), torch.ones(3, H), None) is None


def test_an_attention_dp_rank_without_requests_is_left_alone(run):
    rows = torch.ones(5, H)
    run.recorder.record(Forward([], [0], [5], torch.zeros(5, dtype=torch.int64), rows, [rows] * L))
    assert list(run.folder.iterdir()) == []


def test_a_rid_that_is_no_file_name_is_refused(run):
    req = request("hs-../../etc/1", 4)
    run.forward([(req, 0, 4)])
    assert "a rid may hold" in run.recorder.problem(req)
    assert list(run.folder.iterdir()) == []
