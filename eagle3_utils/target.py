"""The target model as the pipeline sees it: its shape, its tokenizer, and the few weights read outside SGLang.

A 1-T-parameter target works on a laptop: only config.json, the tokenizer and the shards that hold `lm_head`, the
embeddings or the final norm are ever opened.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from eagle3_utils.errors import UserError
from eagle3_utils.example_target import make_example_target
from eagle3_utils.runs import read_json, resolve_path

EXAMPLE_FOLDER = "outputs/models/SmolLM2-135M-Instruct"
# Beginnings of the architectures whose RMS norms multiply by 1 + weight (transformers; SGLang: GemmaRMSNorm and alike)
_ONE_PLUS_WEIGHT = ("GemmaFor", "Gemma2For", "Gemma3For", "PaliGemmaFor", "RecurrentGemmaFor",
                    "VaultGemmaFor", "Qwen3NextFor", "Qwen3_5For", "Qwen3_5MoeFor")  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Shape and conventions of a target, from its config.json (the text part of a multi-modal one)."""

    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    logit_scale: float  # logits = lm_head(final) * logit_scale
    logit_softcap: float | None  # then softcap * tanh(logits / softcap)
    rms_norm_eps: float
    norm_offset: float  # its RMS norms multiply by norm_offset + weight: 1.0 for Gemma's and alike
    max_position_embeddings: int
    rope: dict[str, Any]  # HF `rope_parameters`
    dtype: str
    text_config: dict[str, Any]
    fingerprint: str  # of config and the weight files' names and sizes
    trust_remote_code: bool = False


def load_target(model: str, trust_remote_code: bool = False) -> Target:
    """Describe a target without loading it.

    Parameters
    ----------
    model : "example" (made on first use), a Hugging Face folder, or a name on the hub.

    Raises
    ------
    UserError
        When there is no such folder or it has no config.json.
    """
    path = _local_folder(model)
    if not (path / "config.json").is_file():
        raise UserError("no config.json: not a Hugging Face checkpoint", str(path))
    config = json.loads((path / "config.json").read_text())
    text = config.get("text_config") or config
    architecture = (config.get("architectures") or ["?"])[0]
    return Target(
        path=path,
        architecture=architecture,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        tie_word_embeddings=_is_tied(text.get("tie_word_embeddings", config.get("tie_word_embeddings")), path),
        logit_scale=_logit_scale(text),
        logit_softcap=text.get("final_logit_softcapping"),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        norm_offset=1.0 if architecture.startswith(_ONE_PLUS_WEIGHT) else 0.0,
        max_position_embeddings=text.get("max_position_embeddings", 2048),
        rope=rope_parameters(text),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"),
        text_config=text,
        fingerprint=_fingerprint(path),
        trust_remote_code=trust_remote_code,
    )


