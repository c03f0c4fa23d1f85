"""Two gloo ranks on a CPU against one: the same loss curve on the same global batches."""

import os
import subprocess
import sys

import pytest
import torch
import yaml
from draft_runs import folder_of

from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.distributed import Ranks, open_ranks
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.errors import UserError

pytest_plugins = ["draft_runs"]  # fixtures


def test_two_ranks_give_the_loss_curve_of_one(make_config, tmp_path):
    one = make_config("one", batches_per_step=2, epochs=2.0)
    two = make_config("two", batches_per_step=2, epochs=2.0)
    train(one)
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(two.model_dump()))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "eagle3_utils.draft.train", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    a, b = (read_journal(folder_of(config), "train") for config in (one, two))
    assert [e["loss"] for e in a] == pytest.approx([e["loss"] for e in b], abs=1e-5)
    assert [e["tokens"] for e in a] == [e["tokens"] for e in b]


def test_steps_that_ranks_cannot_share_are_refused(make_config):
    ranks = Ranks(0, 2, torch.device("cpu"))
    with pytest.raises(UserError, match="no multiple of 2 ranks"):
        train(make_config(batches_per_step=3), ranks=ranks)


def test_plain_process_is_one_rank_and_sums_are_its_own(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with open_ranks("cpu") as ranks:
        assert (ranks.rank, ranks.num_ranks, ranks.is_first) == (0, 1, True)
        assert ranks.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
