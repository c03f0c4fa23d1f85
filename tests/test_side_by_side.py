"""benchmarks/side_by_side.py: a process that fails costs its own row, and is named, whatever it printed before."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import side_by_side

ONE_LINE = """print('{"work": "dense", "tokens_per_second": 1.0}', flush=True)"""


def results_of(script: str, folder: Path) -> list[dict]:
    process, gate = side_by_side._start([sys.executable, "-c", script], folder / "run", {})
    Path(f"{gate}.ready").touch()
    return side_by_side._let_through("ours tiny", process, gate)


def test_a_whole_run_has_its_lines_only(tmp_path):
    assert results_of(ONE_LINE, tmp_path) == [{"run": "ours tiny", "work": "dense", "tokens_per_second": 1.0}]


def test_a_run_that_fails_after_its_first_line_keeps_it_and_is_named(tmp_path):
    first, second = results_of(f"{ONE_LINE}\nraise MemoryError('no room')", tmp_path)
    assert first["work"] == "dense"
    assert second["exit_code"] == 1 and side_by_side._last_line(second["error"]) == "MemoryError: no room"


def test_a_run_without_a_line_is_a_failure(tmp_path):
    (only,) = results_of("pass", tmp_path)
    assert only["run"] == "ours tiny" and only["error"] == ""
    assert side_by_side._last_line(only["error"]) == "no output"
