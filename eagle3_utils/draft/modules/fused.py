"""Parts of the layer written for speed and memory, the same formulas on every device.

- Elementwise chains are compiled on CUDA (`fused`): one kernel instead of several passes over memory. EAGLE3_COMPILE=0
  in the environment leaves them as they are.
- `gated_mlp` and `linear` add a weight's gradient to `weight.grad` in place (one product with beta = 1), because a
  weight is used once per step of the unroll: autograd would write a full-size gradient for each use and then add it.
  So `torch.autograd.grad` sees no gradient of these weights; `backward` does.
- `gated_mlp` keeps gate and up for the backward pass, not their product.

N rows · H hidden · I width of the MLP.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps

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


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [N, in] @ weightᵀ [in, out]; the weight, a leaf, gets its gradient added in place."""
    return _Linear.apply(x, weight)


def gated_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) · up(x)): x [N, H], gate and up [I, H], down [H, I] -> [N, H]."""
    return _GatedMLP.apply(x, gate, up, down)


def add_weight_gradient(weight: torch.Tensor, upstream: torch.Tensor, x: torch.Tensor) -> None:
    """weight.grad += upstreamᵀ [out, N] @ x [N, in], in the weight's dtype (products are summed in float32)."""
    if not weight.requires_grad:
        return
    if weight.grad is None:
        weight.grad = upstream.T @ x
    else:
        weight.grad.addmm_(upstream.T, x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, upstream):
        add_weight_gradient(ctx.weight, upstream, ctx.saved_tensors[0])
        return upstream @ ctx.weight, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        gate_NI, up_NI = x @ gate.T, x @ up.T
        ctx.save_for_backward(x, gate_NI, up_NI)
        ctx.weights = gate, up, down
        return swiglu(gate_NI, up_NI) @ down.T

    @staticmethod
    def backward(ctx, upstream):
        x, gate_NI, up_NI = ctx.saved_tensors
        gate, up, down = ctx.weights
        product, gate_gradient, up_gradient = swiglu_backward(upstream @ down, gate_NI, up_NI)
        add_weight_gradient(down, upstream, product)
        add_weight_gradient(gate, gate_gradient, x)
        add_weight_gradient(up, up_gradient, x)
        return torch.addmm(gate_gradient @ gate, up_gradient, up), None, None, None


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
