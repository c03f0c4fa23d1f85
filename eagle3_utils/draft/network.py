"""The EAGLE-3 draft network: one decoder layer between fused target states and a small vocabulary.

    h = fc(concat(aux))                      target states of L layers -> one hidden state per position
    h' = midlayer(embed(next token), h)      attention over [norm(embedding), norm(h)], then an MLP
    logits = lm_head(norm(h'))               over the draft vocabulary; h' (before the norm) feeds the next step

The state dict has exactly the tensor names SGLang 0.5.14 loads as `LlamaForCausalLMEagle3` (or, with MLA, as
`Eagle3DeepseekV2ForCausalLM`); the target's embedding is held, frozen, and never saved.
Source: sglang/srt/models/llama_eagle3.py, kimi_k25_eagle3.py.

T tokens · N rows · L auxiliary layers · H hidden · D draft vocabulary · V vocabulary · A, K heads · E, F head widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from eagle3_utils.draft.modules.layers import DraftLayer, Linear, RMSNorm
from eagle3_utils.draft.modules.rope import RotaryEmbedding, rope_as_served
from eagle3_utils.draft.vocab import VocabMap


@dataclass(frozen=True)
class DraftConfig:
    """The draft's shape. `rope` is a Hugging Face `rope_parameters` dict; MLA widths are for `layer_kind="mla"`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # 0-based target layers whose outputs `fc` fuses
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm per auxiliary state before fc
    norm_output: bool = False  # EAGLE-3.1: the next step takes the state after the final norm
    layer_kind: Literal["llama", "mla"] = "llama"
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def num_aux_layers(self) -> int:
        return len(self.aux_layers)


@dataclass
class DraftCache:
    """Keys [M, K, E] and values [M, K, F] of the M rows decoded so far."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.keys is None else self.keys.shape[0]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add rows at the end."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.values = values if self.values is None else torch.cat([self.values, values])

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on (rejected drafts)."""
        if length < len(self):
            self.keys, self.values = self.keys[:length], self.values[:length]


class DraftModel(nn.Module):
    """Weights of a draft and its inference. Training unrolls the same parts in unroll.py. Matrices begin unset.

    embed_tokens: the target's [V, H], frozen. vocab: the draft vocabulary, kept in buffers d2t, t2d.
    """

    def __init__(self, config: DraftConfig, vocab: VocabMap, embed_tokens: torch.Tensor):
        super().__init__()
        self.config = config
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(config.num_aux_layers)
            )
        self.fc = Linear(config.num_aux_layers * config.hidden_size, config.hidden_size)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        rope = rope_as_served(config.rope, config.layer_kind)
        self.rotary = RotaryEmbedding(rope, self.midlayer.self_attn.rotary_dim, config.max_position_embeddings)

    def place(self, device: torch.device | str, dtype: torch.dtype, embeddings_on_host: bool = False) -> DraftModel:
        """Move to a device and dtype; the frozen embeddings keep the target's dtype (rows are cast when looked up)
        and, if wanted, stay in host memory."""
        embed_tokens, self.embed_tokens = self.embed_tokens, None
        self.to(device=device, dtype=dtype)
        self.embed_tokens = embed_tokens.to("cpu" if embeddings_on_host else device)
        return self

    def forward(self, compute: Callable[..., Any], *args) -> tuple[torch.Tensor, Any]:
        """`compute(self, *args)`, a result with a `loss`; returns the loss and the result.

        All training goes through here, because a sharded model (FSDP) has whole weights only inside its forward.
        """
        result = compute(self, *args)
        return result.loss, result

    @property
    def target_ids(self) -> torch.Tensor:
        """Target id of every draft id, int64 [D]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_id_of(self, token_id: int) -> int:
        """Draft id of a target token; -1 when it has none."""
        found = (self.target_ids == token_id).nonzero()
        return int(found[0]) if len(found) else -1

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """Fuse target states: aux [T, L, H] or [T, L·H] -> h [T, H]."""
        aux = aux.flatten(1).to(self.fc.weight.dtype)
        if self.config.fc_norm:
            chunks = aux.chunk(self.config.num_aux_layers, dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: torch.Tensor, embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Frozen embeddings, [N] -> [N, H]; `embeds` are those rows, when a loader has looked them up."""
        if embeds is None:
            embeds = F.embedding(token_ids.to(self.embed_tokens.device), self.embed_tokens)
        return embeds.to(self.fc.weight)

    def next_input(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next step takes: the state before the final norm, or after it (`norm_output`)."""
        return normed if self.config.norm_output else hidden

    @torch.no_grad()
    def decode_step(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DraftCache,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over N new rows and append their keys and values to `cache`.

        hidden [N, H]: `project(aux[t])`, or what an earlier step returned. token_ids [N]: for a row at position t
        the token t+1. position_ids [N]. mask: bool [N, M + N], which cached and new rows each row sees (a tree);
        without it, all cached rows and the new ones up to itself.
        Returns the next step's hidden [N, H] and logits [N, D] over the draft vocabulary (`target_ids` maps back).
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        both = torch.cat([layer.input_layernorm(self.embed(token_ids)), layer.hidden_norm(hidden)], dim=-1)
        cos, sin = self.rotary(position_ids)
        query = attention.queries(F.linear(both, attention.query_weight()), cos, sin)
        latent = torch.cat([F.linear(both, weight) for weight in attention.key_value_weights()], dim=-1)
        cache.append(*attention.keys_values(latent, cos, sin))
        if mask is None:
            new, total = len(query), len(cache)
            mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            cache.keys.transpose(0, 1)[None],
            cache.values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=attention.scale,
            enable_gqa=True,
        )
        hidden = layer.finish(hidden, attended[0].transpose(0, 1))
        normed = self.norm(hidden)
        return self.next_input(hidden, normed), self.lm_head(normed)
