"""Triton kernels for `own_keys`: a program holds one row's query heads of one key-value head, for all its own keys.

What PyTorch's compiler makes of the same formulas reads every operand once more for each key. Imported only where there
is a GPU (or Triton's interpreter, in the tests).

n rows · P places · A query heads · K key-value heads · G = A / K · i own keys of a row · E key width · F value width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def merge(attended, lse, places, query, own_keys, own_values, scale: float):
    """As `own_keys.merge_own`; lse may have any strides, places and own keys and values must be contiguous."""
    out = attended.new_empty(len(query), *attended.shape[1:])
    out_lse = lse.new_empty(len(query), query.shape[1])
    sizes, options = _launch(query, own_keys, own_values)
    tensors = attended.contiguous(), lse, places, query.contiguous(), own_keys, own_values, out, out_lse
    with torch.cuda.device_of(query):
        _merge[sizes](*tensors, *lse.stride(), scale, *own_keys.shape[1:3], **options)
    return out, out_lse


def gradients(upstream, attended, lse, query, own_keys, own_values, scale: float, by_place, places):
    """As `own_keys.own_gradients`; query and by_place may have any strides, the rest must be contiguous."""
    by_query, by_keys, by_values = (tensor.new_empty(tensor.shape) for tensor in (query, own_keys, own_values))
    sizes, options = _launch(query, own_keys, own_values)
    given = upstream, attended, lse, query.contiguous(), own_keys, own_values, by_place.contiguous(), places
    with torch.cuda.device_of(query):
        _gradients[sizes](*given, by_query, by_keys, by_values, scale, *own_keys.shape[1:3], **options)
    return by_query, by_keys, by_values


def _launch(query, own_keys, own_values) -> tuple[tuple[int, int], dict]:
    """The grid, and the sizes that a kernel is compiled for."""
    (num_rows, num_heads, width), num_kv, value_width = query.shape, own_keys.shape[2], own_values.shape[3]
    group = num_heads // num_kv
    sizes = {
        f"{name}_BLOCK": triton.next_power_of_2(size)
        for name, size in zip("GEF", (group, width, value_width), strict=True)
    }
    num_warps = max(1, min(4, sizes["G_BLOCK"] * sizes["E_BLOCK"] // 512))
    return (num_rows, num_kv), {"G": group, "E": width, "F": value_width, "num_warps": num_warps, **sizes}


@triton.jit
def _program(places, num_kv, G: tl.constexpr, G_BLOCK: tl.constexpr):
    """Which row and key-value head; of its query heads [G_BLOCK]: their numbers, whether they are there, and where they
    lie among all rows' heads and all places' heads; the row's place."""
    row, kv_head, g = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, G_BLOCK)
    place, heads = tl.load(places + row), kv_head * G + g
    return row, kv_head, heads, g < G, row * num_kv * G + heads, place * num_kv * G + heads, place


@triton.jit
def _heads(tensor, at, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The vectors of some heads, float32 [G_BLOCK, BLOCK]; zeros beyond."""
    w = tl.arange(0, BLOCK)
    return tl.load(tensor + at[:, None] * WIDTH + w, mask=there[:, None] & (w < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _put_heads(tensor, at, there, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    w = tl.arange(0, BLOCK)
    tl.store(tensor + at[:, None] * WIDTH + w, values, mask=there[:, None] & (w < WIDTH))


@triton.jit
def _vector(tensor, at, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One key or value, float32 [BLOCK]; zeros beyond."""
    w = tl.arange(0, BLOCK)
    return tl.load(tensor + at * WIDTH + w, mask=w < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _put_vector(tensor, at, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    w = tl.arange(0, BLOCK)
    tl.store(tensor + at * WIDTH + w, values, mask=w < WIDTH)


@triton.jit(do_not_specialize=["num_own"])
def _merge(
    attended, lse, places, query, own_keys, own_values, out, out_lse,
    lse_by_place, lse_by_head, scale, num_own, num_kv,
    G: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, F_BLOCK: tl.constexpr,
):  # fmt: skip
    row, kv_head, heads, there, in_row, in_place, place = _program(places, num_kv, G, G_BLOCK)
    q = _heads(query, in_row, there, E, E_BLOCK)
    mixed = _heads(attended, in_place, there, F, F_BLOCK)
    largest = tl.load(lse + place * lse_by_place + heads * lse_by_head, mask=there, other=0.0)
    total = tl.full([G_BLOCK], 1.0, tl.float32)
    for number in range(num_own):
        at = (row * num_own + number) * num_kv + kv_head
        key, value = _vector(own_keys, at, E, E_BLOCK), _vector(own_values, at, F, F_BLOCK)
        score = tl.sum(q * key[None, :], 1) * scale
        new_largest = tl.maximum(largest, score)
        shrunk, weight = tl.exp(largest - new_largest), tl.exp(score - new_largest)
        mixed = mixed * shrunk[:, None] + weight[:, None] * value[None, :]
        total = total * shrunk + weight
        largest = new_largest
    _put_heads(out, in_row, there, mixed / total[:, None], F, F_BLOCK)
    tl.store(out_lse + in_row, largest + tl.log(total), mask=there)


@triton.jit(do_not_specialize=["num_own"])
def _gradients(
    upstream, attended, lse, query, own_keys, own_values, by_place, places, by_query, by_keys, by_values,
    scale, num_own, num_kv,
    G: tl.constexpr, E: tl.constexpr, F: tl.constexpr,
    G_BLOCK: tl.constexpr, E_BLOCK: tl.constexpr, F_BLOCK: tl.constexpr,
):  # fmt: skip
    row, kv_head, _, there, in_row, in_place, _ = _program(places, num_kv, G, G_BLOCK)
    q = _heads(query, in_row, there, E, E_BLOCK)
    up = _heads(upstream, in_row, there, F, F_BLOCK)
    mean = tl.sum(up * _heads(attended, in_row, there, F, F_BLOCK), 1)
    lse_of_both = tl.load(lse + in_row, mask=there, other=0.0)
    by_q = _heads(by_place, in_place, there, E, E_BLOCK)
    for number in range(num_own):
        at = (row * num_own + number) * num_kv + kv_head
        key, value = _vector(own_keys, at, E, E_BLOCK), _vector(own_values, at, F, F_BLOCK)
        weight = tl.exp(tl.sum(q * key[None, :], 1) * scale - lse_of_both)
        by_score = weight * (tl.sum(up * value[None, :], 1) - mean) * scale
        by_q += by_score[:, None] * key[None, :]
        _put_vector(by_keys, at, tl.sum(by_score[:, None] * q, 0), E, E_BLOCK)
        _put_vector(by_values, at, tl.sum(weight[:, None] * up, 0), F, F_BLOCK)
    _put_heads(by_query, in_row, there, by_q, E, E_BLOCK)
