"""The strict check names each fault that SGLang would serve without a word."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from draft_folders import LAYERS
from safetensors.torch import load_file, save_file

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft import check
from eagle3_utils.draft.check import check_draft, review_draft, why_untrained
from eagle3_utils.draft.export import export_draft
from eagle3_utils.draft.training.build import new_draft
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.runner import notebook_path
from eagle3_utils.target import load_target

pytest_plugins = ["draft_folders"]  # fixtures
pytestmark = pytest.mark.usefixtures("trained_target")


def edit(folder, tensors=None, config=None):
    """Change an exported draft in place: functions on the dict of tensors and on the config."""
    if tensors:
        loaded = load_file(folder / "model.safetensors")
        tensors(loaded)
        save_file(loaded, folder / "model.safetensors")
    if config:
        values = json.loads((folder / "config.json").read_text())
        config(values)
        (folder / "config.json").write_text(json.dumps(values))


FAULTS = {
    "lm_head dropped": (lambda t: t.pop("lm_head.weight"), None, "lm_head.weight is missing"),
    "unknown tensor": (lambda t: t.update(extra=torch.ones(1)), None, "extra is unknown"),
    "d2t absolute": (lambda t: t.update(d2t=t["d2t"] + torch.arange(256)), None, "target ids, not offsets"),
    "d2t out of range": (lambda t: t["d2t"].add_(10**6), None, "outside the vocabulary"),
    "d2t not injective": (lambda t: t["d2t"].sub_(torch.arange(256)), None, "do not say the same"),
    "not finite": (lambda t: t["fc.weight"].fill_(float("nan")), None, "fc.weight holds values that are not finite"),
    "constant": (lambda t: t["fc.weight"].zero_(), None, "fc.weight is constant"),
    "noise": (lambda t: t["fc.weight"].normal_(std=0.3), None, "fc.weight is random noise: it was never trained"),
    "ones": (lambda t: t["midlayer.hidden_norm.weight"].fill_(1), None, "midlayer.hidden_norm.weight is 1 everywhere"),
    "wrong shape": (lambda t: t.update({"fc.weight": torch.ones(64, 64)}), None, "fc.weight has shape [64, 64]"),
    "no eagle_config": (None, lambda c: c.pop("eagle_config"), "SGLang would capture its default layers [1, 2, 2]"),
    "no draft vocabulary": (None, lambda c: c.pop("draft_vocab_size"), "no draft_vocab_size"),
    "short context": (None, lambda c: c.update(max_position_embeddings=512), "acceptance falls on longer contexts"),
    "other RoPE": (None, lambda c: c["rope_parameters"].update(rope_theta=5e5), "'rope_theta': 500000.0"),
    "other layers": (
        None,
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        "capture the outputs of layers [2, 3, 4]; the draft was trained on [1, 2, 4]",
    ),
    "no capture": (
        None,
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "would feed final states",
    ),
    "fewer ids than fc takes": (
        None,
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2]),
        "of which a draft is given [1, 2]: 2 where fc takes 3; SGLang would stop at the first request",
    ),
    "RoPE scaled beside": (None, lambda c: c.update(rope_scaling={"type": "linear", "factor": 2}), "'factor': 2.0"),
    "gelu": (None, lambda c: c.update(hidden_act="gelu"), "hidden_act is gelu"),
    "biases": (None, lambda c: c.update(attention_bias=True), "attention_bias is true: SGLang would add biases"),
    "two layers": (None, lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2, not 1"),
    "other epsilon": (None, lambda c: c.update(rms_norm_eps=0.01), "rms_norm_eps is 0.01, the draft was trained with"),
    "other output": (None, lambda c: c.update(norm_output=not c["norm_output"]), "norm_output is "),
    "tied": (None, lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(fault, exported, target):
    tensors, config, message = FAULTS[fault]
    edit(exported, tensors, config)
    problems = check_draft(exported, target, LAYERS)
    assert len(problems) == 1 and message in problems[0]


def test_a_draft_that_was_never_trained_is_found_out(draft, target, tmp_path, monkeypatch):
    config = TrainConfig(draft_vocab_size=256, init="random")
    fresh = export_draft(new_draft(config, target, LAYERS, vocab_of(draft)), target, tmp_path / "fresh")
    problems = check_draft(fresh, target, LAYERS)
    assert "fc.weight is random noise: it was never trained or never loaded" in problems
    monkeypatch.setattr("eagle3_utils.draft.check.load_final_norm", lambda target: torch.ones(64))
    assert check_draft(fresh, target, LAYERS) == []  # a random target's draft cannot be told from an untrained one


def test_a_norm_that_did_not_move_is_a_note_and_all_that_began_at_1_are_problems(exported, target):
    """A few steps of training may be too small for bfloat16's grid around 1."""
    edit(exported, lambda t: t["midlayer.input_layernorm.weight"].fill_(1))
    review = review_draft(exported, target, LAYERS)
    assert review.problems == []
    assert "midlayer.input_layernorm.weight is 1 everywhere" in review.notes[-1] and "few steps" in review.notes[-1]
    edit(exported, lambda t: [t[f"fc_norm.{index}.weight"].fill_(1) for index in range(3)])
    problems = check_draft(exported, target, LAYERS)
    assert len(problems) == 4 and all("is 1 everywhere: it was never trained" in line for line in problems)


