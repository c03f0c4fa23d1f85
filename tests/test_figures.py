"""Tables of stage 05 (metrics.json is pinned in test_evaluate.py)."""

from eagle3_utils.acceptance import figures
from eagle3_utils.acceptance.intervals import Interval


def test_one_row_per_source_and_step_with_the_interval_of_the_accept_length():
    steps = [Interval(0.5, 0.4, 0.6), Interval(0.25, 0.2, 0.3)]
    one = dict.fromkeys(figures.BY_STEP, steps) | {
        "supervised": [10, 8],
        "accept_length": [Interval(1.5, 1.4, 1.6)] * 2,
    }
    rows = figures.step_rows({"all": one, "chat": one})
    assert [(row["source"], row["step"]) for row in rows] == [("all", 0), ("all", 1), ("chat", 0), ("chat", 1)]
    assert rows[1]["positions"] == 8 and rows[1]["conditional"] == 0.25
    assert (rows[0]["accept_length"], rows[0]["length_low"], rows[0]["length_high"]) == (1.5, 1.4, 1.6)


def test_a_source_that_one_way_does_not_know_gets_a_dash():
    rows = figures.decoded_rows({"decoded": {"all": Interval(2.0, 1.5, 2.5)}, "served": {"code": Interval(3.0, 3, 3)}})
    assert rows == [
        {"source": "all", "decoded": "2.000 [1.500, 2.500]", "served": "–"},
        {"source": "code", "decoded": "–", "served": "3.000 [3.000, 3.000]"},
    ]
