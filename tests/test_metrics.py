"""Acceptance figures against hand computation."""

import pytest
import torch

from eagle3_utils.draft.metrics import (
    StepCounts,
    accept_length,
    chain_counts,
    draft_overlap,
)


def test_chains_end_at_the_first_miss_and_at_unsupervised_steps():
    correct = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    supervised = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    alive, accepted = chain_counts(correct & supervised, supervised)
    # step 0: all 4 alive, 3 right. step 1: rows 0, 1, 3 alive, rows 0 and 3 right. step 2: row 0 alive, wrong.
    assert alive.tolist() == [4, 3, 1]
    assert accepted.tolist() == [3, 2, 0]


def test_accept_length_counts_the_bonus_token():
    assert accept_length([0.0, 0.9]) == 1.0
    assert accept_length([0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25)
    assert accept_length([1.0] * 7) == 8.0


def test_summary_divides_by_supervised_positions():
    counts = StepCounts(*(torch.tensor(row, dtype=torch.float64) for row in (
        [10, 8], [5, 2], [1, 2], [3, 0], [20, 24], [6, 2], [10, 4], [5, 1])))  # fmt: skip
    figures = counts.summary()
    assert figures["accuracy"] == [0.5, 0.25]
    assert figures["out_of_vocab"] == [0.1, 0.25]
    assert figures["baseline"] == [0.3, 0.0]
    assert figures["loss"] == [2.0, 3.0]
    assert figures["overlap"] == [0.6, 0.25]
    assert figures["conditional"] == [0.5, 0.25]
    assert figures["accept_length"] == pytest.approx(1 + 0.5 + 0.125)


def test_counts_add_up_and_survive_the_trip_through_a_tensor():
    ones = StepCounts.from_tensor(torch.ones(8, 3, dtype=torch.float64))
    both = ones + ones + StepCounts.zeros(3)
    assert torch.equal(both.as_tensor(), torch.full((8, 3), 2.0, dtype=torch.float64))


def test_nothing_supervised_gives_zeros_not_errors():
    assert StepCounts.zeros(2).summary()["accuracy"] == [0.0, 0.0]
    assert StepCounts.zeros(2).summary()["accept_length"] == 1.0


def test_overlap_is_one_minus_total_variation():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    assert float(draft_overlap(p, q)) == pytest.approx(1 - 0.5 * (0.4 + 0.3 + 0.1))
