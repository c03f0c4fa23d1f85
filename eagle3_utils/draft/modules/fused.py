"""Parts of the layer written for speed and memory, the same formulas on every device.

- Elementwise chains are compiled on CUDA (`fused`): one kernel instead of several passes over memory. EAGLE3_COMPILE=0
  in the environment leaves them as they are (not the Triton kernels of unrolling/own_keys_kernels.py).
- `normed_gated_mlp`, `linear` and `normed_linears` add a weight's gradient to `weight.grad` in place (one product with
  beta = 1), because a weight is used once per step of the unroll: autograd would write a full-size gradient for each
  use and then add it. `rows_of` does the same for a leaf of which each step takes some rows. So `torch.autograd.grad`
  sees no gradient of these leaves; `backward` does.
- `normed_linears` and `normed_gated_mlp` keep the input of the norm before them, not its output, which costs little
  to make again; the MLP keeps gate and up, not their product.

N rows · H hidden · I width of the MLP.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import NamedTuple

import torch
import torch.nn.functional as F

_COMPILE = os.environ.get("EAGLE3_COMPILE") != "0"


def fused(function: Callable) -> Callable:
    """Compile a function of tensors on CUDA, whatever their first dimension; leave it as it is elsewhere."""

    @cache
    def compiled():
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        return torch.compile(function)

    @wraps(function)
    def call(*args):
        if not (args[0].is_cuda and _COMPILE):
            return function(*args)
        for argument in args:
            if isinstance(argument, torch.Tensor) and argument.dim():
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled()(*args)

    return call


class Columns(NamedTuple):
    """Some columns of a weight [out, in] that is a leaf; their gradient is added in place to the leaf's."""

    leaf: torch.Tensor
    columns: slice

    @property
    def values(self) -> torch.Tensor:
        return self.leaf.detach()[:, self.columns]


def halves(leaf: torch.Tensor) -> tuple[Columns, Columns]:
    """The left and the right half of a weight's columns."""
    middle = leaf.shape[1] // 2
    return Columns(leaf, slice(0, middle)), Columns(leaf, slice(middle, None))


def linear(x: torch.Tensor, weight: torch.Tensor | Columns) -> torch.Tensor:
    """x [N, in] @ weightᵀ [in, out]; the weight, a leaf or columns of one, gets its gradient added in place."""
    return _Linear.apply(x, _columns(weight))


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows, int64 [n], of x [N, …] -> [n, …]; a leaf gets its gradient added in place."""
    return _RowsOf.apply(x, rows)


def row_gradient(x: torch.Tensor, rows: torch.Tensor | slice, upstream: torch.Tensor) -> torch.Tensor | None:
    """The gradient by all of x [N, …], given that by some of its rows; None for a leaf: it is added to its `.grad`."""
    if not x.is_leaf:
        return _add_rows(torch.zeros_like(x), rows, upstream)
    if x.requires_grad:
        x.grad = _add_rows(torch.zeros_like(x) if x.grad is None else x.grad, rows, upstream)
    return None


def normed_linears(
    x: torch.Tensor, norm: torch.Tensor, eps: float, *weights: torch.Tensor | Columns
) -> tuple[torch.Tensor, ...]:
    """RMS norm (weight [H]) and then several linear maps: x [N, H], weights [out, H] each -> [N, out] each.

    The weights, leaves or columns of some, get their gradients added in place.
    """
    return _NormedLinears.apply(x, norm, eps, *map(_columns, weights))


def normed_gated_mlp(
    x: torch.Tensor, norm: torch.Tensor, eps: float, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """down(silu(gate(n)) · up(n)), n the RMS norm (weight [H]) of x: x [N, H], gate and up [I, H], down [H, I]
    -> [N, H]."""
    return _NormedGatedMLP.apply(x, norm, eps, gate, up, down)


def add_weight_gradient(
    weight: torch.Tensor, upstream: torch.Tensor, x: torch.Tensor, columns: slice = slice(None)
) -> None:
    """weight.grad[:, columns] += upstreamᵀ [out, N] @ x [N, in], in the weight's dtype (sums are float32)."""
    if not weight.requires_grad:
        return
    if weight.grad is None and x.shape[1] == weight.shape[1]:
        weight.grad = upstream.T @ x
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    weight.grad[:, columns].addmm_(upstream.T, x)