def default_aux_layers(num_layers: int) -> list[int]:
    """The three captured layers, 0-based, by EAGLE-3's early / middle / late rule: [1, n//2 - 1, n - 4].

    As SGLang boundaries these are [2, n//2, n-3] (sglang/srt/models/llama.py, `set_eagle3_layers_to_capture`).
    """
    layers = [1, num_layers // 2 - 1, num_layers - 4]
    if sorted(set(layers)) != layers or layers[0] < 0:
        raise UserError(f"{num_layers} layers are too few for the default auxiliary layers", fix="set aux_layers")
    return layers


def load_tokenizer(target: Target):
    """The target's tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target.path, trust_remote_code=target.trust_remote_code)


def stop_ids_of(target: Target, tokenizer: Any = None) -> list[int]:
    """Tokens that end an answer, as SGLang takes them: of generation_config.json, config.json and the tokenizer."""
    found = {getattr(tokenizer, "eos_token_id", None)} - {None}
    configs = [target.text_config, read_json(target.path / "generation_config.json") or {}]
    for ids in (config.get("eos_token_id") for config in configs):
        found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    return sorted(found)


def added_token_ids(target: Target) -> list[int]:
    """Tokens that stand beside the tokenizer's own vocabulary (end of turn, `<think>`, tool calls, reserved ones …).

    Read from the tokenizer's files, so that none of its code runs; those the model has no row for are left out.
    """
    config, old = (read_json(target.path / name) or {} for name in ("tokenizer_config.json", "added_tokens.json"))
    found = {int(token) for token in config.get("added_tokens_decoder") or {}} | set(old.values())
    if not found:  # tokenizer.json is large
        found = {token["id"] for token in (read_json(target.path / "tokenizer.json") or {}).get("added_tokens", [])}
    return sorted(token for token in found if token < target.vocab_size)


def load_lm_head(target: Target) -> torch.Tensor:
    """`lm_head.weight` [V, H] in the checkpoint's dtype; the embeddings where they are tied."""
    if target.tie_word_embeddings:
        return load_embed_tokens(target)
    return _load_tensor(target.path, "lm_head.weight")


def load_embed_tokens(target: Target) -> torch.Tensor:
    """`embed_tokens.weight` [V, H] in the checkpoint's dtype."""
    return _load_tensor(target.path, "embed_tokens.weight")


def load_final_norm(target: Target) -> torch.Tensor:
    """The final norm's weight [H] as in the checkpoint; the norm multiplies by `target.norm_offset` + weight."""
    return _load_tensor(target.path, "model.norm.weight")


def load_decoder_layer(target: Target, index: int) -> dict[str, torch.Tensor]:
    """The tensors of one decoder layer of the text model, named within the layer ("mlp.up_proj.weight").

    Those of a mixture's experts are left out: they are the bulk of the bytes. Raises `UserError` when there are none.
    """
    prefix = re.compile(rf"(?:^|\.)layers\.{index}\.(?!.*\.experts\.)")
    weight_map = {name: file for name, file in _weight_map(target.path).items() if "vision" not in name}
    found = {name[match.end() :]: (name, file) for name, file in weight_map.items() if (match := prefix.search(name))}
    if not found:
        raise UserError(f"no tensor of decoder layer {index}", str(target.path))
    tensors = {}
    for short, (name, file) in found.items():
        with safe_open(target.path / file, "pt") as shard:
            tensors[short] = shard.get_tensor(name)
    return tensors


def target_logits(final: torch.Tensor, lm_head: torch.Tensor, target: Target) -> torch.Tensor:
    """The target's own logits from its final, post-norm hidden state.

    Parameters
    ----------
    final : [..., H], same dtype as lm_head.
    lm_head : [V', H], all rows or those of a draft vocabulary.

    Returns
    -------
    float32 logits [..., V'].
    """
    logits = torch.nn.functional.linear(final, lm_head).float()
    if target.logit_scale != 1.0:
        logits = logits * target.logit_scale
    if target.logit_softcap:
        logits = target.logit_softcap * torch.tanh(logits / target.logit_softcap)
    return logits


def _local_folder(model: str) -> Path:
    if model == "example":
        return make_example_target(resolve_path(EXAMPLE_FOLDER))
    path = resolve_path(model)
    if path.is_dir():
        return path
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise UserError("no such folder", f"model: {model}", exit_code=2)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model))
    except (OSError, ValueError) as error:
        raise UserError(f"neither a folder nor a model the hub gives: {error}", f"model: {model}") from None


def _is_tied(said: bool | None, path: Path) -> bool:
    """Whether the head is the embeddings; where config.json does not say so (Gemma's: it is their class's default),
    whether no head is stored."""
    return said if said is not None else not any(name.endswith("lm_head.weight") for name in _weight_map(path))


def _logit_scale(text: dict[str, Any]) -> float:
    """Cohere multiplies (`logit_scale`), Granite divides (`logits_scaling`); others leave the logits alone."""
    if "logits_scaling" in text:
        return 1.0 / text["logits_scaling"]
    return text.get("logit_scale") or 1.0


def rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """RoPE in one form, whether config.json has `rope_parameters` (transformers 5) or theta and scaling apart; where it
    has both, `rope_scaling` counts, as when transformers loads it.

    Of a target whose layers differ, that of its full attention. Sections for images (`mrope`) are left out: for text,
    where the three positions are one, it is `default`, and SGLang serves drafts so (llama_eagle3.py).
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    rope = {name: value for name, value in rope.get("full_attention", rope).items() if not name.startswith("mrope")}
    kind = rope.pop("type", "default")
    rope = {"rope_theta": text.get("rope_theta", 10000.0), "rope_type": kind} | rope
    return rope | ({"rope_type": "default"} if rope.get("rope_type") == "mrope" else {})


def _fingerprint(path: Path) -> str:
    """xxh3-128 of config.json and of the weight files' names and sizes: quick for terabytes of weights."""
    digest = xxhash.xxh3_128((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()


def _load_tensor(path: Path, suffix: str) -> torch.Tensor:
    """The one tensor of the text model whose name ends in `suffix`, read from the shard that holds it."""
    weight_map = _weight_map(path)
    names = [name for name in weight_map if name == suffix or name.endswith("." + suffix)]
    names = [name for name in names if "vision" not in name and ".layers." not in name]
    if len(names) != 1:
        raise UserError(f"expected one tensor named …{suffix}, found {names or 'none'}", str(path))
    with safe_open(path / weight_map[names[0]], "pt") as tensors:
        return tensors.get_tensor(names[0])


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file of a checkpoint folder, from its index or from the files themselves."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    weight_map = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), file.name)
    return weight_map
