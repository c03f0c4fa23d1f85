"""AdamW on float32 master weights, with a cosine schedule and clipping by the global gradient norm.

A bfloat16 weight is the upper half of its master's bits, rounded to nearest; the lower half is kept as 16 bits beside
it. So master and weight together take four bytes instead of six, and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from eagle3_utils.devices import to_device
from eagle3_utils.draft.modules.fused import fused

_EPSILON = 1e-8


class MasterAdamW:
    """AdamW of parameters that are float32, or bfloat16 with float32 masters; moments are float32.

    Gradients must already be the whole step's (summed over ranks). Sharded parameters (DTensor) are stepped shard by
    shard; `sum_over_ranks` then adds up the squares of the gradient norms of the shards.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.5,
        betas: tuple[float, float] = (0.9, 0.95),
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        shards = [_local(parameter) for parameter in self.parameters]
        self.means = [torch.zeros_like(shard, dtype=torch.float32) for shard in shards]
        self.squares = [torch.zeros_like(shard, dtype=torch.float32) for shard in shards]
        self.lower_halves = [_empty_or_zeros(shard) for shard in shards]
        self._steps_taken = torch.zeros((), dtype=torch.int64)
        self.weight_decay, self.max_grad_norm, self.betas = weight_decay, max_grad_norm, betas
        self.sum_over_ranks = sum_over_ranks

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def grad_norm(self) -> float:
        """Global norm of the gradients, summed in float32."""
        norms = [
            torch.linalg.vector_norm(_local(p.grad), dtype=torch.float32) for p in self.parameters if p.grad is not None
        ]
        square = torch.stack(norms).square().sum() if norms else torch.zeros(())
        return math.sqrt(float(square if self.sum_over_ranks is None else self.sum_over_ranks(square)))

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Scale the gradients down to `max_grad_norm` if they exceed it, and take one AdamW step."""
        self._steps_taken += 1
        clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6))
        first, second = (1 - beta ** int(self._steps_taken) for beta in self.betas)
        numbers = (clip, 1 - learning_rate * self.weight_decay, learning_rate / first, 1 / math.sqrt(second),
                   1 - self.betas[0], 1 - self.betas[1])  # fmt: skip
        scalars: dict[torch.device, tuple[torch.Tensor, ...]] = {}
        moments = zip(self.means, self.squares, self.lower_halves, strict=True)
        for parameter, (mean, square, lower) in zip(self.parameters, moments, strict=True):
            if parameter.grad is None or not mean.numel():
                continue
            if mean.device not in scalars:
                scalars[mean.device] = to_device(torch.tensor(numbers), mean.device).unbind()
            width = math.gcd(mean.numel(), 1024)  # so that one compiled kernel serves all sizes
            gradient = _local(parameter.grad).reshape(-1, width)
            tensors = (tensor.view(-1, width) for tensor in (_local(parameter), lower, mean, square))
            adamw_(*tensors, gradient, *scalars[mean.device])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Named tensors that share memory with the optimiser's (DTensors where the parameters are), steps included."""
        named = {}
        for name in ("means", "squares", "lower_halves"):
            for number, (parameter, tensor) in enumerate(zip(self.parameters, getattr(self, name), strict=True)):
                if name != "lower_halves" or parameter.dtype != torch.float32:
                    named[f"{name}.{number}"] = sharded_like(tensor, parameter)
        return named | {"steps_taken": self._steps_taken}


@fused
def adamw_(weight, lower, mean, square, gradient, clip, decay, rate, correction, first, second) -> None:
    """One step in place over tensors [N, width]; the rest are 0-d float32.

    weight bfloat16 with lower int16 (see `split_master`), or float32 with lower empty. clip: factor on the gradient.
    decay: 1 - learning rate · weight decay. rate: learning rate / (1 - β1^t). correction: 1 / sqrt(1 - β2^t).
    first, second: 1 - β1, 1 - β2.
    """
    gradient = gradient.float() * clip
    new_mean = mean + first * (gradient - mean)
    new_square = square + second * (gradient * gradient - square)
    master = weight if weight.dtype == torch.float32 else join_master(weight, lower)
    master = master * decay - rate * new_mean / (new_square.sqrt() * correction + _EPSILON)
    mean.copy_(new_mean)
    square.copy_(new_square)
    if weight.dtype == torch.float32:
        weight.copy_(master)
    else:
        upper, rest = split_master(master)
        weight.copy_(upper)
        lower.copy_(rest)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 -> the nearest bfloat16, and what its bits lack to the master's, int16."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(weight: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_master`."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)).view(torch.float32)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; another tensor itself."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def sharded_like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A shard as part of a whole laid out as the parameter (a DTensor, or else the shard is the whole)."""
    if not hasattr(parameter, "to_local"):
        return shard
    from torch.distributed.tensor import DTensor

    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(shard, parameter.device_mesh, parameter.placements, run_check=False, **layout)


def _empty_or_zeros(shard: torch.Tensor) -> torch.Tensor:
    """Lower halves of fresh masters: none for float32, zeros for bfloat16 (master and weight are then the same)."""
    return torch.zeros(0 if shard.dtype == torch.float32 else shard.shape, dtype=torch.int16, device=shard.device)


def cosine_with_warmup(step: int, total_steps: int, peak: float, warmup_fraction: float, floor: float = 0.1) -> float:
    """Learning rate of step 0…total-1: linear warm-up to `peak`, then half a cosine down to `floor · peak`."""
    warmup = max(1, round(warmup_fraction * total_steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
