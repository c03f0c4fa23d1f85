"""One packed batch through the unroll on whatever device the model is on, with what stays the same between batches."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.metrics import StepCounts
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.training.distributed import Ranks, gather_again
from eagle3_utils.draft.unroll import UnrollOptions, UnrollResult, training_time_test
from eagle3_utils.draft.unrolling.attention import eager_prefix_attention, flex_prefix_attention
from eagle3_utils.draft.unrolling.groups import unroll_in_groups
from eagle3_utils.draft.unrolling.plan import UnrollPlan, plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.states.dataset import PackedBatch, PackedDataset

_CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 512 << 20}


class BatchRunner:
    """Options and a coverage cache around `training_time_test`.

    most_frequent: target id whose constant prediction is the baseline. Whether a teacher row's argmax has a draft id
    never changes, so it is kept per sample after the first visit: later ones spare most of the target's head.
    """

    def __init__(self, model: DraftModel, teacher: Teacher, config: TrainConfig, most_frequent: int):
        self.model, self.teacher, self.device = model, teacher, model.fc.weight.device
        self.num_steps, self.max_rows = config.ttt_steps, config.max_rows_at_once
        self.weights = tuple(config.step_weight_decay**step for step in range(config.ttt_steps))
        self.loss = config.loss
        hits = (model.target_ids == most_frequent).nonzero()
        self.baseline_id = int(hits[0]) if len(hits) else -1
        self._coverage: dict[str, torch.Tensor] = {}

    def prepare(self, batch: PackedBatch) -> PackedBatch:
        """What a loader's thread can do ahead on a CUDA run: look up embeddings kept on the host, pin the memory."""
        if self.device.type != "cuda":
            return batch
        if self.model.embed_tokens.device.type == "cpu":
            batch = replace(batch, embeds=F.embedding(batch.input_ids, self.model.embed_tokens))
        return batch.pin_memory()

    def forget_coverage(self) -> None:
        """Treat every sample as not visited yet."""
        self._coverage.clear()

    def plan(self, batch: PackedBatch) -> UnrollPlan:
        """The plan of a batch, on the CPU."""
        return plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, self.num_steps)

    def __call__(
        self,
        batch: PackedBatch,
        plan: UnrollPlan,
        num_supervised: torch.Tensor | None = None,
        want_overlap: bool = False,
    ) -> UnrollResult:
        """Loss and counts of one batch; num_supervised float64 [S]: positions of the whole optimiser step.

        After it comes `result.loss.backward()`, of the loss itself (see groups.py).
        """
        rows_of = self._teacher_rows(batch)
        known = [self._coverage.get(sample) for sample in batch.sample_ids]
        covered = None if any(part is None for part in known) else torch.cat(known).to(self.device)
        on_cuda = self.device.type == "cuda"
        parts = [part.to(self.device) for part in plan.split(self.max_rows)]
        moved = batch.to(self.device, non_blocking=on_cuda)
        options = UnrollOptions(
            step_weights=self.weights,
            loss=self.loss,
            want_overlap=want_overlap,
            baseline_id=self.baseline_id,
            chunk_bytes=_CHUNK_BYTES[self.device.type],
        )
        attention = flex_prefix_attention if on_cuda else eager_prefix_attention
        if len(parts) == 1:
            work = training_time_test, moved, parts[0], self.teacher, options, num_supervised, covered
            _, result = self.model(*work, attention(parts[0]))
        else:
            divisor = plan.num_supervised if num_supervised is None else num_supervised
            _, result = self.model(unroll_in_groups, moved, parts, self.teacher, options, divisor, covered, attention)
        if covered is None:
            by_sample = result.covered.cpu().split(rows_of)
            self._coverage |= dict(zip(batch.sample_ids, by_sample, strict=True))
        return result

    @torch.no_grad()
    def validate(self, dataset: PackedDataset, ranks: Ranks, want_overlap: bool = False) -> StepCounts:
        """Counts over a whole store, all ranks together."""
        counts = StepCounts.zeros(self.num_steps)
        for batch in dataset.epoch(0):
            counts = counts + self(batch, self.plan(batch), want_overlap=want_overlap).counts
        gather_again(self.model)
        return StepCounts.from_tensor(ranks.sum(counts.as_tensor()))

    @staticmethod
    def _teacher_rows(batch: PackedBatch) -> list[int]:
        """Teacher rows of each sample; they stand in `final` sample after sample."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), (batch.final_index >= 0).cumsum(0)])
        return before[batch.cu_seqlens.long()].diff().tolist()
