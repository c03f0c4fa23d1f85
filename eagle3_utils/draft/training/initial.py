"""First weights of a draft, taken from the target where the two mean the same.

`lm_head` and `norm` are the target's own rows and final norm, so the draft reads its hidden state as the target does.
Where the target's norms multiply by 1 + weight, the 1 goes into the draft's weight: its own norms are plain.
With `init: target_layer`, `fc` passes the highest captured layer through and the draft's layer is the target's last
one: training then begins at an early exit of the target instead of at noise, and needs a fraction of the tokens
(figures in LOG.md). EAGLE-3.1 feeds the layer normed states, many times smaller than those it worked on in the target;
so what it adds to them, `o_proj` and `down_proj`, is made smaller by the same factor, which the final norm undoes.
What has no counterpart stays random: the embedding half of the attention's input, the experts of a mixture, weights
of another shape or stored quantised. A wider MLP begins as the target's.
"""

from __future__ import annotations

import torch
from torch import nn

from eagle3_utils.draft.network import DraftModel
from eagle3_utils.target import Target, load_decoder_layer, load_final_norm, load_lm_head

_STD = 0.02
_FC_NOISE = 0.1  # share of the random start that `fc` keeps beside the passed-through layer
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


@torch.no_grad()
def initialise(model: DraftModel, target: Target, init: str, state_rms: float = 1.0) -> list[str]:
    """Fill every weight of a new draft in place; returns the names taken from the target's last layer.

    init: "target_layer" as the module says, "random" for random weights but for `lm_head` and `norm`. state_rms: root
    mean square of the highest captured layer's states, needed for EAGLE-3.1.
    """
    draw_matrices(model)
    model.lm_head.weight.copy_(load_lm_head(target)[model.target_ids])
    model.norm.weight.copy_(load_final_norm(target).float() + target.norm_offset)
    if init == "random":
        return []
    size = model.config.hidden_size
    model.fc.weight.mul_(_FC_NOISE)
    model.fc.weight[:, -size:] += torch.eye(size)
    layer = load_decoder_layer(target, target.num_layers - 1)
    copied = _copy_layer(model.midlayer, layer, size, target.norm_offset)
    _fit_normed_states(model, state_rms)
    return copied


@torch.no_grad()
def draw_matrices(module: nn.Module, std: float = _STD) -> None:
    """Fill all matrices of a module with normally distributed numbers, in place; a draft's begin unset."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=std)


def _fit_normed_states(model: DraftModel, state_rms: float) -> None:
    """Make `fc` give states as large as those of later steps, and what the layer adds smaller in proportion."""
    config = model.config
    if not (config.fc_norm or config.norm_output):
        return
    wanted_rms = float(model.norm.weight.square().mean().sqrt()) if config.norm_output else 1.0
    model.fc.weight.mul_(wanted_rms if config.fc_norm else wanted_rms / state_rms)
    for part in (model.midlayer.self_attn.o_proj, model.midlayer.mlp.down_proj):
        part.weight.mul_(wanted_rms / state_rms)


def _copy_layer(midlayer: nn.Module, layer: dict[str, torch.Tensor], size: int, norm_offset: float) -> list[str]:
    """Copy a decoder layer's tensors, named within the layer, where the draft's layer has the same ones."""
    if not _comparable(layer):
        return []
    copied, same_attention = [], _same_attention(layer)
    for name, parameter in midlayer.named_parameters():
        source = layer.get({"hidden_norm.weight": "input_layernorm.weight"}.get(name, name))
        if name == "input_layernorm.weight" or source is None or source.dtype not in _FLOATS:
            continue  # the draft's input_layernorm is the embedding's
        if name.startswith("self_attn.") and not same_attention:
            continue
        if parameter.shape == source.shape:
            parameter.copy_(source.float() + norm_offset if source.dim() == 1 else source)
        elif parameter.dim() == 2 and parameter.shape == (source.shape[0], 2 * size) and source.shape[1] == size:
            parameter[:, size:] = source  # the draft's attention reads [embedding, hidden state]
        elif name.startswith("mlp.") and parameter.numel() > source.numel():
            _widen(parameter, source)
        else:
            continue
        copied.append(name)
    return copied


def _widen(parameter: torch.Tensor, source: torch.Tensor) -> None:
    """A narrower MLP's weight within a wider one's: the further units' input stays random, their output is zero."""
    if parameter.shape[1] > source.shape[1]:  # down_proj
        parameter.zero_()
    parameter[: source.shape[0], : source.shape[1]] = source


def _comparable(layer: dict[str, torch.Tensor]) -> bool:
    """Whether the layer has the draft's two norms and no other (Gemma's and OLMo 2's have, and compute otherwise)."""
    norms = {name for name in layer if "layernorm" in name and name.count(".") == 1}
    return norms == {"input_layernorm.weight", "post_attention_layernorm.weight"}


def _same_attention(layer: dict[str, torch.Tensor]) -> bool:
    """Whether queries and keys have no bias and no norm of their own: SGLang's draft layer has neither."""
    own = ("self_attn.q_norm.", "self_attn.k_norm.")
    return not any(name.startswith(own) or (name.startswith("self_attn.") and name.endswith(".bias")) for name in layer)
