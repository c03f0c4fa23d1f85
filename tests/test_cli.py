"""The command line as a user meets it: exit codes, one-line errors, JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from fake_capture import fill, flip_a_byte, make_records
from test_card import CONFIG, DONE

from eagle3_utils import cli, run_lock
from eagle3_utils.runs import write_json

COMMANDS = [
    "run",
    "stop",
    "status",
    "plan",
    "doctor",
    "verify",
    "report",
    "export",
    "check-draft",
    "example-target",
    "clean",
]


def call(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0 and "Usage" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "no.yaml"),
        ("run", "parameters/smoke.yaml", "--only", "nonsense"),
        ("run", "parameters/smoke.yaml", "--set", "04_train_draft.epochz=1"),
        ("status", "no/run"),
        ("verify", "no/store"),
        ("clean", "no/run"),
        ("run",),
    ],
)
def test_a_users_mistake_exits_with_2_and_no_traceback(arguments, capsys):
    code, _, err = call(capsys, *arguments)
    assert code == 2 and "Traceback" not in err and err.strip()


def test_status_as_json(tmp_path, capsys):
    write_json(tmp_path / "00_generate_responses" / "DONE.json", {"wall_seconds": 1.0})
    code, out, _ = call(capsys, "status", tmp_path, "--json")
    assert code == 0 and json.loads(out)[0]["state"] == "done"


def test_status_watch_shows_again_until_it_is_interrupted(tmp_path, capsys, monkeypatch):
    waits = iter([None, None])

    def wait(seconds):
        if next(waits, "end") == "end":
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", wait)
    code, _, err = call(capsys, "status", tmp_path, "--watch")
    assert code == 2 and "is not a run folder" in err
    (tmp_path / "01_merge_data").mkdir()
    code, out, _ = call(capsys, "status", tmp_path, "--watch")
    assert code == 130 and out.count("03_extract_hidden_states") == 3


def test_plan_says_what_would_fit_and_exits_with_2(tmp_path, capsys, monkeypatch):
    """Kimi's parameters, without its weights; neither this run nor its model is here."""
    run = ("--json", "--set", f"shared.run_dir={tmp_path / 'run'}")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 2**40))
    code, out, err = call(capsys, "plan", "parameters/kimi-k25.yaml", *run)
    found = json.loads(out)
    assert code == 2 and not err and not found["fits"] and found["shortfall_bytes"] > 2**40
    assert any(option["change"].startswith("codec: fp8, final: supervised") for option in found["options"])
    whole = found["codecs"][0]
    assert (whole["codec"], whole["final"], whole["state_bytes_per_token"]) == ("bf16", "all", 57_344)
    assert round(whole["store_bytes"] / 2**40, 2) == 4.58
    code, out, _ = call(capsys, "plan", "parameters/kimi-k25.yaml", *run, "--set", "03.codec=fp8")
    assert code == 0 and json.loads(out)["fits"] and not (tmp_path / "run").exists()


def test_verify_names_the_bad_sample_exits_with_1_and_repair_leaves_the_rest_whole(tmp_path, capsys):
    fill(tmp_path, make_records(20))
    flip_a_byte(tmp_path / "shard-000000.h5", row=2)
    assert call(capsys, "verify", tmp_path)[0] == 0
    code, out, _ = call(capsys, "verify", tmp_path, "--deep", "--json")
    bad = list(json.loads(out)["bad"])
    assert code == 1 and len(bad) == 1
    code, out, _ = call(capsys, "verify", tmp_path, "--deep", "--repair")
    assert code == 1 and f"{bad[0]}: shard-000000.h5 row 2: the bytes do not match" in out and "pending" in out
    code, out, _ = call(capsys, "verify", tmp_path, "--deep")
    assert code == 0 and "19 samples" in out and "1 pending" in out


def test_doctor_as_json(capsys):
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 0 and {row["name"] for row in json.loads(out)} >= {"sglang", "plugin"}


