"""A real SGLang server on the CPU: launch, capture under every kind of traffic, planted faults and failures."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import capture_faults
import httpx
import psutil
import pytest
import torch
from server_helpers import failed, record, trials

from eagle3_utils.config import ProbeConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import DumpError
from eagle3_utils.serving.launch import checks
from eagle3_utils.serving.probe import run_probe
from eagle3_utils.serving.probing import gates
from eagle3_utils.serving.server import AttachedServer, CaptureSpec, Server, capture_spec
from eagle3_utils.target import load_target

pytestmark = pytest.mark.server

CHUNK = 192  # small, so that most batches are split
LIMIT = 690  # the model's own longest sequence, and `max_seq_len`
MAX_BYTES = 4 << 20  # staging: 1.3 of the longest dumps (4,616 bytes a token)


@pytest.fixture(scope="module")
def target(example_target, tmp_path_factory):
    """The example target, but made for shorter sequences, so that one of the full length takes two seconds."""
    folder = tmp_path_factory.mktemp("model")
    for path in example_target.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": LIMIT}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return load_target(str(folder))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    return ProbeConfig(
        run_dir=str(run), model="example", device="cpu", max_seq_len=LIMIT, chunked_prefill_size=CHUNK,
        num_probe_samples=3, num_concurrent=6, num_pilot_samples=6, staging_max_bytes=MAX_BYTES,
        extra_server_args=["--enable-mixed-chunk"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fault") / "fault"
    path.write_text("none")
    return path


@pytest.fixture(scope="module")
def server(target, config, fault_file, tmp_path_factory):
    run = Path(config.run_dir)
    spec = capture_spec(config, target, "server-test")
    spec.dump_dir.mkdir()
    (spec.dump_dir / "hs-stale.safetensors").write_bytes(b"of a server that died")
    environment = {
        "PYTHONPATH": capture_faults.install(tmp_path_factory.mktemp("plugin")),
        "EAGLE3_TEST_FAULT_FILE": str(fault_file),
        "SGLANG_HS_WAIT_SECONDS": "15",
        "SGLANG_TEST_RETRACT": "true",  # SGLang's own test aid: now and then a decoding request starts all over
        "SGLANG_TEST_RETRACT_INTERVAL": "4",
    }
    with Server(config, target, run / "server.log", run, spec, environment=environment) as server:
        yield server


@pytest.fixture
def fault(fault_file):
    yield fault_file.write_text
    fault_file.write_text("none")


@pytest.fixture(scope="module")
def texts(target) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.path)
    root = Path(__file__).parents[1]
    return tokenizer("\n".join(path.read_text() for path in sorted((root / "eagle3_utils").glob("*.py"))))["input_ids"]


@pytest.fixture(scope="module")
def records(texts):
    rng = random.Random(0)
    starts = [(rng.randrange(len(texts) - 256), rng.randint(8, 80)) for _ in range(9)]
    samples = [texts[start : start + n] for start, n in starts] + [texts[:200]]
    return [record(ids, f"r{i}") for i, ids in enumerate(samples)]


# --- launch ----------------------------------------------------------------------------------------------------------


def test_a_ready_server_is_the_one_just_launched(server, target):
    assert server.handshake["nonce"] == server.nonce
    assert psutil.Process(server.handshake["pid"]).is_running()
    assert server.handshake["boundaries"] == [2, 15, 27] and server.handshake["method"] == "model"
    assert not (server.dump_dir / "hs-stale.safetensors").exists(), "stale dumps are cleared before the start"


def test_its_port_and_its_dump_folder_are_taken_now(server, target, config):
    port = int(server.url.rsplit(":", 1)[1])
    second = config.model_copy(update={"port": port})
    with pytest.raises(UserError, match=rf"port {port} is taken by pid {server.pid} \("):
        checks.check_port(second.port)
    run = Path(config.run_dir) / "second"
    spec = CaptureSpec([1], server.dump_dir, MAX_BYTES)
    with pytest.raises(UserError, match="a live server"):
        Server(config, target, run / "server.log", run, spec).start()


def test_it_can_be_attached_to_and_outlives_that(server, target):
    attached = AttachedServer(server.url, server.dump_dir, target, server.capture)
    assert attached.handshake == server.handshake
    with pytest.raises(UserError, match="expected"):
        AttachedServer(server.url, server.dump_dir, target, CaptureSpec([2], server.dump_dir))


# --- the probe, and the faults it is there for ------------------------------------------------------------------------


def test_the_probe_passes(server, target, config, records):
    report = run_probe(server, target, config, records)
    assert report.passed, report.table().to_string()
    assert [row["found_boundary"] for row in report.layers] == [2, 15, 27, 30]
    detail = next(gate.detail for gate in report.gates if gate.name == "invariance")
    assert "in pieces" in detail and "the longest sample cut" in detail, "it is longer than a chunk"


def test_layers_shifted_by_one_are_caught(server, target, config, records, fault):
    fault("shift")
    examined = trials(server, target, config, records)
    examined.layers()
    assert "layers against Hugging Face" in failed(examined)
    assert [row["found_boundary"] for row in examined.layer_rows] == [3, 16, 28, 30]


def test_a_final_state_from_before_the_norm_is_caught(server, target, config, records, fault):
    fault("pre_norm")
    examined = trials(server, target, config, records)
    examined.logprobs()
    assert failed(examined) == ["log-probabilities rebuilt"]


def test_staging_too_small_for_the_longest_sample_is_caught(server, target, config, texts):
    """It holds three dumps of 250 tokens: every one of them arrives, and extraction would still crawl."""
    examined = trials(server, target, config.model_copy(update={"num_concurrent": 2}), [record(texts[:250])])
    examined.capacity()
    assert failed(examined) == ["capacity"] and "staging holds 3" in examined.gates[0].measured


def test_a_stale_dump_that_appears_under_a_running_server_is_caught(server, target, config, records):
    stale = server.dump_dir / "hs-stale-too.safetensors"
    stale.write_bytes(b"of another server that dumps here")
    examined = trials(server, target, config, records)
    examined.quiet()
    stale.unlink()
    assert failed(examined) == ["nothing unasked"]


def test_a_corpus_longer_than_max_seq_len_is_caught(server, target, config, texts):
    examined = trials(server, target, config, [record(texts[: LIMIT + 1])])
    examined.capacity()
    assert failed(examined) == ["capacity"]


# --- traffic ---------------------------------------------------------------------------------------------------------


def test_chunks_batches_decoding_and_ordinary_traffic_together(server, texts, target):
    """Wanted requests that also decode, ordinary ones and health checks, all at once, chunked, some retracted."""
    rng = random.Random(1)
    lengths = [1, 2, CHUNK - 1, CHUNK + 1, 2 * CHUNK, 3, 10, 20]  # all their dumps fit into staging at once
    sequences = {f"hs-mix-{i}": texts[rng.randrange(2000) :][:n] for i, n in enumerate(lengths)}
    stop = threading.Event()

    def ordinary():
        while not stop.is_set():
            server.client.generate(texts[:40], max_new_tokens=6)
            server.client.is_healthy()

    thread = threading.Thread(target=ordinary)
    thread.start()
    try:
        dumps = server.client.capture_many(sequences.items(), 10, max_new_tokens=5)
    finally:
        stop.set()
        thread.join()
    assert "Testing retraction" in server.log_path.read_text()
    for rid, ids in sequences.items():
        assert gates.content_problem(dumps[rid], ids, 3, target, torch.bfloat16) is None
        alone, _ = server.client.capture(ids, f"{rid}-alone")
        assert gates.likeness(dumps[rid], alone).mean > 0.99
    assert [path.name for path in server.dump_dir.iterdir()] == ["handshake.json"]


def test_a_request_as_long_as_the_model_takes_and_one_too_long(server, texts, target):
    """SGLang keeps positions for tokens it might generate; the longest sample needs them."""
    ids = texts[:LIMIT]
    assert target.max_position_embeddings == len(ids)
    dump, _ = server.client.capture(ids, "hs-longest")
    assert gates.content_problem(dump, ids, 3, target, torch.bfloat16) is None
    with pytest.raises(DumpError, match="exceeds the maximum allowed length"):
        server.client.generate(texts[: LIMIT + 12], rid="hs-too-long")
    assert [path.name for path in server.dump_dir.iterdir()] == ["handshake.json"]


def test_the_same_id_and_the_same_prompt_twice(server, texts):
    first, _ = server.client.capture(texts[:60], "hs-twice")
    second, _ = server.client.capture(texts[:60], "hs-twice")
    assert torch.equal(first.aux, second.aux) and torch.equal(first.final, second.final)


def test_with_and_without_log_probabilities_the_states_are_the_same(server, texts):
    plain, _ = server.client.capture(texts[:100], "hs-plain")
    scored, _ = server.client.capture(texts[:100], "hs-scored", return_logprob=True, logprob_start_len=0)
    assert torch.equal(plain.final, scored.final) and torch.equal(plain.aux, scored.aux)


def test_a_request_aborted_midway_leaves_no_half_dump_and_hurts_nobody(server, texts, target):
    """It is in the first of its four pieces when it is aborted, and others come to share its batches."""
    others = {"hs-beside-0": texts[300:500], "hs-beside-1": texts[500:560]}
    before = {rid: server.client.capture(ids, f"{rid}-before")[0] for rid, ids in others.items()}
    log_length, deadline = len(server.log_path.read_text()), time.monotonic() + 30
    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(server.client.generate, texts[:LIMIT], rid="hs-abort")
        while f"#pending-token: {LIMIT - CHUNK}," not in server.log_path.read_text()[log_length:]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        httpx.post(f"{server.url}/abort_request", json={"rid": "hs-abort"}, timeout=30)
        dumps = server.client.capture_many(others.items(), 2)
        assert aborted.result()["meta_info"]["finish_reason"]["type"] == "abort"
    for rid, ids in others.items():
        assert gates.content_problem(dumps[rid], ids, 3, target, torch.bfloat16) is None
        assert gates.likeness(dumps[rid], before[rid]).mean > 0.999
    assert [path.name for path in server.dump_dir.iterdir()] == ["handshake.json"]


# --- staging and failures --------------------------------------------------------------------------------------------


def test_capture_waits_while_nobody_takes_dumps_and_loses_none(server, texts):
    """Eight dumps of 0.7 MB into staging of 4 MB: the server stands still until they are taken."""
    rids = [f"hs-slow-{i}" for i in range(8)]
    threads = [
        threading.Thread(target=server.client.generate, args=(texts[i : i + 150],), kwargs={"rid": rid})
        for i, rid in enumerate(rids)
    ]
    for thread in threads:
        thread.start()
    for rid in sorted(rids, key=lambda name: int(name.rsplit("-", 1)[1])):
        path = server.client.wait_for_dump(rid, 60)
        time.sleep(0.05)
        path.unlink()
    for thread in threads:
        thread.join()


def test_dumps_that_nobody_takes_become_an_error_in_time(server, texts):
    taken = [f"hs-full-{i}" for i in range(7)]
    with pytest.raises(DumpError, match="no dump was taken for 15 s"):
        for rid in taken:
            server.client.generate(texts[:150], rid=rid)
    for path in server.dump_dir.glob("hs-*"):
        path.unlink()
    server.client.capture(texts[:150], "hs-full-again")


def test_a_full_disk_reaches_the_client_and_passes_when_there_is_room(server, texts, fault):
    fault("disk_full")
    with pytest.raises(DumpError, match="No space left"):
        server.client.capture(texts[:20], "hs-disk", wait_seconds=10)
    fault("none")
    (server.dump_dir / "hs-disk.error").unlink(missing_ok=True)
    server.client.capture(texts[:20], "hs-disk-again")


def test_a_rid_that_is_no_file_name_is_answered_with_an_error(server, texts):
    with pytest.raises(DumpError, match="a rid may hold"):
        server.client.generate(texts[:5], rid="hs-a/b")
