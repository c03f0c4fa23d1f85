"""Is the server that answers the one we mean? Model name, handshake, and the reason when it did not start."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.spec import CaptureSpec
from eagle3_utils.target import Target

_ERROR_LINE = re.compile(r"^(\w+\.)*\w*(Error|Exception|Refused|Model)\b.*: |error: |No module named|out of memory")
_CRASH, _SKIPPED = "hit an exception: Traceback", "Ignore import error"  # as SGLang's processes log them
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_name(client: Client, target: Target) -> dict[str, Any]:
    """Raise `UserError` unless the server says it serves this target. Returns `/model_info`."""
    info = client.get_json("/model_info")
    served = info.get("model_path")
    if served is None or not is_same_model(served, target):
        raise UserError(f"the server serves {served}, not {target.path}", client.url)
    return info


def is_same_model(served: str, target: Target) -> bool:
    """Whether a server's model path means this target: the same folder, or a name on the hub and a copy of that.

    A copy is the hub's own cache of that name, or a folder called like the name's last part; what is in it is shown
    by value, in the probe.
    """
    if Path(served).resolve() == target.path.resolve():
        return True
    if not _HUB_NAME.fullmatch(served) or Path(served).exists():
        return False
    cached = f"models--{served.replace('/', '--')}" in target.path.parts
    return cached or target.path.name.lower() == served.split("/")[1].lower()


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
    if not is_same_model(facts["model_path"], target):
        raise UserError(f"the handshake is for {facts['model_path']}, not {target.path}", str(dump_dir))
    num_writers = facts["ranks"]["writers"]
    missing = [rank for rank in range(1, num_writers) if not (dump_dir / f"handshake.{rank}.json").is_file()]
    if missing:
        raise UserError(f"no handshake from data-parallel ranks {missing}", str(dump_dir))
    return facts


def last_error(log_path: Path) -> str:
    """The line of a server's log that says why its last start failed.

    That is the exception which ended the first of SGLang's processes to crash: the others, and the main process with
    its "scheduler died during initialization", only follow it. Without one: the last line that names an error, else
    the last line.
    """
    text = log_path.read_text(errors="replace")
    lines = [line.rstrip() for line in text[text.rfind("\n$ ") + 1 :].splitlines() if line.strip()]  # "$ " + command
    crash = next((number for number, line in enumerate(lines) if _CRASH in line), len(lines))
    entry = itertools.takewhile(lambda line: not line.startswith("[20"), lines[crash + 1 :])  # "[2026-… starts the next
    raised = ""
    for line in entry:
        if line.startswith("Traceback"):
            raised = ""  # another exception while this one was handled
        elif not raised and not line[0].isspace():  # what follows is the rest of its message
            raised = line
    if raised:
        return raised[:300]
    named = [line.strip() for line in lines if _ERROR_LINE.search(line.strip()) and _SKIPPED not in line]
    return (named or lines or ["its log is empty"])[-1].strip()[:300]
