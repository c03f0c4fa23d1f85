"""Single trials of the probe against a stand-in server (the whole probe and its planted faults: test_probe.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from serving_fakes import FakeSGLang

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.probing import trials
from eagle3_utils.serving.server import AttachedServer, CaptureSpec
from eagle3_utils.target import load_target


@pytest.fixture
def fake(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with FakeSGLang(model, load_target(str(tiny_llama)), tmp_path, [2, 4]) as fake:
        yield fake


@pytest.fixture
def examined(fake) -> trials.Trials:
    server = AttachedServer(fake.url, fake.dump_dir, fake.target, CaptureSpec([1, 3], fake.dump_dir))
    config = ProbeConfig(max_seq_len=64, num_probe_samples=2, num_concurrent=2)
    records = [SimpleNamespace(id=f"r{i}", input_ids=list(range(5, 25 + i))) for i in range(3)]
    return trials.Trials(server, fake.target, config, records, log=lambda _line: None)


def test_a_dump_that_does_not_come_fails_arrival(fake, examined, monkeypatch):
    monkeypatch.setattr(trials, "_ARRIVAL_SECONDS", 0.2)
    fake.lose = True
    assert not examined.arrival()
    assert "no dump of hs-probe-arrival-1" in examined.gates[0].detail


def test_content_includes_a_request_of_one_token(fake, examined):
    lengths = []
    generate = fake.generate
    fake.generate = lambda body: (lengths.append(len(body["input_ids"])), generate(body))[1]
    examined.content()
    assert 1 in lengths and examined.gates[0].passed


def test_dumps_of_another_server_are_not_taken_for_this_ones(fake, examined):
    examined.server.handshake["nonce"] = "another"
    examined.content()
    assert "the dump is of another server" in examined.gates[0].detail


def test_no_more_is_in_flight_than_half_of_staging_holds(fake, examined):
    per_token = 3 * 64 * 4 + 8  # two layers and the final state of 64 floats, and an id
    facts = examined.server.handshake
    assert examined.num_in_flight(100) == 2, "num_concurrent"
    examined.config = examined.config.model_copy(update={"num_concurrent": 32})
    facts["max_bytes"] = 2 * 5 * 100 * per_token
    assert examined.num_in_flight(100) == 5 and examined.num_in_flight(1000) == 1
    facts["ranks"]["writers"] = 2  # max_bytes is that of each
    assert examined.num_in_flight(100) == 10


def test_a_checkpoint_that_transformers_cannot_run_is_judged_by_the_anchored_check(examined, monkeypatch):
    def refuse(*_args):
        raise ValueError("unknown architecture")

    lines = []
    examined.log = lines.append
    monkeypatch.setattr(trials.reference, "huggingface_boundaries", refuse)
    examined.layers()
    assert [gate.name for gate in examined.gates] == ["anchors", "layers against all boundaries"]
    assert "transformers cannot run this checkpoint here" in lines[0] and len(examined.layer_rows) == 2
    examined.config = examined.config.model_copy(update={"reference": "huggingface"})
    with pytest.raises(ValueError, match="unknown architecture"):
        examined.layers()


def test_an_odd_start_is_repeated_by_the_first_gate(examined):
    examined.server.suspicion = "suspicious: ready after 0.1 s"
    examined.identity()
    assert examined.gates[0].passed and "ready after 0.1 s" in examined.gates[0].detail


def test_every_trial_that_fails_says_so_instead_of_raising(fake, examined):
    fake.status = 500
    for trial in ("content", "quiet", "logprobs", "layers", "invariance", "capacity", "rate"):
        getattr(examined, trial)()
    assert len(examined.gates) == 7 and not any(gate.passed for gate in examined.gates)
    assert all("not captured: planted" in gate.detail for gate in examined.gates)


def test_the_batch_of_the_invariance_gate_holds_others_among_the_copies(examined):
    ids = list(range(50))
    batch = examined._batch_of(ids, 8)
    assert [sequence == ids for _, sequence in batch] == [True, False, False, False] * 2
    assert all(sorted(sequence) == ids for _, sequence in batch) and len({rid for rid, _ in batch}) == 8


def test_states_that_depend_on_where_a_prompt_is_cut_fail_invariance(fake, examined):
    """The longest sample (22 tokens) and the same without its last one, each said to have come in two pieces."""

    def judge():
        examined.capacity()
        examined.invariance()
        return examined.gates[-1]

    assert judge().passed and "NOT TESTED in pieces: nothing was cut" in examined.gates[-1].measured
    examined.server.handshake["chunked_prefill_size"] = 21  # extraction will cut the longest sample
    assert not judge().passed
    fake.cut_rids = "full"
    gate = judge()
    assert gate.passed and "the longest sample cut 2 ways: [3, 19], [3, 18]" in gate.detail
    assert "NOT TESTED" not in gate.measured
    fake.noise, fake.noisy_rids = 1.0, "full"
    assert not judge().passed


def test_pieces_cut_as_those_of_the_sample_alone_show_nothing(fake, examined):
    fake.cut_rids = "hs-probe"
    examined.capacity()
    assert list(examined._cut_otherwise()) == ["[3, 18]"]