def test_clean_says_how_much_and_removes_only_what_was_asked(tmp_path, capsys):
    states = tmp_path / "data" / "hidden_states"
    states.mkdir(parents=True)
    (states / "shard").write_bytes(b"x" * 1024)
    (tmp_path / "keep").touch()
    code, _, err = call(capsys, "clean", tmp_path, "--yes")
    assert code == 2 and "is not a run folder" in err and states.exists()
    (tmp_path / "01_merge_data").mkdir()
    code, out, _ = call(capsys, "clean", tmp_path, "--states", "--yes")
    assert code == 0 and "GiB" in out
    assert not states.exists() and (tmp_path / "keep").exists()


def test_report_writes_into_a_run_folder_only_and_of_a_copy_only_into_the_copy(tmp_path, capsys):
    code, _, err = call(capsys, "report", tmp_path)
    assert code == 2 and "is not a run folder" in err and not list(tmp_path.iterdir())
    run, elsewhere, copy = tmp_path / "run", tmp_path / "large-disk", tmp_path / "copy"
    done = DONE | {"config_hash": "cafebabe", "wall_seconds": 1.0}
    for data in (run / "data", elsewhere):
        write_json(data / "draft" / "export" / "config.json", CONFIG)
        (data / "draft" / "export" / "model.safetensors").touch()
        card = data / "draft" / "export" / "README.md"
        write_json(run / "04_train_draft" / "DONE.json", done | {"data": str(data)})
        code, out, _ = call(capsys, "report", run)
        assert code == 0 and str(card) in out and card.is_file()
    card = run / "data" / "draft" / "export" / "README.md"
    card.write_text("the original's")
    write_json(run / "04_train_draft" / "DONE.json", done | {"data": str(run / "data")})
    shutil.copytree(run, copy)
    code, out, _ = call(capsys, "report", copy)
    assert code == 0 and str(copy / "data" / "draft" / "export" / "README.md") in out
    shutil.rmtree(copy / "data")
    code, out, _ = call(capsys, "report", copy)
    assert code == 0 and "no model card" in out and card.read_text() == "the original's"


def test_stop_without_a_runner_says_so(tmp_path, capsys):
    code, _, err = call(capsys, "stop", tmp_path)
    assert code == 2 and "is not a run folder" in err
    (tmp_path / "01_merge_data").mkdir()
    code, _, err = call(capsys, "stop", tmp_path)
    assert code == 1 and "no runner is at work here" in err


def test_what_the_system_refuses_is_said_without_a_traceback(tmp_path, capsys):
    (tmp_path / "file").touch()
    code, _, err = call(capsys, "run", "parameters/smollm2-cpu.yaml", "--set", f"shared.run_dir={tmp_path}/file/run")
    assert code == 1 and f"{tmp_path}/file" in err and "Traceback" not in err


def test_detach_starts_a_runner_of_its_own_that_writes_a_log(tmp_path):
    parameters = tmp_path / "p.yaml"
    parameters.write_text(f"shared: {{run_dir: {tmp_path / 'another'}}}\n")
    command = [sys.executable, "-m", "eagle3_utils.cli", "run", str(parameters), "--detach", "--only", "06"]
    command += ["--set", f"shared.run_dir={tmp_path / 'run'}"]
    with run_lock.hold(tmp_path / "run", "eagle3 run"):
        beside = subprocess.run(command, capture_output=True, text=True)
    assert beside.returncode == 1 and f"another runner (pid {os.getpid()})" in beside.stderr
    wrong = subprocess.run([*command, "--set", "6.nonsense=1"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown key 'nonsense'" in wrong.stderr
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"eagle3 stop {tmp_path / 'run'}" in out
    pid = int(out.split("pid ")[1].split(",")[0])
    assert os.getsid(pid) == pid, "a session of its own, which no hang-up reaches"
    log = tmp_path / "run" / "runner.log"
    deadline = time.monotonic() + 120
    while "eagle3:" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "06_inspect_hidden_states needs 03_extract_hidden_states, which is not done" in log.read_text()
