"""The whole probe against a stand-in server: it passes, and every planted fault fails the gate that is there for it."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from serving_fakes import FakeSGLang

from eagle3_utils.config import ExtractConfig, ProbeConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.probe import fingerprint, probe_servers, read_probe, require_probe, run_probe, write_probe
from eagle3_utils.serving.server import AttachedServer, CaptureSpec
from eagle3_utils.target import load_target

LAYERS = [1, 3]  # boundaries 2 and 4 of 6 layers


@pytest.fixture(scope="module")
def model(tiny_llama):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def fake(model, tiny_llama, tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    with FakeSGLang(model, load_target(str(tiny_llama)), folder, [layer + 1 for layer in LAYERS]) as fake:
        yield fake


@pytest.fixture
def config(tmp_path):
    return ProbeConfig(run_dir=str(tmp_path / "run"), max_seq_len=64, num_probe_samples=3, num_concurrent=3)


def records(longest: int = 40):
    rng = random.Random(0)
    lengths = [longest, *(rng.randint(8, 30) for _ in range(9))]
    return [SimpleNamespace(id=f"r{i}", input_ids=rng.choices(range(1000), k=n)) for i, n in enumerate(lengths)]


def attach(fake) -> AttachedServer:
    spec = CaptureSpec(LAYERS, fake.dump_dir)
    return AttachedServer(fake.url, fake.dump_dir, fake.target, spec)


def failed_gates(fake, config, longest: int = 40) -> list[str]:
    report = run_probe(attach(fake), fake.target, config, records(longest), log=lambda _line: None)
    return [gate.name for gate in report.gates if not gate.passed]


def test_a_right_server_passes_every_gate(fake, config):
    report = run_probe(attach(fake), fake.target, config, records())
    assert report.passed, report.table().to_string()
    assert [row["found_boundary"] for row in report.layers] == [2, 4, 6]
    assert report.pilot["tokens_per_second"] > 0
    assert report.pilot["tokens_per_second_low"] <= report.pilot["tokens_per_second_high"]
    assert report.longest == 40
    assert not list(fake.dump_dir.glob("hs-*")), "every dump was taken"


@pytest.mark.parametrize("reference", ["auto", "huggingface", "anchored"])
def test_layers_shifted_by_one_fail_the_layer_gates(fake, config, reference):
    fake.shift = 1
    failed = failed_gates(fake, config.model_copy(update={"reference": reference}))
    expected = {"layers against Hugging Face"} if reference != "anchored" else set()
    expected |= {"layers against all boundaries"} if reference != "huggingface" else set()
    assert set(failed) == expected


def test_a_final_state_from_before_the_norm_fails_log_probabilities_and_anchors(fake, config):
    fake.pre_norm = True
    assert {"log-probabilities rebuilt", "anchors"} <= set(failed_gates(fake, config))


def test_other_token_ids_fail_the_content_gate(fake, config):
    fake.other_ids = True
    assert "ids, shapes, values" in failed_gates(fake, config)


def test_states_that_depend_on_the_batch_fail_invariance(fake, config):
    fake.noise, fake.noisy_rids = 1.0, "batch"
    assert failed_gates(fake, config) == ["invariance"]


def test_a_server_error_reaches_the_gate_with_its_reason(fake, config):
    server = attach(fake)
    fake.status = 500
    report = run_probe(server, fake.target, config, records(), log=lambda _line: None)
    assert [gate.name for gate in report.gates if not gate.passed] == ["dump arrives"]
    assert "not captured: planted" in report.gates[-1].detail


def test_stale_files_in_the_dump_folder_fail_the_gate_for_them(fake, config):
    (fake.dump_dir / "hs-old.safetensors").write_bytes(b"old")
    assert failed_gates(fake, config) == ["nothing unasked"]


def test_a_corpus_longer_than_max_seq_len_fails_capacity(fake, config):
    assert failed_gates(fake, config, longest=65) == ["capacity"]


def test_staging_too_small_for_four_dumps_fails_capacity(fake, config):
    fake.write_handshake(max_bytes=3 * 40 * 64 * 4 * 3)
    assert failed_gates(fake, config) == ["capacity"]


def test_several_servers_are_probed_as_one(fake, config):
    report = probe_servers([attach(fake), attach(fake)], fake.target, config, records(), log=lambda _line: None)
    assert report.passed
    assert len(report.gates) % 2 == 0


def test_servers_whose_dumps_would_differ_are_refused(fake, config):
    one = attach(fake)
    fake.write_handshake(kv_cache_dtype="fp8")
    with pytest.raises(UserError, match="would differ"):
        probe_servers([one, attach(fake)], fake.target, config, records(), log=lambda _line: None)


# --- what extraction demands ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passing(model, tiny_llama, tmp_path_factory):
    """The report of a right server, made once."""
    folder = tmp_path_factory.mktemp("dumps")
    config = ProbeConfig(max_seq_len=64, num_probe_samples=3, num_concurrent=3)
    with FakeSGLang(model, load_target(str(tiny_llama)), folder, [2, 4]) as fake:
        return run_probe(attach(fake), fake.target, config, records(), log=lambda _line: None)


def extract_config(config) -> ExtractConfig:
    return ExtractConfig(run_dir=config.run_dir)


def test_extraction_takes_a_passing_probe_of_the_same_server(fake, config, passing):
    write_probe(config, passing)
    found = require_probe(extract_config(config), fake.target, attach(fake), longest=40)
    assert found["passed"] and found["pilot"]["num_samples"] == 10


def test_extraction_without_a_probe_is_refused(config):
    with pytest.raises(UserError, match="there is no probe of this run"):
        read_probe(extract_config(config))


def test_extraction_after_a_failed_probe_is_refused_and_says_what_failed(fake, config):
    fake.shift = 1
    write_probe(config, run_probe(attach(fake), fake.target, config, records(), log=lambda _line: None))
    with pytest.raises(UserError, match="did not pass: layers against Hugging Face"):
        read_probe(extract_config(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunked_prefill_size": 512}, "chunked_prefill_size was 2048, is 512"),
        ({"sglang_version": "0.5.15"}, "sglang_version was 0.5.14, is 0.5.15"),
        ({"capture_hash": "d"}, "capture_hash was c, is d"),
    ],
)
def test_extraction_from_another_kind_of_server_is_refused(fake, config, passing, changes, words):
    write_probe(config, passing)
    fake.write_handshake(**changes)
    with pytest.raises(UserError, match=words):
        require_probe(extract_config(config), fake.target, attach(fake), longest=40)


def test_another_number_of_copies_makes_the_same_dumps_and_another_split_of_sums_does_not(fake):
    prints = []
    for ranks in ((1, 1, 1), (1, 1, 8), (8, 1, 8)):
        fake.write_handshake(ranks=dict(zip(("tp", "attn_tp", "writers"), ranks, strict=True)))
        server = SimpleNamespace(handshake=json.loads((fake.dump_dir / "handshake.json").read_text()))
        prints.append(fingerprint(fake.target, server)["digest"])
    assert prints[0] == prints[1] != prints[2]


def test_extraction_of_longer_samples_than_probed_is_refused(fake, config, passing):
    write_probe(config, passing)
    with pytest.raises(UserError, match="longest sample had 40 tokens, this corpus has 41"):
        require_probe(extract_config(config), fake.target, attach(fake), longest=41)


def test_the_saved_probe_is_json_with_figures_and_thresholds(config, passing):
    path = write_probe(config, passing)
    saved = json.loads(path.read_text())
    assert {"name", "measured", "threshold", "verdict"} <= set(saved["gates"][0])
    assert saved["fingerprint"]["boundaries"] == [2, 4]
