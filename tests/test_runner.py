"""The runner over small fixture notebooks: skip, refuse, resume, fail and be interrupted, all by DONE.json."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import nbformat
import pytest
import yaml

from eagle3_utils import run_lock, runner, runs, summary
from eagle3_utils.config import STAGES
from eagle3_utils.errors import UserError

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
STAGE = "06_inspect_hidden_states"
OPEN = """from eagle3_utils.config import InspectConfig
from eagle3_utils.runs import open_stage
config = InspectConfig.from_notebook(globals())
stage = open_stage(config, {})"""


@pytest.fixture
def write_notebook(tmp_path, monkeypatch):
    """Make the stage's notebook a small one whose last cell is `body`; the stage then has no inputs."""
    monkeypatch.setattr(runner, "notebook_path", lambda stage: tmp_path / "notebook.ipynb")
    monkeypatch.setattr(runner, "stage_inputs", lambda config: {})

    def write(body: str) -> None:
        parameters = [
            f"{name}: {_annotation(value)} = {value!r}" for name, value in STAGES[STAGE]().model_dump().items()
        ]
        cells = [nbformat.v4.new_code_cell("\n".join(parameters), metadata={"tags": ["parameters"]})]
        cells += [nbformat.v4.new_code_cell(source) for source in (OPEN, body)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), tmp_path / "notebook.ipynb")

    return write


def _annotation(value) -> str:
    return "str | None" if value is None else type(value).__name__


@pytest.fixture
def parameters(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({"shared": {"run_dir": str(tmp_path / "run")}, STAGE: {"num_samples": 5}}))
    return path


def run(parameters, overrides=(), force=False):
    return runner.run_pipeline(parameters, [STAGE], list(overrides), force)


FINISH = "stage.finish({'num_samples': num_samples}, {})"


def test_a_stage_runs_with_its_parameters_and_leaves_notebook_html_and_done(parameters, write_notebook):
    write_notebook(FINISH)
    folder = run(parameters) / STAGE
    assert json.loads((folder / "metrics.json").read_text()) == {"num_samples": 5}
    assert yaml.safe_load((folder / "parameters.yaml").read_text())["num_samples"] == 5
    page = (folder / "notebook.html").read_text()
    assert "<html" in page and not re.search(r"""<(script|link)[^>]*(src|href)=|import\(|cdnjs""", page)
    assert runs.read_done(folder.parent, STAGE)["config"]["num_samples"] == 5
    assert summary.how_to_go_on(folder.parent, summary.stage_rows(folder.parent)) is None  # the stages before wait


def test_a_done_stage_is_skipped_and_force_runs_it_again(parameters, write_notebook, capsys):
    write_notebook(FINISH)
    run(parameters)
    first = runs.read_done(run(parameters), STAGE)
    assert "done already" in capsys.readouterr().out
    again = runs.read_done(run(parameters, force=True), STAGE)
    assert again["started"] > first["started"]


def test_a_done_stage_refuses_other_parameters_and_names_the_key(parameters, write_notebook):
    write_notebook(FINISH)
    run(parameters)
    with pytest.raises(UserError, match="parameter num_samples is now 6, it was made with 5"):
        run(parameters, [f"{STAGE}.num_samples=6"])


def test_figures_of_an_earlier_time_do_not_outlive_their_stage(parameters, write_notebook):
    write_notebook(FINISH)
    folder = run(parameters) / STAGE
    write_notebook("raise ValueError('no')")
    with pytest.raises(UserError, match="ValueError"):
        run(parameters, force=True)
    assert not (folder / "DONE.json").exists() and not (folder / "metrics.json").exists()


def test_a_disk_too_full_for_the_page_does_not_undo_the_stage(parameters, write_notebook, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    write_notebook(FINISH)
    monkeypatch.setattr(runner.runs, "write_text", full)
    assert runs.read_done(run(parameters), STAGE)
    assert "No space left on device" in capsys.readouterr().err


def test_a_users_mistake_in_a_notebook_comes_out_in_its_own_words(parameters, write_notebook):
    write_notebook("from eagle3_utils.errors import UserError\nraise UserError('the disk is full', '/x', 'free it')")
    with pytest.raises(UserError, match=r"^/x: the disk is full\n  free it\n  details: \S+notebook\.html$"):
        run(parameters)


def test_a_defect_in_a_notebook_names_its_class_and_the_html(parameters, write_notebook):
    write_notebook("raise RuntimeError('what\\nand forty lines more')")
    with pytest.raises(UserError, match=rf"^notebooks/{STAGE}\.ipynb: RuntimeError: what\n  details: \S+\.html$"):
        run(parameters)


def test_a_notebook_that_ends_without_finish_is_not_done(parameters, write_notebook):
    write_notebook("1 + 1")
    with pytest.raises(UserError, match="without finishing its stage"):
        run(parameters)


def test_a_key_missing_from_the_parameters_cell_is_refused_before_anything_runs(parameters, write_notebook, tmp_path):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("seed: int = 0", metadata={"tags": ["parameters"]})], metadata=KERNEL
    )
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    with pytest.raises(UserError, match="'run_dir' is not in the notebook's parameters cell"):
        run(parameters)


