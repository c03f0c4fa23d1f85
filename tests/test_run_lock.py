"""One runner per run folder: who holds it, who is refused, and that asking leaves no trace."""

from __future__ import annotations

import os

import pytest

from eagle3_utils import run_lock, runs
from eagle3_utils.errors import UserError


def test_the_command_that_goes_on_stays_only_where_the_end_was_not_reached(tmp_path):
    with pytest.raises(KeyboardInterrupt), run_lock.hold(tmp_path, "eagle3 run p.yaml"):
        with pytest.raises(UserError, match=rf"another runner \(pid {os.getpid()}\)"):
            run_lock.require_free(tmp_path)
        raise KeyboardInterrupt
    assert runs.read_runner(tmp_path) == (os.getpid(), "eagle3 run p.yaml")
    run_lock.require_free(tmp_path)
    assert runs.read_runner(tmp_path) == (os.getpid(), "eagle3 run p.yaml")
    with run_lock.hold(tmp_path, "eagle3 run q.yaml"):
        assert runs.read_runner(tmp_path) == (os.getpid(), "eagle3 run q.yaml")
    assert runs.read_runner(tmp_path) is None
    with pytest.raises(UserError, match="no runner is at work here"):
        run_lock.stop(tmp_path, 1.0)


def test_stopping_a_folder_that_is_no_run_does_not_make_it_one(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not a run folder"):
        run_lock.stop(tmp_path, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"] and not runs.is_run_folder(tmp_path)
