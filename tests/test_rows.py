"""Rows of a prompt: placed by the position each piece says it starts at, and a gap is never overlooked."""

from __future__ import annotations

import pytest

from eagle3_utils.serving.capture.rows import GapError, Piece, place


@pytest.mark.parametrize(
    ("prefix", "extend", "filled", "expected"),
    [
        (0, 10, 0, Piece(100, 110, 0)),  # whole prompt
        (4, 3, 4, Piece(100, 103, 4)),  # a chunk
        (7, 3, 7, Piece(100, 103, 7)),  # the last chunk
        (10, 1, 10, None),  # a decode step in a mixed batch
        (0, 14, 10, Piece(100, 110, 0)),  # prefilled again after a retraction: generated rows are left out
        (2, 3, 6, Piece(100, 103, 2)),  # rows that are there already are written again
    ],
)
def test_rows_are_placed_by_position(prefix, extend, filled, expected):
    assert place(100, prefix, extend, num_tokens=10, num_filled=filled) == expected


def test_rows_answered_by_a_prefix_cache_are_missed():
    with pytest.raises(GapError, match=r"rows 0…8 of 10 were never computed"):
        place(0, prefix=9, extend=1, num_tokens=10, num_filled=0)