def test_two_runners_in_one_run_folder_are_refused(parameters, write_notebook, tmp_path):
    write_notebook(FINISH)
    with (
        run_lock.hold(tmp_path / "run", "eagle3 run p.yaml"),
        pytest.raises(UserError, match=rf"pid {os.getpid()}\)"),
    ):
        run(parameters)


def test_sigterm_interrupts_the_kernel_lets_it_clean_up_and_leaves_the_stage_undone(
    parameters, write_notebook, tmp_path
):
    write_notebook(
        "import time\ntry:\n    stage.progress(force=True, at='sleep')\n    time.sleep(600)\n"
        "finally:\n    (stage.folder / 'cleaned').touch()"
    )
    script = (
        "import sys; from pathlib import Path; from eagle3_utils import runner, cli\n"
        f"runner.notebook_path = lambda stage: Path({str(tmp_path / 'notebook.ipynb')!r})\n"
        f"cli.main(['run', {str(parameters)!r}, '--only', '6', '--force'])"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    progress = tmp_path / "run" / STAGE / "progress.json"
    deadline = time.monotonic() + 120
    while not (progress.is_file() and "sleep" in progress.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert run_lock.stop(tmp_path / "run", timeout_seconds=120) == process.pid  # sends SIGTERM, and waits
    said = process.communicate(timeout=120)[1]  # without --force, which would begin with what is done
    assert f"interrupted\n  to go on: eagle3 run {parameters} --from 06 --to 06\n" in said
    assert process.returncode == 130
    assert (tmp_path / "run" / STAGE / "cleaned").exists()
    assert runs.read_done(tmp_path / "run", STAGE) is None
    assert runs.read_runner(tmp_path / "run") == (process.pid, f"eagle3 run {parameters} --from 06 --to 06")
    kernel = json.loads(progress.read_text())["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)


@pytest.mark.parametrize("seen_by", ["the next cell", "no cell"])
def test_a_stop_that_comes_between_two_cells_or_after_the_last_one_ends_the_run(seen_by, tmp_path, monkeypatch):
    """The kernel pays it no heed there, so papermill does not fail; a stage that was finished stays finished."""
    interrupts = runner._Interrupts()
    folder, ran = tmp_path / STAGE, []

    def execute_notebook(*_paths, on_cell_execute, **_options):
        on_cell_execute(cell=None, cell_index=0)
        interrupts.received = True
        (folder / "DONE.json").touch()
        if seen_by == "the next cell":
            on_cell_execute(cell=None, cell_index=1)
        ran.append("all")

    monkeypatch.setattr(runner.papermill, "execute_notebook", execute_notebook)
    with pytest.raises(KeyboardInterrupt):
        runner._execute(STAGE, {}, tmp_path, interrupts)
    assert ran == (["all"] if seen_by == "no cell" else []) and (folder / "DONE.json").is_file()


def test_responses_that_no_source_reads_are_not_generated(tmp_path, capsys):
    stages, chats = list(STAGES), {"name": "chats", "path": str(tmp_path / "chats.jsonl")}
    merging = STAGES["01_merge_data"]
    own_data, both = merging(sources=[chats]), merging(sources=[chats, *merging().sources])
    assert runner.without_unread_responses(stages, own_data) == stages[1:]
    assert "00_generate_responses: left out" in capsys.readouterr().out
    for asked, config in ((stages, both), (stages, merging()), (stages[:1], own_data), (stages[1:], own_data)):
        assert runner.without_unread_responses(asked, config) == asked
    assert not capsys.readouterr().out


def test_stage_range_by_number_and_name():
    names = list(STAGES)
    assert runner.stage_range(None, None, None) == names
    assert runner.stage_range("2", "extract_hidden_states", None) == names[2:4]
    assert runner.stage_range("1", "3", "05") == [names[5]]
    with pytest.raises(UserError, match="comes after"):
        runner.stage_range("4", "2", None)
