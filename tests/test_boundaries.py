"""Layer ids, asked from the classes of the installed SGLang."""

from types import SimpleNamespace

import pytest

from eagle3_utils.draft.boundaries import (
    aux_layers_of,
    captured_boundaries,
    layer_ids_for,
    require_servable,
    states_given,
)
from eagle3_utils.errors import UserError


def fake_target(architecture, text=None, num_layers=61):
    return SimpleNamespace(architecture=architecture, text_config={"architectures": [text]}, num_layers=num_layers,
                           path="x")  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "text", "layers", "ids"),
    [
        ("LlamaForCausalLM", None, [1, 29, 57], [1, 29, 57]),
        ("Qwen3MoeForCausalLM", None, [2, 30, 58], [2, 30, 58]),
        ("DeepseekV3ForCausalLM", None, [1, 29, 57], [1, 29, 57]),  # first id 1: the class adds 1
        ("DeepseekV3ForCausalLM", None, [2, 30, 58], [3, 31, 59]),  # else it takes ids as boundaries
        ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", [2, 30, 58], [3, 31, 59]),
        ("MistralForCausalLM", None, [1, 2, 3], [1, 2, 3]),  # inherits Llama's
    ],
)
def test_layer_ids_make_the_targets_class_capture_the_trained_layers(architecture, text, layers, ids):
    target = fake_target(architecture, text)
    assert layer_ids_for(target, layers) == ids
    assert captured_boundaries(target, ids) == [layer + 1 for layer in layers]
    assert aux_layers_of(target, ids) == layers


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_no_ids_at_all_mean_the_class_own_default(architecture):
    assert captured_boundaries(fake_target(architecture), None) == [2, 30, 58]


def test_layers_that_no_draft_could_be_served_with_are_refused():
    target = fake_target("DeepseekV3ForCausalLM")
    assert require_servable(target, [2, 30, 58]) == [3, 31, 59]
    for layers in ([2, 30, 60], [30]):
        with pytest.raises(UserError, match="two or more, never the last layer"):
            require_servable(target, layers)
    with pytest.raises(UserError, match="no EAGLE-3 capture"):
        require_servable(fake_target("GPT2LMHeadModel"), [2, 5, 8])


def test_a_draft_is_given_no_layer_twice_and_the_last_one_by_gemma_alone():
    assert states_given(fake_target("LlamaForCausalLM"), [-1, 2, 2, 59, 60, 61]) == [2, 59]
    assert states_given(fake_target("Gemma3ForCausalLM"), [2, 60, 61]) == [2, 60]


def test_target_without_capture_is_refused():
    with pytest.raises(UserError, match="no EAGLE-3 capture"):
        layer_ids_for(fake_target("MixtralForCausalLM"), [1, 2, 3])
