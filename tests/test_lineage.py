"""What a stage reads: outputs of earlier stages, files named in the parameters, the target."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest

from eagle3_utils import lineage, runs
from eagle3_utils.config import STAGES, GenerateConfig, MergeConfig
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


def test_an_upstream_output_is_taken_from_its_done_file(shared):
    upstream = GenerateConfig(**shared, prompts=[], earlier_responses=[])
    runs.open_stage(upstream, {}).finish({}, {"responses": "abc"})
    assert lineage.stage_inputs(MergeConfig(**shared, decontaminate_with=[]))["responses"] == "abc"
