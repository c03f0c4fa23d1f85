"""Figures of an extraction, by hand: rates over the time in which requests ran, resumed runs included."""

from eagle3_utils.states.extraction.report import ExtractReport, summarise


def test_a_resumed_extraction_has_the_rate_of_all_its_runs():
    report = ExtractReport(
        num_samples=3, num_resumed=7, num_tokens=300, total_tokens=1000, total_seconds=4.0, num_runs=2
    )
    assert report.tokens_per_second == 250.0
    assert report.table_row()["samples"] == 10 and report.table_row()["runs"] == 2


def test_stores_are_summed_and_failures_kept_by_name():
    train = ExtractReport(
        num_samples=8, total_tokens=900, total_seconds=3.0, num_retries=1, failures={"a": "timed out"}
    )
    val = ExtractReport(num_samples=2, total_tokens=100, total_seconds=1.0)
    together = summarise({"train": train, "val": val})
    assert together["tokens_per_second"] == 250.0
    assert together["num_failed"] == 1 and together["num_retries"] == 1
    assert together["stores"]["train"]["failures"] == {"a": "timed out"}


def test_nothing_done_has_no_rate():
    assert summarise({"train": ExtractReport()})["tokens_per_second"] == 0.0
