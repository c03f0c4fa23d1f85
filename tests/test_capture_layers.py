"""Boundaries of a model: switched on by value in its own capture, or tapped at its layers."""

from __future__ import annotations

import json

import pytest
import torch
from capture_fakes import DeepseekLike, FakeDecoder, FlaggedLike, H, LlamaLike
from torch import nn

from eagle3_utils.serving.capture.layers import BoundaryTap, UnsupportedModel, switch_on, switched_on
from eagle3_utils.serving.capture.recorder import boundaries_json


@pytest.mark.parametrize("kind", [LlamaLike, DeepseekLike, FlaggedLike])
@pytest.mark.parametrize("boundaries", [[2, 3, 5], [1, 4], [3], [1, 2, 3, 4, 5]])
def test_boundaries_are_switched_on_by_value_whatever_the_class_adds(kind, boundaries):
    model = kind()
    assert switch_on(model, boundaries)
    assert switched_on(model) == boundaries
    if kind is not FlaggedLike:
        _, captured = model.model(torch.zeros(4, H))
        assert [int(tensor[0, 0]) for tensor in captured] == boundaries


def test_a_model_without_capture_says_so():
    assert not switch_on(FakeDecoder(), [2])


def test_the_tap_takes_every_boundary_from_embedding_to_norm():
    decoder = FakeDecoder()
    tap = BoundaryTap(decoder, 6, list(range(7)))
    tap.attach()
    decoder(torch.zeros(4, H))
    taken = tap.take(4)
    assert [int(tensor[0, 0]) for tensor in taken] == [0, 1, 2, 3, 4, 5, 6]
    assert not any(module._forward_pre_hooks for module in decoder.modules())


def test_the_tap_refuses_rows_that_are_not_all_there():
    decoder = FakeDecoder()
    tap = BoundaryTap(decoder, 6, [2, 6])
    tap.attach()
    decoder(torch.zeros(4, H))
    with pytest.raises(UnsupportedModel, match=r"\[2, 6\] are not there in full"):
        tap.take(8)


def test_metadata_names_layers_and_boundaries():
    assert json.loads(boundaries_json([2, 15, 27])["layers"]) == [1, 14, 26]


def test_a_model_whose_layers_cannot_be_found_is_refused():
    with pytest.raises(UnsupportedModel, match="0 modules with 7 layers and a norm"):
        BoundaryTap(FakeDecoder(), 7, [2])


def test_layers_that_do_not_name_their_input_are_refused_at_the_start():
    decoder = FakeDecoder()
    decoder.layers[3] = nn.Identity()  # takes `input`, which could be anything
    with pytest.raises(UnsupportedModel, match=r"layers \[3\] do not name their input"):
        BoundaryTap(decoder, 6, [2, 3, 6])


def test_a_tapped_layer_without_a_residual_gives_its_input_as_it_was():
    class Plain(nn.Module):
        def forward(self, positions, hidden_states):
            return hidden_states.add_(1)

    decoder = FakeDecoder()
    decoder.layers = nn.ModuleList(Plain() for _ in range(6))
    tap = BoundaryTap(decoder, 6, [1, 2, 5])
    tap.attach()
    hidden = torch.zeros(3, H)
    for layer in decoder.layers:
        hidden = layer(None, hidden)
    assert [int(tensor[0, 0]) for tensor in tap.take(3)] == [1, 2, 5]


def test_a_sum_that_is_still_spread_over_ranks_is_not_taken():
    decoder = FakeDecoder()
    tap = BoundaryTap(decoder, 6, [2])
    tap.attach()
    partial = torch.zeros(4, H)
    partial._sglang_needs_allreduce_fusion = True
    decoder.layers[2](None, partial, None, torch.zeros(4, H))
    with pytest.raises(UnsupportedModel, match="not there in full"):
        tap.take(4)
