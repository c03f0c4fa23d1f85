"""What the pipeline reads of a target: shape, layers, the weights it needs and no others, its logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer

from eagle3_utils.errors import UserError
from eagle3_utils.target import (
    added_token_ids,
    default_aux_layers,
    load_embed_tokens,
    load_final_norm,
    load_lm_head,
    load_target,
    stop_ids_of,
    target_logits,
)


def write_checkpoint(folder, config, tensors=None):
    folder.mkdir(exist_ok=True)
    base = {"architectures": ["X"], "num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 6}
    (folder / "config.json").write_text(json.dumps(base | config))
    save_file(tensors or {"model.embed_tokens.weight": torch.ones(6, 4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("layers", "expected"), [(30, [1, 14, 26]), (61, [1, 29, 57]), (32, [1, 15, 28])])
def test_default_layers_are_sglangs_boundaries_minus_one(layers, expected):
    assert default_aux_layers(layers) == expected == [2 - 1, layers // 2 - 1, layers - 3 - 1]


def test_too_few_layers_for_the_default_is_an_error():
    with pytest.raises(UserError, match="3 layers are too few"):
        default_aux_layers(3)


def test_the_example_targets_shape(example_target):
    target = load_target(str(example_target))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.tie_word_embeddings and target.rope["rope_theta"] == 100000.0
    assert torch.equal(load_lm_head(target), load_embed_tokens(target))
    assert load_final_norm(target).shape == (576,)


def test_the_text_part_of_a_multimodal_config_is_read(tmp_path):
    folder = write_checkpoint(
        tmp_path / "m", {"text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 9}}
    )
    assert load_target(str(folder)).hidden_size == 7168


def test_untied_lm_head_is_read_and_not_confused_with_layers_or_vision(tmp_path):
    tensors = {
        "language_model.lm_head.weight": torch.full((6, 4), 2.0),
        "language_model.model.embed_tokens.weight": torch.ones(6, 4),
        "language_model.model.norm.weight": torch.ones(4),
        "language_model.model.layers.0.model.norm.weight": torch.zeros(4),
        "vision_tower.model.norm.weight": torch.zeros(4),
    }
    target = load_target(str(write_checkpoint(tmp_path / "m", {"tie_word_embeddings": False}, tensors)))
    assert load_lm_head(target)[0, 0] == 2.0
    assert load_final_norm(target).sum() == 4


def test_a_head_that_config_and_checkpoint_both_leave_out_is_the_embeddings(tmp_path):
    folder = write_checkpoint(tmp_path / "m", {})
    assert load_lm_head(load_target(str(folder))).sum() == 24
    write_checkpoint(folder, {}, {"lm_head.weight": torch.zeros(6, 4), "model.embed_tokens.weight": torch.ones(6, 4)})
    assert load_lm_head(load_target(str(folder))).sum() == 0


def test_a_missing_tensor_is_an_error_that_names_it(tmp_path):
    target = load_target(str(write_checkpoint(tmp_path / "m", {"tie_word_embeddings": False})))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        load_lm_head(target)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "outputs/models/nothing"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(model):
    with pytest.raises(UserError, match="no such folder"):
        load_target(model)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [8.0]),
        ({"logit_scale": 0.5}, [4.0]),
        ({"logits_scaling": 4.0}, [2.0]),
        ({"final_logit_softcapping": 2.0}, [2.0 * float(torch.tanh(torch.tensor(4.0)))]),
    ],
)
def test_logits_carry_the_models_own_scale_and_soft_cap(tmp_path, config, expected):
    target = load_target(str(write_checkpoint(tmp_path / "m", config)))
    logits = target_logits(torch.full((1, 4), 2.0), torch.ones(1, 4), target)
    assert logits[0].tolist() == pytest.approx(expected)


def test_norm_offset_is_one_for_every_class_of_transformers_whose_norms_multiply_by_one_plus_weight(tmp_path):
    """By its source, encoder-decoders left out; Nemotron's is a layer norm, which no draft has."""
    models, wanted = Path(transformers.__file__).parent / "models", {}
    for file in models.glob("*/modeling_*.py"):
        source = file.read_text()
        for name in re.findall(r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", source, re.MULTILINE):
            wanted[name] = 1.0 if "(1.0 + self.weight.float())" in source else 0.0
    found = {
        name: load_target(str(write_checkpoint(tmp_path / "m", {"architectures": [name]}))).norm_offset
        for name in wanted
        if not name.startswith(("T5Gemma", "PaliGemma"))
    }
    assert found == {name: wanted[name] for name in found}
    assert {"Gemma3ForConditionalGeneration", "Qwen3NextForCausalLM"} <= {name for name in found if found[name]}


def test_rope_is_read_in_the_old_and_the_new_form(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0}
    old = write_checkpoint(tmp_path / "old", {"rope_theta": 5e5, "rope_scaling": scaling})
    new = write_checkpoint(
        tmp_path / "new", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}}
    )
    assert load_target(str(old)).rope == load_target(str(new)).rope


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20],
                             "mrope_interleaved": True}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}}},
    ],
    ids=["mrope", "mrope of transformers 5", "by kind of attention"],
)  # fmt: skip
def test_rope_is_that_of_text_and_of_full_attention(config, tmp_path):
    rope = load_target(str(write_checkpoint(tmp_path / "m", config))).rope
    assert rope == {"rope_type": "default", "rope_theta": 1e6}


def test_fingerprint_changes_with_config_and_with_weights(tmp_path):
    folder = write_checkpoint(tmp_path / "m", {})
    first = load_target(str(folder)).fingerprint
    assert load_target(str(folder)).fingerprint == first
    write_checkpoint(folder, {"vocab_size": 5})
    second = load_target(str(folder)).fingerprint
    write_checkpoint(folder, {"vocab_size": 5}, {"model.embed_tokens.weight": torch.ones(7, 4)})
    assert len({first, second, load_target(str(folder)).fingerprint}) == 3


def test_stop_ids_come_from_generation_config_config_and_tokenizer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    target = SimpleNamespace(path=tmp_path, text_config={"eos_token_id": 2})
    assert stop_ids_of(target, SimpleNamespace(eos_token_id=9)) == [2, 5, 7, 9]
    assert stop_ids_of(target) == [2, 5, 7]
    (tmp_path / "generation_config.json").unlink()
    assert stop_ids_of(target, SimpleNamespace(eos_token_id=None)) == [2]


def test_added_tokens_are_those_the_tokenizer_knows_and_the_model_has_rows_for(example_target, tmp_path):
    target, tokenizer = load_target(str(example_target)), AutoTokenizer.from_pretrained(example_target)
    assert added_token_ids(target) == sorted(tokenizer.added_tokens_decoder) and len(added_token_ids(target)) == 17
    bare = SimpleNamespace(path=tmp_path, vocab_size=10)
    assert added_token_ids(bare) == []
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"9": {"content": "a"}, "10": {}}}')
    (tmp_path / "added_tokens.json").write_text('{"<b>": 4}')
    assert added_token_ids(bare) == [4, 9]
