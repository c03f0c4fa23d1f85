"""The gate between serving and extraction: real requests, real dumps, and figures that say whether they are right.

    report = probe_servers(servers, target, config, records)  # notebook 02
    require_probe(config, target, server, longest=8192)     # stage 03: refuses without a passing probe like this server

Every gate has a name, a measured figure, a threshold and a verdict. `probe.json` holds them, the fingerprint of model,
layers and server settings that extraction compares, and the pilot's rate for the planner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_utils.config import ProbeConfig, StageConfig
from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_json, resolve_path, write_json
from eagle3_utils.serving.probing.gates import Gate
from eagle3_utils.serving.probing.trials import HasTokens, Trials
from eagle3_utils.serving.server import RunningServer
from eagle3_utils.target import Target

PROBE_STAGE = ProbeConfig.stage
_FINGERPRINT_KEYS = (
    "capture_hash", "sglang_version", "model_class", "boundaries", "num_layers", "hidden_size", "dtype", "model_dtype",
    "device", "quantization", "kv_cache_dtype", "attention_backend", "chunked_prefill_size", "method",
)  # fmt: skip
_RANK_KEYS = ("tp", "attn_tp")  # how sums are split; how many copies write changes no number


@dataclass
class ProbeReport:
    """All gates, the layer table, the fingerprint and the pilot."""

    gates: list[Gate]
    layers: list[dict[str, Any]]
    fingerprint: dict[str, Any]
    pilot: dict[str, Any]
    longest: int
    layer_cosines: dict[str, list[float]]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, "gates": [asdict(gate) | {"verdict": gate.verdict} for gate in self.gates]} | {
            "layers": self.layers, "fingerprint": self.fingerprint, "pilot": self.pilot, "longest": self.longest,
            "layer_cosines": self.layer_cosines,
        }  # fmt: skip

    def table(self):
        """The gates as a pandas table."""
        import pandas

        rows = [[gate.name, gate.verdict, gate.measured, gate.threshold, gate.detail] for gate in self.gates]
        return pandas.DataFrame(rows, columns=["gate", "verdict", "measured", "threshold", "detail"])


def run_probe(
    server: RunningServer,
    target: Target,
    config: ProbeConfig,
    records: Sequence[HasTokens],
    log: Callable[[str], None] = print,
) -> ProbeReport:
    """Send real samples through a capturing server and judge what comes back.

    Parameters
    ----------
    records : the corpus (training and validation): probe and pilot samples are drawn from it by `config.seed`.
    log : called with one line per gate.

    Returns
    -------
    The report, whether it passed or not; nothing is raised for a failed gate.
    """
    if not records:
        raise UserError("the corpus is empty: the probe needs real samples", "records")
    trials = Trials(server, target, config, records, log)
    trials.identity()
    if trials.arrival():
        trials.content()
        trials.quiet()
        trials.logprobs()
        trials.layers()
        trials.capacity()
        trials.invariance()
        trials.rate()
    longest = max(len(record.input_ids) for record in records)
    facts = fingerprint(target, server)
    return ProbeReport(trials.gates, trials.layer_rows, facts, trials.pilot, longest, trials.layer_cosines)


def probe_servers(
    servers: Sequence[RunningServer],
    target: Target,
    config: ProbeConfig,
    records: Sequence[HasTokens],
    log: Callable[[str], None] = print,
) -> ProbeReport:
    """Probe every server of a stage as one: all gates of all of them, and the sum of their rates.

    Raises
    ------
    UserError
        When the servers differ in anything that makes their dumps differ.
    """
    reports = [run_probe(server, target, config, records, log) for server in servers]
    first = reports[0]
    for server, report in zip(servers, reports, strict=True):
        if report.fingerprint != first.fingerprint:
            raise UserError(f"its dumps would differ from those of {servers[0].url}", server.url)
    for report in reports[1:]:
        first.gates += report.gates
        for rate in ("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high", "bytes_per_second"):
            if rate in first.pilot and rate in report.pilot:
                first.pilot[rate] += report.pilot[rate]
    return first


def fingerprint(target: Target, server: RunningServer) -> dict[str, Any]:
    """What makes two servers' dumps interchangeable: target, layers, versions, settings; with a digest over it all."""
    facts = {name: server.handshake[name] for name in _FINGERPRINT_KEYS} | {"target": target.fingerprint}
    facts["ranks"] = {name: server.handshake["ranks"][name] for name in _RANK_KEYS}
    return facts | {"digest": hash_json(facts)}


def read_probe(config: StageConfig) -> dict[str, Any]:
    """The run's `probe.json`. Raises `UserError` when it is missing or did not pass."""
    path = probe_path(config)
    fix = f"run notebooks/{PROBE_STAGE}.ipynb"
    if not path.is_file():
        raise UserError("there is no probe of this run: hidden states are not extracted unprobed", str(path), fix)
    found = json.loads(path.read_text())
    if not found["passed"]:
        failed = [gate["name"] for gate in found["gates"] if not gate["passed"]]
        raise UserError(f"the probe did not pass: {', '.join(failed)}", str(path), fix)
    return found


def require_probe(config: StageConfig, target: Target, server: RunningServer, longest: int) -> dict[str, Any]:
    """The passing probe of a server like this one; stage 03 calls it for every server before the first request.

    Parameters
    ----------
    longest : tokens of the longest sample about to be extracted.

    Raises
    ------
    UserError
        When there is no passing probe, or model, layers, versions, settings or length differ; the message says what.
    """
    found = read_probe(config)
    own = fingerprint(target, server)
    different = [name for name in own if name != "digest" and own[name] != found["fingerprint"].get(name)]
    fix = f"run notebooks/{PROBE_STAGE}.ipynb again with these settings"
    if different:
        told = "; ".join(f"{name} was {found['fingerprint'].get(name)}, is {own[name]}" for name in different[:3])
        raise UserError(f"the probe was of another server: {told}", str(probe_path(config)), fix)
    if longest > found["longest"]:
        raise UserError(f"the probe's longest sample had {found['longest']} tokens, this corpus has {longest}", fix=fix)
    return found


def probe_path(config: StageConfig) -> Path:
    """Where a run keeps its probe."""
    return resolve_path(config.run_dir) / PROBE_STAGE / "probe.json"


def write_probe(config: StageConfig, report: ProbeReport) -> Path:
    """Save the report as the run's `probe.json`, atomically."""
    write_json(probe_path(config), report.to_json())
    return probe_path(config)
