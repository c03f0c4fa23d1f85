"""The draft's folder of a run: one training at a time in it, and which checkpoint a training goes on from.

    draft/{training.lock, checkpoints/, best.safetensors, metrics.jsonl, report.json, …}

report.json is written last and removed when steps are taken: where it is, the training is finished. A finished draft
gives way to a training with other parameters or states, an unfinished one does not.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eagle3_utils.draft.training.checkpoint import Position, newest_whole_checkpoint
from eagle3_utils.draft.training.distributed import Ranks
from eagle3_utils.errors import UserError
from eagle3_utils.runs import resolve_path, try_lock

REPORT = "report.json"
CHECKPOINTS = "checkpoints"
_LOCK = "training.lock"  # locked by the first rank at work; the kernel drops that when the process dies


@contextmanager
def sole_training(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold a draft's folder while the block runs; all ranks call it.

    Raises `UserError`, on all of them, when another training is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "a+") as file:
        is_taken = ranks.is_first and not try_lock(file)
        if ranks.sum(torch.tensor(float(is_taken))) > 0:  # so no rank waits for one that has ended
            file.seek(0)
            who = f" ({said})" if (said := file.read().strip()) else ""
            raise UserError(f"another training{who} is at work here", str(folder), "wait for its end, or stop it")
        if ranks.is_first:
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def checkpoint_to_go_on_from(
    folder: Path, wanted: dict[str, Any], ranks: Ranks, log: logging.Logger
) -> tuple[Path, Position] | None:
    """The newest whole checkpoint of a draft's folder; None when training begins anew. All ranks call it.

    A finished draft made with other parameters than `wanted`, or on other states, is moved aside to `draft.old`.
    Raises `UserError` when the training that made it is not finished, or `init_from` lies in it.
    """
    found = newest_whole_checkpoint(folder / CHECKPOINTS, log)
    if found is None or (key := found[1].differs_in(wanted)) is None:
        return found
    path, position = found
    difference = f"made with {key} = {position.parameters.get(key)!r}, now it is {wanted[key]!r}"
    fix = f"to go on set {key} back, to train anew remove {folder}"
    if key == "states":
        difference, fix = "begun on other hidden states than are there now", f"to train on these remove {folder}"
    if not (folder / REPORT).is_file():
        raise UserError(f"an unfinished training is here, {difference}", str(path), fix)
    if wanted.get("init_from") and resolve_path(wanted["init_from"]).is_relative_to(folder):
        raise UserError(
            f"the draft here, which init_from names, was {difference}, so it would have to give way",
            str(folder), "copy it to another folder for init_from, or use another run_dir",
        )  # fmt: skip
    ranks.barrier()  # all have looked
    if ranks.is_first:
        log.info("the finished draft here was %s: moved to %s, training begins anew", difference, _set_aside(folder))
    ranks.barrier()
    return None


def _set_aside(folder: Path) -> Path:
    """Rename a draft's folder, in the place of an older one that was, and leave an empty one with the same lock."""
    old = folder.with_name(f"{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    os.replace(folder, old)
    folder.mkdir()
    if (old / _LOCK).exists():
        os.replace(old / _LOCK, folder / _LOCK)
    return old
