"""Drafts of other trainers: recognised, put into SGLang's names, and their differences said."""

import json
from dataclasses import replace

import pytest
import torch
from draft_folders import LAYERS
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle3_utils.draft.check import review_draft
from eagle3_utils.draft.export import load_draft
from eagle3_utils.draft.layouts import read_draft_files
from eagle3_utils.errors import UserError

pytest_plugins = ["draft_folders"]  # fixtures
OURS = ("num_aux_hidden_states", "trained_aux_layers", "trained_with")


@pytest.fixture
def parts(exported):
    """config and tensors of a sound draft, to be written again as others would."""
    return json.loads((exported / "config.json").read_text()), load_file(exported / "model.safetensors")


def write(folder, values, tensors, name="model.safetensors"):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / name)
    return folder


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def test_specforge_leaves_the_layers_to_sglangs_default_and_rope_to_whom_trained_it(parts, target, tmp_path):
    values, tensors = parts
    values = without(values, "eagle_config", *OURS, "rope_parameters") | {"rope_theta": 500000.0}
    folder = write(tmp_path / "s", values, tensors)
    review = review_draft(folder, replace(target, num_layers=8))
    assert "SpecForge" in review.layout and review.problems == []
    notes = "\n".join(review.notes)
    assert "captures its default layers" in notes and "right only if the draft was trained with it" in notes
    (problem,) = review_draft(folder, target).problems  # of six layers, the default names one twice
    assert "layers [1, 2, 2], of which a draft is given [1, 2]: 2 where fc takes 3; SGLang would stop" in problem


def test_rope_scaling_beside_rope_parameters_is_what_transformers_loads(parts, target, tmp_path):
    values, tensors = parts
    values = without(values, *OURS) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    folder = write(tmp_path / "r", values, tensors)
    loaded = AutoConfig.from_pretrained(folder).rope_parameters
    assert (loaded["rope_type"], loaded["factor"], loaded["rope_theta"]) == ("linear", 2.0, values["rope_theta"])
    assert any("'factor': 2.0" in note and "is not the target's" in note for note in review_draft(folder, target).notes)


LATE = "; SGLang would stop at the first request, if it starts"


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2, 99], "layers [1, 2, 99], of which a draft is given [1, 2]: 2 where fc takes 3" + LATE),
        ([1, 2, 5], "layers [1, 2, 5], of which a draft is given [1, 2]: 2 where fc takes 3" + LATE),  # the last one
        ([-1, 2, 4], "layers [-1, 2, 4], of which a draft is given [2, 4]: 2 where fc takes 3" + LATE),
        ([2, 98, 99], "is given [2]: 1 where fc takes 3; SGLang would skip fc without a word"),
        ("1,2,4", "layer ids '1,2,4' are no list of whole numbers: SGLang would not start"),
        (["1", "2", "4"], "layer ids ['1', '2', '4'] are no list of whole numbers"),
        (None, "eagle_config is '1,2,4', no object: SGLang would not start"),
    ],
)
def test_layer_ids_that_sglang_cannot_serve_are_one_problem(ids, said, parts, target, tmp_path):
    values, tensors = parts
    says = {"eagle_aux_hidden_state_layer_ids": ids} if ids else "1,2,4"
    folder = write(tmp_path / "i", without(values, *OURS) | {"eagle_config": says}, tensors)
    problems = review_draft(folder, target if ids else replace(target, num_layers=8)).problems
    assert len(problems) == 1 and said in problems[0]


def test_the_older_name_of_fc_norm_asks_for_its_weights(parts, target, tmp_path):
    values, tensors = parts
    values = without(values, "fc_norm", *OURS) | {"use_aux_norm": True}
    assert review_draft(write(tmp_path / "a", values, tensors), target).problems == []
    lacking = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc_norm.")}
    problems = review_draft(write(tmp_path / "b", values, lacking), target).problems
    assert [line.split(":")[0] for line in problems] == [f"fc_norm.{index}.weight is missing" for index in range(3)]


def test_eagles_own_checkpoint_needs_another_architecture(parts, target, tmp_path):
    values, tensors = parts
    values = without(values, *OURS) | {"architectures": ["LlamaForCausalLM"]}
    folder = write(tmp_path / "e", values, {"unused": torch.ones(1)}, "other.txt")
    torch.save(tensors | {"embed_tokens.weight": torch.ones(2, 2)}, folder / "pytorch_model.bin")
    review = review_draft(folder, target, LAYERS)
    assert review.layout.startswith("eagle (")
    assert len(review.problems) == 1 and "write LlamaForCausalLMEagle3" in review.problems[0]
    assert any("shares the target's embeddings" in note for note in review.notes)


def test_speculators_layer_ids_and_norms_are_explained(parts, target, tmp_path):
    values, tensors = parts
    outer = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 256}
    outer |= {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYERS], "norm_before_residual": True}
    nested = without(values, "architectures", "eagle_config", "draft_vocab_size", *OURS)
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    review = review_draft(write(tmp_path / "v", outer | {"transformer_layer_config": nested}, tensors), target)
    assert review.layout.startswith("speculators") and len(review.problems) == 3
    nesting, residual, ids = review.problems
    assert "would not start" in nesting and "acceptance would collapse" in residual
    assert f"eagle_config.eagle_aux_hidden_state_layer_ids = {LAYERS}" in ids


def test_an_eagle_2_draft_is_served_by_another_algorithm(parts, target, tmp_path):
    values, _ = parts
    old = {"fc.weight": torch.ones(64, 128), "layers.0.mlp.up_proj.weight": torch.ones(128, 64)}
    folder = write(tmp_path / "old", values | {"architectures": ["LlamaForCausalLM"]}, old)
    assert "--speculative-algorithm EAGLE" in review_draft(folder, target).problems[0]


def test_older_names_of_the_norms_become_sglangs(parts, tmp_path):
    values, tensors = parts
    tensors = {f"model.{name}": tensor for name, tensor in tensors.items()} | {"aux_norm_mid.weight": torch.ones(64)}
    names = read_draft_files(write(tmp_path / "n", values, tensors)).tensors.keys()
    assert {"fc_norm.1.weight", "midlayer.mlp.up_proj.weight", "norm.weight"} <= names


def test_damaged_files_are_named_in_a_line(exported, parts, target, tmp_path):
    config, weights = exported / "config.json", exported / "model.safetensors"
    whole, again = config.read_text(), r"\n  download or export it again$"
    for text in (whole[:20], "[]"):
        config.write_text(text)
        for read in (lambda: read_draft_files(exported), lambda: load_draft(exported, target)):
            with pytest.raises(UserError, match=rf"config\.json: damaged: .+{again}"):
                read()
    config.write_text(whole)
    with open(weights, "r+b") as file:
        file.truncate(10_000)
    for read in (lambda: read_draft_files(exported), lambda: load_draft(exported, target)):
        with pytest.raises(UserError, match=rf"model\.safetensors: missing or damaged: .+{again}"):
            read()
    weights.rename(exported / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"pytorch_model\.bin: missing or damaged: .+{again}"):
        read_draft_files(exported)
    with pytest.raises(UserError, match=r"model\.safetensors: missing or damaged"):
        load_draft(exported, target)


def test_a_folder_without_weights_says_so(parts, target, tmp_path):
    folder = write(tmp_path / "w", parts[0], parts[1], "weights.txt")
    assert "SGLang would find no weights" in review_draft(folder, target).problems[0]
