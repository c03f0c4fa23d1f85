"""Fixtures of the tests that train: stores of a tiny target's greedy text with its real states, and configs on them."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.runs import data_folder
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

LAYERS = [1, 2, 4]
PROMPT, ANSWER = 8, 24


@pytest.fixture(scope="module")
def states(tiny_llama, tmp_path_factory):
    """A data folder with train (8 samples) and val (4); made once for all test files."""
    folder = tmp_path_factory.getbasetemp() / "tiny_states"
    if not (folder / "complete").exists():
        make_states(tiny_llama, folder)
        (folder / "complete").touch()
    return folder


def make_states(tiny_llama, folder):
    """Greedy continuations of random prompts, and what the target thought at each token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    prompts = torch.randint(10, 2000, (12, PROMPT), generator=torch.Generator().manual_seed(0))
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER, do_sample=False)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    aux = torch.stack([output.hidden_states[layer + 1] for layer in LAYERS], dim=2).bfloat16()
    final = output.hidden_states[-1].bfloat16()
    mask = np.array([0] * PROMPT + [1] * (ids.shape[1] - PROMPT), np.uint8)
    for split, rows in (("train", range(8)), ("val", range(8, 12))):
        meta = StoreMeta(hidden_size=64, aux_layers=LAYERS, codec="bf16", final="supervised", fingerprint="tiny")
        with StoreWriter(folder / "hidden_states" / split, meta, shard_bytes=1 << 28) as writer:
            for row in rows:
                tokens = ids[row].numpy().astype(np.int32)
                writer.add(Sample(f"{split}-{row}", tokens, mask, aux[row], final[row], source="test"))


@pytest.fixture
def make_config(states, tiny_llama, tmp_path):
    """make(name, **changes) -> TrainConfig of a fresh run that shares the stores."""

    def make(name="run", **changes):
        return config_on(states, tiny_llama, tmp_path / name, **changes)

    return make


def config_on(states, tiny_llama, run_folder, **changes):
    """A small training on the shared stores, in a run folder of its own."""
    data = run_folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    if not (data / "hidden_states").exists():
        (data / "hidden_states").symlink_to(states / "hidden_states")
    values = dict(
        run_dir=str(run_folder), data_root=str(data), model=str(tiny_llama), device="cpu",
        draft_vocab_size=256, ttt_steps=3, epochs=3.0, max_tokens_per_step=64, learning_rate=3e-3,
        validate_every_steps=4, checkpoint_every_steps=4, max_seq_len=64,
    )  # fmt: skip
    return TrainConfig(**(values | changes))


def folder_of(config):
    """The draft folder of a run."""
    return data_folder(config) / "draft"


def train_until(config, step):
    """Train until a SIGTERM right after a step ends it."""

    def stop(**fields):
        if fields["done"] == step:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train(config, progress=stop)


def run_on_two_ranks(config, path):
    """Train under torchrun; the entries of the journal's training steps. path: for the parameters."""
    path.write_text(yaml.safe_dump(config.model_dump()))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "eagle3_utils.draft.train", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return read_journal(folder_of(config), "train")
