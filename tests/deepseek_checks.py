"""What the probe must find on the tiny DeepSeek-V3 (deepseek_on_cpu.py), on whatever device it is served."""

from __future__ import annotations

from eagle3_utils.serving.probe import run_probe
from eagle3_utils.serving.probing.trials import Trials


def check_every_gate(server, target, config, records) -> None:
    """Every gate of the probe passes, and the layers are those of Hugging Face's forward."""
    report = run_probe(server, target, config, records)
    assert report.passed, report.table().to_string()
    found = [row["found_boundary"] for row in report.layers]
    assert found == [3, 4, 5, 6], found


def check_the_anchored_check(server, target, config, records) -> None:
    """Without a reference the same layers are found."""
    anchored = config.model_copy(update={"reference": "anchored"})
    examined = Trials(server, target, anchored, records, log=lambda _line: None)
    examined.layers()
    assert all(gate.passed for gate in examined.gates), examined.gates
    found = [row["found_boundary"] for row in examined.layer_rows]
    assert found == [3, 4, 5], found
