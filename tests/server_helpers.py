"""Short ways to examine a server in tests."""

from __future__ import annotations

from types import SimpleNamespace

from eagle3_utils.serving.probing.trials import Trials


def record(ids: list[int], name: str = "r") -> SimpleNamespace:
    return SimpleNamespace(id=name, input_ids=ids)


def trials(server, target, config, records) -> Trials:
    return Trials(server, target, config, records, log=lambda _line: None)


def failed(examined: Trials) -> list[str]:
    return [gate.name for gate in examined.gates if not gate.passed]
