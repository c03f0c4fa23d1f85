"""The capture plugin for a server whose Python has not installed this package: one folder on its PYTHONPATH."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

from eagle3_utils.serving.launch.checks import PLUGIN_GROUP, PLUGIN_NAME

_PACKAGE = "eagle3_capture"


def make_plugin_folder(folder: Path) -> Path:
    """Copy just the capture package and its entry-point metadata into `folder`, which then goes on PYTHONPATH.

    SGLang finds entry points through distribution metadata on `sys.path`, so nothing needs to be installed.
    """
    source = Path(__file__).parents[1] / "capture"
    shutil.copytree(source, folder / _PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    version = metadata.version("eagle3-utils")
    info = folder / f"{_PACKAGE}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{PLUGIN_NAME} = {_PACKAGE}:register\n")
    return folder
