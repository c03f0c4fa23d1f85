"""The draft's folder of a run: one training at a time in it, and which checkpoint a training goes on from.

    draft/{training.lock, checkpoints/, best.safetensors, metrics.jsonl, report.json, …}

report.json is written last and removed when steps are taken: where it is, the training is finished. A finished draft
gives way to a training that begins anew, and is kept as draft.old, draft.old-2 …; an unfinished one does not.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from eagle3_utils.draft.training.checkpoint import INIT_FROM_HASH, Position, newest_whole_checkpoint
from eagle3_utils.draft.training.distributed import Ranks
from eagle3_utils.errors import UserError
from eagle3_utils.locks import TRAINING, in_brackets, lock_file
from eagle3_utils.runs import resolve_path

REPORT = "report.json"
CHECKPOINTS = "checkpoints"


@contextmanager
def sole_training(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold a draft's folder while the block runs; all ranks call it.

    Raises `UserError`, on all of them, when another training is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, us = folder / TRAINING, f"pid {os.getpid()} on {socket.gethostname()}\n"
    with lock_file(lock, us) if ranks.is_first else nullcontext() as holder:
        if ranks.sum(torch.tensor(float(holder is not None))) > 0:  # so no rank waits for one that has ended
            who = in_brackets(lock.read_text().strip())
            raise UserError(f"another training{who} is at work here", str(folder), "wait for its end, or stop it")
        yield


def checkpoint_to_go_on_from(folder: Path, wanted: dict[str, Any], log: logging.Logger) -> tuple[Path, Position] | None:
    """The newest whole checkpoint of a draft's folder; None when training begins anew (`keep_finished` comes first).

    `wanted`: what the draft is made with. Raises `UserError` when the checkpoint was made with something else and its
    training is not finished; and when training would begin anew in a finished draft's place and `init_from` lies in it.
    """
    found = newest_whole_checkpoint(folder / CHECKPOINTS, log)
    key = found[1].differs_in(wanted) if found else None
    if found and key is None:
        return found
    is_finished, difference, fix = (folder / REPORT).is_file(), "left without a whole checkpoint", ""
    if found:
        difference, fix = _difference(key, found[1].parameters.get(key), wanted[key], folder)
        if not is_finished:
            raise UserError(f"an unfinished training is here, {difference}", str(found[0]), fix)
    if not is_finished:
        return None
    if wanted.get("init_from") and resolve_path(wanted["init_from"]).is_relative_to(folder.resolve()):
        raise UserError(
            f"the draft here, which init_from names, was {difference}, so it would have to give way",
            str(folder), "copy it to another folder for init_from, or use another run_dir",
        )  # fmt: skip
    log.info("the finished draft here was %s: training begins anew", difference)
    return None


def _difference(key: str, had: Any, wants: Any, folder: Path) -> tuple[str, str]:
    """What another value of `key` means, and what to do about it where the training is not finished."""
    if key == "states":
        return "begun on other hidden states than are there now", f"to train on these remove {folder}"
    if key == INIT_FROM_HASH:
        fix = f"to go on put the earlier one back, or take it away; to train from this one remove {folder}"
        return "begun when init_from held another draft than now", fix
    fix = f"to go on set {key} back, to train anew remove {folder}"
    return f"made with {key} = {had!r}, now it is {wants!r}", fix


def keep_finished(folder: Path, ranks: Ranks, log: logging.Logger) -> None:
    """Make room for a training that begins anew: a finished draft moves to the first name that is free among
    draft.old, draft.old-2, draft.old-3 …, and leaves an empty folder with the same lock. All ranks call it."""
    ranks.barrier()  # all have looked
    if ranks.is_first and (folder / REPORT).is_file():
        names = itertools.chain(["old"], (f"old-{number}" for number in itertools.count(2)))
        old = next(path for name in names if not (path := folder.with_name(f"{folder.name}.{name}")).exists())
        os.replace(folder, old)
        folder.mkdir()
        if (old / TRAINING).exists():
            os.replace(old / TRAINING, folder / TRAINING)
        log.info("the finished draft is kept: moved to %s", old)
    ranks.barrier()
