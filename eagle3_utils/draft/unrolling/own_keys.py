"""A row's own later keys, merged into its attention to the step-0 keys, and the gradients of that.

    attended, lse = merge_own(attended, lse, places, query, own_keys, own_values, scale)
    by_query, by_keys, by_values = own_gradients(upstream, attended, lse, query, own_keys, own_values, scale, …)

Plain tensor operations on a CPU; on CUDA the kernels of own_keys_kernels.py, which are believed only once they have
agreed with the same formulas there.

n rows · P places · A query heads · K key-value heads · G = A / K · i own keys of a row · E key width · F value width.
"""

from __future__ import annotations

from functools import cache

import torch

from eagle3_utils.draft.modules.fused import fused
from eagle3_utils.draft.unrolling.attention import merge_own_keys
from eagle3_utils.draft.unrolling.trust import relative_difference, trusted


def merge_own(attended, lse, places, query, own_keys, own_values, scale: float):
    """One softmax over what was attended to already and each row's own keys.

    attended [P, A, F] and its log-sum-exp float32 [P, A], of which row r takes `places[r]`; query [n, A, E], own_keys
    [n, i, K, E], own_values [n, i, K, F] -> attended to both [n, A, F], log-sum-exp of both [n, A].
    """
    return _implementation(query, own_keys, own_values)[0](attended, lse, places, query, own_keys, own_values, scale)


def own_gradients(upstream, attended, lse, query, own_keys, own_values, scale: float, by_place, places):
    """Gradients of `merge_own`'s softmax by query [n, A, E], own_keys [n, i, K, E] and own_values [n, i, K, F].

    upstream, attended [n, A, F]: the gradient by the merged output, and that output. lse [n, A]: its log-sum-exp.
    by_place [P, A, E]: the query's gradient from the other keys, which is added at its `places` [n].
    """
    compute = _implementation(query, own_keys, own_values)[1]
    return compute(upstream, attended, lse, query, own_keys, own_values, scale, by_place, places)


def merge_plainly(attended, lse, places, query, own_keys, own_values, scale: float):
    """`merge_own` by tensor operations."""
    attended, lse = attended.index_select(0, places), lse.index_select(0, places)
    return merge_own_keys(attended, lse, query, own_keys, own_values, scale)


def gradients_plainly(upstream, attended, lse, query, own_keys, own_values, scale: float, by_place, places):
    """`own_gradients` by tensor operations."""
    num_kv, dtypes = own_keys.shape[2], (query.dtype, own_keys.dtype, own_values.dtype)
    query, upstream, attended = (part.unflatten(1, (num_kv, -1)).float() for part in (query, upstream, attended))
    own_keys, own_values = own_keys[:, :, :, None].float(), own_values[:, :, :, None].float()  # [n, i, K, 1, width]
    scores = (query[:, None] * own_keys).sum(-1) * scale  # [n, i, K, G]
    weights = (scores - lse.unflatten(1, (num_kv, -1))[:, None]).exp()
    mean = (upstream * attended).sum(-1)  # [n, K, G]
    by_scores = weights * ((upstream[:, None] * own_values).sum(-1) - mean[:, None]) * scale
    by_query = (by_scores[..., None] * own_keys).sum(1).flatten(1, 2) + by_place.index_select(0, places).float()
    by_keys = (by_scores[..., None] * query[:, None]).sum(3)
    by_values = (weights[..., None] * upstream[:, None]).sum(3)
    found = (by_query, by_keys, by_values)
    return tuple(gradient.to(dtype) for gradient, dtype in zip(found, dtypes, strict=True))


_FORMULAS = merge_plainly, gradients_plainly
_COMPILED_FORMULAS = tuple(map(fused, _FORMULAS))


def _implementation(query, own_keys, own_values):
    if not query.is_cuda:
        return _FORMULAS
    return _on_cuda(query.device, query.dtype, query.shape[1], own_keys.shape[2], query.shape[2], own_values.shape[3])


@cache
def _on_cuda(device: torch.device, dtype: torch.dtype, *widths: int):
    """What merges and differentiates on a GPU; `widths` are A, K, E and F."""
    chosen = trusted(
        "the kernel for own keys",
        _kernels,
        _FORMULAS,
        lambda first, second: largest_difference(first, second, device, dtype, *widths),
    )
    return _COMPILED_FORMULAS if chosen is _FORMULAS else chosen


def _kernels():
    from eagle3_utils.draft.unrolling import own_keys_kernels

    return own_keys_kernels.merge, own_keys_kernels.gradients


def largest_difference(first, second, device, dtype, num_heads: int, num_kv: int, width: int, value_width: int):
    """Of two implementations' outputs, log-sum-exps and gradients, in units of the first one's norm."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    places = torch.tensor([5, 0, 3], device=device)
    query, upstream = random(3, num_heads, width).to(dtype), random(3, num_heads, value_width).to(dtype)
    own_keys, own_values = random(3, 2, num_kv, width).to(dtype), random(3, 2, num_kv, value_width).to(dtype)
    attended, by_place = random(6, num_heads, value_width).to(dtype), random(6, num_heads, width).to(dtype)
    lse, scale, results = random(num_heads, 6).T, width**-0.5, []
    for combine, differentiate in (first, second):
        merged = combine(attended, lse, places, query, own_keys, own_values, scale)
        found = differentiate(upstream, *merged, query, own_keys, own_values, scale, by_place, places)
        results.append((*merged, *found))
    return relative_difference(*results)
