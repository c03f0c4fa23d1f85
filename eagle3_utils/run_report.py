"""`outputs/RUN/report.html`: a run on one page, from whatever stages are done, for the screen and for print.

    write_report(Path("outputs/smollm2-cpu"))        # eagle3 report outputs/smollm2-cpu

The page stands alone: figures are SVG inside it, links go to the notebooks beside it. It is drawn from the stages'
`DONE.json` and `metrics.json` and from the training journal; nothing is computed anew.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from eagle3_utils import runs, summary
from eagle3_utils.acceptance.intervals import from_json
from eagle3_utils.config import STAGES
from eagle3_utils.draft.card import measured, target_name
from eagle3_utils.draft.training.journal import read_journal
from eagle3_utils.plots import acceptance as acceptance_plots
from eagle3_utils.plots import draft as draft_plots
from eagle3_utils.plots.style import svg_uri

REPORT_NAME = "report.html"

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>$title</title>
<style>
body {font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #111}
h1 {font-size: 1.6rem} h2 {font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #999}
h3 {font-size: 1rem; margin: 1.2rem 0 .3rem}
table {border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums}
th, td {text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #ddd; vertical-align: top}
td.number {text-align: right} .wide {overflow-x: auto} code {font-size: .9em}
img {max-width: 100%; height: auto} .note {color: #444} .bad {font-weight: bold; text-decoration: underline}
@page {margin: 15mm}
@media print {body {font-size: 10pt; margin: 0; padding: 0; max-width: none} h2, h3 {break-after: avoid}
  tr, img {break-inside: avoid} table {font-size: 7.5pt} th, td {padding-right: .4rem} .wide {overflow: visible}
  a {color: inherit; text-decoration: none}}
</style></head><body>
<h1>$title</h1>
$body
</body></html>
""")


def write_report(run_folder: Path) -> Path:
    """Write the page of a run folder and return its path. What is not done, or of another draft, has no section."""
    metrics, _ = measured(run_folder)
    done = {stage: runs.read_done(run_folder, stage) for stage in STAGES}
    rows = [row for row in summary.result_rows(run_folder) if row[0] != summary.WHERE]
    body = [_heading(done), table({"": label, "result": value} for label, value in rows)]
    body.append(section("Lineage", _lineage(run_folder, done)))
    for stage, (title, draw) in _SECTIONS.items():
        if metrics[stage[:2]]:
            body.append(section(title, *draw(metrics[stage[:2]], run_folder, done[stage])))
    path = run_folder / REPORT_NAME
    title = f"EAGLE-3 draft: {html.escape(run_folder.name)}"
    runs.write_text(path, _PAGE.substitute(title=title, body="\n".join(body)))
    return path