def test_a_short_training_of_our_own_leaves_notes_and_none_or_a_lost_tensor_problems(draft, target, tmp_path):
    """Rows drawn at random, and bfloat16 around 1, hardly move within a few steps."""
    draft = new_draft(TrainConfig(draft_vocab_size=256, init="random"), target, LAYERS, vocab_of(draft))
    fresh = export_draft(draft, target, tmp_path / "fresh", steps=30)
    review = review_draft(fresh, target, LAYERS)
    assert review.problems == []
    assert "fc.weight is random noise: 30 optimiser steps changed it too little to tell" in review.notes
    assert "fc_norm.0.weight is 1 everywhere: 30 optimiser steps changed it too little to tell" in review.notes
    edit(fresh, lambda t: t["midlayer.self_attn.o_proj.weight"].zero_())
    problems = ["midlayer.self_attn.o_proj.weight is constant: it was never trained or never loaded"]
    assert check_draft(fresh, target, LAYERS) == problems
    export_draft(draft, target, fresh, steps=0)
    assert any(line.startswith("fc.weight is random noise") for line in check_draft(fresh, target, LAYERS))


def test_after_many_steps_what_still_looks_untrained_is_a_problem(draft, target, tmp_path):
    draft = new_draft(TrainConfig(draft_vocab_size=256, init="random"), target, LAYERS, vocab_of(draft))
    few, many = (export_draft(draft, target, tmp_path / str(steps), steps=steps) for steps in (199, 200))
    assert check_draft(few, target, LAYERS) == []
    problems = check_draft(many, target, LAYERS)
    assert "fc.weight is random noise: it was never trained or never loaded" in problems
    assert "fc_norm.0.weight is 1 everywhere: it was never trained or never loaded" in problems
    edit(many, lambda t: t["midlayer.self_attn.q_proj.weight"].add_(torch.ones(64, 128)))
    review = review_draft(many, target, LAYERS)  # a matrix that moved: small rates leave others behind for long
    assert "fc.weight is random noise: 200 optimiser steps changed it too little to tell" in review.notes
    assert review.problems and all("is 1 everywhere: it was never trained" in line for line in review.problems)


def test_the_attentions_input_is_untrained_only_when_both_its_halves_are(exported, target, monkeypatch):
    """The embedding half, which a wide target's block lies in, is drawn at random; the other begins as the target's."""
    monkeypatch.setattr(check, "_BLOCK", 64)
    torch.manual_seed(0)
    name = "midlayer.self_attn.q_proj.weight"
    edit(exported, lambda tensors: tensors[name][:, :64].normal_(std=0.02))
    assert check_draft(exported, target, LAYERS) == []
    edit(exported, lambda tensors: tensors[name].normal_(std=0.02))
    problems = [f"{name} is random noise: it was never trained or never loaded"]
    assert check_draft(exported, target, LAYERS) == problems


