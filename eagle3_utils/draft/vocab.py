"""Draft vocabulary: the most frequent target tokens, and the maps between draft ids and target ids.

A draft's `lm_head` has D rows instead of the target's V. SGLang stores the map as `d2t` [D], the *offset* from a
draft id to its target id (`target_id = draft_id + d2t[draft_id]`), and `t2d` [V], which target ids have a draft id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle3_utils.errors import UserError


@dataclass(frozen=True)
class VocabMap:
    """d2t int64 [D] offsets, t2d bool [V], target_ids int64 [D] ascending; all three say the same thing."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    target_ids: torch.Tensor


def count_tokens(
    samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """How often each token is one the model must predict, and how often it stands anywhere: two int64 [V].

    samples: (input_ids, loss_mask) per sample; the first token of a sample is never predicted.
    """
    supervised, everything = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for input_ids, loss_mask in samples:
        ids, mask = np.asarray(input_ids, np.int64), np.asarray(loss_mask).astype(bool)
        np.add.at(supervised, ids[1:][mask[1:]], 1)
        np.add.at(everything, ids, 1)
    return supervised, everything


def build_draft_vocab(
    token_counts: np.ndarray, size: int, always: Iterable[int] = (), all_counts: np.ndarray | None = None
) -> VocabMap:
    """The `size` most frequent tokens; `always` (end tokens, say) are in whatever their counts.

    token_counts: int [V], of supervised tokens. Ties (a small corpus has thousands of tokens seen never or once) go to
    the token with more `all_counts`, int [V], of prompts and answers together; then to the lower id, which byte-level
    BPE merged earlier. Raises `UserError` when size exceeds V or `always` alone exceeds size.
    """
    vocab_size = len(token_counts)
    forced = np.unique(np.fromiter(always, dtype=np.int64))
    if size > vocab_size:
        raise UserError(f"draft_vocab_size {size} exceeds the target's vocabulary of {vocab_size}")
    if len(forced) > size:
        raise UserError(f"draft_vocab_size {size} is smaller than the {len(forced)} tokens that must be in it")
    ties = np.zeros(vocab_size, np.int64) if all_counts is None else np.asarray(all_counts, np.int64)
    by_frequency = np.lexsort((np.arange(vocab_size), -ties, -np.asarray(token_counts, dtype=np.int64)))
    rest = by_frequency[~np.isin(by_frequency, forced)][: size - len(forced)]
    return vocab_map_of(torch.from_numpy(np.sort(np.concatenate([forced, rest]))), vocab_size)


def vocab_map_of(target_ids: torch.Tensor, vocab_size: int) -> VocabMap:
    """The maps for ascending, distinct target ids [D]."""
    target_ids = target_ids.to(torch.int64)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=target_ids.device)
    t2d[target_ids] = True
    return VocabMap(target_ids - torch.arange(len(target_ids), device=target_ids.device), t2d, target_ids)
