"""Checkpoints: whole or passed over, kept in number, and atomic."""

import json
import logging
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from eagle3_utils.draft.training.checkpoint import (
    Position,
    checkpoint_folders,
    load_checkpoint,
    newest_whole_checkpoint,
    save_checkpoint,
)
from eagle3_utils.draft.training.optimizer import MasterAdamW

LOG = logging.getLogger("test_checkpoint")
PART = "part-00-of-01.safetensors"


@dataclass
class Shape:
    size: int = 4


def trained(steps=3, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4, bias=False)
    model.config = Shape()
    optimizer = MasterAdamW(model.parameters())
    for _ in range(steps):
        model.weight.grad = torch.randn(4, 4)
        optimizer.step(0.1, optimizer.grad_norm())
    return model, optimizer


def save_three(folder, keep=3):
    model, optimizer = trained()
    for step in (10, 20, 30):
        save_checkpoint(folder, model, optimizer, Position(step=step, epoch=1, parameters={"a": 1}), keep)
    return model, optimizer


def test_restores_weights_moments_and_random_state(tmp_path):
    model, optimizer = save_three(tmp_path)
    expected = torch.rand(3)
    path, position = newest_whole_checkpoint(tmp_path, LOG)
    other, other_optimizer = trained(seed=5)
    load_checkpoint(path, other, other_optimizer)
    assert torch.equal(other.weight, model.weight) and position.step == 30 and position.parameters == {"a": 1}
    assert torch.equal(optimizer.means[0], other_optimizer.means[0])
    assert torch.equal(torch.rand(3), expected)


def test_keeps_only_the_newest(tmp_path):
    save_three(tmp_path, keep=2)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-000020", "step-000030"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "state"])
def test_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, tmp_path, caplog):
    save_three(tmp_path)
    newest = tmp_path / "step-000030"
    if damage == "truncate":
        with open(newest / PART, "r+b") as file:
            file.truncate(100)
    elif damage == "flip":
        data = bytearray((newest / PART).read_bytes())
        data[-1] ^= 1
        (newest / PART).write_bytes(data)
    elif damage == "remove":
        (newest / PART).unlink()
    else:
        (newest / "state.json").write_text('{"step": 30')
    with caplog.at_level(logging.WARNING):
        path, position = newest_whole_checkpoint(tmp_path, LOG)
    assert path.name == "step-000020" and position.step == 20
    assert "step-000030" in caplog.text


def damage(checkpoint):
    with open(checkpoint / PART, "r+b") as file:
        file.truncate(100)


def test_damaged_checkpoints_are_not_kept_in_the_place_of_whole_ones(tmp_path):
    model, optimizer = save_three(tmp_path)
    damage(tmp_path / "step-000030")
    save_checkpoint(tmp_path, model, optimizer, Position(step=25), keep=2)  # resumed from 20
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-000020", "step-000025"]


def test_when_all_are_damaged_training_begins_anew_and_that_is_said(tmp_path, caplog):
    save_three(tmp_path)
    for path in checkpoint_folders(tmp_path):
        damage(path)
    assert newest_whole_checkpoint(tmp_path, LOG) is None
    assert "no whole checkpoint: training begins anew" in caplog.text


def test_the_newest_is_the_one_of_the_highest_step_and_other_folders_are_none(tmp_path):
    for name in ("step-999999", "step-1000000", "step-000030.bak", "step-old"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-999999", "step-1000000"]


def test_a_checkpoint_of_an_older_version_is_read(tmp_path):
    save_three(tmp_path)
    state = tmp_path / "step-000030" / "state.json"
    values = json.loads(state.read_text())
    del values["seconds"], values["waited"]
    state.write_text(json.dumps(values))
    assert newest_whole_checkpoint(tmp_path, LOG)[1] == Position(step=30, epoch=1, parameters={"a": 1})


def test_what_a_kill_left_half_written_is_no_checkpoint_and_the_next_save_removes_it(tmp_path):
    model, optimizer = save_three(tmp_path)
    (tmp_path / ".step-000040.tmp").mkdir()
    (tmp_path / ".step-000040.tmp" / PART).write_bytes(b"1")
    assert newest_whole_checkpoint(tmp_path, LOG)[1].step == 30
    assert newest_whole_checkpoint(tmp_path / "nothing", LOG) is None
    save_checkpoint(tmp_path, model, optimizer, Position(step=50), 3)
    assert not list(tmp_path.glob(".step-*"))


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer = save_three(tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    save_checkpoint(tmp_path, model, optimizer, Position(step=30), 3)
    assert load_file(tmp_path / "step-000030" / PART)["model.weight"].abs().sum() == 0


def test_the_first_other_parameter_is_named():
    made = Position(parameters={"seed": 0, "loss": "soft"})
    assert made.differs_in({"seed": 0, "loss": "hard", "rope": 1}) == "loss"
    assert made.differs_in({"loss": "soft", "rope": None}) is None  # a parameter younger than the checkpoint


def test_another_content_of_init_from_is_told_where_both_are_known():
    assert Position(parameters={"init_from_hash": "a"}).differs_in({"init_from_hash": "b"}) == "init_from_hash"
    assert Position(parameters={"init_from_hash": "a"}).differs_in({}) is None  # removed since
    assert Position(parameters={}).differs_in({"init_from_hash": "b"}) is None  # not recorded


def test_a_checkpoint_says_the_models_shape(tmp_path):
    save_three(tmp_path)
    assert json.loads((tmp_path / "step-000030" / "state.json").read_text())["shape"] == {"size": 4}
