"""A draft to begin with: its shape from the target, its vocabulary from the corpus, its first weights.

A warm start takes another draft's weights and vocabulary; else `initial.py` says what a draft begins with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.export import MLA_WIDTHS
from eagle3_utils.draft.layouts import draft_to_train
from eagle3_utils.draft.modules.rope import SERVED_KINDS, why_served_otherwise
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.training.checkpoint import (
    BEST_WEIGHTS,
    INIT_FROM_HASH,
    checkpoint_weights,
    newest_whole_checkpoint,
)
from eagle3_utils.draft.training.folder import CHECKPOINTS
from eagle3_utils.draft.training.initial import initialise
from eagle3_utils.draft.vocab import VocabMap, build_draft_vocab, count_tokens
from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_files, read_json, resolve_path
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.target import Target, added_token_ids, load_embed_tokens, load_target, stop_ids_of

logger = logging.getLogger(__name__)
_RMS_SAMPLES = 8
_SAME_IN_WARM_START = ("hidden_size", "vocab_size", "aux_layers", "layer_kind", "fc_norm", "norm_output", "rope",
                       "intermediate_size")  # fmt: skip
# by kind of RoPE, beside rope_theta
_ROPE_NUMBERS = {"linear": ("factor",), "yarn": ("factor",),
                 "llama3": ("factor", "low_freq_factor", "high_freq_factor")}  # fmt: skip


def draft_config_for(config: TrainConfig, target: Target, aux_layers: Iterable[int]) -> DraftConfig:
    """The draft's shape: the target's heads, RoPE and MLP width unless the parameters say otherwise.

    A Llama-like draft of an MLA target gets 128-wide heads, eight of them for keys and values.
    Raises `UserError` for a single layer, when an MLA draft is wanted for a target without all of MLA's widths, and for
    RoPE parameters that lack some, or that SGLang would serve otherwise than they are trained.
    """
    aux_layers = tuple(aux_layers)
    if len(aux_layers) == 1:
        why = "SGLang passes a single captured state by `fc` (llama_eagle3.py: it is as wide as an embedding)"
        raise UserError(why, f"aux_layers {list(aux_layers)}", "capture two layers or more", exit_code=2)
    text, rope = target.text_config, _draft_rope(config, target)
    lacks = [name for name in MLA_WIDTHS if not text.get(name)]
    if config.layer_kind == "mla" and lacks:
        why = f"the target has no {', '.join(lacks)}, without which SGLang serves no MLA draft"
        raise UserError(why, "layer_kind mla", "set layer_kind: llama", exit_code=2)
    target_is_mla = "kv_lora_rank" in text
    heads = text["num_attention_heads"]
    kv_heads, head_dim = text.get("num_key_value_heads", heads), text.get("head_dim") or target.hidden_size // heads
    if target_is_mla:
        kv_heads, head_dim = (heads, head_dim) if config.layer_kind == "mla" else (min(8, heads), 128)
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or text["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(config.draft_vocab_size, target.vocab_size),
        aux_layers=aux_layers,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        rope=rope,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        layer_kind=config.layer_kind,
        **({name: text[name] for name in MLA_WIDTHS} if config.layer_kind == "mla" else {}),
    )


def _draft_rope(config: TrainConfig, target: Target) -> dict[str, Any]:
    if config.rope is not None:
        needed = ("rope_theta", *_ROPE_NUMBERS.get(str(config.rope.get("rope_type")), ()))
        lacks = [] if "rope_type" in config.rope else ["rope_type"]
        values = {name: config.rope.get(name) for name in needed}
        lacks += [name for name, value in values.items() if not isinstance(value, int | float) or value <= 0]
        if lacks:
            hint = "beside rope_type all are numbers above 0; YAML reads 1e6 as text: write 1000000.0"
            raise UserError(f"rope {config.rope} needs {', '.join(lacks)}", "rope", hint, exit_code=2)
    rope = config.rope or target.rope
    if odd := why_served_otherwise(rope, config.layer_kind):
        kinds = ", ".join(SERVED_KINDS[config.layer_kind])
        fix = f"set rope to one of {kinds}: {{rope_type: default, rope_theta: {rope['rope_theta']}}} for instance"
        raise UserError(f"{odd}: SGLang would serve it otherwise than it is trained", "rope", fix, exit_code=2)
    return rope


def shape_to_train(config: TrainConfig, target: Target, aux_layers: Iterable[int]) -> DraftConfig:
    """As `draft_config_for`; but a warm start has the heads, the MLP width and the vocabulary's size of `init_from`.

    Raises `UserError` when what weights do not show (layers, RoPE, the state that the next step takes …) differs.
    """
    wanted = draft_config_for(config, target, aux_layers)
    return wanted if config.init_from is None else _warm_start(config, target, wanted)[0]


def _warm_start(
    config: TrainConfig, target: Target, wanted: DraftConfig
) -> tuple[DraftConfig, Callable[[], dict[str, torch.Tensor]]]:
    """The shape of `init_from`, which must be as `wanted`, and what gives its weights (a checkpoint's are read then).

    They have their own d2t: a vocabulary built anew would undo them without a word.
    """
    folder = resolve_path(config.init_from)
    state = read_json(folder / "state.json")
    if state is None:
        own, tensors = draft_to_train(folder, target)
        weights = partial(dict, tensors)
    else:
        own, weights = _checkpoint_shape(state, target, wanted), partial(checkpoint_weights, folder)
    wanted = replace(wanted, intermediate_size=config.intermediate_size or own.intermediate_size)
    for name in _SAME_IN_WARM_START:
        had, wants = getattr(own, name), getattr(wanted, name)
        if had != wants:
            raise UserError(f"init_from was trained with {name} {had}, here it is {wants}", str(folder))
    return replace(own, max_position_embeddings=wanted.max_position_embeddings), weights


def _checkpoint_shape(state: dict[str, Any], target: Target, wanted: DraftConfig) -> DraftConfig:
    """The draft's shape by a checkpoint's state.json; those of older versions say only some of it."""
    if shape := state.get("shape"):
        return DraftConfig(**shape | {"aux_layers": tuple(shape["aux_layers"])})
    if not (said := state["parameters"]):
        return wanted
    rope, norm_output = said.get("rope") or target.rope, said.get("norm_output", wanted.norm_output)
    return replace(wanted, rope=rope, norm_output=norm_output)


def init_from_hash(config: TrainConfig) -> dict[str, str]:
    """Of what a warm start reads of `init_from`, under its name in `Position`; empty when there is none (any more)."""
    if config.init_from is None or not (folder := resolve_path(config.init_from)).is_dir():
        return {}
    names, kinds = ("config.json", "state.json"), (".safetensors", ".bin")
    read = [path for path in folder.iterdir() if path.name in names or path.suffix in kinds]
    return {INIT_FROM_HASH: hash_files(read)}


def without_lost_init_from(config: TrainConfig, draft_folder: Path) -> TrainConfig:
    """The same parameters to build the draft of a training that has begun: where `init_from` has been removed since,
    the newest whole checkpoint stands for it, which has the same shape and vocabulary."""
    if config.init_from is None or resolve_path(config.init_from).is_dir():
        return config
    found = newest_whole_checkpoint(draft_folder / CHECKPOINTS, logger)
    return config if found is None else config.model_copy(update={"init_from": str(found[0])})


def token_counts(reader: StoreReader, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """How often each token is predicted in a store, and how often it stands anywhere: two int64 [V]."""
    stored = (reader.index_arrays(index) for index in reader.in_stored_order())  # no states: terabytes
    pairs = ((arrays["input_ids"], arrays["loss_mask"]) for arrays in stored)
    return count_tokens(pairs, target.vocab_size)


def corpus_vocab(counts: np.ndarray, target: Target, size: int, all_counts: np.ndarray | None = None) -> VocabMap:
    """Draft vocabulary from the corpus' counts int64 [V], ties by `all_counts`.

    Every stop token and every added token (think marks, tool calls …) is in it, whatever its count: one that is not can
    never be drafted. Where added tokens would fill more than a sixteenth (some tokenizers reserve thousands), only the
    commonest that the corpus supervises are.
    """
    stops = [token for token in stop_ids_of(target) if token < target.vocab_size]
    added, room = added_token_ids(target), size // 16
    if len(added) > room:
        added = sorted((token for token in added if counts[token]), key=lambda token: (-counts[token], token))[:room]
    return build_draft_vocab(counts, min(size, target.vocab_size), stops + added, all_counts)


def typical_rms(reader: StoreReader) -> float:
    """Root mean square of a typical token's state of the highest captured layer: the median over a few samples, since
    a handful of tokens are a hundred times as large."""
    samples = (reader.read(index).aux[:, -1].float() for index in range(min(_RMS_SAMPLES, len(reader))))
    return float(torch.cat([states.square().mean(-1).sqrt() for states in samples]).median())


def new_draft(
    config: TrainConfig, target: Target, aux_layers: Iterable[int], vocab: VocabMap, state_rms: float = 1.0
) -> DraftModel:
    """A draft ready to train, float32 on the CPU: warm-started from `init_from`, else as the module says.

    state_rms: `typical_rms` of its states; see initial.py.
    Raises `UserError` when `init_from` was made for other layers, or of another kind than the parameters say.
    """
    wanted = draft_config_for(config, target, aux_layers)
    if config.init_from is not None:
        shape, weights = _warm_start(config, target, wanted)
        model = _from_tensors(weights(), target, shape)
        if (size := model.config.draft_vocab_size) != config.draft_vocab_size:
            kept = "init_from keeps its own draft vocabulary of %d tokens: draft_vocab_size %d is not used"
            logger.warning(kept, size, config.draft_vocab_size)
    else:
        torch.manual_seed(config.seed)
        model = DraftModel(wanted, vocab, load_embed_tokens(target))
        taken = len(initialise(model, target, config.init, state_rms))
        logger.info("draft of %d layers' states, %d tensors of the target's last layer", len(wanted.aux_layers), taken)
    model.lm_head.requires_grad_(not config.freeze_lm_head)
    return model


def draft_of_training(config: TrainConfig, data: Path) -> DraftModel:
    """The best weights of a finished training under a run's data folder, float32 on the CPU, ready to decode."""
    target = load_target(config.model, config.trust_remote_code)
    tensors = load_file(data / "draft" / BEST_WEIGHTS)
    layers = StoreReader(data / "hidden_states" / "val").meta.aux_layers
    config = without_lost_init_from(config, data / "draft")
    return _from_tensors(tensors, target, shape_to_train(config, target, layers)).eval()


def _from_tensors(tensors: dict[str, torch.Tensor], target: Target, shape: DraftConfig) -> DraftModel:
    """A model of this shape, float32 on the CPU, with the weights and the draft vocabulary of a state dict."""
    vocab = VocabMap(tensors["d2t"], tensors["t2d"], tensors["t2d"].nonzero().flatten())
    shape = replace(shape, draft_vocab_size=len(vocab.d2t))
    model = DraftModel(shape, vocab, load_embed_tokens(target)).place("cpu", torch.float32)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError("weights of another shape: " + " ".join(str(error).split()), "init_from") from None
    return model
