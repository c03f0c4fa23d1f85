"""The pilot: a few samples extracted first, to judge the codec and measure the rate before disk and days are spent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eagle3_utils.config import ExtractConfig
from eagle3_utils.states.codec import CODECS, CodecReport, measure_codec
from eagle3_utils.states.extract import extract
from eagle3_utils.states.extraction.report import ExtractReport
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.store import StoreMeta


@dataclass
class PilotReport:
    """What the pilot said: one `CodecReport` per codec, and the extraction's own figures."""

    codecs: dict[str, CodecReport]
    extraction: ExtractReport

    def rate(self) -> tuple[float, float]:
        """Tokens per second to expect, as a range: a short pilot with cold caches is good to about 30 %."""
        return 0.7 * self.extraction.tokens_per_second, 1.3 * self.extraction.tokens_per_second

    def rows(self) -> list[dict]:
        """One row per codec and state, for a table."""
        return [
            {"codec": name, **row, "mean_kl": report.mean_kl, "argmax_agreement": report.argmax_agreement}
            for name, report in self.codecs.items()
            for row in report.rows()
        ]

    def metrics(self) -> dict:
        """For metrics.json."""
        return {
            "tokens_per_second": self.extraction.tokens_per_second,
            "num_tokens": self.extraction.num_tokens,
            "codecs": {name: report.summary() for name, report in self.codecs.items()},
        }


def choose_pilot(records: list, num_samples: int) -> list:
    """Records spread evenly over the corpus's lengths, the longest among them."""
    by_length = sorted(records, key=lambda record: (-len(record.input_ids), record.id))
    step = max(1, len(by_length) // max(1, num_samples))
    return by_length[::step][:num_samples]


def run_pilot(
    servers: list,
    records: list,
    folder: Path,
    meta: StoreMeta,
    config: ExtractConfig,
    teacher_logits: Callable[[torch.Tensor], torch.Tensor],
) -> PilotReport:
    """Extract the pilot in bf16 to a store that is removed again, and judge every codec on it.

    `teacher_logits` maps final states [M, H] to logits [M, V]. Raises `UserError` like `extract`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        plain = replace(meta, codec="bf16", final="all")
        here = config.model_copy(update={"shard_builders": 0})  # the start of processes would count as extraction
        report = extract(servers, choose_pilot(records, config.num_pilot_samples), folder, plain, here)
        reader = StoreReader(folder)
        samples = [reader.read(index) for index in range(len(reader))]
        codecs = {name: measure_codec(samples, name, meta.aux_layers, teacher_logits) for name in CODECS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return PilotReport(codecs, report)
