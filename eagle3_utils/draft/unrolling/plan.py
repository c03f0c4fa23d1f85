"""Which slots of a packed batch need what: only what carries loss is computed.

Slot t is drafted step after step: step i takes token t+1+i and predicts token t+2+i, in the same document. A slot
whose predicted tokens are supervised at no step needs nothing but its step-0 key and value. At step i only slots with
a supervised prediction at step i or later are needed. Those sets shrink with i, so the slots are gathered once,
ordered by their last supervised step (latest first) and then by position: step i works on the first n_i rows.

T slots · N rows (slots that carry loss) · M rows with a teacher state · S steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class UnrollPlan:
    """rows int64 [N]: slots in row order. num_rows: n_i by step. document_start int64 [T]: first slot of t's document.

    pair_index int64 [M, S]: for teacher row m and step i, where the hidden state that predicts the same token stands
    in the steps' hidden states laid end to end ([n_0; n_1; …]); `num_hidden` where there is none.
    num_supervised float64 [S]: supervised positions by step.
    """

    rows: torch.Tensor
    num_rows: list[int]
    document_start: torch.Tensor
    pair_index: torch.Tensor
    num_supervised: torch.Tensor

    @property
    def num_steps(self) -> int:
        return len(self.num_rows)

    @property
    def num_hidden(self) -> int:
        """Hidden states of all steps together."""
        return sum(self.num_rows)

    def to(self, device: torch.device | str) -> UnrollPlan:
        """The same plan with rows and pairs on a device."""
        moved = (self.rows.to(device), self.num_rows, self.document_start.to(device), self.pair_index.to(device))
        return UnrollPlan(*moved, self.num_supervised)

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
    num_tokens = len(loss_mask)
    mask, steps = loss_mask.bool(), torch.arange(num_steps)
    lengths = cu_seqlens.diff().long()
    start = cu_seqlens[:-1].long().repeat_interleave(lengths)
    end = cu_seqlens[1:].long().repeat_interleave(lengths)
    slots = torch.arange(num_tokens)

    predicted = slots[:, None] + 2 + steps  # [T, S]
    supervised = (predicted < end[:, None]) & mask[predicted.clamp(max=num_tokens - 1)]
    last_step = torch.where(supervised, steps, -1).amax(dim=1)
    order = last_step.sort(descending=True, stable=True).indices
    rows = order[: int((last_step >= 0).sum())]
    num_rows = [int((last_step >= step).sum()) for step in range(num_steps)]

    row_of_slot = torch.full((num_tokens,), -1)
    row_of_slot[rows] = torch.arange(len(rows))
    offsets = torch.tensor([0, *num_rows[:-1]]).cumsum(0)
    with_teacher = (final_index >= 0).nonzero().squeeze(1)
    teacher_slot = torch.empty(len(with_teacher), dtype=torch.int64)
    teacher_slot[final_index[with_teacher]] = with_teacher  # [M]
    drafting_slot = teacher_slot[:, None] - 1 - steps  # [M, S]
    is_supervised = (teacher_slot + 1 < end[teacher_slot]) & mask[(teacher_slot + 1).clamp(max=num_tokens - 1)]
    has_pair = is_supervised[:, None] & (drafting_slot >= start[teacher_slot][:, None])
    hidden_index = offsets + row_of_slot[drafting_slot.clamp(min=0)]
    pair_index = torch.where(has_pair, hidden_index, sum(num_rows))
    num_supervised = supervised.sum(0)
    if not torch.equal(has_pair.sum(0), num_supervised):
        raise ValueError("a supervised token has no teacher state: `final` must hold the row before each of them")
    return UnrollPlan(rows, num_rows, start, pair_index, num_supervised.double())
