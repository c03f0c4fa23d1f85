"""Training as the notebook starts it: in this process, or as a torchrun over the machine's GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.train import TrainReport, train
from eagle3_utils.draft.training.build import draft_of_training
from eagle3_utils.draft.training.folder import REPORT
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.draft.training.pace import progress_of
from eagle3_utils.errors import UserError
from eagle3_utils.runs import Stage

_POLL_SECONDS = 2.0
_MAX_WAIT_SHARE = 0.05


def run_training(
    config: TrainConfig, stage: Stage, watch: Callable[[], None] = lambda: None
) -> tuple[DraftModel, TrainReport]:
    """Train to the end, or go on from the last checkpoint; returns the best draft, float32 on the CPU, and the report.

    watch: called after every step (under torchrun every two seconds), a live plot for instance.

    With `num_gpus` > 1 every rank is a process of its own; this one shows their progress and hands on an interrupt.
    Raises `UserError` when a rank fails, in its words (the rest is in train.log).
    """
    if config.num_gpus <= 1:

        def progress(**fields) -> None:
            stage.progress(**fields)
            watch()

        model, report = train(config, stage.log, progress)
        _say_waiting(report, stage)
        return model.place("cpu", torch.float32), report
    parameters = stage.folder / "train.yaml"
    parameters.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.num_gpus}",
               "-m", "eagle3_utils.draft.train", str(parameters)]  # fmt: skip
    _watch(command, stage, watch)
    report = TrainReport(**json.loads((stage.data / "draft" / REPORT).read_text()))
    _say_waiting(report, stage)
    return draft_of_training(config, stage.data), report


def _say_waiting(report: TrainReport, stage: Stage) -> None:
    if report.wait_share > _MAX_WAIT_SHARE:
        stage.log.warning(
            "%.0f %% of the time went into waiting for data: a faster disk, or more prefetch_batches",
            100 * report.wait_share,
        )


def _watch(command: list[str], stage: Stage, watch: Callable[[], None]) -> None:
    """Run torchrun to its end, showing the newest journal entry as progress; SIGTERM it when interrupted."""
    log_path: Path = stage.folder / "train.log"
    written = log_path.stat().st_size if log_path.exists() else 0
    with open(log_path, "a") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                entries = read_journal(stage.data / "draft", "train")
                if entries and "total_steps" in entries[-1]:
                    stage.progress(**progress_of(entries[-1]))
                watch()
        except BaseException:  # an interrupt, or whatever failed here: not to wait for the training's end with it
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        said = _first_error(log_path.read_bytes()[written:].decode(errors="replace"))
        raise UserError(said or f"training ended with exit code {process.returncode}", str(log_path))


def _first_error(log: str) -> str | None:
    """Of a rank: what it said itself, with what to do about it, or its exception."""
    said = r"^(?:eagle3: |\[rank\d+\]: (?=[\w.]*(?:Error|Exception): ))(.+(?:\n  \S.*)?)"
    found = re.search(said, log, re.MULTILINE)
    return found[1] if found else None
