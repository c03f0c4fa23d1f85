"""The pilot's rates, on arrivals made by hand."""

from __future__ import annotations

import pytest

from eagle3_utils.serving.probing.pilot import _running_rates, run_pilot


def test_the_range_is_of_the_running_rate_after_a_quarter_of_the_samples():
    arrivals = [(1.0, 10), (2.0, 10), (2.5, 10), (3.0, 10), (7.0, 10), (7.5, 10), (8.0, 10), (8.5, 10)]
    assert _running_rates(arrivals) == pytest.approx([30 / 2.5, 40 / 3, 50 / 7, 60 / 7.5, 70 / 8, 80 / 8.5])


def test_answers_that_arrive_together_do_not_look_infinitely_fast():
    together = [(2.0, 10), (2.0, 10), (2.0, 10), (2.000001, 10)]
    assert max(_running_rates(together)) <= 20.0


class StandIn:
    """A client whose dumps are files of 100 bytes per token."""

    def __init__(self, folder):
        self.folder, self.sizes = folder, {}

    def generate(self, input_ids, rid):
        (self.folder / rid).write_bytes(b"x" * 100 * len(input_ids))

    def wait_for_dump(self, rid):
        return self.folder / rid


def test_tokens_and_bytes_are_counted_and_dumps_taken(tmp_path):
    pilot = run_pilot(StandIn(tmp_path), [[1] * n for n in (3, 5, 2, 10)], num_concurrent=2)
    assert (pilot["num_tokens"], pilot["num_samples"], pilot["bytes_per_token"]) == (20, 4, 100)
    assert pilot["tokens_per_second"] == pytest.approx(20 / pilot["seconds"])
    assert pilot["tokens_per_second_low"] <= pilot["tokens_per_second_high"]
    assert list(tmp_path.iterdir()) == []
