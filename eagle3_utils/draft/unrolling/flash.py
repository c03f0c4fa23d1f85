"""A row's attention over step-0 keys and its own later keys, by FlashAttention kernels.

The kernel's backward pass wants nothing of its forward pass but the output and the log-sum-exp. So the forward pass
here attends to the step-0 keys, merges the own keys in, and keeps the *merged* output and log-sum-exp; given those,
the kernel's backward pass returns the step-0 keys' part of the exact gradient of one softmax over both, and a few dot
products per row return the rest.

The kernel knows causal sequences, not rows picked here and there. So each document's rows are laid into a span from
its first to its last row, which ends where its keys end. Places without a row have a zero query and a log-sum-exp of
+inf in the backward pass: no weight and no gradient. Of a plan's parts, each attends only to keys up to its last row.
Where step-0 keys and values are leaves (groups.py), their gradients are added in place.

T slots · N rows of the plan · n of them at a step · P places in spans · A query heads · K key-value heads · E width.
Source: FlashAttention-2 (arXiv 2307.08691), sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch

from eagle3_utils.devices import to_device
from eagle3_utils.draft.modules.fused import row_gradient
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.unrolling import kernels
from eagle3_utils.draft.unrolling.attention import Attention, eager_attention, flex_attention_of
from eagle3_utils.draft.unrolling.own_keys import merge_own, own_gradients
from eagle3_utils.draft.unrolling.plan import UnrollPlan

_SHORT_TAIL = 64  # a span is drawn out to its document's end over this many slots, so that keys need no gathering
_MOST_WIDTH = 256


@dataclass
class SpanLayout(kernels.Spans):
    """places int64 [N]: where in the spans each row lies. rows int64 [P]: the row at each place, any if there is none.

    keys: the slots whose keys the documents see, laid end to end; a slice where they are neighbours.
    """

    places: torch.Tensor
    rows: torch.Tensor
    keys: slice | torch.Tensor

    def to(self, device: torch.device | str) -> SpanLayout:
        """The same layout on a device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return SpanLayout(
            **{name: to_device(value, device) if torch.is_tensor(value) else value for name, value in values.items()}
        )


def span_layout(plan: UnrollPlan) -> SpanLayout:
    """The layout of a plan's rows; the plan on the CPU, with at least one row."""
    slots, start = plan.rows.numpy(), plan.document_start.numpy()
    in_order = np.sort(slots)
    documents, firsts, counts = np.unique(start[in_order], return_index=True, return_counts=True)  # by first slot
    lowest, end = in_order[firsts], in_order[firsts + counts - 1] + 1
    document_end = np.searchsorted(start, documents, side="right")
    end = np.where(document_end - end <= _SHORT_TAIL, document_end, end)
    spans, num_keys = end - lowest, end - documents
    query_bounds, key_bounds = (np.concatenate([[0], lengths.cumsum()]) for lengths in (spans, num_keys))
    document = np.searchsorted(documents, start[slots])
    places = slots - lowest[document] + query_bounds[document]
    rows = np.zeros(query_bounds[-1], np.int64)
    rows[places] = np.arange(len(places))
    if np.array_equal(documents[1:], end[:-1]):
        keys = slice(int(documents[0]), int(end[-1]))
    else:
        keys = torch.from_numpy(np.concatenate([np.arange(*ends) for ends in zip(documents, end, strict=True)]))
    bounds = (torch.from_numpy(each.astype(np.int32)) for each in (query_bounds, key_bounds))
    longest = int(spans.max()), int(num_keys.max())
    return SpanLayout(*bounds, *longest, torch.from_numpy(places), torch.from_numpy(rows), keys)


def attention_for(model: DraftModel) -> Callable[[UnrollPlan], Attention]:
    """What makes the attention of a plan (on the CPU) for a model where it is: on CUDA the flash kernels, or flex
    attention for what those do not take (float32, values wider than keys); elsewhere plain products."""
    attention, device, dtype = model.midlayer.self_attn, model.fc.weight.device, model.fc.weight.dtype
    if device.type != "cuda":
        return eager_attention
    if attention.value_width <= attention.key_width and has_flash(device, dtype, attention.key_width):
        return lambda plan: flash_attention(plan, device)
    return lambda plan: flex_attention_of(plan.to(device))


def has_flash(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels take heads of such a width there."""
    return (
        device.type == "cuda"
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and width <= _MOST_WIDTH
        and width % 8 == 0
    )


def flash_attention(plan: UnrollPlan, device: torch.device | str) -> Attention:
    """Attention for the rows of a plan (on the CPU) on a device that `has_flash`."""
    if len(plan.rows) == 0:
        return lambda query, *rest: query
    layout = span_layout(plan).to(device)

    def attend(query, keys, values, own_keys, own_values, scale):
        return _MergedAttention.apply(query, keys, values, layout, scale, *own_keys, *own_values)

    return attend


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, keys, values, layout, scale, *own):
        places, rows = _places(layout, len(query))
        seen = keys[layout.keys], values[layout.keys]
        by_place = kernels.forward(query.index_select(0, rows), *seen, layout, scale)
        if own:
            attended, lse = merge_own(*by_place, places, query, *_stacked(own), scale)
        else:
            attended, lse = (part.index_select(0, places) for part in by_place)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(query, keys, values, attended, lse, *own)
        return attended

    @staticmethod
    def backward(ctx, upstream):
        query, keys, values, attended, lse, *own = ctx.saved_tensors
        layout, scale = ctx.layout, ctx.scale
        (places, rows), upstream = _places(layout, len(query)), upstream.contiguous()
        laid_out = (tensor.index_select(0, rows) for tensor in (upstream, query, attended))
        weightless = lse.new_full((len(rows), lse.shape[1]), float("inf")).index_copy_(0, places, lse)
        by_place, *by_seen = kernels.backward(
            *laid_out, keys[layout.keys], values[layout.keys], weightless, layout, scale
        )
        by_keys, by_values = (
            row_gradient(whole, layout.keys, part) for whole, part in zip((keys, values), by_seen, strict=True)
        )
        if not own:
            return by_place.index_select(0, places), by_keys, by_values, None, None
        by_query, by_own_keys, by_own_values = own_gradients(
            upstream, attended, lse, query, *_stacked(own), scale, by_place, places
        )
        by_own = (*by_own_keys.unbind(1), *by_own_values.unbind(1))
        return by_query, by_keys, by_values, None, None, *by_own


def _places(layout: SpanLayout, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the first rows lie [n], and which of them to lay at each place [P].

    A place without a row gets another's query, and has no weight in the backward pass (its log-sum-exp is infinite).
    """
    return layout.places[:num_rows], layout.rows.clamp(max=num_rows - 1)


def _stacked(own: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of i steps, then values of i steps -> [n, i, K, width] of each."""
    half = len(own) // 2
    return torch.stack(own[:half], 1), torch.stack(own[half:], 1)
