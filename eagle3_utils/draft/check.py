"""A strict check of a draft folder against its target: what SGLang would not notice, said in one line each.

    review = review_draft(Path("draft"), load_target("Qwen/Qwen3-8B"))
    review.problems        # what would go wrong in serving; [] when nothing would
    review.notes           # what to know: right only if the draft was trained so

Works on drafts of other trainers too (layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3_utils.devices import one_torch_thread
from eagle3_utils.draft.boundaries import are_layer_ids, aux_layers_of, states_given
from eagle3_utils.draft.export import ARCHITECTURES, LAYER_IDS, SHAPE_KEYS, draft_config_of
from eagle3_utils.draft.layouts import DraftFiles, read_draft_files
from eagle3_utils.draft.modules.rope import why_served_otherwise
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.target import Target, load_final_norm

_NUM_STATES = "num_aux_hidden_states"
_CONSTANT = "is constant"
_BLOCK = 512  # rows and columns of a matrix that are looked at for its spectrum
_EDGE_MARGIN = 1.1  # the largest singular value of noise stays this close to its edge from 64 × 64 on
_FEW_STEPS = 200  # optimiser steps below which weights may still look as they began
_SCATTERS = 6  # deviations by which noise's measured kurtosis may exceed 3


@dataclass
class Review:
    """What was found; every finding is one line."""

    layout: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_draft(folder: Path, target: Target, trained_aux_layers: list[int] | None = None) -> list[str]:
    """The problems of `review_draft`."""
    return review_draft(folder, target, trained_aux_layers).problems


def review_draft(folder: Path, target: Target, trained_aux_layers: list[int] | None = None) -> Review:
    """Look at everything SGLang reads of a draft, and at what it does not.

    trained_aux_layers: 0-based layers the draft was trained on; by default what its own config.json says, if anything.
    Raises `UserError` when the folder is no EAGLE draft at all.
    """
    files = read_draft_files(folder)
    review = Review(files.layout, list(files.problems), list(files.notes))
    if files.layout.startswith("eagle1"):
        return review
    if not files.tensors:
        review.problems.append("no *.safetensors and no *.bin: SGLang would find no weights")
        return review
    _check_layers(files, target, trained_aux_layers or files.values.get("trained_aux_layers"), review)
    if "draft_vocab_size" not in files.values:
        review.problems.append("config.json has no draft_vocab_size: SGLang would stop with an AttributeError")
        files.values["draft_vocab_size"] = len(files.tensors["d2t"]) if "d2t" in files.tensors else None
    try:
        fused = _fused_states(files)
        any_ids = list(range(fused)) if type(fused) is int else [0, 1, 2]
        config = draft_config_of(files.values | {"eagle_config": {LAYER_IDS: any_ids}}, target)
    except UserError as error:
        review.problems.append(f"{error.what}: SGLang would not start")
        return review
    _check_config(files, config, target, review)
    _check_constants(files.values, config, review.problems)
    _check_tensors(files, config, target, review)
    review.problems += _vocab_problems(files.tensors, config)
    return review


def _fused_states(files: DraftFiles) -> Any:
    """How many auxiliary states SGLang builds `fc` for (MLA's class does not read the number itself)."""
    ids = files.boundaries or (files.values.get("eagle_config") or {}).get(LAYER_IDS)
    said = None if files.values["architectures"][0] == ARCHITECTURES["mla"] else files.values.get(_NUM_STATES)
    return said if said is not None else len(ids) if are_layer_ids(ids) else 3


def _check_layers(files: DraftFiles, target: Target, trained: list[int] | None, review: Review) -> None:
    """Which layers this target's own class will capture, beside those of training and the width of `fc`."""
    ids = (files.values.get("eagle_config") or {}).get(LAYER_IDS)
    if files.boundaries is not None:
        ids = files.ids_for(target)
        review.problems.append(
            f"layer ids {files.boundaries} stand outside eagle_config and count what enters a layer: for "
            f"{target.architecture} write eagle_config.{LAYER_IDS} = {ids}"
        )
    elif not (ids is None or are_layer_ids(ids)):
        review.problems.append(f"layer ids {ids!r} are no list of whole numbers: SGLang would not start")
        return
    captured = aux_layers_of(target, ids)
    given, fused = states_given(target, captured), _fused_states(files)
    capture = f"layer ids {ids or '(default)'} make {target.architecture} capture the outputs of layers"
    if ids is None and files.layout == "sglang":
        review.problems.append(
            f"config.json has no eagle_config.{LAYER_IDS}: SGLang would capture its default layers {captured}"
        )
    elif len(given) != fused or len(given) == 1 or not set(captured) <= set(given):
        end = "skip fc without a word" if len(given) == 1 else "stop at the first request, if it starts"
        review.problems.append(
            f"{capture} {captured}, of which a draft is given {given}: {len(given)} where fc takes {fused!r}; "
            f"SGLang would {end}"
        )
    elif trained is not None and captured != sorted(trained):
        review.problems.append(
            f"{capture} {captured}; the draft was trained on {sorted(trained)}: acceptance would fall without an error"
        )
    elif files.boundaries is None:
        review.notes.append(
            f"layer ids {ids or '(default)'}: {target.architecture} captures the outputs of layers {captured}"
        )


def _check_constants(values: dict[str, Any], config: DraftConfig, problems: list[str]) -> None:
    """What SGLang's class reads and a draft of one layer, as it is trained, has in one way only."""
    if values.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {values['hidden_act']}: SGLang's class has silu alone and would not start")
    if values.get("num_hidden_layers") != 1:
        count = values.get("num_hidden_layers")
        problems.append(f"num_hidden_layers is {count}, not 1: SGLang would not start, or serve layers never trained")
    for name in ("attention_bias", "bias") if config.layer_kind == "llama" else ("bias",):
        if values.get(name):
            problems.append(f"{name} is true: SGLang would add biases, at random values where the file has none")
    ours = {theirs: name for name, theirs in SHAPE_KEYS.items()}
    for name, trained in (values.get("trained_with") or {}).items():
        if (served := getattr(config, ours.get(name, name), None)) != trained:
            problems.append(
                f"{name} is {served}, the draft was trained with {trained}: acceptance would fall without an error"
            )


def _check_config(files: DraftFiles, config: DraftConfig, target: Target, review: Review) -> None:
    values, problems = files.values, review.problems
    if (values.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        problems.append(
            "eagle_config.use_aux_hidden_state is false: SGLang would feed final states, not auxiliary ones"
        )
    if values.get("max_position_embeddings") is None:
        problems.append("config.json has no max_position_embeddings: SGLang would take 2048")
    if values.get("rope_parameters") is None and values.get("rope_theta") is None:
        problems.append("config.json has neither rope_parameters nor rope_theta: SGLang would use theta 10000")
    elif odd := why_served_otherwise(config.rope, config.layer_kind):
        problems.append(f"{odd}: SGLang would serve it otherwise than it was trained")
    elif _same_rope(config.rope) != (trained := _same_rope(values.get("trained_rope") or target.rope)):
        line = f"RoPE {_same_rope(config.rope)} is not"
        if files.layout == "sglang":  # our own training mirrors the target's, or says what it took instead
            line += f" {trained}, with which the draft was trained"
            problems.append(f"{line}: acceptance would fall without an error")
        else:
            review.notes.append(f"{line} the target's {trained}: right only if the draft was trained with it")
    if values.get("tie_word_embeddings"):
        problems.append("tie_word_embeddings is true: the draft would use the embeddings as its lm_head")
    if config.hidden_size != target.hidden_size:
        problems.append(
            f"hidden_size {config.hidden_size} is not the target's {target.hidden_size}: no shared embedding"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(
            f"vocab_size {config.vocab_size} is not the target's {target.vocab_size}: not this target's draft"
        )
    if config.max_position_embeddings < target.max_position_embeddings:
        problems.append(
            f"max_position_embeddings {config.max_position_embeddings} is below the target's "
            f"{target.max_position_embeddings}: acceptance falls on longer contexts"
        )


def _same_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters in one form, so that equal ones compare equal."""
    plain = {key: value for key, value in rope.items() if value is not None and key != "type"}
    plain["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return {k: float(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for k, v in plain.items()}


def _check_tensors(files: DraftFiles, config: DraftConfig, target: Target, review: Review) -> None:
    """Every expected tensor: there, shaped, finite, trained; nothing else."""
    tensors, problems = files.tensors, review.problems
    is_random, untrained = _is_random(target), {}
    with torch.device("meta"):
        vocab = vocab_map_of(torch.arange(config.draft_vocab_size), config.vocab_size)
        embed = torch.empty(config.vocab_size, config.hidden_size)
        expected = {name: tuple(t.shape) for name, t in DraftModel(config, vocab, embed).state_dict().items()}
    if files.values.get("draft_vocab_size", 0) is None:
        expected.pop("lm_head.weight")  # SGLang then takes the target's
    for name in sorted(expected.keys() - tensors.keys() - {"d2t", "t2d"}):
        consequence = ": nothing drafted would be accepted" if name == "lm_head.weight" else ""
        problems.append(f"{name} is missing: SGLang would serve it at its random initial value{consequence}")
    for name in sorted(tensors.keys() - expected.keys() - {"embed_tokens.weight"}):
        problems.append(f"{name} is unknown: SGLang would skip it without a word")
    for name in sorted(expected.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            problems.append(
                f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}: SGLang would not start"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite: every drafted token would be garbage")
        elif tensor.is_floating_point() and (
            why := why_untrained(tensor, is_random, 1 + _reads_embeddings(name, tensor, config))
        ):
            untrained[name] = why
    steps = files.values.get("trained_steps") or 0  # our own exports say it
    # A short training may leave a norm that begins at 1 there (bfloat16 is coarse), but not all of them.
    own = {name for name in expected if name.startswith("fc_norm.") or name.endswith("input_layernorm.weight")}
    at_one = {name for name in untrained if tensors[name].dim() == 1}
    is_short = not own <= at_one or len(at_one) == 1
    # At small rates some matrices drawn at random look so after a thousand steps, but never all of them.
    drawn = {name for name, shape in expected.items() if len(shape) == 2 and name != "lm_head.weight"}
    moved = not drawn <= untrained.keys()
    for name, why in untrained.items():
        slow = 0 < steps < _FEW_STEPS or (steps > 0 and moved and tensors[name].dim() == 2)
        if slow and why != _CONSTANT:
            review.notes.append(f"{name} {why}: {steps} optimiser steps changed it too little to tell")
        elif name in own and is_short:
            review.notes.append(f"{name} {why}: it was never trained or never loaded, or for a few steps only")
        else:
            problems.append(f"{name} {why}: it was never trained or never loaded")
    if "embed_tokens.weight" in tensors:
        review.notes.append("embed_tokens.weight is not used: SGLang shares the target's embeddings")


def _is_random(target: Target) -> bool:
    """Whether the target itself was never trained (a test's); its draft may look so too. No weights here: it was."""
    return any(target.path.glob("*.safetensors")) and bool((load_final_norm(target) + target.norm_offset == 1).all())


def _reads_embeddings(name: str, tensor: torch.Tensor, config: DraftConfig) -> bool:
    """Whether a weight takes the attention's input, [embedding, hidden state] side by side."""
    return ".self_attn." in name and tensor.dim() == 2 and tensor.shape[1] == 2 * config.hidden_size


def why_untrained(tensor: torch.Tensor, may_be_random: bool = False, num_parts: int = 1) -> str | None:
    """How a weight shows that it still has its initial value; None when it does not.

    A vector is a norm's weight, which begins at 1. A matrix begins constant or as independent random numbers, normal or
    uniform: then its largest singular value lies at the edge s·(√rows + √columns) of the Marchenko–Pastur law, s being
    the numbers' deviation, and their kurtosis is 3 at the most. Training adds directions of its own, far above that
    edge after a few optimiser steps; where long training made them all alike again, as in a value projection, rows and
    columns differ in size, which raises the kurtosis.
    ``may_be_random``: the target itself is, so only a constant matrix counts. ``num_parts``: matrices side by side in
    this one, which is noise when all of them are.
    """
    if tensor.dim() == 1:
        return "is 1 everywhere" if bool((tensor == 1).all()) and not may_be_random else None
    blocks = [part[:_BLOCK, :_BLOCK].float() for part in tensor.chunk(num_parts, dim=1)]
    if any(float(block.std()) == 0.0 for block in blocks):
        return _CONSTANT
    return "is random noise" if not may_be_random and all(map(_is_noise, blocks)) else None


def _is_noise(block: torch.Tensor) -> bool:
    deviation = float(block.std())
    edge = deviation * (block.shape[0] ** 0.5 + block.shape[1] ** 0.5)
    with one_torch_thread():  # a hundred milliseconds; the threads of a busy machine with many cores make it seconds
        largest = float(torch.linalg.matrix_norm(block, 2))
    kurtosis = float(((block - block.mean()) / deviation).pow(4).mean())
    most_kurtosis = 3 + _SCATTERS * (24 / block.numel()) ** 0.5
    return largest < _EDGE_MARGIN * edge and kurtosis < most_kurtosis


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
        return [f"d2t maps outside the vocabulary (ids {int(ids.min())} to {int(ids.max())}): SGLang would crash"]
    return ["d2t and t2d do not say the same: drafted ids would be mapped to other tokens than those trained"]
