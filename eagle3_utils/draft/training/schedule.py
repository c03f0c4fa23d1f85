"""Which packed batches make up each optimiser step, from any position in the data on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from eagle3_utils.draft.training.checkpoint import Position
from eagle3_utils.errors import UserError
from eagle3_utils.states.dataset import PackedBatch, PackedDataset


class StepSchedule:
    """`epochs` passes over a dataset in steps of `batches_per_rank` batches; the last step of an epoch may be short."""

    def __init__(self, dataset: PackedDataset, batches_per_rank: int, epochs: float):
        self.dataset, self.batches_per_rank, self.epochs = dataset, batches_per_rank, epochs

    def total_steps(self) -> int:
        """Optimiser steps of the whole training; a fraction of an epoch is rounded to whole steps.

        Raises `UserError` when there are too few samples for one of them.
        """
        whole = int(self.epochs)
        try:
            total = sum(self._steps_in_epoch(epoch) for epoch in range(whole))
            rest = round((self.epochs - whole) * self._steps_in_epoch(whole)) if self.epochs > whole else 0
        except UserError:
            raise UserError(
                f"the train split has {len(self.dataset.reader)} samples: too few for steps of batches_per_step = "
                f"{self.dataset.multiple_of}",
                str(self.dataset.reader.folders[0]),
                "lower batches_per_step (it stays a multiple of num_gpus), or take more samples",
            ) from None
        return max(1, total + rest)

    def steps(self, position: Position, total_steps: int) -> Iterator[tuple[list[PackedBatch], float]]:
        """Batches of each step from `position` on, with the seconds waited for them.

        The caller advances `position.step` and `position.step_in_epoch` after each step; epochs are turned over here.
        """
        while position.step < total_steps:
            batches = self.dataset.epoch(position.epoch, start=position.step_in_epoch * self.batches_per_rank)
            while position.step < total_steps:
                began = time.perf_counter()
                taken = [batch for _, batch in zip(range(self.batches_per_rank), batches, strict=False)]
                if not taken:
                    break
                yield taken, time.perf_counter() - began
            else:
                return
            position.epoch, position.step_in_epoch = position.epoch + 1, 0

    def _steps_in_epoch(self, epoch: int) -> int:
        return math.ceil(self.dataset.num_batches(epoch) / self.batches_per_rank)
