"""The shape of the package: rooms import in one direction, the capture plugin stands alone, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from eagle3_utils.runs import repo_root

PACKAGE = repo_root() / "eagle3_utils"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {"errors", "config", "parameter_types", "strict_yaml", "runs", "locks", "target", "example_target", "devices"}
MAY_IMPORT = {
    "corpus": set(),
    "serving": set(),
    "states": {"corpus", "serving"},
    "draft": {"corpus", "states"},
    "acceptance": {"corpus", "serving", "states", "draft"},
    "stats": {"states"},
    "plots": {"corpus", "serving", "states", "draft", "acceptance", "stats"},
    "errors": set(),
    "devices": set(),
    "locks": set(),
    "config": set(),
    "runs": set(),
    "example_target": set(),
    "target": set(),
    "lineage": {"corpus", "states"},
}
EVERYWHERE_BUT_RARE = {"sglang": {"serving"}, "matplotlib": {"plots"}, "typer": {"cli"}, "papermill": {"runner"}}


def room(path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_rooms_import_in_one_direction_and_nobody_imports_the_command_line():
    for path in FILES:
        here = room(path)
        if here not in MAY_IMPORT:
            continue
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "eagle3_utils" and len(parts) > 1:
                assert parts[1] in MAY_IMPORT[here] | BASE | {here}, f"{path.name} imports {name}"


def test_heavy_libraries_stay_in_their_room():
    for path in FILES:
        for name in imported(path):
            rooms = EVERYWHERE_BUT_RARE.get(name.split(".")[0])
            assert rooms is None or room(path) in rooms, f"{path.name} imports {name}"


def test_the_capture_plugin_needs_only_torch_safetensors_sglang_and_the_standard_library():
    allowed = set(sys.stdlib_module_names) | {"torch", "safetensors", "sglang", "numpy"}
    for path in (PACKAGE / "serving" / "capture").glob("*.py"):
        for name in imported(path):
            own = name.startswith("eagle3_utils.serving.capture")
            assert own or name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_importing_the_plugin_pulls_in_nothing_of_the_rest():
    code = "import sys, eagle3_utils.serving.capture; print([m for m in sys.modules if m.startswith('eagle3_utils')])"
    loaded = ast.literal_eval(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert all(re.match(r"eagle3_utils(\.serving(\.capture.*)?)?$", name) for name in loaded), loaded


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_small_functions_fit_a_screen_and_modules_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_every_module_has_its_test_file():
    tests = {path.stem.removeprefix("test_") for path in (repo_root() / "tests").rglob("test_*.py")}
    rooms = {"capture", "plots"}
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if path.name == "__init__.py":
            continue
        assert parts[-1] in tests or rooms & set(parts) & tests, f"{path} has no test file"
