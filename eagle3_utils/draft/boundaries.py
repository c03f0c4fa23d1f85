"""Which layers a served target captures for a draft: asked from the target's own class in the installed SGLang.

`eagle_aux_hidden_state_layer_ids` means different boundaries to different classes (most add 1, DeepSeek only if the
first id is 1). The class's own `set_eagle3_layers_to_capture` is read from SGLang's source and called on a stand-in,
so nobody has to import SGLang's model files (minutes on a CPU) or keep a table in step with them.

A boundary b is what enters decoder layer b: the output of layer b - 1.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3_utils.errors import UserError
from eagle3_utils.target import Target

_SETTER = "set_eagle3_layers_to_capture"


def captured_boundaries(target: Target, layer_ids: list[int] | None) -> list[int]:
    """The boundaries the served target captures when a draft's config names `layer_ids` (None: no ids), ascending.

    Raises `UserError` when the ids are no list of whole numbers, SGLang is not installed or the target's class has no
    EAGLE-3 capture.
    """
    if not (layer_ids is None or are_layer_ids(layer_ids)):
        raise UserError(f"layer ids {layer_ids!r} are no list of whole numbers", str(target.path))
    stand_in = _StandIn(target)
    setter = _setter_of(target.architecture)
    if setter is None:
        raise UserError(f"{target.architecture} has no EAGLE-3 capture in the installed SGLang", str(target.path))
    setter(stand_in, None if layer_ids is None else list(layer_ids))
    return sorted(stand_in.captured)


def are_layer_ids(value: Any) -> bool:
    """Whether a value of some config.json is what SGLang can take for layer ids."""
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


def states_given(target: Target, aux_layers: list[int]) -> list[int]:
    """Those of `aux_layers` whose outputs SGLang hands a draft, each once, ascending.

    A model file looks at every layer what enters it, so the last layer's output is handed out by no class but Gemma's.
    Source: the uses of `layers_to_capture` in sglang/srt/models/*.py.
    """
    last = target.num_layers - (1 if target.architecture.startswith("Gemma") else 2)
    return sorted({layer for layer in aux_layers if 0 <= layer <= last})


def layer_ids_for(target: Target, aux_layers: list[int]) -> list[int]:
    """The ids to write so that the target's class captures the outputs of `aux_layers` (0-based).

    Raises `UserError` when no numbering gives those boundaries.
    """
    wanted = [layer + 1 for layer in aux_layers]
    for ids in (list(aux_layers), wanted):
        if captured_boundaries(target, ids) == sorted(wanted):
            return ids
    raise UserError(
        f"{target.architecture} in the installed SGLang cannot capture boundaries {wanted} by any layer ids",
        fix="choose other aux_layers and extract again",
    )


def require_servable(target: Target, aux_layers: list[int]) -> list[int] | None:
    """The layer ids of a draft for the outputs of `aux_layers`; None where no SGLang is installed that could say them.

    Raises `UserError` when SGLang could not serve such a draft: better before states are extracted than after.
    """
    if importlib.util.find_spec("sglang") is None:
        return None
    ids, given = layer_ids_for(target, aux_layers), states_given(target, aux_layers)
    if given != sorted(aux_layers) or len(given) < 2:
        raise UserError(
            f"of layers {aux_layers} SGLang hands a draft {given}: it takes two or more, never the last layer",
            "aux_layers", "choose other aux_layers",
        )  # fmt: skip
    return ids


def aux_layers_of(target: Target, layer_ids: list[int] | None) -> list[int]:
    """The inverse: outputs of which layers (0-based) a served draft with these ids is given; None: SGLang's default."""
    return [boundary - 1 for boundary in captured_boundaries(target, layer_ids)]


class _StandIn:
    """Answers like a loaded target model as far as the setter looks, and keeps what it is told to capture."""

    def __init__(self, target: Target):
        text = SimpleNamespace(num_hidden_layers=target.num_layers)
        self.__dict__.update(
            captured=[], pp_group=SimpleNamespace(is_last_rank=True),
            config=SimpleNamespace(num_hidden_layers=target.num_layers, text_config=text),
            layers=[SimpleNamespace() for _ in range(target.num_layers)], _target=target,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            return self  # the inner model: what is set on it counts
        if name == "language_model":  # a multi-modal target hands the ids to its text model's class
            return _TextModel(self)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "layers_to_capture":
            self.captured[:] = value

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.captured[:] = layers


class _TextModel:
    def __init__(self, outer: _StandIn):
        self.__dict__["outer"] = outer

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.outer, name, value)

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        architecture = (self.outer._target.text_config.get("architectures") or ["?"])[0]
        setter = _setter_of(architecture)
        if setter is None:
            raise UserError(f"text model {architecture} has no EAGLE-3 capture in the installed SGLang")
        setter(self.outer, layer_ids)


@cache
def _model_files() -> dict[str, str]:
    """SGLang's model files, name to source; nothing is imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise UserError("SGLang is not installed here, so the layer ids cannot be asked from it", fix="make setup")
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    return {file.name: file.read_text(encoding="utf-8-sig") for file in sorted(folder.glob("*.py"))}


def _class_named(name: str) -> ast.ClassDef | None:
    for source in _model_files().values():
        if re.search(rf"^class {re.escape(name)}\b", source, re.MULTILINE):
            return next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    return None


@cache
def _setter_of(name: str) -> Callable[[Any, list[int]], None] | None:
    """The class's own setter, or that of the nearest base; None when there is none."""
    class_node = _class_named(name)
    if class_node is None:
        return None
    for node in class_node.body:
        if isinstance(node, ast.FunctionDef) and node.name == _SETTER:
            node.returns, node.decorator_list = None, []
            for argument in node.args.args:
                argument.annotation = None
            module = ast.fix_missing_locations(ast.Module([node], type_ignores=[]))
            namespace: dict[str, Any] = {"get_pp_group": lambda: SimpleNamespace(is_last_rank=True)}
            exec(compile(module, f"<sglang {name}>", "exec"), namespace)
            return namespace[_SETTER]
    bases = (base.id for base in class_node.bases if isinstance(base, ast.Name))
    return next((setter for base in bases if (setter := _setter_of(base)) is not None), None)
