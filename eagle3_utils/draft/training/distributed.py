"""Ranks of a torchrun, or the one of a plain process: the few collective calls that training needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class Ranks:
    """rank of num_ranks; `device` is where this rank's model lives."""

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, on the device of `values`, which may become the sum itself."""
        if self.num_ranks > 1:
            moved = values.to(self.device)
            dist.all_reduce(moved)
            values = moved.to(values.device)
        return values

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over ranks, in buckets; a missing one counts as zeros."""
        if self.num_ranks == 1:
            return
        bucket: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= _BUCKET_BYTES:
                _sum_bucket(bucket)
                bucket = []
        if bucket:
            _sum_bucket(bucket)

    def shard(self, model: nn.Module) -> None:
        """Shard weights, gradients and, through them, the optimiser's state over ranks (FSDP2), in place.

        Gradients are summed in float32, not averaged: losses are already divided by the whole step's positions.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.num_ranks,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.num_ranks > 1:
            dist.barrier()


ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def free_whole_weights(model: nn.Module) -> None:
    """Of a sharded model, free the whole weights that a forward without a backward leaves in memory."""
    if hasattr(model, "reshard"):
        model.reshard()


def _sum_bucket(gradients: list[torch.Tensor]) -> None:
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)


@contextmanager
def open_ranks(device: str):
    """The process group torchrun announced in the environment (NCCL on CUDA, gloo on CPU), or a single rank."""
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local = int(os.environ.get("LOCAL_RANK", 0))
    where = torch.device("cuda", local) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield Ranks(0, 1, where)
        return
    dist.init_process_group("nccl" if use_cuda else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), where)
    finally:
        dist.destroy_process_group()
