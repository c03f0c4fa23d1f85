"""A draft's folder: who trains in it, and when what lies there gives way."""

import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import make_dataclass
from pathlib import Path

import pytest
import torch
from draft_runs import folder_of, train_until
from safetensors.torch import load_file

from eagle3_utils.draft.export import export_draft
from eagle3_utils.draft.train import train
from eagle3_utils.draft.training.build import draft_of_training
from eagle3_utils.draft.training.checkpoint import Position, checkpoint_folders, save_checkpoint
from eagle3_utils.draft.training.distributed import ONE_RANK
from eagle3_utils.draft.training.folder import checkpoint_to_go_on_from, keep_finished, sole_training
from eagle3_utils.draft.training.optimizer import MasterAdamW
from eagle3_utils.errors import UserError
from eagle3_utils.runs import data_folder
from eagle3_utils.target import load_target

pytest_plugins = ["draft_runs"]  # fixtures

LOG = logging.getLogger("test_folder")
MADE = {"learning_rate": 0.003, "init_from": None, "states": "a"}


def leave_checkpoint(folder, finished, **more):
    model = torch.nn.Linear(2, 2)
    model.config = make_dataclass("Shape", [])()
    save_checkpoint(
        folder / "checkpoints", model, MasterAdamW(model.parameters()), Position(step=3, parameters=MADE | more), 1
    )
    if finished:
        (folder / "report.json").write_text("{}")
    return folder


def go_on(folder, **changes):
    """As a training does: what it goes on from; where that is nothing, a finished draft makes room."""
    found = checkpoint_to_go_on_from(folder, MADE | changes, LOG)
    if found is None:
        keep_finished(folder, ONE_RANK, LOG)
    return found


@pytest.mark.parametrize("finished", [False, True])
def test_the_same_training_goes_on(finished, tmp_path):
    path, position = go_on(leave_checkpoint(tmp_path / "draft", finished))
    assert path.name == "step-000003" and position.step == 3
    assert go_on(tmp_path / "other") is None


@pytest.mark.parametrize("changes", [{"learning_rate": 0.1}, {"states": "b"}, {"init_from_hash": "b"}])
def test_a_finished_draft_gives_way_and_is_kept_beside_older_ones(changes, tmp_path, caplog):
    folder = leave_checkpoint(tmp_path / "draft", finished=True, init_from_hash="a")
    for older in ("draft.old", "draft.old-2"):
        (tmp_path / older / "export").mkdir(parents=True)
    old = tmp_path / "draft.old-3"
    with sole_training(folder, ONE_RANK), caplog.at_level(logging.INFO):
        assert go_on(folder, **changes) is None
        assert "training begins anew" in caplog.text and f"moved to {old}" in caplog.text
        with pytest.raises(UserError, match="is at work here"), sole_training(folder, ONE_RANK):  # the lock stays
            pass
    assert [path.name for path in folder.iterdir()] == ["training.lock"]
    assert {path.name for path in old.iterdir()} == {"checkpoints", "report.json"}
    assert (tmp_path / "draft.old" / "export").is_dir() and (tmp_path / "draft.old-2" / "export").is_dir()


def test_a_finished_draft_without_checkpoints_is_kept_too(tmp_path):
    folder = leave_checkpoint(tmp_path / "draft", finished=True)
    (folder / "best.safetensors").write_bytes(b"weights")
    shutil.rmtree(folder / "checkpoints")  # to free the disk
    with pytest.raises(UserError, match="which init_from names, was left without a whole checkpoint"):
        go_on(folder, init_from=str(folder))
    assert go_on(folder) is None
    assert (tmp_path / "draft.old" / "best.safetensors").read_bytes() == b"weights"
    assert list(folder.iterdir()) == []


def test_looking_for_a_checkpoint_moves_nothing(tmp_path):
    """The new training may yet fail before it begins."""
    folder = leave_checkpoint(tmp_path / "draft", finished=True)
    assert checkpoint_to_go_on_from(folder, MADE | {"learning_rate": 0.1}, LOG) is None
    assert (folder / "report.json").is_file()


def test_an_unfinished_one_does_not_and_what_to_do_is_said(tmp_path):
    folder = leave_checkpoint(tmp_path / "draft", finished=False)
    with pytest.raises(
        UserError, match=r"made with learning_rate = 0\.003, now it is 0\.1\n  to go on set learning_rat"
    ):
        go_on(folder, learning_rate=0.1)
    with pytest.raises(UserError, match="begun on other hidden states") as error:
        go_on(folder, states="b")
    assert error.value.fix == f"to train on these remove {folder}"
    other = leave_checkpoint(tmp_path / "other", finished=False, init_from_hash="a")
    with pytest.raises(UserError, match="begun when init_from held another draft than now\n  to go on put the earlier"):
        go_on(other, init_from_hash="b")
    assert len(checkpoint_folders(folder / "checkpoints")) == 1


def test_a_draft_that_the_new_training_begins_with_stays_where_it_is(tmp_path):
    folder = leave_checkpoint(tmp_path / "draft", finished=True)
    with pytest.raises(UserError, match="which init_from names"):
        go_on(folder, init_from=str(folder / "checkpoints" / "step-000003"))
    assert len(checkpoint_folders(folder / "checkpoints")) == 1


def weights_of(config):
    newest = checkpoint_folders(folder_of(config) / "checkpoints")[-1]
    return load_file(newest / "part-00-of-01.safetensors").values()  # weights, moments, random state


def test_a_finished_draft_stays_when_the_training_after_it_cannot_begin(make_config):
    config = make_config(epochs=1.0)
    train(config)
    with pytest.raises(UserError, match=r"no config\.json"):
        train(make_config(epochs=1.0, init_from="/no/such/draft"))
    assert (folder_of(config) / "report.json").is_file()


def test_init_from_is_known_by_its_content_and_needed_only_to_begin(make_config, tmp_path):
    """Changed, the finished draft gives way and an unfinished one stops the run; removed, training goes on."""
    first, source = make_config("first", epochs=1.0, intermediate_size=96), tmp_path / "source"
    model, _ = train(first)
    target = load_target(first.model)
    export_draft(model, target, source)
    warm = {"epochs": 1.0, "init_from": str(source)}
    whole, halves = make_config("whole", **warm), make_config("halves", **warm)
    train(whole)

    train_until(halves, 2)
    shutil.move(source, tmp_path / "away")
    trained, _ = train(halves)
    assert all(torch.equal(a, b) for a, b in zip(*map(weights_of, (whole, halves)), strict=True))
    again = draft_of_training(halves, data_folder(halves))
    assert again.config == trained.config and again.config.intermediate_size == 96
    with torch.no_grad():
        model.fc.weight.mul_(2)
    export_draft(model, target, source)
    train_until(whole, 2)  # begun anew
    assert (folder_of(whole).with_name("draft.old") / "report.json").is_file()
    shutil.rmtree(source)
    shutil.move(tmp_path / "away", source)
    with pytest.raises(UserError, match="begun when init_from held another draft than now"):
        train(whole)


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