def table(rows: Iterable[dict[str, Any]]) -> str:
    """An HTML table with one column per key, in the order of their first appearance; empty without rows."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return ""
    head = "".join(f"<th>{html.escape(str(name).replace('_', ' '))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name, '')) for name in names)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def section(title: str, *parts: str) -> str:
    """A titled part of the page; empty parts are left out."""
    return "\n".join([f"<h2>{html.escape(title)}</h2>", *filter(None, parts)])


def rows_of(value: Any, name: str = "") -> list[dict[str, Any]]:
    """Rows for `table` from a list of dicts, or from a dict of dicts (its keys become the first column)."""
    if isinstance(value, dict):
        return [{name: key} | inner for key, inner in value.items() if isinstance(inner, dict)]
    return [row for row in value or [] if isinstance(row, dict)]


def scalars(values: dict[str, Any]) -> str:
    """The plain numbers, words and short lists of a metrics dict as a two-column table."""
    plain = {k: v for k, v in values.items() if isinstance(v, str | int | float) or _is_flat_list(v)}
    return table({"figure": name.replace("_", " "), "value": value} for name, value in plain.items())


_WORDS = (
    "<p class=note>A small <i>draft</i> model guesses the next tokens of a large one, the <i>target</i>, which checks "
    "them all at once (a <i>verification</i>) and keeps those it would have chosen: the same text in fewer passes. "
    "<i>Accept length</i>: tokens per verification, the target's own included, so 1.0 means that no guess was right. "
    "<i>3 · 1 · 4</i>: three drafting steps, one branch, four tokens in a verification.</p>"
)


def _heading(done: dict[str, dict | None]) -> str:
    last = next((entry for entry in reversed(done.values()) if entry), None)
    if last is None:
        return "<p>No stage of this run is done yet.</p>"
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    model = html.escape(target_name(last["config"]["model"]))
    written = time.strftime("%Y-%m-%d %H:%M")
    return f"<p>Target <b>{model}</b>. Written {written}. <span class=note>{versions}</span></p>{_WORDS}"


def _lineage(run_folder: Path, done: dict[str, dict | None]) -> str:
    rows = []
    for stage, entry in done.items():
        notebook = _beside(run_folder, f"{stage}/notebook.html", f"{stage}/notebook.ipynb")
        row = {"stage": _Link(stage, notebook), "state": "done" if entry else "not done"}
        if entry:
            row |= {"reads": _hashes(entry["inputs"]), "makes": _hashes(entry["outputs"])}
            parameters = _Link(entry["config_hash"][:8], _beside(run_folder, f"{stage}/parameters.yaml"))
            row |= {"seconds": entry["wall_seconds"], "parameters": parameters}
        rows.append(row)
    note = "<p class=note>Eight digits of each content hash: what a stage makes is what the next one reads.</p>"
    return table(rows) + note


def _corpus(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    names = {"train": "draft_vocab_coverage", "val": "draft_vocab_coverage_held_out"}
    covered = {split: metrics.get(name) for split, name in names.items()}
    covered = [{"split": split} | {f"{int(size):,} tokens": f"{share:.2%}" for size, share in shares.items()}
               for split, shares in covered.items() if shares]  # fmt: skip
    return [
        table(rows_of(metrics.get("counts"), "split")),
        table(rows_of(metrics.get("statistics"))),
        "<h3>Supervised tokens inside a draft vocabulary</h3>" + table(covered) if covered else "",
    ]


def _probe(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    probe = runs.read_json(run_folder / "02_patch_and_probe" / "probe.json") or {}
    gates = [{key: gate.get(key, "") for key in ("name", "measured", "threshold", "verdict")}
             for gate in probe.get("gates", [])]  # fmt: skip
    return [table(gates), "<h3>Pilot</h3>" + scalars(metrics["pilot"]) if metrics.get("pilot") else ""]


def _extraction(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    return [
        scalars(metrics),
        table(rows_of(metrics.get("stores"), "store")),
        table(rows_of((metrics.get("pilot") or {}).get("codecs"), "codec")),
    ]


def _training(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    folder = runs.recorded_data(run_folder, done) / "draft"
    train, validation = read_journal(folder, "train"), read_journal(folder, "validation")
    report = metrics.get("report") or {}
    best = report.get("validation") or {}
    by_step = {name: values for name, values in best.items() if isinstance(values, list)}
    rows = [{"step": step} | {name: values[step] for name, values in by_step.items()}
            for step in range(len(best.get("accuracy", [])))]  # fmt: skip
    shown = {"simulated accept length" if name == "accept_length" else name: value for name, value in metrics.items()}
    return [
        scalars(shown | {key: value for key, value in report.items() if key != "validation"}),
        _figure(lambda: draft_plots.training_curves(train, validation)) if train and validation else "",
        "<h3>Best draft on validation, by step of the unroll</h3>" + table(rows) if rows else "",
        _figure(lambda: draft_plots.acceptance_by_step(best)) if rows else "",
    ]


def _acceptance(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    teacher_forced = from_json(metrics.get("teacher_forced") or {})
    lengths, replayed = from_json(metrics.get("accept_lengths") or {}), from_json(metrics.get("replayed") or {})
    parts = [
        "<p class=note>Shapes are steps · top-k · draft tokens. Intervals are 95 %, from a bootstrap over prompts. "
        "Of the served figures <i>counted</i> is the one to compare; distances are logits below the best token.</p>",
        scalars({k: v for k, v in metrics.items() if k in ("accept_length_from", "num_prompts", "identical")}),
    ]
    if teacher_forced:
        parts += ["<h3>Teacher-forced, by source and drafting step</h3>" + table(_step_rows(teacher_forced))]
        parts += [_figure(lambda: acceptance_plots.by_step(teacher_forced, "conditional"))]
        parts += [_figure(lambda: acceptance_plots.by_step(teacher_forced, "accuracy", baseline=True))]
    if any(lengths.values()):
        shape = " · ".join(map(str, metrics.get("shape", [])))
        parts += [f"<h3>Held-out prompts ({shape})</h3>" + table(rows_of(lengths, "accept length"))]
        title = f"Accept length, {metrics.get('num_prompts')} held-out prompts"
        parts += [_figure(lambda: acceptance_plots.accept_length_by_source(lengths, title))]
    if replayed:
        parts += ["<h3>Other shapes</h3>" + table([replayed])]
        parts += [_figure(lambda: acceptance_plots.accept_length_by_shape(replayed))]
    return [*parts, *_served(metrics)]


_WHEN_IT_PAYS = "A verification launches several models: it pays where a step of the target takes longer than that."


def _served(metrics: dict[str, Any]) -> list[str]:
    parity = metrics.get("parity") or {}
    if metrics.get("served_left_out"):
        title, why = "Served by SGLang; parity of the served number", html.escape(metrics["served_left_out"])
        return [f"<h3>{title}</h3><p>Left out: {why}.</p>"]
    rows = metrics.get("served") or []
    parts = [f"<h3>Served by SGLang</h3>{table(rows)}<p class=note>{_WHEN_IT_PAYS}</p>"] if rows else []
    parts += [_figure(lambda: acceptance_plots.served_speed(rows))] if rows else []
    by_source = from_json(metrics.get("served_accept_lengths") or {})
    counted = {run: {source: of["counted"] for source, of in found.items()} for run, found in by_source.items()}
    parts += ["<h3>Served accept length by source</h3>" + table(rows_of(counted, "draft"))] if counted else []
    if changes := metrics.get("served_changes"):
        parts += ["<h3>Answers that changed: by batching alone, and with the draft</h3>" + table(changes)]
    if parity.get("left_out"):
        return [*parts, f"<h3>Parity</h3><p>Left out: {html.escape(parity['left_out'])}.</p>"]
    if parity.get("served"):
        pairs = zip(parity["offline"], parity["served"], strict=True)
        compared = [{"accepted at least": n, "offline": a, "served": b} for n, (a, b) in enumerate(pairs, start=1)]
        verdict = "passed" if parity["passed"] else f'<span class="bad">FAILED</span> {_causes(parity)}'
        parts += [f"<h3>Parity: {verdict} (tolerance {parity['tolerance']})</h3>" + table(compared)]
        names = {"fault": "fault tried", "distance": "largest difference", "mismatch": "counted otherwise"}
        trials = [{label: trial.get(key, "") for key, label in names.items()} for trial in parity.get("trials", [])]
        share = f"{parity.get('mismatch', 0):.1%}"
        parts += [f"<p>Prompt by prompt, {share} of the verifications are counted otherwise.</p>"]
        parts += [table(sorted(trials, key=lambda row: row["counted otherwise"]))]
    return parts


def _causes(parity: dict[str, Any]) -> str:
    return "explained by: " + html.escape("; or ".join(parity.get("causes") or ["none of the faults tried"]))


def _states(metrics: dict[str, Any], run_folder: Path, done: dict | None) -> list[str]:
    layers = [{k: v for k, v in row.items() if isinstance(v, str | int | float)} for row in metrics.get("layers", [])]
    return [scalars({k: v for k, v in metrics.items() if k != "position_edges"}), table(layers)]


_Draw = Callable[[dict[str, Any], Path, dict | None], Sequence[str]]
_SECTIONS: dict[str, tuple[str, _Draw]] = {
    "01_merge_data": ("Corpus", _corpus),
    "02_patch_and_probe": ("Probe: is what the server captures what we think?", _probe),
    "03_extract_hidden_states": ("Extraction", _extraction),
    "04_train_draft": ("Training", _training),
    "05_evaluate_acceptance": ("Acceptance", _acceptance),
    "06_inspect_hidden_states": ("Hidden states", _states),
}


class _Link(str):
    """A table cell that links to a file beside the page."""

    def __new__(cls, text: str, address: str | None):
        link = super().__new__(cls, text)
        link.address = address
        return link


def _cell(value: Any) -> str:
    if isinstance(value, _Link) and value.address:
        return f'<td><a href="{html.escape(value.address)}">{html.escape(value)}</a></td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        return f'<td class="number">{_number(value)}</td>'
    if isinstance(value, list):
        return f"<td>{html.escape('  '.join(map(_number, value)))}</td>"
    text = "" if value in ({}, None) else html.escape(str(value))
    return f'<td class="bad">{text}</td>' if value in ("fail", "FAILED", "NO") else f"<td>{text}</td>"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _is_flat_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int | float) for item in value)


def _figure(draw: Callable[[], Any]) -> str:
    try:
        drawn = draw()
        title = drawn.get_suptitle() or drawn.axes[0].get_title(loc="left")
        return f'<p><img alt="{html.escape(title)}" src="{svg_uri(drawn)}"></p>'
    except (KeyError, ValueError, IndexError) as error:  # records of another version; the page must not fail for one
        return f"<p>No figure from these records: {html.escape(f'{type(error).__name__}: {error}')}.</p>"


def _step_rows(teacher_forced: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("accuracy", "conditional", "overlap", "out_of_vocab", "baseline", "accept_length")
    return [
        {"source": source, "step": step, "positions": positions} | {name: str(of[name][step]) for name in names}
        for source, of in teacher_forced.items()
        for step, positions in enumerate(of["supervised"])
    ]


def _beside(run_folder: Path, *names: str) -> str | None:
    return next((name for name in names if (run_folder / name).is_file()), None)


def _hashes(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value[:8]}" for name, value in values.items())
