"""RoPE equals transformers' own for every kind, and does what a rotation does."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_utils.draft.modules.rope import RotaryEmbedding, rope_as_served, rotate, why_served_otherwise


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_equals_transformers(rope):
    ours = RotaryEmbedding(rope, 16, 512)
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope)))
    positions = torch.tensor([0, 3, 100, 400])
    cos, sin = ours(positions)
    expected_cos, expected_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(torch.cat([cos, cos], -1)[:, 0], expected_cos[0])
    torch.testing.assert_close(torch.cat([sin, sin], -1)[:, 0], expected_sin[0])


def test_yarn_of_a_llama_like_draft_is_scaled_as_sglang_scales_it():
    """SGLang's YaRNScalingRotaryEmbedding: 0.1 ln(factor) + 1, DeepSeek's mscale fields unread; MLA reads them."""
    rope = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
            "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    llama, mla = (RotaryEmbedding(rope_as_served(rope, kind), 16, 262144) for kind in ("llama", "mla"))
    assert llama.attention_scaling == pytest.approx(1.4158883083359672)
    assert mla.attention_scaling == 1.0
    assert torch.equal(llama.inverse_frequencies, mla.inverse_frequencies)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rotary = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, 8, 64)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    products = []
    for position in (0, 17):
        cos, sin = rotary(torch.tensor([position + 5, position]))
        products.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum())
    torch.testing.assert_close(products[0], products[1], atol=1e-5, rtol=1e-5)
    assert rotate(q, cos[:1], sin[:1]).norm() == pytest.approx(float(q.norm()), rel=1e-5)


@pytest.mark.parametrize(
    "odd", [{"mscale": 0.7}, {"mscale_all_dim": 1.0}, {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1.2}]
)
def test_yarn_that_sglang_scales_otherwise_in_an_mla_draft_is_named(odd):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert "YaRN" in why_served_otherwise(yarn | odd, "mla")
    for fine in (yarn, yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}):
        assert why_served_otherwise(fine, "mla") is None
    assert why_served_otherwise(yarn | odd, "llama") is None  # there they are not read