@pytest.mark.parametrize(("problems", "said"), [([], None), (["fc is odd", "norm is odd"], "fc is odd\nnorm is odd")])
def test_notebook_04_ends_in_the_lines_of_the_check(problems, said):
    cells = nbformat.read(notebook_path("04_train_draft"), as_version=4).cells
    (source,) = (cell.source for cell in cells if "review_draft(" in cell.source)
    review = SimpleNamespace(problems=problems, notes=["layer ids"])
    names = {
        "export": SimpleNamespace(export_draft=lambda model, target, folder, steps: folder if steps == 12 else None),
        "check": SimpleNamespace(review_draft=lambda *_: review), "model": None, "target": None,
        "folder": Path("draft"), "UserError": UserError,
        "states": {"train": SimpleNamespace(meta=SimpleNamespace(aux_layers=LAYERS))},
        "report": SimpleNamespace(best_step=12),
    }  # fmt: skip
    if said is None:
        exec(source, names)
        return
    with pytest.raises(UserError, match=said) as error:
        exec(source, names)
    assert error.value.where == "draft/export"


def vocab_of(draft):
    return vocab_map_of(draft.target_ids, draft.config.vocab_size)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (300, 700)])
def test_noise_is_told_from_noise_with_a_direction_of_its_own(shape):
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.02
    direction = torch.outer(*(torch.ones(size) / size**0.5 for size in shape))
    assert why_untrained(noise) == why_untrained(torch.rand(shape) - 0.5) == "is random noise"
    assert why_untrained(noise + 0.02 * 2 * (shape[0] ** 0.5 + shape[1] ** 0.5) * direction) is None


def test_no_matrix_of_a_well_trained_model_looks_like_noise():
    """Long training makes singular values alike again: by them alone, 33 of these 210 matrices are noise."""
    weights = load_file(load_target("example").path / "model.safetensors")
    matrices = {name: tensor for name, tensor in weights.items() if ".layers." in name and tensor.dim() == 2}
    assert len(matrices) == 210
    assert [name for name, tensor in matrices.items() if why_untrained(tensor)] == []


def test_a_sound_draft_has_notes_but_no_problem(exported, target):
    review = review_draft(exported, target, LAYERS)
    assert review.layout == "sglang" and review.problems == []
    assert review.notes == [f"layer ids {LAYERS}: LlamaForCausalLM captures the outputs of layers {LAYERS}"]


def test_our_own_drafts_say_themselves_what_they_were_trained_on(exported, target):
    assert check_draft(exported, target) == []
    edit(exported, config=lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]))
    assert "the draft was trained on [1, 2, 4]" in check_draft(exported, target)[0]


def test_a_draft_trained_with_a_rope_of_its_own_is_held_against_that_one(exported, draft, target):
    draft.config = replace(draft.config, rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    export_draft(draft, target, exported)
    assert check_draft(exported, target) == []
    edit(exported, config=lambda c: c["rope_scaling"].update(factor=2.0))
    assert "'factor': 4.0}, with which the draft was trained" in check_draft(exported, target)[0]


def test_heads_of_another_width_are_noticed_where_the_draft_says_its_own(exported, target):
    """Twice as many of half the width have the same tensors."""

    def halve(values):
        values.update({name: values[name] * 2 for name in ("num_attention_heads", "num_key_value_heads")})
        values["head_dim"] //= 2

    edit(exported, config=halve)
    problems = check_draft(exported, target)
    assert len(problems) == 3 and all("acceptance would fall without an error" in line for line in problems)
    edit(exported, config=lambda c: c.pop("trained_with"))  # an older export
    assert check_draft(exported, target) == []


def test_a_missing_width_is_a_problem_and_no_crash(exported, target):
    edit(exported, config=lambda c: c.pop("intermediate_size"))
    assert check_draft(exported, target)[0] == "config.json has no intermediate_size: SGLang would not start"


def test_folder_that_is_no_draft_is_refused(tiny_llama, target, tmp_path):
    with pytest.raises(UserError, match="not a draft folder"):
        check_draft(tmp_path, target)
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        check_draft(tiny_llama, target)
