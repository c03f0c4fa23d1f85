"""Draft vocabulary and its maps."""

from time import perf_counter

import numpy as np
import pytest
import torch

from eagle3_utils.draft.vocab import build_draft_vocab, count_tokens, vocab_map_of
from eagle3_utils.errors import UserError


def test_most_frequent_tokens_in_ascending_order_with_offsets():
    vocab = build_draft_vocab(np.array([5, 0, 9, 1, 7]), 3)
    assert vocab.target_ids.tolist() == [0, 2, 4]
    assert vocab.d2t.tolist() == [0, 1, 2]  # target id minus draft id
    assert vocab.t2d.tolist() == [True, False, True, False, True]


def test_ties_go_to_the_lower_id():
    assert build_draft_vocab(np.array([1, 1, 1, 1]), 2).target_ids.tolist() == [0, 1]


def test_ties_go_to_the_token_that_is_seen_more_often_anywhere():
    supervised, everything = np.array([0, 2, 0, 0, 2]), np.array([0, 2, 7, 1, 2])
    assert build_draft_vocab(supervised, 3, all_counts=everything).target_ids.tolist() == [1, 2, 4]
    assert build_draft_vocab(supervised, 4, all_counts=everything).target_ids.tolist() == [1, 2, 3, 4]
    assert build_draft_vocab(supervised, 1, all_counts=everything).target_ids.tolist() == [1]


def test_a_vocabulary_of_163840_is_built_in_less_than_a_second():
    counts = np.random.default_rng(0).zipf(1.3, 163_840)
    start = perf_counter()
    vocab = build_draft_vocab(counts, 32_000, always=[163_585, 163_586], all_counts=counts)
    assert perf_counter() - start < 1
    assert len(vocab.target_ids) == 32_000 and vocab.t2d.sum() == 32_000 and vocab.t2d[163_585]


def test_forced_tokens_are_in_whatever_their_counts():
    vocab = build_draft_vocab(np.array([9, 8, 7, 0, 0]), 2, always=[4])
    assert vocab.target_ids.tolist() == [0, 4]


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="exceeds"):
        build_draft_vocab(np.ones(3), 4)
    with pytest.raises(UserError, match="must be in it"):
        build_draft_vocab(np.ones(9), 1, always=[1, 2])


def test_counts_are_of_supervised_tokens_after_the_first():
    counts, _ = count_tokens([([3, 3, 1, 2], [1, 1, 0, 1]), ([2, 2], [0, 1])], vocab_size=4)
    assert counts.tolist() == [0, 0, 2, 1]


def test_all_counts_are_of_every_token():
    supervised, everything = count_tokens([([3, 3, 1, 2], [1, 1, 0, 1]), ([2, 2], [0, 1])], vocab_size=4)
    assert supervised.tolist() == [0, 0, 2, 1] and everything.tolist() == [0, 1, 3, 2]


def test_maps_agree_with_each_other():
    ids = torch.tensor([2, 3, 11, 40])
    vocab = vocab_map_of(ids, 50)
    assert torch.equal(vocab.d2t + torch.arange(4), ids)
    assert torch.equal(vocab.t2d.nonzero().flatten(), ids)
