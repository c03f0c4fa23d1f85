"""Attention of the unroll: step-0 keys within the document, and each slot's own later keys, merged exactly.

At step i slot t attends to the step-0 keys of slots ≤ t of its document and to its own keys of steps 1…i. The first
part is ordinary attention that also returns its log-sum-exp; the second is a few dot products per slot. Merging them
through the log-sum-exp equals one softmax over both, without a [T, i·T] mask.

T slots · n query rows · A query heads · K key-value heads · G = A / K · E key width · F value width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eagle3_utils.draft.modules.fused import fused
from eagle3_utils.draft.unrolling.plan import UnrollPlan

# (query [n, A, E], keys [T, K, E], values [T, K, F], scale) -> attended [n, A, F], log-sum-exp [n, A] (natural)
PrefixAttention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# (query, keys, values, own keys by step [n, K, E], own values by step [n, K, F], scale) -> attended [n, A, F]
Attention = Callable[..., torch.Tensor]

_QUERY_BLOCK = 512  # eager: scores of at most this many queries at a time
_FLEX_BLOCK = 128
# Of few queries torch would choose its decoding kernel, which has no build for dynamic shapes (2.11).
_KERNEL_OPTIONS = {"BACKEND": "TRITON"}


@cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=True)


def eager_attention(plan: UnrollPlan) -> Attention:
    """Whole attention by plain matrix products."""
    return with_own_keys(eager_prefix_attention(plan))


def flex_attention_of(plan: UnrollPlan) -> Attention:
    """Whole attention by flex_attention, compiled; the plan on the device."""
    return with_own_keys(flex_prefix_attention(plan))


def with_own_keys(attend_prefix: PrefixAttention) -> Attention:
    """Attention to step-0 keys made one to own keys as well."""

    def attend(query, keys, values, own_keys, own_values, scale):
        attended, lse = attend_prefix(query, keys, values, scale)
        if not own_keys:
            return attended
        own = torch.stack(own_keys, 1), torch.stack(own_values, 1)
        return _compiled_merge(attended, lse, query, *own, scale)[0]

    return attend


def eager_prefix_attention(plan: UnrollPlan) -> PrefixAttention:
    """Plain matrix products, document by document; float32 on a CPU. Rows may come in any order."""
    layouts: dict[int, tuple] = {}

    def attend(query, keys, values, scale):
        count = len(query)
        if count not in layouts:
            layouts[count] = _document_blocks(plan, count)
        order, inverse, blocks = layouts[count]
        query = query.index_select(0, order) * scale
        parts = [
            _attend_block(query[first:last], keys[lo:hi], values[lo:hi], hidden)
            for first, last, lo, hi, hidden in blocks
        ]
        attended, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return attended.index_select(0, inverse), lse.index_select(0, inverse)

    return attend


def _document_blocks(plan: UnrollPlan, count: int):
    """Order the first `count` rows by slot and cut them into query blocks (first, last, first key, last key, mask)."""
    slots, order = plan.rows[:count].sort()
    starts = plan.document_start[slots]
    _, lengths = starts.unique_consecutive(return_counts=True)
    blocks, first = [], 0
    for length in lengths.tolist():
        for begin in range(first, first + length, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, first + length)
            lo, hi = int(starts[begin]), int(slots[end - 1]) + 1
            hidden = torch.arange(lo, hi, device=slots.device) > slots[begin:end, None]  # [queries, keys]
            blocks.append((begin, end, lo, hi, hidden))
        first += length
    return order, order.argsort(), blocks


def _attend_block(query, keys, values, hidden):
    """query [n, A, E] (scaled), keys [m, K, E], values [m, K, F], hidden bool [n, m] -> [n, A, F], [n, A]."""
    (num_queries, num_heads, _), num_kv = query.shape, keys.shape[1]
    grouped = query.unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3)  # [K, G, n, E]
    scores = grouped.flatten(1, 2) @ keys.permute(1, 2, 0)  # [K, G·n, m]
    scores = scores.unflatten(1, (-1, num_queries)).masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)  # [K, G, n]
    attended = (scores - lse[..., None]).exp().flatten(1, 2) @ values.transpose(0, 1)  # [K, G·n, F]
    attended = attended.unflatten(1, (-1, num_queries)).permute(2, 0, 1, 3)  # [n, K, G, F]
    return attended.reshape(num_queries, num_heads, -1), lse.permute(2, 0, 1).reshape(num_queries, num_heads)


def flex_prefix_attention(plan: UnrollPlan, compiled: bool = True) -> PrefixAttention:
    """flex_attention over blocks of 128 × 128; compiled on CUDA, and the same code uncompiled for tests on a CPU."""
    attention = _compiled_flex() if compiled else flex_attention
    masks: dict[int, BlockMask] = {}

    def attend(query, keys, values, scale):
        count = len(query)
        if count not in masks:
            masks[count] = interval_block_mask(plan.document_start, plan.rows[:count])
        attended, aux = attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            block_mask=masks[count],
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options=_KERNEL_OPTIONS if query.is_cuda else None,
        )
        return attended[0].transpose(0, 1), aux.lse[0].transpose(0, 1)

    return attend


def interval_block_mask(document_start: torch.Tensor, slots: torch.Tensor) -> BlockMask:
    """Block mask where query row r sees the keys document_start[slots[r]] … slots[r]; built without a [T, T] mask."""
    num_keys, device = len(document_start), slots.device
    first_key, last_key = document_start[slots], slots
    padding = -len(slots) % _FLEX_BLOCK
    lowest = torch.nn.functional.pad(first_key, (0, padding), value=num_keys).view(-1, _FLEX_BLOCK)
    highest = torch.nn.functional.pad(last_key, (0, padding), value=-1).view(-1, _FLEX_BLOCK)
    block_first = torch.arange(0, num_keys, _FLEX_BLOCK, device=device)
    block_last = (block_first + _FLEX_BLOCK - 1).clamp(max=num_keys - 1)
    touches = (lowest[..., None] <= block_last) & (highest[..., None] >= block_first)  # [query blocks, 128, key blocks]
    covers = (lowest[..., None] <= block_first) & (highest[..., None] >= block_last)
    full = covers.all(1)
    partial = touches.any(1) & ~full

    def ordered(blocks):
        counts = blocks.sum(-1, dtype=torch.int32)
        indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return counts[None, None], indices[None, None]

    def sees(_batch, _head, query_row, key_slot):
        return (first_key[query_row] <= key_slot) & (key_slot <= last_key[query_row])

    return BlockMask.from_kv_blocks(
        *ordered(partial), *ordered(full), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=sees, seq_lengths=(len(slots), num_keys)
    )


def merge_own_keys(attended, lse, query, own_keys, own_values, scale):
    """Add each row's own later keys to its prefix attention, as one softmax over both.

    attended [n, A, F], lse [n, A], query [n, A, E], own_keys [n, i, K, E], own_values [n, i, K, F] -> attended to both
    [n, A, F], log-sum-exp of both [n, A].
    """
    num_kv = own_keys.shape[2]
    grouped = query.unflatten(1, (num_kv, -1)).float()  # [n, K, G, E]
    scores = (grouped[:, None] * own_keys[:, :, :, None]).sum(-1).flatten(2) * scale  # [n, i, A], float32
    total = torch.logaddexp(lse, scores.logsumexp(1))
    weights = (scores - total[:, None]).exp().unflatten(2, (num_kv, -1))[..., None]  # [n, i, K, G, 1]
    own = (weights * own_values[:, :, :, None]).sum(1).flatten(1, 2)  # [n, A, F]
    return (attended.float() * (lse - total).exp()[..., None] + own).to(attended.dtype), total


_compiled_merge = fused(merge_own_keys)
