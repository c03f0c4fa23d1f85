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


def test_every_trial_that_fails_says_so_instead_of_raising(fake, examined):
    fake.status = 500
    for trial in ("content", "quiet", "logprobs", "layers", "invariance", "capacity", "rate"):
        getattr(examined, trial)()
    assert len(examined.gates) == 7 and not any(gate.passed for gate in examined.gates)
    assert all("not captured: planted" in gate.detail for gate in examined.gates)
