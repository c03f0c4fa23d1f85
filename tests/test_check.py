"""The strict check names each fault that SGLang would serve without a word."""

import json

import pytest
import torch
from draft_folders import LAYERS
from safetensors.torch import load_file, save_file

from eagle3_utils.draft.check import check_draft
from eagle3_utils.errors import UserError

pytest_plugins = ["draft_folders"]  # fixtures


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
    "wrong shape": (lambda t: t.update({"fc.weight": torch.ones(64, 64)}), None, "fc.weight has shape [64, 64]"),
    "no eagle_config": (None, lambda c: c.pop("eagle_config"), "eagle_aux_hidden_state_layer_ids"),
    "short context": (None, lambda c: c.update(max_position_embeddings=512), "acceptance falls on longer contexts"),
    "other layers": (
        None,
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 5]),
        "capture the outputs of layers [2, 3, 5]; the draft was trained on [1, 2, 4]",
    ),
    "tied": (None, lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_named(fault, exported, target):
    tensors, config, message = FAULTS[fault]
    edit(exported, tensors, config)
    problems = check_draft(exported, target, LAYERS)
    assert len(problems) == 1 and message in problems[0]


def test_folder_that_is_no_draft_is_refused(tiny_llama, target, tmp_path):
    with pytest.raises(UserError, match="not a draft folder"):
        check_draft(tmp_path, target)
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        check_draft(tiny_llama, target)
