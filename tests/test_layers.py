"""The layer's parts against plain formulas."""

import torch
from draft_reference import MLA, small_config, small_model
from torch import nn

from eagle3_utils.draft.modules.layers import MLP, LlamaAttention, MLAttention, RMSNorm
from eagle3_utils.draft.training.initial import draw_matrices


def drawn(module: nn.Module) -> nn.Module:
    """The module with random matrices; a draft's begin unset."""
    draw_matrices(module, std=0.2)
    return module


def test_norm_divides_by_the_root_mean_square():
    norm = RMSNorm(4, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 1.0, 1.0]))
    torch.testing.assert_close(norm(torch.tensor([[2.0, 2.0, 2.0, 2.0]])), torch.tensor([[1.0, 2.0, 1.0, 1.0]]))


def test_mlp_gates_with_silu():
    mlp, norm, x = drawn(MLP(3, 5)), RMSNorm(3, 1e-5), torch.randn(2, 3)
    normed = norm(x)
    gate, up = normed @ mlp.gate_proj.weight.T, normed @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x, norm), (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.T)


def test_llama_latents_split_into_keys_and_values():
    attention, both = drawn(LlamaAttention(small_config())), torch.randn(3, 64)
    zero, one = torch.zeros(3, 1, 4), torch.ones(3, 1, 4)
    keys, values = attention.keys_values(both @ torch.cat(attention.key_value_weights()).T, one, zero)  # no rotation
    torch.testing.assert_close(keys, attention.k_proj(both).view(3, 2, 8))
    torch.testing.assert_close(values, attention.v_proj(both).view(3, 2, 8))


def test_mla_scores_equal_deepseeks_interleaved_rotation():
    attention, both = drawn(MLAttention(small_config(**MLA))), torch.randn(2, 64)
    angle = torch.tensor([[0.3, 0.7], [1.1, 0.2]])
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    query = attention.queries(both @ attention.query_weight().T, cos, sin)
    keys, _ = attention.keys_values(both @ torch.cat(attention.key_value_weights()).T, cos, sin)
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(both))).view(2, 4, 12)
    latent = attention.kv_a_proj_with_mqa(both)
    k = attention.kv_b_proj(attention.kv_a_layernorm(latent[:, :12])).view(2, 4, 14)[..., :8]

    def turn(pairs):  # complex multiplication of (even, odd) pairs, as deepseek_v2 does it
        return torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            cos * 0 + 1, angle[:, None]
        )

    rotary = (turn(q[..., 8:]) * turn(latent[:, None, 12:]).conj()).real.sum(-1)
    torch.testing.assert_close((query * keys).sum(-1), (q[..., :8] * k).sum(-1) + rotary, atol=1e-5, rtol=1e-5)


def test_mla_norms_and_scale_are_those_of_sglangs_class():
    plain, _ = small_model(**MLA)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    scaled, _ = small_model(**MLA, rope=rope)
    eps = {norm.eps for norm in plain.modules() if isinstance(norm, RMSNorm)}
    assert eps == {plain.config.rms_norm_eps}  # of latents, too (deepseek_v2.py); Hugging Face has 1e-6 there
    ratio = scaled.midlayer.self_attn.scale / plain.midlayer.self_attn.scale
    assert abs(ratio - 1.3688879454113936**2) < 1e-6  # 0.1 ln 40 + 1
