"""Draft folders as others write them, told apart and put into SGLang's own names: for one check, and one warm start.

- sglang: what `export.py` writes; SpecForge and the re-uploads of EAGLE drafts for SGLang have the same tensors, but
  often leave `eagle_config` out.
- eagle: SafeAILab's EAGLE-3 checkpoints: the same tensors under `"architectures": ["LlamaForCausalLM"]`.
- speculators: vLLM's: the layer's shape nested in `transformer_layer_config`, tensors under `layers.0.`, the layer ids
  counted as vLLM counts them (what *enters* a layer), and two norms that SGLang's class does not have.
- eagle1: an EAGLE-1 or -2 draft, which another SGLang algorithm serves.

Sources: sglang/srt/models/llama_eagle3.py; the config classes of speculators and SpecForge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3_utils.draft.boundaries import are_layer_ids, layer_ids_for
from eagle3_utils.draft.export import (
    ARCHITECTURES,
    LAYER_IDS,
    draft_config_of,
    load_tensors,
    read_any_config,
    with_vocab,
)
from eagle3_utils.draft.network import DraftConfig
from eagle3_utils.errors import UserError
from eagle3_utils.target import Target

LLAMA = ARCHITECTURES["llama"]
_RENAMED = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclass
class DraftFiles:
    """A draft folder's config and tensors in SGLang's names.

    `problems` are what the layout itself would do in SGLang, `notes` what it means; `boundaries` are the layer ids of
    a layout that counts them as what enters a layer, None where `eagle_config` says them in SGLang's way. `unlike` is
    a problem for which nobody can go on training it: the weights are another network's, or of unknown layers.
    """

    layout: str
    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    boundaries: list[int] | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unlike: str | None = None

    def found_unlike(self, problem: str) -> None:
        """A problem for which nobody can go on training it either."""
        self.unlike = problem
        self.problems.append(problem)

    def ids_for(self, target: Target) -> list[int]:
        """`boundaries` as the layer ids by which this target's class captures the same states."""
        return layer_ids_for(target, [boundary - 1 for boundary in self.boundaries])


def read_draft_files(folder: Path) -> DraftFiles:
    """Read and recognise a draft folder. Raises `UserError` when it is damaged, or no EAGLE draft of a known layout."""
    folder = Path(folder)
    values, tensors = read_any_config(folder), _load_tensors(folder)
    names = {_sglang_name(name) for name in tensors}
    if "transformer_layer_config" in values or "speculators_model_type" in values:
        return _speculators(values, tensors)
    architecture = (values.get("architectures") or ["?"])[0]
    if architecture in ARCHITECTURES.values():
        return _sglang(values, tensors)
    if {"fc.weight", "midlayer.hidden_norm.weight"} <= names:
        problem = f"architecture {architecture} would be built as a whole model: write {LLAMA} into config.json"
        found = _sglang({**values, "architectures": [LLAMA]}, tensors)
        found.layout, found.problems = "eagle (SafeAILab's EAGLE-3)", [problem, *found.problems]
        return found
    if "fc.weight" in names and "lm_head.weight" not in names:
        problem = "an EAGLE-1/2 draft (it has no lm_head of its own): serve it with --speculative-algorithm EAGLE"
        return DraftFiles("eagle1 (EAGLE-1/2)", values, tensors, problems=[problem], unlike=problem)
    known = " or ".join(ARCHITECTURES.values())
    raise UserError(f"architecture {architecture} is not {known}", str(folder / "config.json"))


def draft_to_train(folder: Path, target: Target) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Shape and weights (with their own d2t, t2d) of a folder of any layout, to go on training from.

    Raises `UserError` where `read_draft_files` does, without weights, and for what `DraftFiles.unlike` says.
    """
    files = read_draft_files(folder)
    if files.unlike:
        raise UserError(files.unlike, str(folder), "begin with a new draft (init_from: null)")
    if not files.tensors:
        raise UserError("no *.safetensors and no *.bin: no weights to go on from", str(folder))
    values = files.values
    if files.boundaries is not None:
        values = values | {"eagle_config": {LAYER_IDS: files.ids_for(target)}}
    shape = draft_config_of(values, target)
    return shape, with_vocab(files.tensors, shape, folder)


def _sglang(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> DraftFiles:
    ours = "num_aux_hidden_states" in values
    found = DraftFiles("sglang" if ours else "sglang (SpecForge or alike)", values, _renamed(tensors))
    if not isinstance(values.get("eagle_config", {}), dict):
        found.found_unlike(f"eagle_config is {values['eagle_config']!r}, no object: SGLang would not start")
        found.values = values | {"eagle_config": {}}
    elif not ours and values.get("eagle_config", {}).get(LAYER_IDS) is None:
        found.notes.append(f"no eagle_config.{LAYER_IDS}: SGLang captures its default layers, as SpecForge trains on")
    return found


def _speculators(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> DraftFiles:
    flat = {key: value for key, value in values.items() if key != "transformer_layer_config"}
    flat = {**values.get("transformer_layer_config", {}), **flat, "architectures": [LLAMA]}
    flat["tie_word_embeddings"] = False
    found = DraftFiles("speculators (vLLM's)", flat, _renamed(tensors), boundaries=values.get(LAYER_IDS))
    found.problems.append(
        "the layer's shape is nested in transformer_layer_config: SGLang does not read it and would not start; "
        f"flatten it and write architecture {LLAMA}"
    )
    if values.get("norm_before_residual", True):
        found.found_unlike(
            "norm_before_residual: the residual is the normed state, SGLang's class adds the raw one: acceptance would "
            "collapse; it must be trained again without it"
        )
    if values.get("norm_before_fc"):
        found.found_unlike("norm_before_fc: one norm over all auxiliary states, which SGLang's class does not have")
    if not (found.boundaries is None or are_layer_ids(found.boundaries)):
        found.found_unlike(f"{LAYER_IDS} {found.boundaries!r} are no list of whole numbers: nothing could serve it")
        found.boundaries = None
    elif found.boundaries is None:
        found.notes.append(f"no {LAYER_IDS}: vLLM and SGLang both capture what enters layers 2, n/2 and n-3")
    return found


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {_sglang_name(name): tensor for name, tensor in tensors.items()}


def _sglang_name(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name.removeprefix("model.")


def _load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of *.safetensors, else of *.bin."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_tensors(path)
    if not tensors:
        for path in sorted(folder.glob("*.bin")):
            tensors |= load_tensors(path)
    return tensors
