"""The Kimi path on a CPU: a tiny random DeepSeek-V3 passes every gate of the probe through a real server.

MLA attention, mixture of experts and YaRN; Hugging Face's forward of the same checkpoint is the reference, and the
anchored check, which needs no reference, finds the same layers. The server runs in another Python environment, which
has SGLang but not this package; with the overlap schedule, unlike that of test_server.py.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import deepseek_on_cpu
import pytest
from deepseek_checks import check_every_gate, check_the_anchored_check
from other_python import make_other_python

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.launch import checks
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.target import load_target

pytestmark = pytest.mark.server
LAYERS = [2, 3, 4]  # boundaries 3, 4, 5: ids that DeepSeek's own setter would take as they are


@pytest.fixture(scope="module")
def served(example_target, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    folder = deepseek_on_cpu.make_tiny_deepseek(run / "model", example_target)
    target = load_target(str(folder))
    python, packages = make_other_python(run / "other")
    config = ProbeConfig(
        run_dir=str(run), model=str(folder), device="cpu", max_seq_len=128, aux_layers=LAYERS,
        num_probe_samples=3, num_concurrent=8, num_pilot_samples=8, chunked_prefill_size=256, server_python=python,
        disable_overlap_schedule=False,
    )  # fmt: skip
    environment = {"PYTHONPATH": os.pathsep.join([deepseek_on_cpu.install(run / "plugin"), packages])}
    spec = capture_spec(config, target)
    with Server(config, target, run / "server.log", run, spec, environment=environment) as server:
        yield server, target, config


@pytest.fixture(scope="module")
def records():
    rng = random.Random(0)
    return [
        SimpleNamespace(id=f"r{i}", input_ids=[rng.randrange(49152) for _ in range(rng.randint(30, 120))])
        for i in range(8)
    ]


def test_the_servers_python_has_sglang_and_nothing_of_ours_but_the_plugin_folder(served):
    """The handshake is written by the copy of the capture package that was put on its PYTHONPATH."""
    server, _, config = served
    other = checks.ask_interpreter(config.server_python, server._environment)
    assert other.sglang == "0.5.14" and not other.plugin
    assert (Path(server._plugin_folder.name) / "eagle3_capture" / "hooks.py").is_file()
    assert server.handshake["nonce"] == server.nonce


def test_every_gate_passes_and_layers_are_those_of_hugging_face(served, records):
    server, target, config = served
    assert server.handshake["model_class"] == "DeepseekV3ForCausalLM"
    check_every_gate(server, target, config, records)


def test_the_anchored_check_finds_the_same_layers_without_a_reference(served, records):
    server, target, config = served
    check_the_anchored_check(server, target, config, records)
