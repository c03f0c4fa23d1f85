"""The parts of the draft's one layer: norm, MLP, and two kinds of attention (Llama's, DeepSeek's MLA).

Both attentions read `concat(embedding, hidden)`, 2H wide. A first linear map makes a *query latent* and a *key-value
latent* from it; the rest turns latents into rotated heads. Training uses that split: the embedding half of the first
map is computed once per token and shared by all steps (see unroll.py). Names are those of SGLang's checkpoints.

N rows · H hidden · A query heads · K key-value heads · E head width of queries and keys · F head width of values.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from eagle3_utils.draft.modules.fused import linear, normed_gated_mlp
from eagle3_utils.draft.modules.rope import rotate


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Linear(nn.Linear):
    """A linear map without bias. Its weight is left as allocated, since a draft's weights are always drawn
    (`initial.py`) or loaded afterwards, and PyTorch's own would cost 13 s at Kimi-K2.5's width."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


class MLP(nn.Module):
    """down(silu(gate(n)) * up(n)) of the normed input n."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x [N, H], not normed yet -> [N, H]."""
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return normed_gated_mlp(x, norm.weight, norm.eps, *weights)


class LlamaAttention(nn.Module):
    """Grouped-query attention; q, k and v read 2H (sglang/srt/models/llama_eagle3.py)."""

    def __init__(self, config):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.key_width = self.value_width = self.head_dim
        width = 2 * config.hidden_size
        self.q_proj = Linear(width, self.num_heads * self.head_dim)
        self.k_proj = Linear(width, self.num_kv_heads * self.head_dim)
        self.v_proj = Linear(width, self.num_kv_heads * self.head_dim)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size)
        self.scale = self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def query_weight(self) -> torch.Tensor:
        """First map of the queries, [query latent, 2H]: a leaf."""
        return self.q_proj.weight

    def key_value_weights(self) -> tuple[torch.Tensor, ...]:
        """First map of keys and values, [key-value latent, 2H] in all: leaves, one below the other."""
        return self.k_proj.weight, self.v_proj.weight

    def queries(self, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """latent [N, A·E] -> rotated queries [N, A, E]."""
        return rotate(latent.unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)

    def keys_values(self, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """latent [N, 2·K·E] -> rotated keys [N, K, E], values [N, K, F]."""
        key, value = latent.unflatten(-1, (2 * self.num_kv_heads, self.head_dim)).chunk(2, dim=-2)
        return rotate(key, cos, sin), value

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [N, A, F] -> [N, H]."""
        return linear(attended.flatten(-2), self.o_proj.weight)


class MLAttention(nn.Module):
    """DeepSeek's multi-latent attention, computed as plain multi-head attention (kimi_k25_eagle3.py, deepseek_v2.py).

    Rotated dimensions are interleaved pairs (DeepSeek's layout), unlike Llama's halves.
    """

    def __init__(self, config):
        super().__init__()
        self.num_heads = self.num_kv_heads = config.num_heads
        self.nope_dim, self.rotary_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_head_dim, self.kv_lora_rank = config.v_head_dim, config.kv_lora_rank
        self.key_width, self.value_width = self.nope_dim + self.rotary_dim, self.v_head_dim
        width, heads = 2 * config.hidden_size, self.num_heads
        self.q_a_proj = Linear(width, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)  # as SGLang; Hugging Face: 1e-6
        self.q_b_proj = Linear(config.q_lora_rank, heads * self.key_width)
        self.kv_a_proj_with_mqa = Linear(width, config.kv_lora_rank + self.rotary_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (self.nope_dim + self.v_head_dim))
        self.o_proj = Linear(heads * self.v_head_dim, config.hidden_size)
        self.scale = self.key_width**-0.5 * _yarn_softmax_factor(config.rope)

    def query_weight(self) -> torch.Tensor:
        """First map of the queries, [query latent, 2H]: a leaf."""
        return self.q_a_proj.weight

    def key_value_weights(self) -> tuple[torch.Tensor, ...]:
        """First map of keys and values, [key-value latent + rotary, 2H]: a leaf."""
        return (self.kv_a_proj_with_mqa.weight,)

    def queries(self, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """latent [N, q_lora_rank] -> queries [N, A, nope + rotary]."""
        heads = linear(self.q_a_layernorm(latent), self.q_b_proj.weight).unflatten(-1, (self.num_heads, -1))
        nope, rotary = heads.split([self.nope_dim, self.rotary_dim], dim=-1)
        return torch.cat([nope, rotate(_halves(rotary), cos, sin)], dim=-1)

    def keys_values(self, latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """latent [N, kv_lora_rank + rotary] -> keys [N, A, nope + rotary], values [N, A, F]."""
        compressed, rotary = latent.split([self.kv_lora_rank, self.rotary_dim], dim=-1)
        heads = linear(self.kv_a_layernorm(compressed), self.kv_b_proj.weight).unflatten(-1, (self.num_heads, -1))
        nope, value = heads.split([self.nope_dim, self.v_head_dim], dim=-1)
        rotary = rotate(_halves(rotary[:, None]), cos, sin).expand(-1, self.num_heads, -1)
        return torch.cat([nope, rotary], dim=-1), value

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [N, A, F] -> [N, H]."""
        return linear(attended.flatten(-2), self.o_proj.weight)


class DraftLayer(nn.Module):
    """SGLang's `midlayer`: norms of both inputs, attention over their concatenation, MLP, residual from `hidden`."""

    def __init__(self, config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)  # of the token's embedding
        self.hidden_norm = RMSNorm(size, eps)  # of the hidden state
        self.self_attn = MLAttention(config) if config.layer_kind == "mla" else LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, config.intermediate_size)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """hidden [N, H] (the residual), attended [N, A, F] -> the layer's output [N, H], before the final norm."""
        hidden = hidden + self.self_attn.output(attended)
        return hidden + self.mlp(hidden, self.post_attention_layernorm)


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs (x0, y0, x1, y1 …) -> halves (x0, x1 …, y0, y1 …); products of two such vectors are equal."""
    return torch.cat([pairs[..., 0::2], pairs[..., 1::2]], dim=-1)


def _yarn_softmax_factor(rope: dict) -> float:
    """DeepSeek multiplies the softmax scale by mscale² under YaRN (deepseek_v2.py, `mscale_all_dim`)."""
    factor, weight = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if not weight or factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2
