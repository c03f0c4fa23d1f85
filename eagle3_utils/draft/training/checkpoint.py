"""Training checkpoints that are whole or not there: written aside, hashed, renamed; the newest whole one is used.

    checkpoints/step-000100/{model.safetensors, optimizer.pt, state.json}

state.json carries the step, the data position and the xxh3 of the other two files. A folder whose files do not match
it (a full disk, a copy cut short) is passed over, and that is said.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_files, write_json

BEST_WEIGHTS = "best.safetensors"  # the weights with the longest validated accept length


@dataclass
class Position:
    """Where training stands: optimiser steps done, and the next step's place in the data."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    tokens: int = 0
    best_step: int = -1
    best_accept_length: float = 0.0
    parameters: dict[str, Any] = field(default_factory=dict)  # those that decide what the training makes

    def require(self, wanted: dict[str, Any], where: Path) -> None:
        """Raise `UserError` naming the first parameter that differs from this checkpoint's."""
        for key, value in wanted.items():
            if self.parameters.get(key) != value:
                raise UserError(
                    f"the checkpoint was made with {key} = {self.parameters.get(key)!r}, now it is {value!r}",
                    str(where),
                    f"to train anew remove {where.parent.parent}; to go on restore {key}",
                )


def checkpoint_folders(folder: Path) -> list[Path]:
    """All checkpoints of a run by step, newest last; unfinished temporary ones are not among them."""
    return sorted(path for path in Path(folder).glob("step-*") if path.is_dir())


def save_checkpoint(folder: Path, model: torch.nn.Module, optimizer, position: Position, keep: int) -> Path:
    """Write one checkpoint atomically and delete the oldest beyond `keep`. Returns its folder."""
    final = Path(folder) / f"step-{position.step:06d}"
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_weights(temporary / "model.safetensors", model)
    torch.save({"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, temporary / "optimizer.pt")
    files = {name: hash_files([temporary / name]) for name in ("model.safetensors", "optimizer.pt")}
    write_json(temporary / "state.json", asdict(position) | {"files": files})
    for name in files:
        _sync(temporary / name)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync(final.parent)
    for old in checkpoint_folders(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def save_weights(path: Path, model: torch.nn.Module) -> None:
    """Write a model's state dict atomically."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def newest_whole_checkpoint(folder: Path, log: logging.Logger) -> tuple[Path, Position] | None:
    """The newest checkpoint whose files match their hashes; damaged ones are named in the log."""
    for path in reversed(checkpoint_folders(folder)):
        problem = _damage(path)
        if problem is None:
            values = json.loads((path / "state.json").read_text())
            return path, Position(**{key: values[key] for key in Position.__dataclass_fields__})
        log.warning("%s is damaged (%s): using the one before it", path, problem)
    return None


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer) -> None:
    """Restore weights, optimiser and random state in place."""
    model.load_state_dict(load_file(path / "model.safetensors"))
    state = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])


def _damage(path: Path) -> str | None:
    try:
        files = json.loads((path / "state.json").read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"state.json: {error}"
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if hash_files([path / name]) != expected:
            return f"{name} does not match its hash"
    return None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
