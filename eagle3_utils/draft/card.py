"""A draft's model card: README.md beside the weights, with what a person needs who only has the folder.

How to serve it, what it was made for and from, what was measured, and the hashes that tie it to its run. Figures come
from the `metrics.json` of the run's stages; what was not measured, or of another draft or corpus, is left out.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from eagle3_utils import runs
from eagle3_utils.config import STAGES

CARD_NAME = "README.md"
_IN_EVERY_RUN = {"data", "draft", "export", "checkpoints"}  # folder names that do not tell one run from another


def write_card(folder: Path, run_folder: Path) -> Path:
    """Write the card of the draft in `folder`, which the run in `run_folder` made; returns its path."""
    values = json.loads((folder / "config.json").read_text())
    metrics, done = measured(run_folder)
    if done["01"].get("outputs", {}).get("corpus") != done["04"].get("inputs", {}).get("corpus"):
        metrics["01"] = {}
    runs.write_text(folder / CARD_NAME, card_text(values, metrics, done))
    return folder / CARD_NAME


def measured(run_folder: Path) -> tuple[dict[str, dict], dict[str, dict]]:
    """metrics.json and DONE.json by stage number; empty for a stage that is not done, or evaluated another draft."""
    metrics, done = {}, {}
    for stage in STAGES:
        found = runs.read_done(run_folder, stage)
        done[stage[:2]] = found or {}
        metrics[stage[:2]] = {} if found is None else runs.read_json(run_folder / stage / "metrics.json") or {}
    if done["05"].get("inputs", {}).get("draft") != done["04"].get("outputs", {}).get("draft"):
        metrics["05"] = {}  # of a draft before this one
    return metrics, done


def card_text(values: dict[str, Any], metrics: dict[str, dict], done: dict[str, dict]) -> str:
    """The card of a draft with this config.json; metrics and DONE.json by stage number, empty where there are none."""
    target = target_name(str(done["04"].get("config", {}).get("model", "the target")))
    parts = [
        f"---\nbase_model: {target}\ntags: [eagle3, speculative-decoding, sglang]\n---",
        f"# EAGLE-3 draft for {target}",
        "Drafts for this target, and no other, in SGLang; what is generated stays the target's own.",
        "## Serve\n\n" + _serving(target, metrics["05"], done),
        "## Draft\n\n" + _table(_shape_rows(values, done["04"].get("config", {}))),
    ]
    for title, rows in (
        ("Measured", _measured_rows(metrics)),
        ("Data", _data_rows(metrics, done["04"].get("config", {}))),
        ("Lineage", _lineage_rows(done)),
    ):
        if rows:
            parts.append(f"## {title}\n\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _serving(target: str, evaluation: dict[str, Any], done: dict[str, dict]) -> str:
    """The command of the fastest shape that was served, with the flags it was served with; else of the one decoded."""
    fastest = fastest_shape(evaluation)
    command = serve_command(target, fastest or evaluation.get("shape") or [3, 1, 4])
    if flags := _target_flags(done, fastest is not None):
        command += f" \\\n  {shlex.join(flags)}"
    note = "\n\nThe fastest of the shapes below at their lowest concurrency." if fastest else ""
    return f"```\n{command}\n```{note}"


def _target_flags(done: dict[str, dict], was_served: bool) -> list[str]:
    """What the target needs to be served, by the latest stage that served it: 05 when it served the draft, and then
    with all that it added; else those before it (of captures' further flags a draft needs none)."""
    configs = {number: stage.get("config", {}) for number, stage in done.items()}
    stages = ("05", "03", "02", "00") if was_served else ("03", "02", "00", "05")
    served = next((configs[number] for number in stages if "tp_size" in configs[number]), {})
    flags = ["--tp-size", str(served["tp_size"])] if served.get("tp_size", 1) > 1 else []
    if any(config.get("trust_remote_code") for config in configs.values()):
        flags += ["--trust-remote-code"]
    return flags + (served.get("extra_server_args", []) if was_served else [])


def fastest_shape(evaluation: dict[str, Any]) -> list[int] | None:
    """[steps, top-k, draft tokens] of most tokens/s at the lowest concurrency; None when no draft was served."""
    drafting = [row for row in evaluation.get("served") or [] if "counted" in row]
    fewest = min((row["concurrency"] for row in drafting), default=None)
    rows = [row for row in drafting if row["concurrency"] == fewest]
    if not rows:
        return None
    return [int(number) for number in max(rows, key=lambda row: row["tokens/s"])["draft"].split(" · ")]


def serve_command(target: str, shape: list[int], draft: str = "PATH/TO/THIS/FOLDER") -> str:
    """SGLang's command line for a target with a draft; shape is [steps, top-k, draft tokens]."""
    steps, topk, tokens = shape
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} \\\n"
        f"  --speculative-num-steps {steps} --speculative-eagle-topk {topk} --speculative-num-draft-tokens {tokens}"
    )


def target_name(model: str) -> str:
    """A hub name as it is; of a folder only its own name, since the way to it means nothing elsewhere."""
    if model == "example":
        return "SmolLM2-135M-Instruct"
    return Path(model).name if model.startswith(("/", ".", "~")) or model.count("/") > 1 else model


