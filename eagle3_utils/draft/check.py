"""A strict check of a draft folder against its target: what SGLang would not notice, said in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3_utils.draft.export import draft_config_of, read_draft_config
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.target import Target


def check_draft(folder: Path, target: Target, trained_aux_layers: list[int] | None = None) -> list[str]:
    """Problems of a draft, an empty list when there are none.

    trained_aux_layers: 0-based layers the draft was trained on, when they are known.
    Raises `UserError` when the folder is no EAGLE-3 draft at all.
    """
    folder = Path(folder)
    values = read_draft_config(folder)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        return [f"no {weights.name}: SGLang would find no weights"]
    tensors = load_file(weights)
    try:
        config = draft_config_of(values, target)
    except UserError as error:
        return [f"{error.what}: SGLang would fall back to default layers"]
    except KeyError as error:
        return [f"config.json has no {error.args[0]}"]
    problems = _config_problems(values, config, target, trained_aux_layers)
    problems += _tensor_problems(tensors, config)
    return problems + _vocab_problems(tensors, config)


def _config_problems(
    values: dict[str, Any], config: DraftConfig, target: Target, trained: list[int] | None
) -> list[str]:
    problems = []
    for key in ("eagle_config", "draft_vocab_size", "max_position_embeddings"):
        if values.get(key) is None:
            problems.append(f"config.json has no {key}: SGLang would use a default without a word")
    if values.get("rope_parameters") is None and values.get("rope_theta") is None:
        problems.append("config.json has neither rope_parameters nor rope_theta: SGLang would use theta 10000")
    if values.get("tie_word_embeddings", True):
        problems.append("tie_word_embeddings is not false: the draft would use the embeddings as its lm_head")
    if config.hidden_size != target.hidden_size:
        problems.append(
            f"hidden_size {config.hidden_size} is not the target's {target.hidden_size}: no shared embedding"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(f"vocab_size {config.vocab_size} is not the target's {target.vocab_size}")
    if config.max_position_embeddings < target.max_position_embeddings:
        problems.append(
            f"max_position_embeddings {config.max_position_embeddings} is below the target's "
            f"{target.max_position_embeddings}: acceptance falls on longer contexts"
        )
    if trained is not None and list(config.aux_layers) != sorted(trained):
        problems.append(
            f"layer ids {values['eagle_config']['eagle_aux_hidden_state_layer_ids']} make {target.architecture} "
            f"capture the outputs of layers {list(config.aux_layers)}; the draft was trained on {sorted(trained)}"
        )
    return problems


def _tensor_problems(tensors: dict[str, torch.Tensor], config: DraftConfig) -> list[str]:
    problems = []
    renamed = {name.replace("layers.0.", "midlayer."): name for name in tensors}
    with torch.device("meta"):
        vocab = vocab_map_of(torch.arange(config.draft_vocab_size), config.vocab_size)
        embed = torch.empty(config.vocab_size, config.hidden_size)
        expected = {name: tuple(t.shape) for name, t in DraftModel(config, vocab, embed).state_dict().items()}
    for name in sorted(expected.keys() - renamed.keys() - {"d2t", "t2d"}):
        problems.append(f"{name} is missing: SGLang would serve it at its random initial value")
    for name in sorted(renamed.keys() - expected.keys() - {"embed_tokens.weight"}):
        problems.append(f"{renamed[name]} is unknown: SGLang would skip it without a word")
    for name in sorted(expected.keys() & renamed.keys()):
        tensor = tensors[renamed[name]]
        if tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}")
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")
        elif tensor.is_floating_point() and tensor.dim() == 2 and float(tensor.float().std()) == 0.0:
            problems.append(f"{name} is constant: it was never trained or never loaded")
    return problems


def _vocab_problems(tensors: dict[str, torch.Tensor], config: DraftConfig) -> list[str]:
    if config.draft_vocab_size == config.vocab_size and "d2t" not in tensors:
        return []
    if not {"d2t", "t2d"} <= tensors.keys():
        return ["d2t and t2d are not both there: drafted ids would not be mapped to target ids"]
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if len(d2t) != config.draft_vocab_size or len(t2d) != config.vocab_size:
        return [f"d2t has {len(d2t)} and t2d {len(t2d)} entries, not {config.draft_vocab_size} and {config.vocab_size}"]
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    in_range = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if in_range and len(ids.unique()) == len(ids) and torch.equal(ids.sort().values, t2d.bool().nonzero().flatten()):
        return []
    absolute = d2t.to(torch.int64)
    if torch.equal(absolute.sort().values, t2d.bool().nonzero().flatten()):
        return ["d2t holds target ids, not offsets: SGLang adds the draft id, so every drafted token would be wrong"]
    if not in_range:
        return [f"d2t maps outside the vocabulary (ids {int(ids.min())} to {int(ids.max())})"]
    return ["d2t and t2d do not say the same: drafted ids would be mapped to other tokens than those trained"]
