"""Drafts as SGLang 0.5.14 loads them: config.json and model.safetensors, written and read.

SGLang takes `embed_tokens` from the target, skips unknown keys and does not miss absent ones, so nothing here is
optional: the config always carries the layer ids, the draft vocabulary's size, RoPE and maximal positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3_utils.draft.boundaries import aux_layers_of, layer_ids_for
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.vocab import VocabMap
from eagle3_utils.errors import UserError, first_line
from eagle3_utils.runs import replaced_folder
from eagle3_utils.target import Target, load_embed_tokens, rope_parameters

_AGAIN = "download or export it again"
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MLA_WIDTHS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# our name -> config.json's
SHAPE_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_position_embeddings",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
}
# What SGLang would serve otherwise than it was trained without a tensor's shape telling
_UNSEEN = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "norm_output", *MLA_WIDTHS)


def config_json(config: DraftConfig, target: Target, dtype: str, steps: int | None = None) -> dict[str, Any]:
    """The draft's config.json; its layer ids are those by which this target's class captures the trained layers.

    steps: optimiser steps the weights have been trained for, where that is known.
    """
    scaled = config.rope.get("rope_type", "default") != "default"
    values = {
        "architectures": [ARCHITECTURES[config.layer_kind]],
        "model_type": "deepseek_v3" if config.layer_kind == "mla" else "llama",
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE_KEYS.items()},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": dict(config.rope) if scaled else None,
        "rope_parameters": dict(config.rope),
        "num_aux_hidden_states": config.num_aux_layers,
        "trained_aux_layers": list(config.aux_layers),  # not read by SGLang: what check.py holds the layer ids against
        "eagle_config": {
            "use_aux_hidden_state": True,
            LAYER_IDS: layer_ids_for(target, list(config.aux_layers)),
        },
        "torch_dtype": dtype,
    }
    if config.rope != target.rope:
        values["trained_rope"] = dict(config.rope)  # not read by SGLang either
    if config.layer_kind == "mla":
        values |= {name: getattr(config, name) for name in MLA_WIDTHS}
        del values["head_dim"]
    values["trained_with"] = {name: values[name] for name in _UNSEEN if name in values}  # for check.py, too
    if steps is not None:
        values["trained_steps"] = steps  # likewise
    for name in ("bos_token_id", "eos_token_id"):
        if target.text_config.get(name) is not None:
            values[name] = target.text_config[name]
    return values


def export_draft(
    model: DraftModel, target: Target, folder: Path, dtype: torch.dtype = torch.bfloat16, steps: int | None = None
) -> Path:
    """Write a draft folder; an older one of the same name is replaced only once the new one is complete.

    steps: as for `config_json`; without it `check.py` trusts nothing but the weights themselves.
    """
    folder = Path(folder)
    with replaced_folder(folder) as new:
        tensors = {
            name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
            for name, tensor in model.state_dict().items()
        }
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
        values = config_json(model.config, target, str(dtype).removeprefix("torch."), steps)
        (new / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return folder


def read_draft_config(folder: Path) -> dict[str, Any]:
    """A draft folder's config.json. Raises `UserError` when it is missing, damaged or no EAGLE-3 draft's."""
    values = read_any_config(folder)
    if (values.get("architectures") or ["?"])[0] not in ARCHITECTURES.values():
        known = " or ".join(ARCHITECTURES.values())
        raise UserError(f"architecture {values.get('architectures')} is not {known}", f"{folder}/config.json")
    return values


def read_any_config(folder: Path) -> dict[str, Any]:
    """A config.json of whatever kind. Raises `UserError` when it is missing or damaged."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError("no config.json: not a draft folder", str(folder), "a run's draft is data/draft/export in it")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"damaged: {error}", str(path), _AGAIN) from None
    if not isinstance(values, dict):
        raise UserError("damaged: no JSON object", str(path), _AGAIN)
    return values


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a *.safetensors, or of a *.bin (nothing but tensors is unpickled). Raises `UserError` when the
    file is missing or damaged."""
    try:
        if path.suffix == ".bin":
            return torch.load(path, map_location="cpu", weights_only=True)
        return load_file(path)
    except (OSError, EOFError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise UserError(f"missing or damaged: {first_line(error)}", str(path), _AGAIN) from None


def draft_config_of(values: dict[str, Any], target: Target) -> DraftConfig:
    """The draft's shape from its config.json; `aux_layers` are what this target's class captures for its ids, or by
    default where it has none.

    Raises `UserError` naming the first key that is missing.
    """
    layer_kind = next(kind for kind, name in ARCHITECTURES.items() if name == values["architectures"][0])
    shape = {ours: values[theirs] for ours, theirs in SHAPE_KEYS.items() if values.get(theirs) is not None}
    for ours in ("hidden_size", "intermediate_size", "num_heads", "vocab_size"):
        if not shape.get(ours):
            raise UserError(f"config.json has no {SHAPE_KEYS[ours]}")
    shape = {
        "num_kv_heads": shape["num_heads"],
        "head_dim": shape["hidden_size"] // shape["num_heads"],
        "draft_vocab_size": shape["vocab_size"],
        "rms_norm_eps": 1e-6,  # transformers' default
    } | shape
    shape["fc_norm"] = bool(values.get("fc_norm") or values.get("use_aux_norm"))  # an older name
    ids = (values.get("eagle_config") or {}).get(LAYER_IDS)
    if layer_kind == "mla" and (missing := [name for name in MLA_WIDTHS if name not in values]):
        raise UserError(f"config.json has no {missing[0]}")
    widths = {name: values[name] for name in MLA_WIDTHS} if layer_kind == "mla" else {}
    return DraftConfig(
        **shape,
        rope=rope_parameters(values),
        aux_layers=tuple(aux_layers_of(target, ids)),
        layer_kind=layer_kind,
        **widths,
    )


def with_vocab(tensors: dict[str, torch.Tensor], config: DraftConfig, folder: Path) -> dict[str, torch.Tensor]:
    """A draft's tensors without embeddings (the target's are used) and with d2t int64, t2d bool, also where the draft's
    vocabulary is the target's. Raises `UserError` when one of the two is missing otherwise."""
    tensors = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors |= {"d2t": torch.zeros(config.vocab_size), "t2d": torch.ones(config.vocab_size)}
    if not {"d2t", "t2d"} <= tensors.keys():
        raise UserError("d2t and t2d are not both there: draft ids cannot be mapped", str(folder))
    return tensors | {"d2t": tensors["d2t"].to(torch.int64), "t2d": tensors["t2d"].bool()}


def load_draft(
    folder: Path, target: Target, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> DraftModel:
    """A draft folder as a model ready for `project` and `decode_step`, with the target's embeddings.

    Raises `UserError` when a tensor is missing, unknown or of the wrong shape (run `eagle3 check-draft` for more).
    """
    values = read_draft_config(folder)
    config = draft_config_of(values, target)
    loaded = load_tensors(Path(folder) / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in loaded.items()}
    tensors = with_vocab(tensors, config, folder)
    vocab = VocabMap(tensors["d2t"], tensors["t2d"], tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    model = DraftModel(config, vocab, load_embed_tokens(target))
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(" ".join(str(error).split()), str(folder), "see eagle3 check-draft") from None
    return model.place(device, dtype).eval()
