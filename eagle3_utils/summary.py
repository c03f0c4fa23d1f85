"""What a run came to, read from its folders: the table at the end of `eagle3 run`, and `eagle3 status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from eagle3_utils import runs
from eagle3_utils.config import STAGES
from eagle3_utils.draft import card
from eagle3_utils.locks import RUNNER, is_same_process

WHERE = "report, notebooks"  # label of the row that says where they are
_CLOCK_SECONDS = 1.0


def result_rows(run_folder: Path) -> list[tuple[str, str]]:
    """(label, value) pairs from the stages' metrics.json; what is not done, or of another draft, is left out."""
    metrics, _ = card.measured(run_folder)
    rows = []
    if corpus := metrics["01"]:
        rows.append(("corpus", f"{corpus['num_samples']:,} samples, {corpus['num_tokens']:,} tokens"))
    if probe := metrics["02"]:
        rows.append(("probe", f"{probe['num_gates']} gates, {'passed' if probe['passed'] else 'FAILED'}"))
    if states := metrics["03"]:
        rows.append(
            ("extraction", f"{states['tokens_per_second']:,.0f} tokens/s, {states['bytes_stored'] / 2**30:.2f} GiB")
        )
    if draft := metrics["04"]:
        steps = "  ".join(f"{accuracy:.3f}" for accuracy in draft["validation_accuracy"])
        rows.append(("validation accuracy by step", steps))
        rows.append(("  most frequent token", f"{draft['baseline_accuracy']:.3f}"))
    if evaluation := metrics["05"]:
        length = f"{evaluation['accept_length']:.2f} (bonus token included)"
        rows.append((card.accept_length_label(evaluation), length))
        for source, length in evaluation["accept_length_by_source"].items():
            rows.append((f"  {source}", f"{length:.2f}"))
        verdicts = {True: "yes", False: "NO", None: "not checked (nothing was decoded)"}
        rows.append(("output of PyTorch equals plain greedy decoding", verdicts[evaluation["identical"]]))
        rows += card.served_rows(evaluation)
    rows.append((WHERE, f"{short_path(run_folder)}/report.html, {short_path(run_folder)}/*/notebook.ipynb"))
    return rows


def stage_rows(run_folder: Path) -> list[dict[str, Any]]:
    """One dict per stage: stage, state (done, running, stopped, waiting, left out), and what its progress.json says."""
    rows = []
    runner_works = _runner_works(run_folder)
    for stage in STAGES:
        done, progress = runs.read_done(run_folder, stage), runs.read_json(run_folder / stage / "progress.json")
        if done:
            rows.append({"stage": stage, "state": "done", "wall_seconds": done["wall_seconds"]})
        elif progress:
            works = is_same_process(progress["pid"], progress["started"], _CLOCK_SECONDS)
            state = "running" if works else "stopped"
            rows.append(progress | {"state": state, "age_seconds": round(time.time() - progress["updated"], 1)})
        elif (run_folder / stage / "parameters.yaml").is_file():  # begun by the runner, not yet by the notebook
            rows.append({"stage": stage, "state": "running" if runner_works else "stopped"})
        else:
            rows.append({"stage": stage, "state": "waiting"})
    last_begun = max((number for number, row in enumerate(rows) if row["state"] != "waiting"), default=0)
    for row in rows[:last_begun]:
        if row["state"] == "waiting":
            row["state"] = "left out"
    return rows


def how_to_go_on(run_folder: Path, rows: list[dict[str, Any]]) -> str | None:
    """What to type when nobody works at an unfinished run; None when somebody does, it is done, or never began."""
    runner, states = runs.read_runner(run_folder), {row["state"] for row in rows}
    if runner is None or _runner_works(run_folder) or "running" in states or states == {"done"}:
        return None
    return f"stopped; to go on: {runner[1]}"


def format_stage(row: dict[str, Any]) -> str:
    """One line of `eagle3 status`."""
    parts = [f"{row['stage']:28} {row['state']:8}"]
    if row["state"] == "done":
        parts.append(f"{row['wall_seconds']:.0f} s")
    if "done" in row and "total" in row:
        parts.append(f"{row['done']:,}/{row['total']:,} {row.get('unit', '')}")
    known = {"stage", "state", "pid", "started", "updated", "done", "total", "unit", "age_seconds", "wall_seconds"}
    parts += [_figure(key, value) for key, value in row.items() if key not in known and value is not None]
    return "  ".join(parts)


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:{width}}  {value}" for label, value in rows)


def _figure(key: str, value: Any) -> str:
    """A field of progress.json for people."""
    if key == "bytes_per_second":
        return f"{value / 1e9:.3f} GB/s"
    if key == "eta_seconds":
        return f"ETA {value / 60:.1f} min"
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes')} {value / 2**30:.2f} GiB"
    if isinstance(value, float):
        return f"{key} {value:,.0f}" if abs(value) >= 1000 else f"{key} {value:.4g}"
    return f"{key} {value}"


def short_path(path: Path) -> Path:
    """Relative to the repository where it lies inside."""
    return path.relative_to(runs.repo_root()) if path.is_relative_to(runs.repo_root()) else path


def _runner_works(run_folder: Path) -> bool:
    runner = runs.read_runner(run_folder)
    return runner is not None and is_same_process(runner[0], (run_folder / RUNNER).stat().st_mtime, _CLOCK_SECONDS)
