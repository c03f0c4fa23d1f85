"""Which slots of a packed batch need what: only what carries loss is computed.

Slot t is drafted step after step: step i takes token t+1+i and predicts token t+2+i, in the same document. A slot
whose predicted tokens are supervised at no step needs nothing but its step-0 key and value. At step i only slots with
a supervised prediction at step i or later are needed. Those sets shrink with i, so the slots are gathered once,
ordered by their last supervised step (latest first) and then by position: step i works on the first n_i rows.

T slots · N rows (slots that carry loss) · M rows with a teacher state · S steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from eagle3_utils.devices import to_device


@dataclass
class UnrollPlan:
    """rows int64 [N]: slots in row order. num_rows: n_i by step. document_start int64 [T]: first slot of t's document.

    pair_index int64 [M, S]: for teacher row m and step i, where the hidden state that predicts the same token stands
    in the steps' hidden states laid end to end ([n_0; n_1; …]); `num_hidden` where there is none.
    num_supervised float64 [S]: supervised positions by step. teacher_rows: which rows of the batch's `final` are the
    M of this plan (all, but for a part of a plan).
    """

    rows: torch.Tensor
    num_rows: list[int]
    document_start: torch.Tensor
    pair_index: torch.Tensor
    num_supervised: torch.Tensor
    teacher_rows: slice = field(default_factory=lambda: slice(None))

    @property
    def num_steps(self) -> int:
        return len(self.num_rows)

    @property
    def num_hidden(self) -> int:
        """Hidden states of all steps together."""
        return sum(self.num_rows)

    def to(self, device: torch.device | str) -> UnrollPlan:
        """The same plan with rows and pairs on a device."""
        rows, document_start, pair_index = (
            to_device(tensor, device) for tensor in (self.rows, self.document_start, self.pair_index)
        )
        return UnrollPlan(rows, self.num_rows, document_start, pair_index, self.num_supervised, self.teacher_rows)

    def split(self, max_rows: int) -> list[UnrollPlan]:
        """Plans of at most `max_rows` rows that together do the work of this one; on the CPU.

        Slots see each other only through step-0 keys and values, so the parts can be unrolled one after the other.
        """
        num_parts = -(-len(self.rows) // max_rows)
        if num_parts <= 1:
            return [self]
        part_of_row = np.empty(len(self.rows), np.int64)  # neighbouring slots share a part, and so teacher rows
        part_of_row[np.argsort(self.rows.numpy())] = np.arange(len(self.rows)) * num_parts // len(self.rows)
        part_of_hidden = np.concatenate([part_of_row[:count] for count in self.num_rows])
        return [self._part(part_of_row == part, part_of_hidden == part) for part in range(num_parts)]

    def _part(self, is_member: np.ndarray, is_hidden: np.ndarray) -> UnrollPlan:
        """The plan of some rows, bool [N], whose hidden states of all steps are `is_hidden`."""
        num_rows = [int(np.count_nonzero(is_member[:count])) for count in self.num_rows]
        num_hidden = sum(num_rows)
        new_index = np.full(self.num_hidden + 1, num_hidden)
        new_index[:-1][is_hidden] = np.arange(num_hidden)
        pair_index = new_index[self.pair_index.numpy()]
        has_pair = pair_index < num_hidden
        used = np.flatnonzero(has_pair.any(1))
        teacher_rows = slice(int(used[0]), int(used[-1]) + 1)
        rows, pair_index = torch.from_numpy(self.rows.numpy()[is_member]), torch.from_numpy(pair_index[teacher_rows])
        num_supervised = torch.from_numpy(has_pair.sum(0)).double()
        return UnrollPlan(rows, num_rows, self.document_start, pair_index, num_supervised, teacher_rows)

    def by_slot(self, pair_values: torch.Tensor) -> torch.Tensor:
        """Values by teacher row and step [M, S] -> values by row and step [N, S]; zero where there is no pair."""
        flat = torch.zeros(self.num_hidden + 1, dtype=pair_values.dtype, device=pair_values.device)
        flat[self.pair_index.flatten()] = pair_values.flatten()
        out = torch.zeros(len(self.rows), self.num_steps, dtype=pair_values.dtype, device=pair_values.device)
        offset = 0
        for step, count in enumerate(self.num_rows):
            out[:count, step] = flat[offset : offset + count]
            offset += count
        return out


def plan_unroll(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, final_index: torch.Tensor, num_steps: int
) -> UnrollPlan:
    """Plan one packed batch; all tensors on the CPU.

    loss_mask bool [T]: token t must be predicted. cu_seqlens int [documents + 1]. final_index int64 [T]: row of t's
    teacher state, -1 for none. Raises `ValueError` when a supervised prediction has no teacher state.
    """
    # NumPy, because one thread does this in a few milliseconds and a pool of threads wakes up for longer than that
    mask, bounds, index = loss_mask.numpy().astype(bool), cu_seqlens.numpy().astype(np.int64), final_index.numpy()
    num_tokens, steps = len(mask), np.arange(num_steps)
    start, end = np.repeat(bounds[:-1], np.diff(bounds)), np.repeat(bounds[1:], np.diff(bounds))
    slots = np.arange(num_tokens)

    predicted = slots[:, None] + 2 + steps  # [T, S]
    supervised = (predicted < end[:, None]) & mask[np.minimum(predicted, num_tokens - 1)]
    last_step = np.where(supervised, steps, -1).max(axis=1)
    num_rows = [int(np.count_nonzero(last_step >= step)) for step in range(num_steps)]
    rows = np.argsort(-last_step, kind="stable")[: num_rows[0]]

    row_of_slot = np.full(num_tokens, -1)
    row_of_slot[rows] = np.arange(len(rows))
    offsets = np.cumsum([0, *num_rows[:-1]])
    with_teacher = np.flatnonzero(index >= 0)
    teacher_slot = np.empty(len(with_teacher), np.int64)
    teacher_slot[index[with_teacher]] = with_teacher  # [M]
    drafting_slot = teacher_slot[:, None] - 1 - steps  # [M, S]
    is_supervised = (teacher_slot + 1 < end[teacher_slot]) & mask[np.minimum(teacher_slot + 1, num_tokens - 1)]
    has_pair = is_supervised[:, None] & (drafting_slot >= start[teacher_slot][:, None])
    pair_index = np.where(has_pair, offsets + row_of_slot[np.maximum(drafting_slot, 0)], sum(num_rows))
    num_supervised = supervised.sum(0)
    if not np.array_equal(has_pair.sum(0), num_supervised):
        raise ValueError("a supervised token has no teacher state: `final` must hold the row before each of them")
    tensors = (torch.from_numpy(array) for array in (rows, start, pair_index, num_supervised))
    rows, start, pair_index, num_supervised = tensors
    return UnrollPlan(rows, num_rows, start, pair_index, num_supervised.double())
