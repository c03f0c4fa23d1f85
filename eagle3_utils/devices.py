"""Two habits of torch that cost time, and their cures: threads that fight for cores, copies that wait for a GPU."""

from __future__ import annotations

from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread():
    """Threads started within use one core each: small tensor operations of many threads would fight for all cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of the CPU; to a GPU without waiting for what is queued there."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
