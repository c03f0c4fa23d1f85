"""A new draft: shape, vocabulary and first weights; a warm start keeps its own vocabulary."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draft_folders import LAYERS
from safetensors.torch import load_file, save_file

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.export import export_draft
from eagle3_utils.draft.training import build
from eagle3_utils.draft.training.build import (
    corpus_vocab,
    draft_config_for,
    new_draft,
    shape_to_train,
    typical_rms,
)
from eagle3_utils.draft.training.checkpoint import Position, save_checkpoint
from eagle3_utils.draft.training.optimizer import MasterAdamW
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.target import load_final_norm, load_lm_head

pytest_plugins = ["draft_folders"]  # fixtures


def test_head_and_norm_begin_as_the_targets_own(draft, target):
    assert torch.equal(draft.lm_head.weight.detach(), load_lm_head(target)[draft.target_ids].float())
    assert torch.equal(draft.norm.weight.detach(), load_final_norm(target).float())


def test_same_seed_gives_the_same_draft_and_another_gives_another(target):
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    first, again, other = (
        new_draft(TrainConfig(draft_vocab_size=256, seed=seed), target, LAYERS, vocab).fc.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_typical_rms_is_that_of_most_tokens_of_the_highest_layer():
    class Reader:
        def __len__(self):
            return 2

        def read(self, index):
            aux = torch.full((5, 3, 8), 100.0)
            aux[:, -1] = 2.0 + index
            aux[0, -1] = 1000.0  # a massive activation
            return SimpleNamespace(aux=aux.bfloat16())

    assert typical_rms(Reader()) == 3.0


def test_end_tokens_are_in_the_vocabulary_whatever_their_counts(target):
    counts = torch.zeros(target.vocab_size, dtype=torch.int64).numpy()
    counts[100:400] = 5
    vocab = corpus_vocab(counts, target, 256)
    assert vocab.t2d[target.text_config["eos_token_id"]] and len(vocab.target_ids) == 256


def test_added_and_stop_tokens_are_in_the_vocabulary_whatever_their_counts(target, tmp_path):
    """Stops that only generation_config.json names, and think marks, may be rare: none may be impossible to draft."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [601, 602]}')
    names = {str(token): {"content": f"<{token}>"} for token in range(700, 716)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    counts[100:500] = 5
    vocab = corpus_vocab(counts, replace(target, path=tmp_path), 256)
    assert vocab.t2d[[601, 602, *range(700, 716)]].all() and len(vocab.target_ids) == 256
    assert vocab.target_ids.tolist()[1:5] == [100, 101, 102, 103]  # the first is the end token of config.json


def test_of_thousands_of_added_tokens_only_supervised_ones_are_forced(target, tmp_path):
    names = {str(token): {"content": f"<{token}>"} for token in range(1000, 4000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    counts[100:500], counts[1500] = 5, 1
    vocab = corpus_vocab(counts, replace(target, path=tmp_path), 256)
    assert vocab.t2d[1500] and vocab.t2d[1000:4000].sum() == 1 and len(vocab.target_ids) == 256


def test_frozen_head_is_no_parameter_to_train(target):
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    model = new_draft(TrainConfig(draft_vocab_size=256, freeze_lm_head=True), target, LAYERS, vocab)
    assert not model.lm_head.weight.requires_grad and model.fc.weight.requires_grad


def test_warm_start_keeps_the_old_vocabulary(exported, target):
    other = vocab_map_of(torch.arange(256), target.vocab_size)
    model = new_draft(TrainConfig(draft_vocab_size=256, init_from=str(exported)), target, LAYERS, other)
    assert model.d2t.tolist() == list(range(256)) and model.target_ids[-1] == 510
    with pytest.raises(UserError, match=r"trained with aux_layers \(1, 2, 4\), here it is \(1, 2, 3\)"):
        new_draft(TrainConfig(draft_vocab_size=256, init_from=str(exported)), target, [1, 2, 3], other)


def _as_published(layout, ours, folder):
    """A draft folder of ours as others write one."""
    values, tensors = json.loads((ours / "config.json").read_text()), load_file(ours / "model.safetensors")
    for key in ("num_aux_hidden_states", "trained_aux_layers", "trained_with"):
        del values[key]
    folder.mkdir()
    if layout == "SpecForge":
        del values["eagle_config"]
        save_file(tensors, folder / "model.safetensors")
    elif layout == "SafeAILab":
        values["architectures"] = ["LlamaForCausalLM"]
        torch.save(tensors | {"embed_tokens.weight": torch.ones(2, 2)}, folder / "pytorch_model.bin")
    else:
        save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    if layout.startswith("speculators"):
        ids = [layer + 1 for layer in LAYERS]
        nested = {key: value for key, value in values.items() if key not in ("architectures", "eagle_config")}
        values = {"transformer_layer_config": nested, "eagle_aux_hidden_state_layer_ids": ids}
        values["norm_before_residual"] = layout.endswith("residual")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("layout", "layers"),
    [("SpecForge", [1, 3, 4]), ("SafeAILab", LAYERS), ("model. before names", LAYERS), ("speculators", LAYERS)],
)
def test_warm_start_reads_what_others_published(layout, layers, draft, exported, target, tmp_path):
    """Without layer ids, the layers are those of SGLang's default, here of a target of eight."""
    target = replace(target, num_layers=8)
    start = TrainConfig(draft_vocab_size=100, init_from=str(_as_published(layout, exported, tmp_path / "public")))
    vocab = vocab_map_of(torch.arange(100), target.vocab_size)
    model = new_draft(start, target, layers, vocab)
    assert torch.equal(model.d2t, draft.d2t) and model.config.aux_layers == tuple(layers)
    assert torch.equal(model.midlayer.mlp.up_proj.weight, draft.midlayer.mlp.up_proj.weight.bfloat16().float())
    with pytest.raises(UserError, match=r"trained with aux_layers \(1, ., 4\), here it is \(1, 2, 3\)"):
        new_draft(start, target, [1, 2, 3], vocab)


def test_warm_start_from_another_network_or_another_targets_draft_is_refused(exported, target, tmp_path):
    other = _as_published("speculators with normed residual", exported, tmp_path / "other")
    with pytest.raises(UserError, match="norm_before_residual"):
        shape_to_train(TrainConfig(init_from=str(other)), target, LAYERS)
    with pytest.raises(UserError, match="trained with hidden_size 64, here it is 128"):
        shape_to_train(TrainConfig(init_from=str(exported)), replace(target, hidden_size=128), LAYERS)
    (exported / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights to go on from"):
        shape_to_train(TrainConfig(init_from=str(exported)), target, LAYERS)


def test_warm_start_of_another_kind_is_refused_and_one_of_other_widths_keeps_them(draft, exported, target, tmp_path):
    """What the next step takes shows in no weight: it must not change between two trainings without a word."""
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    checkpoint = save_checkpoint(
        tmp_path, draft, MasterAdamW(draft.parameters()), Position(parameters={"norm_output": True, "rope": None}), 1
    )
    for folder in (exported, checkpoint):
        with pytest.raises(UserError, match="trained with norm_output True, here it is False"):
            new_draft(TrainConfig(norm_output=False, init_from=str(folder)), target, LAYERS, vocab)
    narrow = replace(target, max_position_embeddings=512, text_config=target.text_config | {"intermediate_size": 96})
    folder = export_draft(new_draft(TrainConfig(draft_vocab_size=256), narrow, LAYERS, vocab), narrow, tmp_path / "n")
    shape = shape_to_train(TrainConfig(init_from=str(folder)), target, LAYERS)
    assert (shape.intermediate_size, shape.max_position_embeddings) == (96, target.max_position_embeddings)


def test_warm_start_from_a_checkpoint_has_its_weights_and_vocabulary(draft, target, tmp_path):
    folder = save_checkpoint(tmp_path, draft, MasterAdamW(draft.parameters()), Position(step=7), keep=1)
    other = vocab_map_of(torch.arange(100), target.vocab_size)
    model = new_draft(TrainConfig(draft_vocab_size=100, init_from=str(folder)), target, LAYERS, other)
    assert torch.equal(model.d2t, draft.d2t) and torch.equal(model.fc.weight, draft.fc.weight)
    with pytest.raises(UserError, match="trained with fc_norm True, here it is False"):
        new_draft(TrainConfig(fc_norm=False, init_from=str(folder)), target, LAYERS, other)


def test_warm_start_from_a_checkpoint_of_other_layers_is_refused_and_of_another_width_kept(target, tmp_path):
    """No weight shows which layers it was trained on: state.json says the whole shape."""
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    wide = new_draft(TrainConfig(draft_vocab_size=256, intermediate_size=96), target, LAYERS, vocab)
    folder = save_checkpoint(tmp_path, wide, MasterAdamW(wide.parameters()), Position(parameters={"rope": None}), 1)
    start = TrainConfig(draft_vocab_size=256, init_from=str(folder))
    with pytest.raises(UserError, match=r"trained with aux_layers \(1, 2, 4\), here it is \(0, 2, 3\)"):
        new_draft(start, target, [0, 2, 3], vocab)
    assert new_draft(start, target, LAYERS, vocab).config == wide.config
    state = json.loads((folder / "state.json").read_text())
    del state["shape"]  # as older versions wrote it
    (folder / "state.json").write_text(json.dumps(state))
    narrow = replace(target, text_config=target.text_config | {"intermediate_size": 96})
    assert torch.equal(new_draft(start, narrow, LAYERS, vocab).fc.weight, wide.fc.weight)
    with pytest.raises(UserError, match="another shape"):
        new_draft(start, target, LAYERS, vocab)


def test_warm_start_reads_a_draft_once_and_says_that_it_keeps_its_vocabulary(exported, target, monkeypatch, caplog):
    reads, read = [], build.draft_to_train
    monkeypatch.setattr(build, "draft_to_train", lambda *asked: reads.append(asked) or read(*asked))
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    new_draft(TrainConfig(draft_vocab_size=256, init_from=str(exported)), target, LAYERS, vocab)
    assert len(reads) == 1 and not caplog.records
    new_draft(TrainConfig(draft_vocab_size=100, init_from=str(exported)), target, LAYERS, vocab)
    (said,) = caplog.messages
    assert "vocabulary of 256 tokens" in said and "draft_vocab_size 100 is not used" in said


def test_the_hash_of_init_from_is_of_what_a_warm_start_reads(exported):
    config = TrainConfig(init_from=str(exported))
    (before,) = build.init_from_hash(config).items()
    (exported / "README.md").write_text("a card written later")
    assert dict([before]) == build.init_from_hash(config)
    (exported / "config.json").write_text("{}")
    assert dict([before]) != build.init_from_hash(config)
    assert build.init_from_hash(TrainConfig()) == build.init_from_hash(TrainConfig(init_from="/no/such")) == {}


def test_draft_of_an_mla_target_has_its_own_heads(target):
    text = {"num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
    kimi = replace(target, hidden_size=7168, vocab_size=163840, text_config=text)
    llama = draft_config_for(TrainConfig(draft_vocab_size=32000), kimi, [2, 30, 58])
    assert (llama.num_heads, llama.num_kv_heads, llama.head_dim, llama.intermediate_size) == (64, 8, 128, 18432)
    mla = draft_config_for(TrainConfig(layer_kind="mla"), kimi, [2, 30, 58])
    assert (mla.num_kv_heads, mla.kv_lora_rank, mla.v_head_dim) == (64, 512, 128)
    lite = replace(kimi, text_config=text | {"q_lora_rank": None})
    assert draft_config_for(TrainConfig(), lite, LAYERS).head_dim == 128
    with pytest.raises(
        UserError, match=r"no q_lora_rank, without which SGLang serves no MLA draft\n.*layer_kind: llama"
    ):
        draft_config_for(TrainConfig(layer_kind="mla"), lite, LAYERS)
    with pytest.raises(UserError, match=r"layer_kind mla: the target has no q_lora_rank, kv_lora_rank"):
        draft_config_for(TrainConfig(layer_kind="mla"), target, LAYERS)


def test_rope_is_the_targets_or_what_the_parameters_set(target):
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    assert draft_config_for(TrainConfig(), target, LAYERS).rope == target.rope
    assert draft_config_for(TrainConfig(rope=linear), target, LAYERS).rope == linear
    with pytest.raises(UserError, match="needs rope_type, rope_theta"):
        draft_config_for(TrainConfig(rope={"factor": 4.0}), target, LAYERS)


@pytest.mark.parametrize(
    ("rope", "lacks"),
    [
        ({"rope_type": "yarn", "rope_theta": 1e6}, "factor"),
        ({"rope_type": "linear", "rope_theta": 1e6, "factor": None}, "factor"),
        ({"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}, "low_freq_factor, high_freq_factor"),
        ({"rope_type": "default", "rope_theta": "1e6"}, "rope_theta\n.*YAML reads 1e6 as text"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
    ],
)
def test_rope_without_its_kinds_numbers_is_refused_by_name(rope, lacks, target):
    with pytest.raises(UserError, match=f"}} needs {lacks}"):
        draft_config_for(TrainConfig(rope=rope), target, LAYERS)


@pytest.mark.parametrize("wrong", [{"intermediate_size": 0}, {"intermediate_size": -5}, {"epochs": float("inf")}])
def test_sizes_that_nothing_can_be_built_of_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        TrainConfig.parse(wrong)


def test_rope_that_sglang_would_serve_otherwise_is_refused_by_kind_with_what_can_be_set(target):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 256}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert draft_config_for(TrainConfig(rope=yarn | {"attn_factor": 1.0}), target, LAYERS).rope["factor"] == 8.0
    with pytest.raises(UserError, match=r"RoPE of kind dynamic.*\n.*default, linear, llama3, yarn: {rope_type"):
        draft_config_for(TrainConfig(), replace(target, rope=dynamic), LAYERS)
    with pytest.raises(UserError, match=r"YaRN's attn_factor 0\.5"):
        draft_config_for(TrainConfig(rope=yarn | {"attn_factor": 0.5}), target, LAYERS)
    with pytest.raises(UserError, match=r"RoPE of kind linear.*\n.*one of default, yarn"):
        draft_config_for(TrainConfig(rope=dynamic | {"rope_type": "linear"}, layer_kind="mla"), target, LAYERS)


@pytest.mark.parametrize("layers", [[1, 2], [0, 1, 2, 4]])
def test_any_number_of_auxiliary_layers_above_one_trains(target, layers):
    vocab = vocab_map_of(torch.arange(256), target.vocab_size)
    model = new_draft(TrainConfig(draft_vocab_size=256), target, layers, vocab)
    assert model.fc.weight.shape == (64, len(layers) * 64)
    assert model.project(torch.randn(5, len(layers), 64)).shape == (5, 64)
    with pytest.raises(UserError, match="two layers or more"):
        new_draft(TrainConfig(draft_vocab_size=256), target, layers[:1], vocab)
