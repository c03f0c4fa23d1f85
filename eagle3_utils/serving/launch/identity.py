"""Is the server that answers the one we mean? Model name, handshake, and the reason when it did not start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.spec import CaptureSpec
from eagle3_utils.target import Target

_ERROR_LINE = re.compile(r"^(\w+\.)*\w*(Error|Exception|Refused|Model)\b.*: |error: |No module named|out of memory")


def check_model_name(client: Client, target: Target) -> dict[str, Any]:
    """Raise `UserError` unless the server says it serves this target. Returns `/model_info`."""
    info = client.get_json("/model_info")
    served = info.get("model_path")
    if served is None or Path(served).resolve() != target.path.resolve():
        raise UserError(f"the server serves {served}, not {target.path}", client.url)
    return info


def read_handshake(dump_dir: Path) -> dict[str, Any]:
    """The handshake capture wrote. Raises `UserError` when there is none: the plugin did not load."""
    path = dump_dir / "handshake.json"
    if not path.is_file():
        raise UserError(
            "the server is ready but capture left no handshake: the plugin is absent or failed to load",
            str(dump_dir),
            "look for 'plugin' in the server's log; is SGLANG_HS_DUMP_DIR set for it, is SGLANG_PLUGINS excluding it?",
        )
    return json.loads(path.read_text())


def check_handshake(dump_dir: Path, capture: CaptureSpec, target: Target, nonce: str | None) -> dict[str, Any]:
    """The handshake, once it is proved to be this launch's (`nonce`; None for a user's server) and this target's.

    Raises
    ------
    UserError
        When the handshake is missing or stale, or when boundaries or shape are not the ones asked for.
    """
    facts = read_handshake(dump_dir)
    expected = {"boundaries": capture.boundaries, "hidden_size": target.hidden_size, "num_layers": target.num_layers}
    if nonce is not None:
        expected["nonce"] = nonce
    for name, value in expected.items():
        if facts.get(name) != value:
            raise UserError(f"the handshake says {name} {facts.get(name)}, expected {value}", str(dump_dir))
    if Path(facts["model_path"]).resolve() != target.path.resolve():
        raise UserError(f"the handshake is for {facts['model_path']}, not {target.path}", str(dump_dir))
    num_writers = facts["ranks"]["writers"]
    missing = [rank for rank in range(1, num_writers) if not (dump_dir / f"handshake.{rank}.json").is_file()]
    if missing:
        raise UserError(f"no handshake from data-parallel ranks {missing}", str(dump_dir))
    return facts


def last_error(log_path: Path) -> str:
    """The line of a server's log that says why it ended: the last one that names an error, else the last one."""
    lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if _ERROR_LINE.search(line)]
    return (named or lines or ["its log is empty"])[-1][:300]
