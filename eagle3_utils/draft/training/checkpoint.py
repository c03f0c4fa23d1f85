"""Training checkpoints that are whole or not there: written aside, hashed, renamed; the newest whole one is used.

    checkpoints/step-000100/{part-00-of-02.safetensors, part-01-of-02.safetensors, state.json}

Every rank writes its share of the tensors (weights, moments, masters, random state), each tensor whole in one file. So
any number of ranks, sharded or not, reads what any other has written. state.json carries the step, the data position,
the draft's shape and the xxh3 of the other files. A folder whose files do not match it (a full disk, a copy cut short)
is passed over, and that is said.
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

from eagle3_utils.draft.training.distributed import ONE_RANK, Ranks
from eagle3_utils.draft.training.optimizer import sharded_like
from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_files, sync, write_json

INIT_FROM_HASH = "init_from_hash"  # a parameter's name; checkpoints made before it was recorded lack it
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
    seconds: float = 0.0  # of all steps, from the first
    waited: float = 0.0  # of them, for data
    parameters: dict[str, Any] = field(default_factory=dict)  # those that decide what the training makes

    def differs_in(self, wanted: dict[str, Any]) -> str | None:
        """The first of the parameters wanted that has another value here; None when all are the same.

        One that is not here counts as None, the hash of `init_from` as the one wanted.
        """
        had = {INIT_FROM_HASH: wanted.get(INIT_FROM_HASH)} | self.parameters
        return next((key for key, value in wanted.items() if had.get(key) != value), None)


def checkpoint_folders(folder: Path) -> list[Path]:
    """All checkpoints of a run by step, newest last; unfinished temporary ones are not among them."""
    named = (path for path in Path(folder).glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted((path for path in named if path.is_dir()), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def save_checkpoint(
    folder: Path, model: torch.nn.Module, optimizer, position: Position, keep: int, ranks: Ranks = ONE_RANK
) -> Path:
    """Write one checkpoint atomically and delete the oldest beyond `keep`; all ranks call it. Returns its folder.

    model: its `config`, a dataclass, is its shape.
    Those of later steps are deleted too: training went on from this side of them, so they are damaged. So is what a
    kill left of others half written.
    """
    final = Path(folder) / f"step-{position.step:06d}"
    temporary = final.with_name(f".{final.name}.tmp")
    if ranks.is_first:
        for left in final.parent.glob(".step-*.tmp"):
            shutil.rmtree(left)
        temporary.mkdir(parents=True)
    ranks.barrier()
    mine = {}
    for number, (name, tensor) in enumerate(training_tensors(model, optimizer).items()):
        whole = _whole(tensor)  # of a sharded tensor: all ranks take part
        if number % ranks.num_ranks == ranks.rank:
            mine[name] = whole.detach().cpu().contiguous()
    part = temporary / f"part-{ranks.rank:02d}-of-{ranks.num_ranks:02d}.safetensors"
    save_file(mine, part)
    sync(part)
    part.with_suffix(".hash").write_text(hash_files([part]))
    ranks.barrier()
    if ranks.is_first:
        notes = sorted(temporary.glob("*.hash"))
        files = {note.with_suffix(".safetensors").name: note.read_text() for note in notes}
        for note in notes:
            note.unlink()
        shape = asdict(model.config)  # for a warm start from here
        write_json(temporary / "state.json", asdict(position) | {"shape": shape, "files": files})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync(final.parent)
        written = checkpoint_folders(folder)
        until_here = [path for path in written if _step_of(path) <= position.step]
        for path in set(written) - set(until_here[-keep:]):
            shutil.rmtree(path)
    ranks.barrier()
    return final


def training_tensors(model: torch.nn.Module, optimizer) -> dict[str, torch.Tensor]:
    """All that a training is made of, by name; the tensors share memory with the model's and the optimiser's."""
    named = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    named |= {f"optimizer.{name}": tensor for name, tensor in optimizer.state_dict().items()}
    return named | {"random_state": torch.get_rng_state()}


def save_weights(path: Path, model: torch.nn.Module, ranks: Ranks = ONE_RANK) -> None:
    """Write a model's state dict atomically; all ranks call it, the first one writes."""
    tensors = {name: _whole(tensor).detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if ranks.is_first:
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary)
        sync(temporary)
        os.replace(temporary, path)
    ranks.barrier()


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """The inverse of `save_weights`, in place."""
    saved = load_file(path)
    for name, tensor in model.state_dict().items():
        _copy_into(tensor, saved[name])


def newest_whole_checkpoint(folder: Path, log: logging.Logger) -> tuple[Path, Position] | None:
    """The newest checkpoint whose files match their hashes; damaged ones are named in the log."""
    folders = checkpoint_folders(folder)
    for path in reversed(folders):
        problem = _damage(path)
        if problem is None:
            values = json.loads((path / "state.json").read_text())
            return path, Position(**{key: values[key] for key in Position.__dataclass_fields__ if key in values})
        log.warning("%s is damaged (%s): passed over", path, problem)
    if folders:
        log.warning("%s: no whole checkpoint: training begins anew", folder)
    return None


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer) -> None:
    """Restore weights, optimiser and random state in place, whatever number of ranks wrote them."""
    wanted = training_tensors(model, optimizer)
    for part in sorted(path.glob("part-*.safetensors")):
        for name, saved in load_file(part).items():
            _copy_into(wanted.pop(name), saved)
            if name == "random_state":
                torch.set_rng_state(saved)
    if wanted:
        raise UserError(f"the checkpoint lacks {', '.join(sorted(wanted))}", str(path))


def checkpoint_weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's state dict in a checkpoint folder."""
    parts = [load_file(part) for part in sorted(path.glob("part-*.safetensors"))]
    named = {name: tensor for part in parts for name, tensor in part.items()}
    return {name.removeprefix("model."): tensor for name, tensor in named.items() if name.startswith("model.")}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.dtype != torch.int16:
        return tensor.full_tensor()
    # neither NCCL nor Gloo knows 16-bit integers: their bits travel as bfloat16
    bits = sharded_like(tensor.to_local().view(torch.bfloat16), tensor)
    return bits.full_tensor().view(torch.int16)


@torch.no_grad()
def _copy_into(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        saved = saved.to(tensor.device)
        saved = distribute_tensor(saved, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.copy_(saved)


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
