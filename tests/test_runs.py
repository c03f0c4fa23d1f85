"""Run folders: atomic files, DONE.json last, lineage that names what changed."""

from __future__ import annotations

import json
import shutil

import pytest

from eagle3_utils import locks, runs
from eagle3_utils.config import InspectConfig, TrainConfig
from eagle3_utils.errors import UserError
from eagle3_utils.locks import lock_file


@pytest.fixture
def config(tmp_path):
    return TrainConfig(run_dir=str(tmp_path / "run"))


def test_finish_writes_done_with_hashes_versions_and_time(config):
    stage = runs.open_stage(config, {"states": "abc"})
    assert runs.read_done(stage.run_folder, config.stage) is None
    stage.finish({"loss": 1.5}, {"draft": "def"})
    done = runs.read_done(stage.run_folder, config.stage)
    assert done["inputs"] == {"states": "abc"} and done["outputs"] == {"draft": "def"}
    assert done["versions"]["sglang"] == "0.5.14" and done["wall_seconds"] >= 0
    assert json.loads((stage.folder / "metrics.json").read_text()) == {"loss": 1.5}


def test_opening_a_stage_again_takes_its_done_away(config):
    runs.open_stage(config, {}).finish({}, {})
    stage = runs.open_stage(config, {})
    assert runs.read_done(stage.run_folder, config.stage) is None


def test_output_of_an_unfinished_stage_is_an_error_that_names_it(config):
    with pytest.raises(UserError, match="04_train_draft needs 03_extract_hidden_states, which is not done"):
        runs.output_of(config, "03_extract_hidden_states", "states")


def test_changed_parameter_and_changed_input_are_named(config):
    stage = runs.open_stage(config, {"states": "abc"})
    stage.finish({}, {})
    done = runs.read_done(stage.run_folder, config.stage)
    assert runs.why_not_current(done, config, {"states": "abc"}) is None
    other = config.model_copy(update={"epochs": 9.0})
    assert runs.why_not_current(done, other, {"states": "abc"}).startswith("parameter epochs is now 9.0")
    assert runs.why_not_current(done, config, {"states": "xyz"}).startswith("input states is now xyz")


def test_keys_that_say_how_not_what_leave_a_stage_current(config):
    stage = runs.open_stage(config, {})
    stage.finish({}, {})
    done = runs.read_done(stage.run_folder, config.stage)
    assert runs.why_not_current(done, config.model_copy(update={"prefetch_batches": 4}), {}) is None


def test_write_json_leaves_the_old_file_when_the_value_cannot_be_written(tmp_path):
    path = tmp_path / "a.json"
    runs.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        runs.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_hash_files_sees_contents_and_names_but_not_order(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"x")
    two.write_bytes(b"y")
    before = runs.hash_files([one, two])
    assert runs.hash_files([two, one]) == before
    two.write_bytes(b"z")
    assert runs.hash_files([one, two]) != before


def test_relative_paths_count_from_the_repository_root(monkeypatch):
    from_root = runs.resolve_path("outputs/x")
    monkeypatch.chdir(runs.repo_root() / "notebooks")
    assert runs.resolve_path("outputs/x") == from_root


def test_data_folder_is_the_runs_own_unless_data_root_says_otherwise(tmp_path):
    assert runs.data_folder(InspectConfig(run_dir=str(tmp_path))) == tmp_path / "data"
    assert runs.data_folder(InspectConfig(run_dir=str(tmp_path), data_root="/data/x")).as_posix() == "/data/x"


def test_progress_is_throttled_unless_forced(config):
    stage = runs.open_stage(config, {})
    stage.progress(done=1, total=9)
    assert "done" not in json.loads((stage.folder / "progress.json").read_text())
    stage.progress(done=2, total=9, force=True)
    assert json.loads((stage.folder / "progress.json").read_text())["done"] == 2


def run_with(tmp_path, data_root=None):
    """A finished stage whose data folder holds 100 bytes of states and a file that is none of the run's."""
    config = TrainConfig(run_dir=str(tmp_path / "run"), data_root=data_root and str(data_root))
    stage = runs.open_stage(config, {})
    stage.finish({}, {})
    (stage.data / "hidden_states").mkdir(parents=True)
    (stage.data / "hidden_states" / "shard").write_bytes(b"x" * 100)
    (stage.data / "other.txt").write_text("kept")
    return stage


def test_clean_takes_the_states_alone_or_the_whole_run(tmp_path):
    stage = run_with(tmp_path)
    assert runs.clean_targets(stage.run_folder, states_only=True) == [(stage.data / "hidden_states", 100)]
    assert [path for path, _ in runs.clean_targets(stage.run_folder, states_only=False)] == [stage.run_folder]


def test_clean_leaves_what_is_not_the_runs_in_a_data_folder_elsewhere(tmp_path):
    stage = run_with(tmp_path, tmp_path / "large-disk")
    for path, _ in runs.clean_targets(stage.run_folder, states_only=False):
        runs.remove(path)
    assert not stage.run_folder.exists()
    assert [path.name for path in (tmp_path / "large-disk").iterdir()] == ["other.txt"]


def test_clean_takes_every_kept_draft_of_a_data_folder_elsewhere_and_none_that_only_sounds_like_one(tmp_path):
    data = tmp_path / "large-disk"
    stage = run_with(tmp_path, data)
    kept = ["draft", "draft.old", "draft.old-12", "draft.old-2", "dropped", "hidden_states"]
    for name in (*kept, "draft.old-mine", "drafts"):
        (data / name).mkdir(exist_ok=True)
    targets = [path for path, _ in runs.clean_targets(stage.run_folder, states_only=False)]
    assert targets == [*(data / name for name in kept), stage.run_folder]


def test_clean_of_a_copied_run_leaves_the_originals_data_alone(tmp_path):
    stage = run_with(tmp_path)
    copy = shutil.copytree(stage.run_folder, tmp_path / "copy")
    assert runs.clean_targets(copy, states_only=True) == [(copy / "data" / "hidden_states", 100)]
    assert [path for path, _ in runs.clean_targets(copy, states_only=False)] == [copy]


def test_clean_refuses_a_folder_that_is_no_runs_and_one_at_work(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        runs.clean_targets(tmp_path, states_only=False)
    stage = run_with(tmp_path)
    with open(stage.run_folder / "runner.pid", "a") as file:
        assert locks.try_lock(file)
        with pytest.raises(UserError, match="a runner is at work here"):
            runs.clean_targets(stage.run_folder, states_only=True)
    (stage.data / "draft").mkdir()
    by_hand = lock_file(stage.data / "draft" / "training.lock", "pid 7 on a node")  # a torchrun's
    with by_hand, pytest.raises(UserError, match=r"a training \(pid 7 on a node\) is at work here"):
        runs.clean_targets(stage.run_folder, states_only=True)
    assert runs.clean_targets(stage.run_folder, states_only=True)
