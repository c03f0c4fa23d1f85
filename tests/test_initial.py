"""First weights: what comes from the target's last layer, and what must not."""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.network import DraftCache
from eagle3_utils.draft.training import initial
from eagle3_utils.draft.training.build import new_draft
from eagle3_utils.draft.training.initial import initialise
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.target import load_decoder_layer, load_target

LAYERS = [1, 14, 26]
PLAIN = {"fc_norm": False, "norm_output": False}


@pytest.fixture(scope="module")
def target(example_target):
    return load_target(str(example_target))


@pytest.fixture(scope="module")
def vocab(target):
    return vocab_map_of(torch.arange(256), target.vocab_size)


def draft_of(target, vocab, **options):
    return new_draft(TrainConfig(draft_vocab_size=256, **PLAIN, **options), target, LAYERS, vocab)


def test_the_layer_is_the_targets_last_and_fc_passes_the_highest_state_on(target, vocab):
    draft, last, size = draft_of(target, vocab), load_decoder_layer(target, 29), target.hidden_size
    layer = {name: parameter.detach() for name, parameter in draft.midlayer.named_parameters()}
    for name in ("mlp.up_proj.weight", "self_attn.o_proj.weight", "post_attention_layernorm.weight"):
        assert torch.equal(layer[name], last[name].float())
    assert torch.equal(layer["self_attn.k_proj.weight"][:, size:], last["self_attn.k_proj.weight"].float())
    assert float(layer["self_attn.k_proj.weight"][:, :size].std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(layer["hidden_norm.weight"], last["input_layernorm.weight"].float())
    assert bool((layer["input_layernorm.weight"] == 1).all())
    states = torch.randn(50, 3 * size)
    assert torch.cosine_similarity(states @ draft.fc.weight.detach().T, states[:, 2 * size :]).min() > 0.95


@pytest.mark.parametrize("changes", [{"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}])
def test_with_normed_states_a_draft_begins_as_the_same_function(target, vocab, changes):
    config = TrainConfig(draft_vocab_size=256, **PLAIN)
    plain = new_draft(config, target, LAYERS, vocab)
    normed = new_draft(config.model_copy(update=changes), target, LAYERS, vocab, state_rms=24.0)
    states = torch.randn(20, 3, target.hidden_size)
    states *= 24.0 / states.square().mean(-1, keepdim=True).sqrt()
    ids, positions = torch.arange(100, 120), torch.arange(20)
    with torch.no_grad():
        wanted, given = (
            draft.decode_step(draft.project(states), ids, positions, DraftCache())[1] for draft in (plain, normed)
        )
        if normed.config.norm_output:  # and gives states as large as those that `fc` gave
            output = normed.decode_step(normed.project(states), ids, positions, DraftCache())[0]
            assert 0.7 < float(output.norm() / normed.project(states).norm()) < 1.4
    torch.testing.assert_close(given, wanted, atol=1e-2, rtol=1e-3)


def test_a_wider_mlp_begins_as_the_targets(target, vocab):
    plain, wide = draft_of(target, vocab).midlayer, draft_of(target, vocab, intermediate_size=2000).midlayer
    states = torch.randn(20, target.hidden_size)
    expected = plain.mlp(states, plain.post_attention_layernorm)
    torch.testing.assert_close(wide.mlp(states, wide.post_attention_layernorm), expected, atol=1e-4, rtol=1e-4)
    assert float(wide.mlp.up_proj.weight.detach()[1536:].std()) == pytest.approx(0.02, rel=0.05)


def test_random_keeps_only_head_and_norm(target, vocab):
    draft = draft_of(target, vocab, init="random")
    assert float(draft.fc.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(draft.midlayer.mlp.up_proj.weight.std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ("self_attn.q_norm.weight", {"mlp.up_proj.weight"}),
        ("self_attn.q_proj.bias", {"mlp.up_proj.weight"}),
        ("pre_feedforward_layernorm.weight", set()),
    ],
)
def test_a_layer_that_computes_otherwise_is_not_copied(target, vocab, monkeypatch, extra, kept):
    layer = load_decoder_layer(target, 29) | {extra: torch.zeros(4)}
    monkeypatch.setattr(initial, "load_decoder_layer", lambda target, index: layer)
    taken = initialise(draft_of(target, vocab, init="random"), target, "target_layer")
    assert kept <= set(taken) and not any(name.startswith("self_attn.") for name in taken)


def test_quantised_and_differently_shaped_tensors_are_left_out(target, vocab, monkeypatch):
    layer = load_decoder_layer(target, 29)
    layer["mlp.up_proj.weight"] = layer["mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    layer["mlp.down_proj.weight"] = layer["mlp.down_proj.weight"].repeat(1, 2)
    monkeypatch.setattr(initial, "load_decoder_layer", lambda target, index: layer)
    taken = initialise(draft_of(target, vocab, init="random"), target, "target_layer")
    assert "mlp.gate_proj.weight" in taken
    assert not {"mlp.up_proj.weight", "mlp.down_proj.weight"} & set(taken)


def _random_model(cls, config, folder):
    """A tiny random model whose norms are as a trained one's: not the same at every place. Saved to `folder`."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


_TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, vocab_size=300, max_position_embeddings=128)  # fmt: skip
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                tie_word_embeddings=False)  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "config"),
    [(Gemma3ForCausalLM, Gemma3TextConfig(**_TINY)), (Qwen3NextForCausalLM, Qwen3NextConfig(**_TINY, **_EXPERTS))],
    ids=["Gemma 3", "Qwen3-Next"],
)
def test_norms_of_one_plus_weight_are_taken_over_with_the_one(cls, config, tmp_path):
    model = _random_model(cls, config, tmp_path)
    target = load_target(str(tmp_path))
    vocab = vocab_map_of(torch.arange(0, 256, 2), target.vocab_size)
    draft = new_draft(TrainConfig(draft_vocab_size=128, **PLAIN), target, [0, 1, 2], vocab)
    states, last = torch.randn(20, 32) * 3, model.model.layers[-1]
    with torch.no_grad():
        wanted = model.lm_head(model.model.norm(states))[:, draft.target_ids]
        torch.testing.assert_close(draft.lm_head(draft.norm(states)), wanted)
        if cls is Qwen3NextForCausalLM:  # Gemma's layer has more norms, so it is not taken over
            for own, theirs in (("hidden_norm", "input_layernorm"), ("post_attention_layernorm",) * 2):
                given = getattr(draft.midlayer, own)(states)
                torch.testing.assert_close(given, getattr(last, theirs)(states))


def test_a_layer_that_is_not_there_is_an_error(target):
    with pytest.raises(UserError, match="no tensor of decoder layer 99"):
        load_decoder_layer(target, 99)
