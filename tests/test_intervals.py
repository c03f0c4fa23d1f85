"""Intervals beside values worked out by hand, and what imports them: no torch."""

import subprocess
import sys

from eagle3_utils.acceptance.intervals import Interval, from_json, ratio_interval, to_json


def test_a_ratio_is_of_sums_and_identical_items_have_no_spread():
    found = ratio_interval([30, 10], [10, 10])
    assert found.value == 2.0 and found.low == 1.0 and found.high == 3.0
    assert ratio_interval([20] * 6, [10] * 6) == Interval(2.0, 2.0, 2.0)


def test_intervals_become_json_and_text():
    nested = {"all": [Interval(1.5, 1.25, 1.75)], "steps": 3}
    assert to_json(nested) == {"all": [{"value": 1.5, "low": 1.25, "high": 1.75}], "steps": 3}
    assert from_json(to_json(nested)) == nested
    assert str(Interval(1.5, 1.25, 1.75)) == "1.500 [1.250, 1.750]"


def test_a_report_is_written_without_importing_torch():
    code = "import sys, eagle3_utils.run_report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
