"""`eagle3 run`: the notebooks of a run, one after the other, under papermill.

A stage that is done for these parameters and inputs is skipped; one that was done for others refuses. Ctrl-C and
SIGTERM interrupt the kernel and wait for it, so that it saves its work and stops its servers.
"""

from __future__ import annotations

import ast
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import papermill
import yaml
from jupyter_client.manager import KernelManager
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from eagle3_utils import run_lock, runs, summary
from eagle3_utils.config import STAGES, StageConfig, read_parameters, stage_named, stage_parameters
from eagle3_utils.corpus.reading.sources import parse_sources
from eagle3_utils.errors import UserError, first_line
from eagle3_utils.lineage import UPSTREAM, reads_responses, stage_inputs

# Progress bars of libraries redraw themselves into thousands of lines of a saved notebook.
_QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
# The page of a notebook is read offline too: without the scripts that the template fetches (we have no formulas).
_HTML_TEMPLATE = "{% extends 'lab/index.html.j2' %}" + "".join(
    f"{{% block html_head_js{part} %}}{{% endblock %}}" for part in ("", "_mathjax", "_mermaidjs")
)
KERNEL_STOP_SECONDS = 180  # a checkpoint and the stop of a large server fit in here


def stage_range(start: str | None, end: str | None, only: str | None) -> list[str]:
    """The stages from `start` to `end`, both included, or `only` one; numbers or names."""
    names = list(STAGES)
    if only:
        return [stage_named(only)]
    first = names.index(stage_named(start)) if start else 0
    last = names.index(stage_named(end)) if end else len(names) - 1
    if first > last:
        raise UserError(f"--from {start} comes after --to {end}", exit_code=2)
    return names[first : last + 1]


def run_pipeline(parameters_path: Path, stages: list[str], overrides: list[str], force: bool = False) -> Path:
    """Run the stages of a parameters file; returns the run folder.

    Raises
    ------
    UserError
        When the parameters are wrong (before anything starts), another runner is at work in the run folder, a
        finished stage does not fit these parameters, a notebook fails, or a signal ends it.
    """
    flat, configs = checked_parameters(parameters_path, stages, overrides)
    run_folder = runs.resolve_path(configs[stages[0]].run_dir)
    again = ["eagle3", "run", str(summary.short_path(parameters_path.resolve()))]
    if stages != list(STAGES):
        again += ["--from", stages[0][:2], "--to", stages[-1][:2]]
    again += [word for override in overrides for word in ("--set", override)]
    stages = without_unread_responses(stages, configs["01_merge_data"])
    try:
        with run_lock.hold(run_folder, shlex.join(again)), _Interrupts() as interrupts:
            _run_stages(stages, flat, configs, run_folder, force, interrupts)
    except KeyboardInterrupt:  # not by the same command where that has --force: what is done stays done
        raise UserError("interrupted", fix=f"to go on: {shlex.join(again)}", exit_code=130) from None
    return run_folder


def _run_stages(stages, flat, configs, run_folder: Path, force: bool, interrupts: _Interrupts) -> None:
    made: set[str] = set()
    for stage in stages:
        # What follows from a stage that was just made again is made again too.
        follows = any(upstream in made for upstream, _ in UPSTREAM[stage].values())
        if _is_current(configs[stage], run_folder, force or follows):
            print(f"{stage}: done already", flush=True)
            continue
        _execute(stage, flat[stage], run_folder, interrupts)
        made.add(stage)


def without_unread_responses(stages: list[str], merging: StageConfig) -> list[str]:
    """The stages of a run, which does not generate responses that the merge after it would not read."""
    if stages[:2] != list(STAGES)[:2] or reads_responses(merging):
        return stages
    print(f"{stages[0]}: left out, since no source of {stages[1]} reads its responses", flush=True)
    return stages[1:]


def checked_parameters(path: Path, stages: list[str], overrides: list[str]) -> tuple[dict[str, dict], dict[str, Any]]:
    """The flat parameters of every stage, and its config. Raises `UserError` for what can be known before a start."""
    parameters = read_parameters(path, overrides)
    flat = {stage: stage_parameters(parameters, stage) for stage in STAGES}
    configs = {stage: STAGES[stage].parse(flat[stage], str(path)) for stage in STAGES}
    for stage in stages:
        check_notebook(stage, flat[stage])
    parse_sources(configs["01_merge_data"].sources, Path())
    longest, step = configs["03_extract_hidden_states"].max_seq_len, configs["04_train_draft"].max_tokens_per_step
    if {"03_extract_hidden_states", "04_train_draft"} <= set(stages) and step < longest:
        fix = "raise it, or lower max_seq_len to what the longest sample has"
        raise UserError(f"04_train_draft.max_tokens_per_step {step} is below max_seq_len {longest}", str(path), fix, 2)
    return flat, configs


def notebook_path(stage: str) -> Path:
    """The notebook of a stage, in the repository's notebooks/ folder."""
    return runs.repo_root() / "notebooks" / f"{stage}.ipynb"


def check_notebook(stage: str, values: dict[str, Any]) -> None:
    """Every key must be an annotated variable of the notebook's `parameters` cell (papermill would only warn)."""
    known = notebook_parameters(notebook_path(stage))
    for key in values:
        if key not in known:
            raise UserError(f"parameter {key!r} is not in the notebook's parameters cell", f"notebooks/{stage}.ipynb")


