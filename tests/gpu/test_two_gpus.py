"""Two GPUs, through NCCL, give one GPU's loss curve on the same batches; one goes on from what two have saved."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))
from draft_runs import folder_of, run_on_two_ranks

from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.checkpoint import checkpoint_folders
from eagle3_utils.draft.training.journal import read_journal

pytest_plugins = ["draft_runs"]  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
SHARED = {"device": "cuda", "batches_per_step": 2, "epochs": 2.0, "keep_checkpoints": 9, "checkpoint_every_steps": 2}


def same_curve(one, two):
    """Within bfloat16."""
    assert [entry["loss"] for entry in two] == pytest.approx([entry["loss"] for entry in one], rel=2e-2)
    assert [entry["grad_norm"] for entry in two] == pytest.approx([entry["grad_norm"] for entry in one], rel=0.1)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_gpus_give_the_loss_curve_of_one_which_can_go_on_from_their_checkpoint(sharding, make_config, tmp_path):
    one = make_config("one", **SHARED)
    train(one)
    curve = read_journal(folder_of(one), "train")
    two = make_config("two", sharding=sharding, **SHARED)
    same_curve(curve, run_on_two_ranks(two, tmp_path / "two.yaml"))
    for later in checkpoint_folders(folder_of(two) / "checkpoints")[1:]:
        shutil.rmtree(later)
    (folder_of(two) / "metrics.jsonl").unlink()
    train(two)  # one GPU, from step 2 on
    same_curve(curve[2:], read_journal(folder_of(two), "train"))
