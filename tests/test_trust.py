"""Which of two implementations is taken, and what the log says of it."""

import logging

import pytest
import torch

from eagle3_utils.draft.unrolling.trust import relative_difference, trusted


def test_difference_is_the_largest_in_units_of_the_first_ones_norm():
    first = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])]
    assert relative_difference(first, [torch.tensor([3.0, 4.5]), torch.tensor([1.0, 0.25])]) == pytest.approx(0.25)
    assert relative_difference(first, first) == 0


@pytest.mark.parametrize(
    ("difference", "taken", "said"),
    [
        (lambda a, b: 0.01, "new", "the kernel is used"),
        (lambda a, b: 0.5, "old", "the kernel is not used: it differs by 0.500"),
        (lambda a, b: float("nan"), "old", "the kernel is not used: it differs by nan"),
        (lambda a, b: 1 / 0, "old", "the kernel is not used: ZeroDivisionError: division by zero"),
    ],
)
def test_a_candidate_is_taken_when_it_agrees(difference, taken, said, caplog):
    with caplog.at_level(logging.INFO, "eagle3.train"):
        assert trusted("the kernel", lambda: "new", "old", difference) == taken
    assert said in caplog.text


def test_a_candidate_that_cannot_be_made_is_not_taken(caplog):
    def make():
        raise ImportError("no such package")

    assert trusted("the kernel", make, "old", lambda a, b: 0.0) == "old"
    assert "the kernel is not used: ImportError: no such package" in caplog.text
