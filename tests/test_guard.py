"""The guard is quiet when the server was stopped properly (that it kills otherwise is in test_processes.py)."""

from __future__ import annotations

import subprocess
import sys

from eagle3_utils.serving.launch import processes


def test_a_stopped_server_is_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    guard = processes.start_guard(other.pid)
    guard.communicate(b"stopped\n", timeout=10)
    assert guard.returncode == 0 and other.poll() is None
    processes.stop_group(other)
