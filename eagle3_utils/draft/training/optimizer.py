"""AdamW on float32 master weights, with a cosine schedule and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class MasterAdamW:
    """Keeps float32 copies of parameters that are not float32 themselves; steps those and copies back.

    Gradients must already be the whole step's (summed over ranks): their norm is then the global one.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
        betas: tuple[float, float] = (0.9, 0.95),
    ):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()
            for parameter in self.parameters
        ]
        self.max_grad_norm = max_grad_norm
        self.adam = torch.optim.AdamW(self.masters, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.parameters, *self.masters):
            parameter.grad = None

    def grad_norm(self) -> float:
        """Global norm of the gradients, in float32."""
        return float(torch.nn.utils.get_total_norm([p.grad.float() for p in self.parameters if p.grad is not None]))

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Scale the gradients down to `max_grad_norm` if they exceed it, and take one AdamW step."""
        scale = min(1.0, self.max_grad_norm / (grad_norm + 1e-6))
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float().mul_(scale)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and masters: tensors and plain numbers only."""
        masters = [m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        return {"adam": self.adam.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.adam.load_state_dict(state["adam"])
        separate = [m for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        for master, saved in zip(separate, state["masters"], strict=True):
            master.copy_(saved)


def cosine_with_warmup(step: int, total_steps: int, peak: float, warmup_fraction: float, floor: float = 0.1) -> float:
    """Learning rate of step 0…total-1: linear warm-up to `peak`, then half a cosine down to `floor · peak`."""
    warmup = max(1, round(warmup_fraction * total_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
