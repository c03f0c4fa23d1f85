"""The whole chain: seven notebooks under papermill, real SGLang servers on the CPU, killed once and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3_utils.config import STAGES
from eagle3_utils.runs import repo_root

pytestmark = pytest.mark.server


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle3_utils.cli", *arguments]


def kill_during(arguments: list[str], progress: Path) -> None:
    """Start a run and kill -9 the runner and its kernels as soon as the stage of `progress` is at work."""
    process = subprocess.Popen(arguments, cwd=repo_root(), stdout=subprocess.DEVNULL)
    while not progress.is_file():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.2)
    victims = [process.pid] + [child.pid for child in psutil.Process(process.pid).children()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def run_folder(tiny_llama, tmp_path_factory) -> Path:
    """A finished run of parameters/smoke.yaml on the tiny Llama, killed at the start of extraction and run again."""
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    arguments = command(
        "run", "parameters/smoke.yaml", "--set", f"shared.run_dir={folder}", "--set", f"shared.model={tiny_llama}",
        "--set", "shared.aux_layers=[0, 2, 4]",
    )  # fmt: skip
    kill_during(arguments, folder / "03_extract_hidden_states" / "progress.json")
    result = subprocess.run(arguments, cwd=repo_root(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "02_patch_and_probe: done already" in result.stdout
    assert "accept length" in result.stdout
    return folder


def metrics(run_folder: Path, number: str) -> dict:
    stage = next(stage for stage in STAGES if stage.startswith(number))
    return json.loads((run_folder / stage / "metrics.json").read_text())


def test_every_stage_is_done_with_its_notebook_and_html(run_folder):
    for stage in STAGES:
        assert (run_folder / stage / "DONE.json").is_file()
        assert (run_folder / stage / "notebook.html").stat().st_size > 10_000


def test_the_run_leaves_a_report_and_a_model_card(run_folder):
    page = (run_folder / "report.html").read_text()
    assert page.count("<h2>") == 7 and page.count("data:image/svg+xml") >= 5
    card = (run_folder / "data" / "draft" / "export" / "README.md").read_text()
    assert "held-out prompts of" in card and "--speculative-algorithm EAGLE3" in card


def test_nothing_is_lost_between_corpus_and_store(run_folder):
    corpus, states = metrics(run_folder, "01"), metrics(run_folder, "03")
    assert states["num_samples"] == corpus["num_samples"] and states["num_tokens"] == corpus["num_tokens"]
    assert states["num_failed"] == 0 and metrics(run_folder, "02")["passed"]


def test_the_stores_verify_deeply(run_folder):
    for split in ("train", "val"):
        store = run_folder / "data" / "hidden_states" / split
        result = subprocess.run(command("verify", str(store), "--deep", "--json"), capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_the_draft_checks_and_its_decoding_is_lossless(run_folder, tiny_llama):
    draft = run_folder / "data" / "draft" / "export"
    result = subprocess.run(
        command("check-draft", str(draft), "--target", str(tiny_llama)), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert metrics(run_folder, "05")["identical"]
    assert 1.0 <= metrics(run_folder, "05")["accept_length"] <= 8.0


def test_a_second_run_does_nothing_and_other_parameters_refuse(run_folder, tiny_llama):
    common = ["run", "parameters/smoke.yaml", "--set", f"shared.run_dir={run_folder}", "--set"]
    common += [f"shared.model={tiny_llama}", "--set", "shared.aux_layers=[0, 2, 4]"]
    again = subprocess.run(command(*common), cwd=repo_root(), capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("done already") == len(STAGES)
    other = subprocess.run(command(*common, "--set", "4.epochs=9.0"), cwd=repo_root(), capture_output=True, text=True)
    assert other.returncode == 1 and "epochs is now 9.0" in other.stderr


def test_no_server_is_left_behind(run_folder):
    mine = [process for process in psutil.process_iter(["cmdline"]) if str(run_folder) in str(process.info["cmdline"])]
    assert not mine
