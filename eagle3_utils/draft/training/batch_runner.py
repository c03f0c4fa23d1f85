"""One packed batch through the unroll on whatever device the model is on, with what stays the same between batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.metrics import StepCounts
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.training.distributed import Ranks, free_whole_weights
from eagle3_utils.draft.unroll import UnrollOptions, UnrollResult
from eagle3_utils.draft.unrolling.attention import Attention
from eagle3_utils.draft.unrolling.flash import attention_for
from eagle3_utils.draft.unrolling.groups import unroll_in_groups
from eagle3_utils.draft.unrolling.plan import UnrollPlan, plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.states.dataset import PackedBatch, PackedDataset

_CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 256 << 20}


@dataclass
class PlannedBatch:
    """A batch ready for the step. num_supervised float64 [S]: its supervised positions. parts: its plan, at most
    `max_rows_at_once` rows in each, on the device, and the attention of each. teacher_rows: of each sample."""

    packed: PackedBatch
    num_supervised: torch.Tensor
    parts: list[UnrollPlan]
    attentions: list[Attention]
    teacher_rows: list[int]


class BatchRunner:
    """Options and a coverage cache around `unroll_in_groups`.

    most_frequent: target id whose constant prediction is the baseline. Whether a teacher row's argmax has a draft id
    never changes, so it is kept per sample after the first visit: later ones spare most of the target's head.
    """

    def __init__(self, model: DraftModel, teacher: Teacher, config: TrainConfig, most_frequent: int):
        self.model, self.teacher, self.device = model, teacher, model.fc.weight.device
        self.num_steps, self.max_rows = config.ttt_steps, config.max_rows_at_once
        self.weights = tuple(config.step_weight_decay**step for step in range(config.ttt_steps))
        self.loss = config.loss
        self.baseline_id = model.draft_id_of(most_frequent)
        self._coverage: dict[str, torch.Tensor] = {}  # on the device: to fetch them would wait for it
        self._attention = attention_for(model)

    def prepare(self, batch: PackedBatch) -> PlannedBatch:
        """All that can be done ahead, in a loader's thread: plan the unroll; on a CUDA run look up embeddings kept on
        the host and pin the memory."""
        plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, self.num_steps)
        parts = plan.split(self.max_rows)
        on_device, attentions = [part.to(self.device) for part in parts], [self._attention(part) for part in parts]
        teacher_rows = _teacher_rows(batch)
        if self.device.type == "cuda":
            if self.model.embed_tokens.device.type == "cpu":
                batch = replace(batch, embeds=F.embedding(batch.input_ids, self.model.embed_tokens))
            batch = batch.pin_memory()
        return PlannedBatch(batch, plan.num_supervised, on_device, attentions, teacher_rows)

    def forget_coverage(self) -> None:
        """Treat every sample as not visited yet."""
        self._coverage.clear()

    def __call__(
        self, batch: PlannedBatch, num_supervised: torch.Tensor | None = None, want_overlap: bool = False
    ) -> UnrollResult:
        """Loss and counts of one batch; num_supervised float64 [S]: positions of the whole optimiser step.

        After it comes `result.loss.backward()`, of the loss itself (see groups.py).
        """
        sample_ids, parts, attentions = batch.packed.sample_ids, batch.parts, batch.attentions
        known = [self._coverage.get(sample) for sample in sample_ids]
        covered = None if any(part is None for part in known) else torch.cat(known)
        moved = batch.packed.to(self.device, non_blocking=self.device.type == "cuda")
        options = UnrollOptions(
            step_weights=self.weights,
            loss=self.loss,
            want_overlap=want_overlap,
            baseline_id=self.baseline_id,
            chunk_bytes=_CHUNK_BYTES[self.device.type],
        )
        divisor = batch.num_supervised if num_supervised is None else num_supervised
        work = moved, parts, self.teacher, options, divisor, covered, attentions
        _, result = self.model(unroll_in_groups, *work)
        if covered is None:
            self._coverage |= dict(zip(sample_ids, result.covered.split(batch.teacher_rows), strict=True))
        return result

    @torch.no_grad()
    def validate(self, dataset: PackedDataset, ranks: Ranks, want_overlap: bool = False) -> StepCounts:
        """Counts over a whole store, all ranks together; the dataset's `prepare` is this runner's. A rank may have no
        batch."""
        counts = StepCounts.zeros(self.num_steps, self.device)
        for batch in dataset.epoch(0):
            counts = counts + self(batch, want_overlap=want_overlap).counts
        if not dataset.num_batches(0):
            self.model(lambda model: SimpleNamespace(loss=None))  # all ranks gather a sharded model's weights
        free_whole_weights(self.model)
        return StepCounts.from_tensor(ranks.sum(counts.as_tensor()).cpu())


def _teacher_rows(batch: PackedBatch) -> list[int]:
    """Teacher rows of each sample; they stand in `final` sample after sample."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), (batch.final_index >= 0).cumsum(0)])
    return before[batch.cu_seqlens.long()].diff().tolist()
