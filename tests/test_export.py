"""Export and load: SGLang's format, and the same draft back."""

import json

import torch
from draft_folders import LAYERS
from safetensors.torch import load_file
from transformers import AutoConfig

from eagle3_utils.draft.check import check_draft
from eagle3_utils.draft.export import draft_config_of, export_draft, load_draft
from eagle3_utils.draft.network import DraftCache

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


def test_older_configs_say_rope_scaling_by_type_and_leave_out_what_has_a_default(target, exported):
    values = json.loads((exported / "config.json").read_text())
    values |= {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del values["num_key_value_heads"], values["head_dim"]
    config = draft_config_of(values, target)
    assert config.rope == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert (config.num_kv_heads, config.head_dim) == (config.num_heads, 64 // config.num_heads)


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