def _add_rows(total: torch.Tensor, rows: torch.Tensor | slice, values: torch.Tensor) -> torch.Tensor:
    if isinstance(rows, slice):
        total[rows] += values
        return total
    return total.index_add_(0, rows, values)


def _columns(weight: torch.Tensor | Columns) -> Columns:
    return weight if isinstance(weight, Columns) else Columns(weight, slice(None))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.values.T

    @staticmethod
    def backward(ctx, upstream):
        add_weight_gradient(ctx.weight.leaf, upstream, ctx.saved_tensors[0], ctx.weight.columns)
        return upstream @ ctx.weight.values, None


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(x, rows)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, upstream):
        return row_gradient(*ctx.saved_tensors, upstream), None


class _NormedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm, eps, *weights):
        ctx.save_for_backward(x, norm)
        ctx.weights, ctx.eps = weights, eps
        normed = F.rms_norm(x, x.shape[-1:], norm, eps)
        return tuple(normed @ weight.values.T for weight in weights)

    @staticmethod
    def backward(ctx, *upstreams):
        x, norm = ctx.saved_tensors
        normed, by_inputs = _normed_again(x, norm, ctx.eps)
        by_normed = None
        for upstream, weight in zip(upstreams, ctx.weights, strict=True):
            by_normed = upstream @ weight.values if by_normed is None else by_normed.addmm_(upstream, weight.values)
            add_weight_gradient(weight.leaf, upstream, normed, weight.columns)
        return *by_inputs(by_normed), None, *[None] * len(upstreams)


class _NormedGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm, eps, gate, up, down):
        normed = F.rms_norm(x, x.shape[-1:], norm, eps)
        gate_NI, up_NI = normed @ gate.T, normed @ up.T
        ctx.save_for_backward(x, norm, gate_NI, up_NI)
        ctx.weights, ctx.eps = (gate, up, down), eps
        return swiglu(gate_NI, up_NI) @ down.T

    @staticmethod
    def backward(ctx, upstream):
        x, norm, gate_NI, up_NI = ctx.saved_tensors
        gate, up, down = ctx.weights
        product, gate_gradient, up_gradient = swiglu_backward(upstream @ down, gate_NI, up_NI)
        add_weight_gradient(down, upstream, product)
        normed, by_inputs = _normed_again(x, norm, ctx.eps)
        add_weight_gradient(gate, gate_gradient, normed)
        add_weight_gradient(up, up_gradient, normed)
        by_normed = (gate_gradient @ gate).addmm_(up_gradient, up)
        return *by_inputs(by_normed), None, None, None, None


def _normed_again(x: torch.Tensor, norm: torch.Tensor, eps: float):
    """The RMS norm of x once more, and what turns a gradient by it into those by x and by the norm's weight."""
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), norm.detach().requires_grad_()
        normed = F.rms_norm(leaves[0], x.shape[-1:], leaves[1], eps)
    return normed.detach(), lambda by_normed: torch.autograd.grad(normed, leaves, by_normed)


@fused
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, [N, I] twice -> [N, I]."""
    return F.silu(gate) * up


@fused
def swiglu_backward(upstream: torch.Tensor, gate: torch.Tensor, up: torch.Tensor):
    """The product itself, and its gradients by gate and by up; all [N, I], computed in float32."""
    dtype, upstream, gate, up = upstream.dtype, upstream.float(), gate.float(), up.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    by_gate = upstream * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).to(dtype), by_gate.to(dtype), (upstream * silu).to(dtype)
