"""Capture's seams against SGLang's source: what is hooked, and every setting that is read, is there and named so.

A renamed function or field would leave a server that serves and captures nothing. What the hooks do is shown on a real
server (test_server.py); that none is installed in a normal one in test_capture_classes.py.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

SRT = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
CAPTURE = Path(importlib.util.find_spec("eagle3_utils").submodule_search_locations[0]) / "serving" / "capture"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8-sig"))


def parameters(path: Path, function: str, of_class: str | None = None) -> list[str]:
    """Names of a function's positional parameters; of a method of `of_class` where one is named."""
    body = tree(path).body
    if of_class:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == of_class).body
    found = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [argument.arg for argument in found.args.args]


def test_the_logits_processor_takes_what_our_wrapper_hands_on():
    own = parameters(CAPTURE / "hooks.py", "around_logits")
    assert own[0] == "original"
    assert own[1:] == parameters(SRT / "layers/logits_processor.py", "forward", "LogitsProcessor")


@pytest.mark.parametrize(
    ("file", "of_class", "function", "first"),
    [
        ("model_executor/model_runner.py", "ModelRunner", "init_aux_hidden_state_capture", ["self"]),
        ("model_executor/forward_batch_info.py", "ForwardBatch", "init_new", ["cls", "batch", "model_runner"]),
        ("managers/scheduler_components/output_streamer.py", "SchedulerOutputStreamer", "stream_output",
         ["self", "reqs"]),
    ],
)  # fmt: skip
def test_each_hooked_function_is_there(file, of_class, function, first):
    assert parameters(SRT / file, function, of_class)[: len(first)] == first
    name = f"{file.removesuffix('.py').replace('/', '.')}.{of_class}.{function}"
    assert f'"{name}"' in (CAPTURE / "hooks.py").read_text()


def test_every_setting_that_is_read_is_one_of_sglangs():
    server_args = next(
        node for node in tree(SRT / "server_args.py").body
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
    )  # fmt: skip
    fields = {node.target.id for node in server_args.body if isinstance(node, ast.AnnAssign)}
    read = set(re.findall(r"\bargs\.(\w+)", (CAPTURE / "settings.py").read_text() + (CAPTURE / "hooks.py").read_text()))
    assert len(read) >= 12 and read <= fields, read - fields
