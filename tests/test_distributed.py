"""Two gloo ranks on a CPU against one: the same loss curve on the same global batches."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from draft_runs import config_on, folder_of, run_on_two_ranks
from safetensors.torch import load_file

from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.checkpoint import checkpoint_folders
from eagle3_utils.draft.training.distributed import ONE_RANK, Ranks, open_ranks
from eagle3_utils.draft.training.folder import sole_training
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.draft.training.launch import run_training
from eagle3_utils.draft.training.optimizer import join_master
from eagle3_utils.errors import UserError
from eagle3_utils.runs import open_stage, repo_root

pytest_plugins = ["draft_runs"]  # fixtures


SHARED = {"batches_per_step": 2, "epochs": 2.0, "keep_checkpoints": 9, "checkpoint_every_steps": 2,
          "validate_every_steps": 1}  # fmt: skip


@pytest.fixture(scope="module")
def draft_of_one(states, tiny_llama, tmp_path_factory):
    """The draft folder of a training on one rank."""
    config = config_on(states, tiny_llama, tmp_path_factory.mktemp("one"), **SHARED)
    train(config)
    return folder_of(config)


def same_journal(one, two, start=0):
    """Training, validations and the best weights' figures in two draft folders; the second went on from step start."""
    for kind, first in (("train", start + 1), ("validation", start), ("best", 0)):
        wanted = [entry for entry in read_journal(one, kind) if entry["step"] >= first]
        entries = read_journal(two, kind)
        assert [entry["step"] for entry in entries] == [entry["step"] for entry in wanted] != []
        names = ("tokens", "loss", "grad_norm") if kind == "train" else wanted[0]
        for name in names:
            for entry, other in zip(entries, wanted, strict=True):
                tolerance = {"rel": 1e-4} if name == "grad_norm" else {"abs": 1e-5}
                assert entry[name] == pytest.approx(other[name], **tolerance), (kind, name, entry["step"])


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_ranks_learn_what_one_does_and_either_goes_on_from_their_checkpoint(
    sharding, draft_of_one, make_config, tmp_path
):
    config = make_config("two", sharding=sharding, **SHARED)
    run_on_two_ranks(config, tmp_path / "two.yaml")
    same_journal(draft_of_one, folder_of(config))
    by_two = [lambda: run_on_two_ranks(config, tmp_path / "two.yaml")] if sharding == "fsdp" else []
    for go_on in [*by_two, lambda: train(config)]:
        folders = checkpoint_folders(folder_of(config) / "checkpoints")
        parts = [file.name for file in sorted(folders[0].glob("part-*"))]
        assert parts == ["part-00-of-02.safetensors", "part-01-of-02.safetensors"]
        for later in folders[1:]:
            shutil.rmtree(later)
        (folder_of(config) / "metrics.jsonl").unlink()
        go_on()  # from step 2 on
        same_journal(draft_of_one, folder_of(config), start=2)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_rank_without_a_batch_to_validate_waits_for_the_others(sharding, make_config, tmp_path):
    """All validation samples fit into one batch, also when the resumed training begins with a validation."""
    wide = SHARED | {"max_tokens_per_step": 256}
    one, two = make_config("one", **wide), make_config("two", sharding=sharding, **wide)
    train(one)
    run_on_two_ranks(two, tmp_path / "two.yaml")
    same_journal(folder_of(one), folder_of(two))
    (folder_of(two) / "metrics.jsonl").unlink()
    run_on_two_ranks(two, tmp_path / "two.yaml")
    same = read_journal(folder_of(two), "validation")
    assert [entry["step"] for entry in same] == [2]


def test_all_ranks_end_when_another_training_is_at_work_and_when_that_ends_begin(make_config, tmp_path):
    config = make_config("two", num_gpus=2, **SHARED)
    said = r"another training \(pid .*\n  wait for its end"
    with sole_training(folder_of(config), ONE_RANK), pytest.raises(UserError, match=said):
        run_training(config, open_stage(config, inputs={}))
    assert len(run_on_two_ranks(config, tmp_path / "two.yaml")) == 4
    changed = config.model_copy(update={"learning_rate": 1e-3})
    assert len(run_on_two_ranks(changed, tmp_path / "two.yaml")) == 4  # the finished draft gave way
    assert (folder_of(config).with_name("draft.old") / "report.json").is_file()


ONE_BF16_STEP = """
import sys
import torch
from dataclasses import make_dataclass
from pathlib import Path
from eagle3_utils.draft.training.checkpoint import Position, save_checkpoint
from eagle3_utils.draft.training.distributed import open_ranks
from eagle3_utils.draft.training.optimizer import MasterAdamW

with open_ranks("cpu") as ranks:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
    model.config = make_dataclass("Shape", [])()
    if ranks.num_ranks > 1:
        ranks.shard(model)
    optimizer = MasterAdamW(model.parameters(), sum_over_ranks=ranks.sum if ranks.num_ranks > 1 else None)
    model(torch.ones(3, 6, dtype=torch.bfloat16) / ranks.num_ranks).square().sum().backward()
    optimizer.step(0.1, 1.0)
    save_checkpoint(Path(sys.argv[1]), model, optimizer, Position(step=1), 1, ranks)
"""


def test_lower_halves_of_sharded_masters_are_in_the_checkpoint(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(ONE_BF16_STEP)
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment, saved = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root())}, {}
    for name, launcher in (("one", []), ("two", two)):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, *launcher, str(script), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        parts = (load_file(part) for part in (folder / "step-000001").glob("*.safetensors"))
        saved[name] = {key: tensor for part in parts for key, tensor in part.items()}
    assert saved["one"].keys() == saved["two"].keys()
    lower = saved["two"]["optimizer.lower_halves.0"]
    assert lower.dtype == torch.int16 and lower.shape == (5, 6) and (lower != 0).any()
    master = {name: join_master(each["model.weight"], each["optimizer.lower_halves.0"]) for name, each in saved.items()}
    torch.testing.assert_close(master["two"], master["one"], rtol=1e-2, atol=0)


def test_steps_that_ranks_cannot_share_are_refused(make_config):
    ranks = Ranks(0, 2, torch.device("cpu"))
    with pytest.raises(UserError, match="no multiple of 2 ranks"):
        train(make_config(batches_per_step=3), ranks=ranks)


def test_plain_process_is_one_rank_and_sums_are_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.is_first) == (0, 1, True)
        assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