def notebook_parameters(path: Path) -> set[str]:
    """The annotated variables of a notebook's `parameters` cell.

    Read with `ast`, because papermill's own reader does not know annotations such as `str | None`.
    """
    for cell in nbformat.read(path, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            return {node.target.id for node in ast.parse(cell.source).body if isinstance(node, ast.AnnAssign)}
    raise UserError("no cell is tagged `parameters`", str(path))


def _is_current(config: StageConfig, run_folder: Path, force: bool) -> bool:
    done = runs.read_done(run_folder, config.stage)
    if done is None or force:
        return False
    problem = runs.why_not_current(done, config, stage_inputs(config))
    if problem:
        raise UserError(
            f"{config.stage} is done, but not for these parameters: {problem}",
            str(run_folder / config.stage / "DONE.json"),
            f"make it again with --from {config.stage[:2]} --force, or use another run_dir",
        )
    return True


def _execute(stage: str, values: dict[str, Any], run_folder: Path, interrupts: _Interrupts) -> None:
    folder = run_folder / stage
    folder.mkdir(parents=True, exist_ok=True)
    for left in ("DONE.json", "metrics.json", "progress.json"):
        (folder / left).unlink(missing_ok=True)
    (folder / "parameters.yaml").write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    print(f"{stage}: running, log in {folder / 'run.log'}", flush=True)
    output = folder / "notebook.ipynb"
    sockets = tempfile.TemporaryDirectory(prefix="eagle3-")  # of a kernel that is killed, too
    kernel = KernelManager(
        kernel_name="python3", transport="ipc", ip=f"{sockets.name}/kernel", shutdown_wait_time=KERNEL_STOP_SECONDS
    )
    kernel.kernel_spec.argv[0] = sys.executable  # this environment, whatever a kernelspec elsewhere says
    interrupts.kernel = kernel
    os.environ.update(_QUIET)  # kernels inherit it
    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns of `str | None`, which it cannot read
    try:
        papermill.execute_notebook(
            str(notebook_path(stage)), str(output), parameters=values, kernel_name="python3", km=kernel,
            cwd=str(runs.repo_root()), progress_bar=False, stdout_file=sys.stdout, stderr_file=sys.stderr,
            on_cell_execute=interrupts.end_here,
        )  # fmt: skip
        interrupts.end_here()  # a signal that no cell saw: what is finished stays so
    except (PapermillExecutionError, DeadKernelError) as error:
        interrupts.end_here()
        raise _failure(error, stage, folder / "notebook.html") from None
    except OSError as error:  # a full disk: papermill saves the notebook after every cell
        raise UserError(f"cannot run or save the notebook: {error}", str(output)) from None
    finally:
        interrupts.kernel = None
        if kernel.has_kernel:
            # Asked to stop, ipykernel waits 29 s for children it has already killed but does not reap.
            kernel.shutdown_kernel(now=(folder / "DONE.json").is_file())
        sockets.cleanup()
        _write_html(output)
    if not (folder / "DONE.json").is_file():
        raise UserError(f"the notebook ended without finishing its stage: no {folder / 'DONE.json'}")


def _failure(error: PapermillExecutionError | DeadKernelError, stage: str, page: Path) -> UserError:
    """A user's mistake in its own words; a defect by its class, first line and notebook. The traceback is in `page`."""
    details = f"details: {page}"
    if isinstance(error, DeadKernelError):
        return UserError("the kernel died (killed, or out of memory?)", f"notebooks/{stage}.ipynb", details)
    if error.ename == "UserError":
        return UserError(error.evalue, fix=details)
    first = (error.evalue.splitlines() or [""])[0]
    return UserError(f"{error.ename}: {first}", f"notebooks/{stage}.ipynb", details)


def _write_html(notebook: Path) -> None:
    """A picture of the notebook as it ran. It is a convenience: what it lacks is said, the stage's verdict stands."""
    if not notebook.is_file():
        return
    try:
        body, _ = HTMLExporter(raw_template=_HTML_TEMPLATE).from_notebook_node(nbformat.read(notebook, as_version=4))
        runs.write_text(notebook.with_suffix(".html"), body)
    except (ValueError, OSError) as error:  # nbconvert without its templates, or a full disk
        print(f"no HTML beside {notebook}: {first_line(error)}", file=sys.stderr)


class _Interrupts:
    """SIGINT and SIGTERM of the runner, passed on to the kernel at work as SIGINT.

    The cell that runs there raises KeyboardInterrupt, cleans up and ends; papermill then reports the cell as failed,
    so nothing is torn down under it. Sent again, the signal is passed on again.
    """

    def __init__(self):
        self.received, self.kernel = False, None

    def __enter__(self) -> _Interrupts:
        self._before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def end_here(self, **_cell) -> None:
        """Raise KeyboardInterrupt after a signal: between two cells the kernel pays it no heed."""
        if self.received:
            raise KeyboardInterrupt

    def _pass_on(self, signum, frame) -> None:
        self.received = True
        if self.kernel is None or not self.kernel.has_kernel:
            raise KeyboardInterrupt
        print("interrupted: waiting for the notebook to save its work and stop its servers", flush=True)
        os.kill(self.kernel.provisioner.pid, signal.SIGINT)


def detach(parameters_path: Path, stages: list[str], overrides: list[str], arguments: list[str]) -> tuple[int, Path]:
    """Start `eagle3 run` again in a session of its own; returns its pid and its log file.

    Raises `UserError` for wrong parameters and beside another runner, before anything starts.
    """
    _, configs = checked_parameters(parameters_path, stages, overrides)
    run_folder = runs.resolve_path(configs[stages[0]].run_dir)
    run_lock.require_free(run_folder)
    log = run_folder / "runner.log"
    command = [sys.executable, "-m", "eagle3_utils.cli", *(word for word in arguments if word != "--detach")]
    with open(log, "a") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return process.pid, log
