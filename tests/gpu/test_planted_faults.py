"""Faults planted in an exported draft, served by SGLang: the parity report names each, and no answer is wrong.

    EAGLE3_GPU_DRAFT=outputs/smollm2-gpu/data/draft/export python -m pytest tests/gpu

EAGLE3_GPU_TARGET is the target's folder ("example" when it is not set), EAGLE3_GPU_SERVER_ARGS are further SGLang
flags. A running server cannot be given another draft (its layer ids, d2t and RoPE are read at the start), so one
server per fault starts, all at once on one GPU, each with a small share of its memory: three to four minutes in all.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_utils import runs
from eagle3_utils.acceptance import changes, forward, heldout, parity, served
from eagle3_utils.acceptance.prompt_sets import read_prompts
from eagle3_utils.acceptance.speculate import load_reference_model
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig
from eagle3_utils.draft.export import load_draft
from eagle3_utils.serving.server import Server
from eagle3_utils.target import load_target, load_tokenizer

DRAFT = os.environ.get("EAGLE3_GPU_DRAFT")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's EAGLE3 needs a CUDA GPU"),
    pytest.mark.skipif(DRAFT is None, reason="EAGLE3_GPU_DRAFT does not name an exported draft"),
]
SHAPE, PER_SOURCE, NUM_TOKENS, FIRST_PORT = TreeShape(3), 20, 128, 23000


def layer_ids_shifted(config, tensors):
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in ids]


def d2t_absolute(config, tensors):
    draft_ids = torch.arange(len(tensors["d2t"]))
    absolute = tensors["d2t"] + draft_ids
    # as far as the vocabulary goes: beyond it SGLang would read outside the embedding table and crash
    tensors["d2t"] = torch.minimum(absolute, config["vocab_size"] - 1 - draft_ids)


def lm_head_dropped(config, tensors):
    del tensors["lm_head.weight"]


def rope_changed(config, tensors):
    theta = 1_000_000.0 if config["rope_parameters"]["rope_theta"] == 10_000.0 else 10_000.0
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    config |= {"rope_theta": theta, "rope_scaling": None}


FAULTS = {  # what is done to the draft → how the report names it
    layer_ids_shifted: "layer ids are 1 too high",
    d2t_absolute: "d2t holds absolute ids",
    lm_head_dropped: "lm_head is missing",
    rope_changed: "RoPE is plain with theta",
}


@pytest.fixture(scope="module")
def target():
    return load_target(os.environ.get("EAGLE3_GPU_TARGET", "example"))


@pytest.fixture(scope="module")
def prompts(target):
    paths = [runs.resolve_path(path) for path in EvaluateConfig().prompts]
    return read_prompts(paths, load_tokenizer(target), PER_SOURCE, max_tokens=512)


def plant(fault, folder: Path) -> Path:
    """A copy of the draft with the fault in it; the sound one for None."""
    shutil.copytree(DRAFT, folder)
    if fault is not None:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        fault(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def served_runs(target, prompts, tmp_path_factory):
    """What SGLang gives with the sound draft (None) and with each fault, served side by side."""
    folder = tmp_path_factory.mktemp("servers")
    small = f"--max-total-tokens 65536 --max-running-requests {len(prompts)} --cuda-graph-max-bs-decode 64".split()
    extra = os.environ.get("EAGLE3_GPU_SERVER_ARGS", "--sampling-backend pytorch --grammar-backend none").split()

    def run(number_and_fault):
        number, fault = number_and_fault
        place = folder / str(number)
        config = EvaluateConfig(
            device="cuda", attention_backend="triton", mem_fraction_static=0.5, port=FIRST_PORT + 200 * number,
            startup_timeout_seconds=230.0, extra_server_args=[*extra, *small, "--disable-radix-cache"],
        )  # fmt: skip
        flags = served.speculative_flags(plant(fault, folder / f"draft-{number}"), SHAPE)
        with Server(config, target, place / "server.log", place, extra_args=flags) as server:
            return fault, served.measure(server.client, prompts, NUM_TOKENS, 64, "3 · 1 · 4", SHAPE)

    with ThreadPoolExecutor(len(FAULTS) + 1) as pool:
        return dict(pool.map(run, enumerate([None, *FAULTS])))


@pytest.fixture(scope="module")
def model(target, served_runs):
    """The target in PyTorch, once the servers are gone."""
    return load_reference_model(target, torch.float32, "cuda")


@pytest.fixture(scope="module")
def draft(target, served_runs):
    return load_draft(Path(DRAFT), target, "cuda", torch.float32)


def test_sglangs_histogram_accounts_for_every_token(served_runs):
    for run in served_runs.values():
        assert all(answer.verifications == sum(answer.histogram) for answer in run.answers)
        for answer in run.answers:
            tokens = 1 + sum(accepted + 1 for accepted in answer.num_accepted)  # the first comes from prefill
            assert not answer.histogram or 0 <= tokens - answer.completion_tokens <= SHAPE.num_steps


def report_of(run, model, draft, target, prompts):
    """The parity report of a served run, with every fault tried."""
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = [answer for answer in run.answers if answer.histogram]

    def batches_of(aux_layers):
        asked = [by_id[answer.prompt_id] for answer in answers]
        return forward.packed_samples(model, asked, [answer.output_ids for answer in answers], aux_layers)

    accepted = heldout.replay_all(draft, batches_of(draft.config.aux_layers), SHAPE)
    served_accepted = [answer.num_accepted for answer in answers]
    report = parity.compare(accepted, served_accepted, SHAPE.num_steps)
    return parity.diagnose(report, draft, target, batches_of, SHAPE, served_accepted)


def test_the_sound_draft_is_served_as_it_was_trained(served_runs, model, draft, target, prompts):
    report = report_of(served_runs[None], model, draft, target, prompts)
    print(report.text())
    assert report.passed and report.causes == []
    assert 1 + sum(report.served) > 1.2, "a draft that is hardly ever accepted proves nothing"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, served_runs, model, draft, target, prompts):
    report = report_of(served_runs[fault], model, draft, target, prompts)
    print(report.text())
    assert not report.passed
    assert any(cause.startswith(FAULTS[fault]) for cause in report.causes), report.text()


def test_no_draft_however_broken_makes_an_answer_wrong(served_runs, model, target, prompts):
    by_id, sound = {prompt.id: prompt for prompt in prompts}, served_runs[None]
    rounded = load_reference_model(target, torch.bfloat16, "cuda")
    allowance = changes.rounding_allowance(model, rounded, by_id, sound.answers)
    for fault, run in served_runs.items():
        found = changes.changes(model, by_id, sound, run, allowance)
        assert all(change.is_close_call for change in found), (fault, found)
