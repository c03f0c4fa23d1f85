"""The plugin for another interpreter: one folder on PYTHONPATH, importable without this package."""

from __future__ import annotations

import os
import subprocess
import sys

from eagle3_utils.serving.launch.plugin_folder import make_plugin_folder

ASK = """
import importlib.metadata, sys
points = importlib.metadata.entry_points(group="sglang.srt.plugins")
point = next(p for p in points if p.name == "eagle3_capture")
point.load()()
print(point.value, [name for name in sys.modules if name.split(".")[0] in ("eagle3_utils", "torch", "sglang")])
"""


def test_the_folder_alone_gives_a_working_entry_point(tmp_path):
    make_plugin_folder(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    answer = subprocess.run([sys.executable, "-S", "-c", ASK], capture_output=True, text=True, env=environment, cwd="/")
    assert answer.stdout.strip() == "eagle3_capture:register []", answer.stderr
