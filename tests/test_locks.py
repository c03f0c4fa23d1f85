"""Lock files: held by one, who says so; asking changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from eagle3_utils.locks import in_brackets, lock_file
from eagle3_utils.runs import repo_root

HOLD = """
import sys, time
from pathlib import Path
from eagle3_utils.locks import lock_file

with lock_file(Path(sys.argv[1]), "pid of another"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_is_held_until_its_process_dies_and_says_whose_it_is(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repo_root()) as other:
        assert other.stdout.readline() == "held\n"
        with lock_file(path, "us") as holder:
            assert holder == path.read_text() == "pid of another"
        os.kill(other.pid, signal.SIGKILL)
    with lock_file(path) as holder:
        assert holder is None and path.read_text() == "pid of another"  # asking alone writes nothing
    with lock_file(path, "us") as holder:
        assert holder is None and path.read_text() == "us"


def test_a_lock_is_free_again_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_file(tmp_path / "lock", "us"):
        raise ZeroDivisionError
    with lock_file(tmp_path / "lock") as holder:
        assert holder is None


def test_a_holder_is_named_by_the_first_line_it_wrote():
    assert in_brackets("12\neagle3 run p.yaml") == " (12)" and in_brackets("") == ""
