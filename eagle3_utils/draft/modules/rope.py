"""Rotary position embedding of the kinds that SGLang serves as transformers defines them: `SERVED_KINDS`.

Frequencies come from transformers' own `ROPE_INIT_FUNCTIONS`, so that a draft mirrors its target's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_utils.draft.modules.fused import fused

SERVED_KINDS = {"llama": ("default", "linear", "llama3", "yarn"), "mla": ("default", "yarn")}  # by kind of layer
_ONLY_SGLANGS = ("attn_factor", "extrapolation_factor")  # of YaRN; transformers does not read them
_DEEPSEEK_YARN = ("mscale", "mscale_all_dim", "attention_factor")


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions; frequencies are float32 whatever the model's dtype.

    rope: Hugging Face `rope_parameters` ({"rope_type", "rope_theta", …}). Source: transformers modeling_rope_utils.
    """

    def __init__(self, rope: dict[str, Any], rotary_dim: int, max_position_embeddings: int):
        super().__init__()
        kind = rope.get("rope_type", "default")
        self.attention_scaling = 1.0
        if kind == "default":
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            self.inverse_frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
        else:
            config = LlamaConfig(
                head_dim=rotary_dim, max_position_embeddings=max_position_embeddings, rope_parameters=dict(rope)
            )
            self.inverse_frequencies, self.attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, device=None)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [N] -> cos, sin, float32 [N, 1, rotary_dim // 2]."""
        if self.inverse_frequencies.device != position_ids.device:  # kept there: to copy them is to wait for the GPU
            self.inverse_frequencies = self.inverse_frequencies.to(position_ids.device)
        angles = position_ids[:, None, None].float() * self.inverse_frequencies
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rope_as_served(rope: dict[str, Any], layer_kind: str) -> dict[str, Any]:
    """The part of a target's RoPE parameters that SGLang reads for a draft of this kind.

    For YaRN in a Llama-like draft SGLang takes 0.1 ln(factor) + 1 as attention factor, whatever DeepSeek's `mscale` and
    `mscale_all_dim` say; with MLA it follows those (sglang/srt/layers/rotary_embedding/factory.py). A draft must be
    trained as it is served: for a factor of 64 the two differ by 1.42, that is 2.0 in every attention score.
    """
    if layer_kind == "mla" or rope.get("rope_type") != "yarn":
        return rope
    return {name: value for name, value in rope.items() if name not in _DEEPSEEK_YARN}


def why_served_otherwise(rope: dict[str, Any], layer_kind: str) -> str | None:
    """What of these RoPE parameters SGLang reads otherwise than `RotaryEmbedding`; None when nothing is."""
    kind = rope.get("rope_type", "default")
    if kind not in SERVED_KINDS[layer_kind]:
        return f"RoPE of kind {kind}"
    if layer_kind == "mla" and kind == "yarn":
        if "attention_factor" in rope:
            return "YaRN's attention_factor"
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            return "YaRN with one of mscale and mscale_all_dim"
    odd = next((name for name in _ONLY_SGLANGS if kind == "yarn" and rope.get(name, 1) != 1), None)
    return f"YaRN's {odd} {rope[odd]}" if odd else None


@fused
def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [N, heads, rotary_dim] (halves paired, the NeoX layout); computed in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)
