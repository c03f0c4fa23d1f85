"""Which slots are computed, and which hidden state predicts which token."""

import pytest
import torch
from draft_reference import random_batch, small_model, unroll

from eagle3_utils.draft.unrolling.plan import plan_unroll


def test_mask_is_that_of_the_predicted_token():
    # One document of 6 tokens, only token 3 supervised: slot 1 predicts it at step 0, slot 0 at step 1, none at 2.
    model, head = small_model()
    result, plan = unroll(model, head, random_batch([6], ["000100"]), num_steps=3)
    assert result.counts.supervised.tolist() == [1, 1, 0]
    assert result.slots.tolist() == [0, 1]  # slot 0 last counts at step 1, so it comes first
    assert result.supervised.tolist() == [[False, True, False], [True, False, False]]
    assert plan.num_rows == [2, 1, 0]


def test_predictions_never_cross_documents():
    model, head = small_model()
    result, _ = unroll(model, head, random_batch([2, 2, 3], ["11", "11", "111"]), num_steps=3)
    assert result.counts.supervised.tolist() == [1, 0, 0]  # only the third document has a token t + 2


def test_missing_teacher_state_is_an_error():
    batch = random_batch([8], ["00011100"])
    batch.final_index[2] = -1
    batch.final_index[3:5] -= 1
    with pytest.raises(ValueError, match="no teacher state"):
        plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 2)


def test_pairs_and_rows_equal_a_loop_over_slots_and_steps():
    batch, steps = random_batch([9, 1, 30, 14], seed=4), 5
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, steps)
    last, expected = {}, {}
    for slot in range(54):
        for step in range(steps):
            token = slot + 2 + step
            inside = token < 54 and batch.document_ids[slot] == batch.document_ids[token]
            if inside and batch.loss_mask[token]:
                last[slot] = step
                expected[int(batch.final_index[token - 1]), step] = slot
    assert sorted(plan.rows.tolist()) == sorted(last)
    assert plan.rows.tolist() == sorted(last, key=lambda slot: (-last[slot], slot))
    assert plan.num_rows == [sum(value >= step for value in last.values()) for step in range(steps)]
    offsets = [sum(plan.num_rows[:step]) for step in range(steps)]
    for (teacher_row, step), slot in expected.items():
        row = int(plan.pair_index[teacher_row, step]) - offsets[step]
        assert 0 <= row < plan.num_rows[step] and plan.rows[row] == slot
    assert int((plan.pair_index < plan.num_hidden).sum()) == len(expected)


def test_prompt_slots_far_from_supervised_tokens_are_left_out():
    batch = random_batch([40], ["0" * 30 + "1" * 10])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 3)
    assert sorted(plan.rows.tolist()) == list(range(26, 38))  # token 30 is predicted by slots 28, 27, 26
    assert plan.num_rows == [12, 11, 10]


def test_values_by_teacher_row_come_back_by_slot():
    batch = random_batch([6], ["000110"])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 2)
    values = torch.tensor([[1, 2], [3, 4]])  # teacher rows of tokens 3 and 4
    assert plan.rows.tolist() == [0, 1, 2]  # slots 0 and 1 still count at step 1, slot 2 only at step 0
    assert plan.by_slot(values).tolist() == [[0, 2], [1, 4], [3, 0]]
