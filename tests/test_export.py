"""Export and load: SGLang's format, and the same draft back."""

import json
from dataclasses import replace

import pytest
import torch
from draft_folders import LAYERS, pretend_training
from safetensors.torch import load_file
from transformers import AutoConfig

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.check import check_draft
from eagle3_utils.draft.export import draft_config_of, export_draft, load_draft
from eagle3_utils.draft.network import DraftCache
from eagle3_utils.draft.training.build import new_draft
from eagle3_utils.draft.vocab import vocab_map_of

pytest_plugins = ["draft_folders"]  # fixtures


def test_exported_draft_is_clean_and_loads_to_the_same_logits(draft, target, exported):
    assert check_draft(exported, target, LAYERS) == []
    loaded = load_draft(exported, target)
    assert loaded.config == draft.config
    aux, tokens = torch.randn(5, 3, 64).bfloat16().float(), torch.arange(5)
    rounded = draft.place("cpu", torch.bfloat16).place("cpu", torch.float32)
    ours, theirs = (m.decode_step(m.project(aux), tokens, tokens, DraftCache())[1] for m in (rounded, loaded))
    assert torch.equal(ours, theirs)


def test_config_says_what_sglang_reads(target, exported):
    values = json.loads((exported / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": LAYERS}
    assert values["draft_vocab_size"] == 256 and values["vocab_size"] == target.vocab_size
    assert values["max_position_embeddings"] == target.max_position_embeddings
    parsed = AutoConfig.from_pretrained(exported)
    assert parsed.rope_parameters["rope_theta"] == target.rope["rope_theta"]
    assert parsed.head_dim == 16 and parsed.num_hidden_layers == 1 and not parsed.tie_word_embeddings


def test_steps_of_training_are_said_where_they_are_known(draft, target, exported):
    assert "trained_steps" not in json.loads((exported / "config.json").read_text())
    export_draft(draft, target, exported, steps=30)
    assert json.loads((exported / "config.json").read_text())["trained_steps"] == 30


def test_older_configs_say_rope_scaling_by_type_and_leave_out_what_has_a_default(target, exported):
    values = json.loads((exported / "config.json").read_text())
    values |= {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del values["num_key_value_heads"], values["head_dim"]
    config = draft_config_of(values, target)
    assert config.rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert (config.num_kv_heads, config.head_dim) == (config.num_heads, 64 // config.num_heads)


@pytest.mark.parametrize("layers", [LAYERS, [1, 2], [0, 1, 2, 4]])
def test_mla_draft_is_clean_and_loads_to_the_same_logits(layers, target, tmp_path):
    """Two layers or as many as one likes, with DeepSeek's YaRN."""
    widths = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 256,
            "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    target = replace(target, text_config=target.text_config | widths, rope=yarn)
    vocab = vocab_map_of(torch.arange(0, 512, 2), target.vocab_size)
    model = new_draft(TrainConfig(draft_vocab_size=256, layer_kind="mla"), target, layers, vocab)
    pretend_training(model)
    folder = export_draft(model, target, tmp_path / "draft", torch.float32)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert check_draft(folder, target, layers) == []
    loaded = load_draft(folder, target)
    assert loaded.config == model.config
    aux, tokens = torch.randn(5, len(layers), 64), torch.arange(5)
    ours, theirs = (m.decode_step(m.project(aux), tokens, tokens + 100, DraftCache())[1] for m in (model, loaded))
    assert torch.equal(ours, theirs)


def test_tensors_have_sglangs_names_shapes_and_dtypes(exported):
    tensors = load_file(exported / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["lm_head.weight"].shape == (256, 64) and tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].tolist() == list(range(256))
    assert tensors["t2d"].dtype == torch.bool and int(tensors["t2d"].sum()) == 256
    assert "embed_tokens.weight" not in tensors


def test_export_replaces_an_older_draft_and_leaves_nothing_beside_it(draft, target, exported):
    export_draft(draft, target, exported)
    assert sorted(path.name for path in exported.parent.iterdir()) == ["draft"]
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]
