"""FlashAttention kernels over spans of packed documents: version 4 for large heads where it is right, else version 2.

Version 2 comes with PyTorch. Version 4 (`flash-attn-4`, a dependency of SGLang) is made for Hopper and later. It takes
3 to 5 % off the step of an 8B or Kimi-K2.5 shape, and over a minute to compile in every process, so heads of width 64,
those of small models, stay with version 2. It is believed only once it has agreed with version 2 here. Values that are
narrower than keys (MLA) are filled up with zeros.

P places in spans · A query heads · K key-value heads · E width of queries and keys · F ≤ E width of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from eagle3_utils.draft.unrolling.trust import relative_difference, trusted

_WIDTH_OF_VERSION_4 = 128


@dataclass
class Spans:
    """query_bounds, key_bounds int32 [documents + 1]; each span's end is aligned with its keys' end (causal)."""

    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    longest_query: int
    longest_key: int


def forward(query, keys, values, spans: Spans, scale: float):
    """query [P, A, E], keys [slots, K, E], values [slots, K, F] -> attended [P, A, F], log-sum-exp float32 [P, A]."""
    compute, _ = _kernels_for(query, keys)
    width = values.shape[-1]
    attended, lse = compute(query, keys, _filled_up(values, query), spans, scale)
    return attended[..., :width], lse.T


def backward(upstream, query, attended, keys, values, lse, spans: Spans, scale: float):
    """Gradients by query, keys and values, given what the queries attended to and its log-sum-exp [P, A]."""
    _, compute = _kernels_for(query, keys)
    width = values.shape[-1]
    upstream, attended, values = (_filled_up(part, query) for part in (upstream, attended, values))
    by_query, by_keys, by_values = compute(
        upstream, query, attended, keys, values, lse.T.contiguous(), spans, scale
    )[:3]  # fmt: skip
    return by_query, by_keys, by_values[..., :width]


def _filled_up(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros up to the query's width, its rows aligned for the kernels."""
    missing = query.shape[-1] - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor.contiguous()


def _forward_2(query, keys, values, spans: Spans, scale: float):
    return torch.ops.aten._flash_attention_forward(
        query, keys, values, spans.query_bounds, spans.key_bounds, spans.longest_query, spans.longest_key,
        0.0, True, False, scale=scale,
    )[:2]  # fmt: skip


def _backward_2(upstream, query, attended, keys, values, lse, spans: Spans, scale: float):
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is 0
    return torch.ops.aten._flash_attention_backward(
        upstream, query, keys, values, attended, lse, spans.query_bounds, spans.key_bounds,
        spans.longest_query, spans.longest_key, 0.0, True, random_state, random_state[:0], scale=scale,
    )  # fmt: skip


def _version_4():
    """Its forward and backward passes. Raises `ImportError` when it is not installed."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def bounds(spans: Spans) -> dict:
        return {"cu_seqlens_q": spans.query_bounds, "cu_seqlens_k": spans.key_bounds,
                "max_seqlen_q": spans.longest_query, "max_seqlen_k": spans.longest_key}  # fmt: skip

    def forward_4(query, keys, values, spans, scale):
        return _flash_attn_fwd(
            query, keys, values, **bounds(spans), softmax_scale=scale, causal=True, return_lse=True
        )[:2]  # fmt: skip

    def backward_4(upstream, query, attended, keys, values, lse, spans, scale):
        return _flash_attn_bwd(
            query, keys, values, attended, upstream, lse, softmax_scale=scale, causal=True, **bounds(spans)
        )

    return forward_4, backward_4


def _kernels_for(query: torch.Tensor, keys: torch.Tensor):
    return _kernels(query.device, query.shape[-1], query.shape[1] // keys.shape[1], query.dtype)


@cache
def _kernels(device: torch.device, width: int, heads_per_key: int, dtype: torch.dtype):
    """The forward and the backward pass; version 4 is compiled for each number of query heads to a key."""
    version_2 = _forward_2, _backward_2
    if torch.cuda.get_device_capability(device) < (9, 0) or width != _WIDTH_OF_VERSION_4:
        return version_2
    return trusted(
        "FlashAttention 4",
        _version_4,
        version_2,
        lambda first, second: _largest_difference(first, second, device, width, heads_per_key, dtype),
    )


def _largest_difference(first, second, device, width: int, heads_per_key: int, dtype: torch.dtype) -> float:
    """Of output, log-sum-exp and gradients, in units of the first one's norm; some places have no weight."""
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, width, generator=generator, device=device).to(dtype)

    bounds = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 150, 170], [0, 200, 220])]
    spans, scale = Spans(*bounds, 150, 200), width**-0.5
    query, keys, values, upstream = (
        random(rows, heads) for rows, heads in ((170, 2 * heads_per_key), (220, 2), (220, 2), (170, 2 * heads_per_key))
    )
    upstream[::7] = 0
    results = []
    for compute, differentiate in (first, second):
        attended, lse = compute(query, keys, values, spans, scale)
        known = lse.clone()
        known[:, ::7] = float("inf")
        gradients = differentiate(upstream, query, attended, keys, values, known, spans, scale)
        results.append((attended, lse, *gradients[:3]))
    return relative_difference(*results)
