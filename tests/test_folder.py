"""A draft's folder: who trains in it, and when what lies there gives way."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_utils.draft.training.checkpoint import Position, checkpoint_folders, save_checkpoint
from eagle3_utils.draft.training.distributed import ONE_RANK
from eagle3_utils.draft.training.folder import checkpoint_to_go_on_from, sole_training
from eagle3_utils.draft.training.optimizer import MasterAdamW
from eagle3_utils.errors import UserError

LOG = logging.getLogger("test_folder")
MADE = {"learning_rate": 0.003, "init_from": None, "states": "a"}


def leave_checkpoint(folder, finished):
    model = torch.nn.Linear(2, 2)
    save_checkpoint(
        folder / "checkpoints", model, MasterAdamW(model.parameters()), Position(step=3, parameters=MADE), 1
    )
    if finished:
        (folder / "report.json").write_text("{}")
    return folder


def go_on(folder, **changes):
    return checkpoint_to_go_on_from(folder, MADE | changes, ONE_RANK, LOG)


@pytest.mark.parametrize("finished", [False, True])
def test_the_same_training_goes_on(finished, tmp_path):
    path, position = go_on(leave_checkpoint(tmp_path / "draft", finished))
    assert path.name == "step-000003" and position.step == 3
    assert go_on(tmp_path / "other") is None


@pytest.mark.parametrize("changes", [{"learning_rate": 0.1}, {"states": "b"}])
def test_a_finished_draft_gives_way_and_takes_the_place_of_an_older_one(changes, tmp_path, caplog):
    folder = leave_checkpoint(tmp_path / "draft", finished=True)
    (tmp_path / "draft.old" / "export").mkdir(parents=True)
    with sole_training(folder, ONE_RANK), caplog.at_level(logging.INFO):
        assert go_on(folder, **changes) is None
        assert f"moved to {tmp_path / 'draft.old'}, training begins anew" in caplog.text
        with pytest.raises(UserError, match="is at work here"), sole_training(folder, ONE_RANK):  # the lock stays
            pass
    assert [path.name for path in folder.iterdir()] == ["training.lock"]
    assert {path.name for path in (tmp_path / "draft.old").iterdir()} == {"checkpoints", "report.json"}


def test_an_unfinished_one_does_not_and_what_to_do_is_said(tmp_path):
    folder = leave_checkpoint(tmp_path / "draft", finished=False)
    with pytest.raises(
        UserError, match=r"made with learning_rate = 0\.003, now it is 0\.1\n  to go on set learning_rat"
    ):
        go_on(folder, learning_rate=0.1)
    with pytest.raises(UserError, match="begun on other hidden states") as error:
        go_on(folder, states="b")
    assert error.value.fix == f"to train on these remove {folder}"
    assert len(checkpoint_folders(folder / "checkpoints")) == 1


def test_a_draft_that_the_new_training_begins_with_stays_where_it_is(tmp_path):
    folder = leave_checkpoint(tmp_path / "draft", finished=True)
    with pytest.raises(UserError, match="which init_from names"):
        go_on(folder, init_from=str(folder / "checkpoints" / "step-000003"))
    assert len(checkpoint_folders(folder / "checkpoints")) == 1


HOLD = """
import sys, time
from pathlib import Path
from eagle3_utils.draft.training.distributed import ONE_RANK
from eagle3_utils.draft.training.folder import sole_training

with sole_training(Path(sys.argv[1]), ONE_RANK):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_training_is_refused_until_the_first_ends_or_dies(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as first:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"{tmp_path}: another training \(pid {first.pid} on .*at work here"):
            sole_training(tmp_path, ONE_RANK).__enter__()
        os.kill(first.pid, signal.SIGKILL)
    with sole_training(tmp_path, ONE_RANK):
        assert f"pid {os.getpid()} on" in (tmp_path / "training.lock").read_text()
    with sole_training(tmp_path, ONE_RANK):
        pass