def folder_name(path: str) -> str:
    """What a run's folder, or a draft or checkpoint in it, is called, without the way to it."""
    parts = [part for part in Path(path).parts if part not in _IN_EVERY_RUN and part not in ("/", "..", "~")]
    own = parts[-2:] if parts and parts[-1].startswith("step-") else parts[-1:]
    return "/".join(own) or Path(path).name


def _shape_rows(values: dict[str, Any], training: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("class", values["architectures"][0]),
        ("hidden size, MLP width", f"{values['hidden_size']:,}, {values['intermediate_size']:,}"),
        ("draft vocabulary", f"{values['draft_vocab_size']:,} of {values['vocab_size']:,} tokens"),
        ("layer ids for SGLang", str(values["eagle_config"]["eagle_aux_hidden_state_layer_ids"])),
        ("RoPE, positions", f"{_words(values['rope_parameters'])}; {values['max_position_embeddings']:,}"),
    ]
    if training:
        rows.append(("trained on samples up to", f"{training['max_seq_len']:,} tokens"))
        rows.append(("training-time test", f"{training['ttt_steps']} steps, loss {training['loss']}"))
    return rows


def _measured_rows(metrics: dict[str, dict]) -> list[tuple[str, str]]:
    rows, training, evaluation = [], metrics["04"], metrics["05"]
    if training:
        rows.append(("validation accuracy by step", " / ".join(f"{a:.3f}" for a in training["validation_accuracy"])))
        rows.append(("drafting the most frequent token", f"{training['baseline_accuracy']:.3f}"))
        rows.append(("simulated accept length, validation text", f"{training['accept_length']:.2f}"))
    if evaluation:
        interval = evaluation["accept_length_interval"]
        by_source = ", ".join(f"{name} {length:.2f}" for name, length in evaluation["accept_length_by_source"].items())
        rows.append((
            f"{accept_length_label(evaluation)}, steps · top-k · draft tokens "
            f"{' · '.join(map(str, evaluation['shape']))}",
            f"{interval['value']:.2f} [{interval['low']:.2f}, {interval['high']:.2f}]; {by_source}",
        ))  # fmt: skip
        rows += served_rows(evaluation)
    if rows:
        rows.append(("", "Accept length counts the bonus token; 1.0: nothing drafted is accepted. Intervals: 95 %."))
    return rows


def accept_length_label(evaluation: dict[str, Any]) -> str:
    """What stage 05's own accept length was measured on."""
    if evaluation["accept_length_from"] != "decoded":
        return f"accept length, {evaluation['accept_length_from']} on validation text"
    tokens = f" of {evaluation['max_new_tokens']} tokens" if "max_new_tokens" in evaluation else ""
    return f"accept length, {evaluation['num_prompts']} held-out prompts{tokens}"


def served_rows(evaluation: dict[str, Any]) -> list[tuple[str, str]]:
    """Accept length and speed-up of every draft shape SGLang served, and whether they are the offline ones."""
    rows = []
    for row in evaluation.get("served") or []:
        if "counted" in row:
            speed_up = f", {row['speed-up']:.2f}× the tokens/s of the target alone" if row.get("speed-up") else ""
            label = f"served by SGLang, {row['draft']}, {row['concurrency']} in flight"
            rows.append((label, f"accept length {row['counted']:.2f}{speed_up}"))
    parity = evaluation.get("parity") or {}
    passed = parity.get("passed")
    if passed is not None:
        offline, served = (1 + sum(parity[way]) for way in ("offline", "served"))
        rows.append(("accept length of the served tokens, offline and served", f"{offline:.2f} and {served:.2f}"))
        rows.append(("served acceptance equals the offline one", "yes" if passed else "NO"))
    return rows


def _data_rows(metrics: dict[str, dict], training: dict[str, Any]) -> list[tuple[str, str]]:
    corpus, report, rows = metrics["01"], metrics["04"].get("report"), []
    others, start = training.get("more_data"), training.get("init_from")
    if corpus:
        total = f"{corpus['num_samples']:,} samples, {corpus['num_tokens']:,} tokens"
        whose = "corpus of this run alone" if others else "corpus"
        rows.append((whose, f"{total}, {corpus['supervised_share']:.0%} supervised"))
    for row in corpus.get("statistics") or []:
        if row.get("source") not in (None, "all"):
            rows.append((f"source {row['source']}", f"{row['samples']:,} samples, {row['tokens']:,} tokens"))
    if others:
        names = ", ".join(map(folder_name, others))
        rows.append((f"also trained on the states of {len(others)} other run{'s' * (len(others) > 1)}", names))
    if start:
        rows.append(("warm start from", folder_name(start)))
    if report:
        rows.append(("trained for", f"{report['steps']:,} steps, {report['tokens']:,} tokens over all epochs"))
    return rows


def _lineage_rows(done: dict[str, dict]) -> list[tuple[str, str]]:
    training, rows = done["04"], []
    for stage in STAGES:
        outputs = done[stage[:2]].get("outputs", {})
        if outputs:
            rows.append((stage, ", ".join(f"{name} `{value}`" for name, value in outputs.items())))
    if training:
        rows.append(("read by the training", ", ".join(f"{k} `{v}`" for k, v in training["inputs"].items())))
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in training["versions"].items())))
    return rows


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)])


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
