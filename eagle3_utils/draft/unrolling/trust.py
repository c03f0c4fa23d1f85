"""Kernels that are believed only once they agree with another way of computing the same, on the device at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

logger = logging.getLogger("eagle3.train")
_MOST_DIFFERENCE = 0.02  # of the norm, in bfloat16
_Functions = TypeVar("_Functions")


def trusted(
    name: str,
    make: Callable[[], _Functions],
    reference: _Functions,
    difference: Callable[[_Functions, _Functions], float],
) -> _Functions:
    """What `make()` returns, if nothing raises and it agrees with the reference; else that. The log says which.

    difference: of two implementations' results, as `relative_difference` gives it.
    """
    try:
        candidate = make()
        found = difference(reference, candidate)
    except Exception as error:  # noqa: BLE001 (a compiler may raise anything, and the reference does the same work)
        logger.warning("%s is not used: %s: %s", name, type(error).__name__, str(error)[:200])
        return reference
    if not found < _MOST_DIFFERENCE:
        logger.warning("%s is not used: it differs by %.3f", name, found)
        return reference
    logger.info("%s is used", name)
    return candidate


def relative_difference(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> float:
    """The largest difference between results, in units of the norm of each of the first ones."""
    pairs = ((a.float(), b.float()) for a, b in zip(first, second, strict=True))
    return max(float((b - a).norm() / a.norm()) for a, b in pairs)
