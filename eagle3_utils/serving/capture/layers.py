"""Which hidden states a model hands out: boundaries switched on by value, whatever its class does to layer ids.

Boundary b is what enters decoder layer b: hidden + residual, the output of layer b - 1. Boundary 0 is the embedding,
boundary n (of n layers) enters the final norm. SGLang's own EAGLE-3 capture is used where the class has it: it knows
about the class's tensor-parallel and data-parallel layouts. Ids are read back and set right, because Llama-like classes
add 1 to them and DeepSeek-like ones only when the first is 1 (sglang/srt/models/*.py, `set_eagle3_layers_to_capture`).
"""

import inspect

import torch
from torch import nn

_SETTER = "set_eagle3_layers_to_capture"


class UnsupportedModel(RuntimeError):
    """The boundaries cannot be captured from this model."""


def decoder_of(model: nn.Module, num_layers: int) -> nn.Module:
    """The module that holds the decoder layers (`.layers`, as many as the config says) and the final `.norm`."""
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and len(module.layers) == num_layers
        and isinstance(getattr(module, "norm", None), nn.Module)
    ]
    if len(found) != 1:
        raise UnsupportedModel(f"{type(model).__name__}: {len(found)} modules with {num_layers} layers and a norm")
    return found[0]


def switch_on(model: nn.Module, boundaries: list[int]) -> bool:
    """Make SGLang's own capture give exactly `boundaries`. False when the class has none, or not for these.

    Raises `UnsupportedModel` when the class has capture but keeps its ids where they cannot be checked.
    """
    if not hasattr(model, _SETTER) or not boundaries:
        return False
    # Any valid ids do: they flip the class's flags, and the boundaries are corrected below.
    getattr(model, _SETTER)([max(0, boundary - 1) for boundary in boundaries])
    holders = [module for module in model.modules() if getattr(module, "layers_to_capture", None)]
    if len(holders) != 1:
        raise UnsupportedModel(f"{type(model).__name__}: {len(holders)} modules keep ids of layers to capture, not 1")
    holder = holders[0]
    flagged = [layer for layer in holder.layers if getattr(layer, "_is_layer_to_capture", False)]
    for layer in flagged:
        layer._is_layer_to_capture = False
    holder.layers_to_capture = list(boundaries)
    if flagged:
        for boundary in boundaries:
            holder.layers[boundary]._is_layer_to_capture = True
    return True


def switched_on(model: nn.Module) -> list[int]:
    """The boundaries a model's own capture will hand out, read back from where its forward looks."""
    for module in model.modules():
        if getattr(module, "layers_to_capture", None):
            flags = [i for i, layer in enumerate(module.layers) if getattr(layer, "_is_layer_to_capture", False)]
            return flags or sorted(module.layers_to_capture)
    return []


class BoundaryTap:
    """Takes boundaries from the arguments of decoder layers and final norm, during one forward.

    For models without SGLang's capture, for boundaries it never gives (0 and n), and for dumps of every boundary.
    """

    def __init__(self, model: nn.Module, num_layers: int, boundaries: list[int]):
        decoder = decoder_of(model, num_layers)
        self.boundaries = sorted(boundaries)
        self._modules = {b: decoder.norm if b == num_layers else decoder.layers[b] for b in self.boundaries}
        strange = [b for b, module in self._modules.items() if b < num_layers and not _names_its_input(module)]
        if strange:
            raise UnsupportedModel(f"{type(model).__name__}: layers {strange} do not name their input hidden_states")
        self._handles: list = []
        self._taken: dict[int, torch.Tensor] = {}

    def attach(self) -> None:
        """Listen to the next forward. Nothing hangs on the model before or after it."""
        self.detach()
        for boundary, module in self._modules.items():
            hook = module.register_forward_pre_hook(self._taker(boundary), with_kwargs=True)
            self._handles.append(hook)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._taken.clear()

    def take(self, num_rows: int) -> list[torch.Tensor]:
        """The tensors of the forward just run, [num_rows, H] each, in order of boundary; then detach.

        Raises `UnsupportedModel` when a layer did not run or holds other rows than the batch has.
        """
        taken = dict(self._taken)
        self.detach()
        missing = [b for b in self.boundaries if b not in taken or taken[b].shape[0] != num_rows]
        if missing:
            raise UnsupportedModel(f"boundaries {missing} are not there in full (scattered or fused layers?)")
        return [taken[boundary] for boundary in self.boundaries]

    def _taker(self, boundary: int):
        def take(module: nn.Module, args: tuple, kwargs: dict) -> None:
            hidden, residual = _hidden_and_residual(module, args, kwargs)
            if getattr(hidden, "_sglang_needs_allreduce_fusion", False):
                return  # not summed over ranks yet: `take` will say that it is missing
            self._taken[boundary] = hidden.clone() if residual is None else hidden + residual

        return take


def _names_its_input(layer: nn.Module) -> bool:
    return "hidden_states" in inspect.signature(layer.forward).parameters


def _hidden_and_residual(module: nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer names its arguments; a norm takes (x, residual) under names that vary."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    if "hidden_states" in bound:
        return bound["hidden_states"], bound.get("residual")
    return (*args, *kwargs.values(), None)[:2]
