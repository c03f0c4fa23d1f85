"""What a stage reads: outputs of earlier stages, files named in the parameters, the target."""

from __future__ import annotations

import shutil
from itertools import pairwise
from types import SimpleNamespace

import huggingface_hub
import pytest
from fake_capture import fill, make_records

from eagle3_utils import lineage, runs
from eagle3_utils.config import STAGES, GenerateConfig, MergeConfig, TrainConfig
from eagle3_utils.errors import UserError


@pytest.fixture
def shared(example_target, tmp_path):
    return {"run_dir": str(tmp_path / "run"), "model": str(example_target)}


def test_every_stage_is_in_the_table_and_reads_earlier_stages_only():
    order = list(STAGES)
    assert list(lineage.UPSTREAM) == order
    for stage, inputs in lineage.UPSTREAM.items():
        assert all(order.index(upstream) < order.index(stage) for upstream, _ in inputs.values())


def test_a_changed_prompt_file_changes_the_inputs(shared, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    config = GenerateConfig(**shared, prompts=[str(prompts)], earlier_responses=[])
    before = lineage.stage_inputs(config)
    prompts.write_text("{}\n{}\n")
    after = lineage.stage_inputs(config)
    assert before["target"] == after["target"]
    assert before[f"file {prompts}"] != after[f"file {prompts}"]


def test_a_missing_file_is_named_with_its_stage(shared):
    with pytest.raises(UserError, match=r"00_generate_responses: no/such\.jsonl"):
        lineage.stage_inputs(GenerateConfig(**shared, prompts=["no/such.jsonl"], earlier_responses=[]))


def test_merging_needs_the_generation_stage_only_when_it_reads_its_responses(shared, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text("")
    own = MergeConfig(**shared, sources=[{"name": "own", "path": str(file)}], decontaminate_with=[])
    assert set(lineage.stage_inputs(own)) == {"target", f"file {file}"}
    with pytest.raises(UserError, match="needs 00_generate_responses"):
        lineage.stage_inputs(MergeConfig(**shared, decontaminate_with=[]))


@pytest.mark.parametrize("kind", ["folder", "pattern", "hf folder"])
def test_a_changed_file_of_a_source_of_many_changes_the_inputs(shared, tmp_path, kind):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}\n")
    (folder / "b.jsonl").write_text("{}\n")
    place = {
        "folder": {"path": str(folder)},
        "pattern": {"path": f"{folder}/*.jsonl"},
        "hf folder": {"hf": str(folder)},
    }
    config = MergeConfig(**shared, sources=[{"name": "own"} | place[kind]], decontaminate_with=[])
    before = lineage.stage_inputs(config)
    assert len(before) == 2 and lineage.stage_inputs(config) == before
    (folder / "b.jsonl").write_text("[]\n")
    after = lineage.stage_inputs(config)
    assert before.keys() == after.keys() and before != after
    with pytest.raises(UserError, match="no such file"):
        missing = {"name": "own", "path": f"{folder}/*.parquet"}
        lineage.stage_inputs(MergeConfig(**shared, sources=[missing], decontaminate_with=[]))


def test_a_dataset_on_the_hub_is_known_by_its_commit(shared, monkeypatch):
    commits = iter(["abc", OSError("no network")])

    def dataset_info(_api, name):
        commit = next(commits)
        if isinstance(commit, Exception):
            raise commit
        return SimpleNamespace(sha=f"{name}@{commit}")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    source = {"name": "maths", "hf": "openai/gsm8k", "config": "main"}
    config = MergeConfig(**shared, sources=[source], decontaminate_with=[])
    assert lineage.stage_inputs(config)["dataset openai/gsm8k"] == "openai/gsm8k@abc"
    with pytest.raises(UserError, match=r"maths: openai/gsm8k.*no network"):
        lineage.stage_inputs(config)
    commits = iter([OSError("no network")])
    runs.open_stage(config, {"dataset openai/gsm8k": "the one read"}).finish({}, {})
    assert lineage.stage_inputs(config)["dataset openai/gsm8k"] == "the one read", "a finished stage needs no network"


def test_an_upstream_output_is_taken_from_its_done_file(shared):
    upstream = GenerateConfig(**shared, prompts=[], earlier_responses=[])
    runs.open_stage(upstream, {}).finish({}, {"responses": "abc"})
    assert lineage.stage_inputs(MergeConfig(**shared, decontaminate_with=[]))["responses"] == "abc"


def test_a_source_in_the_data_folder_that_is_not_the_responses_is_a_file_like_others(shared):
    extra = runs.resolve_path(shared["run_dir"]) / "data" / "extra.jsonl"
    extra.parent.mkdir(parents=True)
    extra.write_text("{}\n")
    source = {"name": "extra", "path": "{data}/extra.jsonl"}
    config = MergeConfig(**shared, sources=[source], decontaminate_with=[])
    before = lineage.stage_inputs(config)
    assert not lineage.reads_responses(config) and f"file {extra}" in before
    extra.write_text("[]\n")
    assert lineage.stage_inputs(config) != before


@pytest.mark.parametrize(
    "path", ["{data}/responses.jsonl", "{data}//responses.jsonl", "{data}/r*.jsonl", "{data}", None]
)
def test_responses_are_read_by_whatever_path_takes_them_in(shared, path):
    data = runs.resolve_path(shared["run_dir"]) / "data"
    source = {"name": "mine", "path": path or str(data / "responses.jsonl")}
    config = MergeConfig(**shared, sources=[source], decontaminate_with=[])
    assert lineage.reads_responses(config)
    upstream = GenerateConfig(**shared, prompts=[], earlier_responses=[])
    runs.open_stage(upstream, {}).finish({}, {"responses": "abc"})
    (data / "responses.jsonl").write_text("{}\n")
    before = lineage.stage_inputs(config)
    assert before["responses"] == "abc"
    (data / "responses.jsonl").write_text("[]\n")
    assert lineage.stage_inputs(config) == before, "the file itself is known by its stage's output"
    (data / "rest.jsonl").write_text("{}\n")
    assert (lineage.stage_inputs(config) != before) == (path in ("{data}/r*.jsonl", "{data}"))


def test_states_of_other_runs_and_the_draft_begun_with_are_inputs_of_the_training(shared, tmp_path):
    upstream = {"01_merge_data": "corpus", "03_extract_hidden_states": "states"}
    for stage, output in upstream.items():
        runs.open_stage(STAGES[stage](**shared), {}).finish({}, {output: "abc"})
    other, draft = tmp_path / "other", tmp_path / "draft"
    records = make_records(8)
    fill(other / "hidden_states" / "train", records[:5])
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    config = TrainConfig(**shared, more_data=[str(other)], init_from=str(draft))
    found = [lineage.stage_inputs(config)]
    fill(other / "hidden_states" / "val", records[5:])
    found.append(lineage.stage_inputs(config))
    (draft / "config.json").write_text("[]")
    found.append(lineage.stage_inputs(config))
    assert set(found[0]) == {"target", "corpus", "states", f"states of {other}", f"draft {draft}"}
    changed = [{name for name in before if before[name] != after[name]} for before, after in pairwise(found)]
    assert changed == [{f"states of {other}"}, {f"draft {draft}"}]
    runs.open_stage(config, found[-1]).finish({}, {"draft": "made of them"})
    shutil.rmtree(other)
    shutil.rmtree(draft)
    assert lineage.stage_inputs(config) == found[-1], "a finished training needs them no more"
    done = runs.read_done(runs.resolve_path(config.run_dir), config.stage)
    earlier = {"target", "corpus", "states"}  # what an earlier version recorded
    assert runs.why_not_current(done | {"inputs": {k: found[-1][k] for k in earlier}}, config, found[-1]) is None
