"""The table at the end of a run and `eagle3 status`, from a run folder written by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from eagle3_utils import summary
from eagle3_utils.runs import write_json


@pytest.fixture
def run_folder(tmp_path):
    figures = {
        "01_merge_data": {"num_samples": 10, "num_tokens": 1234, "supervised_share": 0.5},
        "02_patch_and_probe": {"num_gates": 9, "passed": True},
        "03_extract_hidden_states": {"num_samples": 10, "num_tokens": 1234, "tokens_per_second": 900.4,
                                     "bytes_stored": 3 << 30, "num_failed": 0},
        "04_train_draft": {"validation_accuracy": [0.5, 0.25], "baseline_accuracy": 0.05, "accept_length": 1.6},
        "05_evaluate_acceptance": {"accept_length": 1.456, "accept_length_by_source": {"maths": 1.7},
                                   "identical": True, "accept_length_from": "decoded",
                                   "num_prompts": 12, "max_new_tokens": 40},
    }  # fmt: skip
    for stage, metrics in figures.items():
        write_json(tmp_path / stage / "metrics.json", metrics)
        write_json(tmp_path / stage / "DONE.json", {})
    return tmp_path


def test_the_result_table_has_the_figures_of_every_stage_that_is_done(run_folder):
    rows = dict(summary.result_rows(run_folder))
    assert rows["corpus"] == "10 samples, 1,234 tokens"
    assert rows["extraction"] == "900 tokens/s, 3.00 GiB"
    assert rows["validation accuracy by step"] == "0.500  0.250"
    assert rows["accept length, 12 held-out prompts of 40 tokens"].startswith("1.46")
    assert rows["  maths"] == "1.70"
    (run_folder / "05_evaluate_acceptance" / "DONE.json").unlink()
    assert not any("accept length" in label for label, _ in summary.result_rows(run_folder))


def test_figures_of_an_earlier_draft_are_left_out(run_folder):
    write_json(run_folder / "04_train_draft" / "DONE.json", {"outputs": {"draft": "trained since"}})
    write_json(run_folder / "05_evaluate_acceptance" / "DONE.json", {"inputs": {"draft": "before"}})
    assert not any("accept length" in label for label, _ in summary.result_rows(run_folder))


def test_a_failed_probe_and_a_differing_output_stand_out(run_folder):
    write_json(run_folder / "02_patch_and_probe" / "metrics.json", {"num_gates": 9, "passed": False})
    write_json(
        run_folder / "05_evaluate_acceptance" / "metrics.json",
        {
            "accept_length": 1.0,
            "accept_length_by_source": {},
            "identical": False,
            "accept_length_from": "teacher-forced",
        },
    )
    rows = dict(summary.result_rows(run_folder))
    assert "FAILED" in rows["probe"] and rows["output of PyTorch equals plain greedy decoding"] == "NO"
    evaluation = {
        "accept_length": 1.0,
        "accept_length_by_source": {},
        "identical": None,
        "accept_length_from": "teacher-forced",
        "parity": {"passed": False, "offline": [0.5, 0.25], "served": [0.25, 0.125]},
    }
    served = {"draft": "3 · 1 · 4", "concurrency": 8, "counted": 1.44, "speed-up": 1.25}
    write_json(run_folder / "05_evaluate_acceptance" / "metrics.json", evaluation | {"served": [served]})
    rows = dict(summary.result_rows(run_folder))
    assert rows["output of PyTorch equals plain greedy decoding"].startswith("not checked")
    assert rows["served by SGLang, 3 · 1 · 4, 8 in flight"].startswith("accept length 1.44, 1.25× the tokens/s")
    assert rows["served acceptance equals the offline one"] == "NO"
    assert rows["accept length of the served tokens, offline and served"] == "1.75 and 1.38"


def test_status_tells_running_from_stopped_by_the_process(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    base = {"updated": 0.0, "started": time.time(), "done": 3, "total": 9, "unit": "samples", "tokens_per_second": 12.5}
    write_json(tmp_path / "01_merge_data" / "progress.json", base | {"stage": "01_merge_data", "pid": os.getpid()})
    write_json(tmp_path / "04_train_draft" / "progress.json", base | {"stage": "04_train_draft", "pid": ended.pid})
    write_json(tmp_path / "00_generate_responses" / "DONE.json", {"wall_seconds": 61.0})
    states = {row["stage"][:2]: row["state"] for row in summary.stage_rows(tmp_path)}
    assert states["00"] == "done" and states["01"] == "running" and states["04"] == "stopped"
    assert states["02"] == "left out" and states["06"] == "waiting"
    line = summary.format_stage(summary.stage_rows(tmp_path)[1])
    assert "3/9 samples" in line and "tokens_per_second 12.5" in line
    json.dumps(summary.stage_rows(tmp_path))
    extraction = {"tokens_per_second_now": 365_123.4, "bytes_per_second": 1.71e9, "eta_seconds": 150.0, "failed": 1}
    disk = {"staged_bytes": 3 << 30, "staging_max_bytes": 4 << 30, "disk_free_bytes": 70 << 30}
    line = summary.format_stage({"stage": "03_extract_hidden_states", "state": "running"} | extraction | disk)
    assert line.endswith(
        "tokens_per_second_now 365,123  1.710 GB/s  ETA 2.5 min  failed 1  "
        "staged 3.00 GiB  staging_max 4.00 GiB  disk_free 70.00 GiB"
    )


def test_status_after_a_stop_says_stopped_and_how_to_go_on(tmp_path):
    """The runner ended before the notebook wrote any progress; while a runner works, the same folder is running."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / "00_generate_responses").mkdir()
    (tmp_path / "00_generate_responses" / "parameters.yaml").touch()
    assert summary.how_to_go_on(tmp_path, summary.stage_rows(tmp_path)) is None
    found = {}
    for pid in (ended.pid, os.getpid()):
        (tmp_path / "runner.pid").write_text(f"{pid}\neagle3 run p.yaml\n")
        rows = summary.stage_rows(tmp_path)
        found[pid] = rows[0]["state"], rows[1]["state"], summary.how_to_go_on(tmp_path, rows)
    began_before_this_process = {"pid": os.getpid(), "started": 1.0, "updated": 1.0}
    write_json(tmp_path / "00_generate_responses" / "progress.json", began_before_this_process)
    os.utime(tmp_path / "runner.pid", (1.0, 1.0))
    rows = summary.stage_rows(tmp_path)
    assert rows[0]["state"] == "stopped" and "to go on" in summary.how_to_go_on(tmp_path, rows)
    assert found[ended.pid] == ("stopped", "waiting", "stopped; to go on: eagle3 run p.yaml")
    assert found[os.getpid()] == ("running", "waiting", None)
