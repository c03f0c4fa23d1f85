"""RoPE equals transformers' own for every kind, and does what a rotation does."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_utils.draft.modules.rope import RotaryEmbedding, rotate


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


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rotary = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, 8, 64)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    products = []
    for position in (0, 17):
        cos, sin = rotary(torch.tensor([position + 5, position]))
        products.append((rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum())
    torch.testing.assert_close(products[0], products[1], atol=1e-5, rtol=1e-5)
    assert rotate(q, cos[:1], sin[:1]).norm() == pytest.approx(float(q.norm()), rel=1e-5)
