"""The figures of stage 05 as tables for the notebook and as metrics.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eagle3_utils.acceptance import served
from eagle3_utils.acceptance.evaluate import ServedPart
from eagle3_utils.acceptance.heldout import DecodedPrompt, acceptance_by_position
from eagle3_utils.acceptance.intervals import ALL, Interval, to_json
from eagle3_utils.acceptance.parity import ParityReport
from eagle3_utils.config import EvaluateConfig

BY_STEP = ("accuracy", "conditional", "overlap", "out_of_vocab", "baseline")


def step_rows(summary: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per source and drafting step of `offline.summarise`; the interval is that of the accept length."""
    rows = []
    for source, figures in summary.items():
        for step, supervised in enumerate(figures["supervised"]):
            row = {"source": source, "step": step, "positions": supervised}
            row |= {name: figures[name][step].value for name in BY_STEP}
            rows.append(row | {"accept_length": figures["accept_length"][step].value} | _bounds(figures, step))
    return rows


def decoded_rows(lengths: dict[str, dict[str, Interval]]) -> list[dict[str, Any]]:
    """One row per source: the accept length of every way of finding it, as "value [low, high]"."""
    sources = dict.fromkeys(source for by_source in lengths.values() for source in by_source)
    return [
        {"source": source} | {name: str(by_source.get(source, "–")) for name, by_source in lengths.items()}
        for source in sources
    ]


def stage_metrics(
    config: EvaluateConfig,
    teacher_forced: dict[str, dict[str, Any]],
    decoded: Sequence[DecodedPrompt],
    differences: Sequence[str],
    lengths: dict[str, dict[str, Interval]],
    by_shape: dict[str, Interval],
    served_part: ServedPart,
    served_changes: Sequence[dict[str, Any]],
    parity: ParityReport,
) -> dict[str, Any]:
    """Everything measured, as JSON values.

    ``accept_length`` is the decoded one where prompts were decoded, else the teacher-forced one of ``num_steps``;
    ``accept_length_from`` says which. ``identical``: no decoded output differed, None when nothing was decoded.
    """
    found, origin = lengths["decoded"], "decoded"
    if not found:
        step, origin = min(config.num_steps, config.num_offline_steps) - 1, "teacher-forced"
        found = {source: figures["accept_length"][step] for source, figures in teacher_forced.items()}
    accepted = [item.speculative.num_accepted for item in decoded]
    return {
        "accept_length": found[ALL].value,
        "accept_length_interval": to_json(found[ALL]),
        "accept_length_by_source": {source: length.value for source, length in found.items() if source != ALL},
        "accept_length_from": origin,
        "identical": not differences if decoded else None,
        "differences": list(differences),
        "num_prompts": len(decoded),
        "max_new_tokens": config.max_new_tokens,
        "shape": [config.num_steps, config.topk, config.num_draft_tokens or config.num_steps + 1],
        "accept_lengths": to_json(lengths),
        "accepted_by_position": to_json(acceptance_by_position(accepted, config.num_steps)) if decoded else [],
        "num_decoded_plainly": sum(item.plain is not None for item in decoded),
        "replayed": to_json(by_shape),
        "teacher_forced": to_json(teacher_forced),
        "served_left_out": served_part.left_out,
        "served": served_part.table(),
        "served_changes": list(served_changes),
        "served_accept_lengths": {
            run.name: to_json(served.accept_lengths(run)) for run in served_part.runs if run.shape is not None
        },
        "parity": asdict(parity) | {"passed": parity.passed, "causes": parity.causes},
    }


def _bounds(figures: dict[str, Any], step: int) -> dict[str, float]:
    interval: Interval = figures["accept_length"][step]
    return {"length_low": interval.low, "length_high": interval.high}
