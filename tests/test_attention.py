"""Attention of the unroll: blocks, both backends, and the exact merge of own keys."""

import pytest
import torch
from draft_reference import random_batch, small_model, unroll

from eagle3_utils.draft.unrolling.attention import (
    eager_attention,
    eager_prefix_attention,
    flex_prefix_attention,
    interval_block_mask,
    merge_own_keys,
    with_own_keys,
)
from eagle3_utils.draft.unrolling.plan import plan_unroll

STEPS = 4


@pytest.mark.parametrize("lengths", [[17, 3, 60, 1, 29], [130, 260, 7]])
def test_flex_attention_equals_eager_attention(lengths):
    model, head = small_model()
    batch = random_batch(lengths)
    with torch.no_grad():  # flex_attention has no backward on a CPU
        eager, _ = unroll(model, head, batch, attend=eager_attention)
        flex, _ = unroll(
            model, head, batch, attend=lambda plan: with_own_keys(flex_prefix_attention(plan, compiled=False))
        )
    assert float(flex.loss) == pytest.approx(float(eager.loss), abs=1e-5)
    assert torch.equal(flex.correct, eager.correct)


def test_block_mask_is_full_where_all_is_seen_and_partial_where_some_is():
    batch = random_batch([300, 130, 900])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, STEPS)
    mask = interval_block_mask(plan.document_start, plan.rows)
    slots, keys = plan.rows[:, None], torch.arange(1330)
    seen = (batch.document_ids[slots] == batch.document_ids[keys]) & (keys <= slots)
    seen = torch.nn.functional.pad(seen, (0, -1330 % 128, 0, -len(slots) % 128))
    blocks = seen.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    real_keys = torch.nn.functional.pad(torch.ones(1330), (0, -1330 % 128)).bool().view(1, 1, -1, 128)
    want_full = (blocks | ~real_keys).all(3).all(1)
    assert want_full.any()
    for row in range(len(want_full)):
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        partial = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        assert sorted(full) == want_full[row].nonzero().flatten().tolist()
        assert sorted(full + partial) == blocks.any(3).any(1)[row].nonzero().flatten().tolist()


def test_merged_attention_equals_one_softmax_over_all_keys():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(5, 4, 8, generator=generator), torch.randn(5, 3, 2, 8, generator=generator)
    value, prefix_scores = torch.randn(5, 3, 2, 6, generator=generator), torch.randn(5, 4, 11, generator=generator)
    prefix_values = torch.randn(5, 4, 11, 6, generator=generator)
    attended = (prefix_scores.softmax(-1)[..., None] * prefix_values).sum(2)
    merged, total = merge_own_keys(attended, prefix_scores.logsumexp(-1), query, key, value, 0.3)
    own_scores = torch.einsum("nhd,nihd->nhi", query, key.repeat_interleave(2, 2)) * 0.3
    every_score = torch.cat([prefix_scores, own_scores], -1)
    torch.testing.assert_close(total, every_score.logsumexp(-1))
    weights = every_score.softmax(-1)
    every = torch.cat([prefix_values, value.repeat_interleave(2, 2).transpose(1, 2)], 2)
    torch.testing.assert_close(merged, (weights[..., None] * every).sum(2))


def test_eager_attention_cut_into_query_blocks_equals_one_masked_softmax():
    batch = random_batch([700, 40])  # longer than one query block
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 2)
    generator = torch.Generator().manual_seed(0)
    count = plan.num_rows[1]
    query, keys = torch.randn(count, 4, 8, generator=generator), torch.randn(740, 2, 8, generator=generator)
    values = torch.randn(740, 2, 6, generator=generator)
    attended, lse = eager_prefix_attention(plan)(query, keys, values, 0.5)
    slots = plan.rows[:count]
    seen = (batch.document_ids[slots, None] == batch.document_ids) & (torch.arange(740) <= slots[:, None])
    scores = torch.einsum("nhd,khd->hnk", query, keys.repeat_interleave(2, 1)) * 0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    expected = torch.einsum("hnk,khd->nhd", scores.softmax(-1), values.repeat_interleave(2, 1))
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T, atol=1e-5, rtol=1e-5)
