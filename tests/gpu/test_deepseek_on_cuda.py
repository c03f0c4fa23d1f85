"""Every gate of the probe on a tiny DeepSeek-V3 (MLA, mixture of experts, YaRN) that SGLang serves on CUDA.

On one GPU, and where there are two also with tensor parallelism (one rank writes) and with attention data parallelism
(the first rank of each group writes). Decoding runs by CUDA graphs; the overlap schedule is off with tensor parallelism
and on otherwise. EAGLE3_GPU_SERVER_ARGS are further SGLang flags.
"""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest
import torch
from deepseek_checks import check_every_gate, check_the_anchored_check
from deepseek_on_cpu import make_tiny_deepseek

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.probing import gates, trials
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.target import load_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LAYERS = [2, 3, 4]
PARALLEL = {"one": (1, 1, 1), "tensor": (2, 1, 1), "attention-data": (2, 2, 2)}  # ranks, groups, writers


@pytest.fixture(scope="module", params=PARALLEL)
def served(request, tmp_path_factory):
    tp_size, dp_size, num_writers = PARALLEL[request.param]
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")
    run = tmp_path_factory.mktemp(request.param)
    folder = make_tiny_deepseek(run / "model", load_target("example").path)
    target = load_target(str(folder))
    extra = os.environ.get("EAGLE3_GPU_SERVER_ARGS", "--sampling-backend pytorch --grammar-backend none").split()
    small = ["--moe-runner-backend", "triton", "--max-total-tokens", "65536"]
    small += ["--cuda-graph-backend-decode", "full", "--cuda-graph-max-bs-decode", "8", "--decode-log-interval", "4"]
    config = ProbeConfig(
        run_dir=str(run), model=str(folder), device="cuda", attention_backend="triton", max_seq_len=1024,
        aux_layers=LAYERS, num_probe_samples=6, num_pilot_samples=32, chunked_prefill_size=512, tp_size=tp_size,
        dp_size=dp_size, mem_fraction_static=0.5, extra_server_args=[*extra, *small],
        disable_overlap_schedule=request.param == "tensor",
    )  # fmt: skip
    with Server(config, target, run / "server.log", run, capture_spec(config, target)) as server:
        assert server.handshake["ranks"]["writers"] == num_writers
        yield server, target, config


@pytest.fixture(scope="module")
def records():
    rng = random.Random(0)
    return [
        SimpleNamespace(id=f"r{i}", input_ids=[rng.randrange(49152) for _ in range(rng.randint(30, 1000))])
        for i in range(32)
    ]


def test_every_gate_passes_and_layers_are_those_of_hugging_face(served, records):
    server, target, config = served
    check_every_gate(server, target, config, records)


def test_the_anchored_check_finds_the_same_layers_without_a_reference(served, records):
    server, target, config = served
    check_the_anchored_check(server, target, config, records)


def test_requests_that_also_decode_by_cuda_graph_leave_the_states_of_their_prompts(served, records):
    server, target, _ = served
    sequences = {f"hs-decoding-{record.id}": record.input_ids for record in records[:8]}
    dumps = server.client.capture_many(sequences.items(), 8, max_new_tokens=32, sampling_params={"ignore_eos": True})
    assert "cuda graph: True" in server.log_path.read_text()
    for rid, ids in sequences.items():
        alone, _ = server.client.capture(ids, f"{rid}-alone")
        assert gates.content_problem(dumps[rid], ids, len(LAYERS), target, torch.bfloat16) is None
        assert gates.likeness(dumps[rid], alone).within(trials._MIXTURE)
