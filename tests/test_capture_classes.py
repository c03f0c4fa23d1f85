"""Every SGLang model class that can capture gets the boundaries asked for; and normal serving is left unwrapped.

The classes are found by reading SGLang's model files. Their own `set_eagle3_layers_to_capture` runs on a stand-in
for the rest of the model, so that all of them are tried without a GPU and without weights.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from eagle3_utils.serving import capture
from eagle3_utils.serving.capture.layers import switch_on, switched_on

MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
SETTER = "set_eagle3_layers_to_capture"
NUM_LAYERS = 12
TARGETS = {  # every class SGLang 0.5.14 serves that has the setter, its own or inherited; drafts left out
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "ExaoneMoEForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "InternS1ProForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration", "KimiK25ForConditionalGeneration", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LongcatFlashForCausalLM", "MindSporeForCausalLM",
    "MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MistralLarge3ForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "SarvamMoEForCausalLM", "TeleFLMForCausalLM",
}  # fmt: skip
DRAFT = re.compile(r"Eagle3?$|NextN$|MTP$|Assistant")


def served_classes_with_setter() -> set[str]:
    """Names in the model files' `EntryClass` whose class, or one that it derives from, defines the setter."""
    texts = [path.read_text(encoding="utf-8-sig") for path in MODELS.glob("*.py")]
    bases: dict[str, set[str]] = {}
    for text in texts:
        for name, parents in re.findall(r"^class (\w+)\(([^)]*)\):", text, re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", parents))
    owners = {name for classes in SETTERS.values() for name in classes} | {"MindSporeForCausalLM"}

    def has(name: str) -> bool:
        return name in owners or any(has(parent) for parent in bases.get(name, set()) - {name})

    entries = " ".join(
        found for text in texts for found in re.findall(r"^EntryClass = (\[[^\]]*\]|\w+)", text, re.MULTILINE)
    )
    return {name for name in re.findall(r"\w+", entries) if has(name)}


def setters() -> dict[str, dict[str, ast.FunctionDef]]:
    """File name → class name → its setter, from SGLang's source."""
    found: dict[str, dict[str, ast.FunctionDef]] = {}
    for path in sorted(MODELS.glob("*.py")):
        if SETTER not in path.read_text() or path.stem == "mindspore":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and item.name == SETTER:
                        found.setdefault(path.stem, {})[node.name] = item
    return found


SETTERS = setters()
OUTER = [
    (file, name) for file, classes in SETTERS.items() for name in classes if name.endswith(("LM", "Generation"))
]  # fmt: skip


def function(node: ast.FunctionDef):
    namespace = vars(typing) | {"get_pp_group": lambda: SimpleNamespace(is_last_rank=True)}
    exec(compile(ast.Module([node], []), "<sglang>", "exec"), namespace)
    return namespace[SETTER]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(NUM_LAYERS))
        self.norm = nn.Identity()
        self.layers_to_capture: list[int] = []


def stand_in(file: str, name: str) -> nn.Module:
    """The class with its own setter around a bare decoder, which has the setter of the file's inner class, if any."""
    inner = next((node for other, node in SETTERS[file].items() if other.endswith("Model")), None)
    inner = inner or next(node for other, node in SETTERS["qwen2_moe"].items() if other.endswith("Model"))
    decoder = type("Inner", (Decoder,), {SETTER: function(inner)})()
    model = type(name, (nn.Module,), {SETTER: function(SETTERS[file][name])})()
    model.config = SimpleNamespace(num_hidden_layers=NUM_LAYERS, text_config=SimpleNamespace())
    model.pp_group = SimpleNamespace(is_last_rank=True)
    model.capture_aux_hidden_states = False
    source = ast.unparse(SETTERS[file][name])
    if f"self.language_model.{SETTER}" in source:
        model.language_model = stand_in("deepseek_v2", "DeepseekV2ForCausalLM")
    elif "self.language_model" in source:
        model.language_model = decoder
    else:
        model.model = decoder
    return model


def test_these_are_all_classes_that_can_capture():
    assert {name for name in served_classes_with_setter() if not DRAFT.search(name)} == TARGETS


@pytest.mark.parametrize(("file", "name"), OUTER, ids=[name for _, name in OUTER])
def test_each_class_captures_exactly_the_boundaries_asked_for(file, name):
    for boundaries in ([2, 6, 9], [3, 6, 9], [1, 5, 11], [2], list(range(1, NUM_LAYERS))):
        model = stand_in(file, name)
        assert switch_on(model, boundaries), name
        assert switched_on(model) == boundaries


ASK = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print(json.dumps({"hooks": dict(HookRegistry._hooks), "patched": list(HookRegistry._patched),
                  "imported": [n for n in sys.modules if n.startswith("eagle3_utils.serving.capture.")]}))
"""


def test_without_the_dump_folder_nothing_is_hooked_wrapped_or_imported(tmp_path):
    """That all four places are hooked with it is what the real server of test_server.py shows."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_HS")}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "eagle3_capture"}
    command = [sys.executable, "-c", ASK]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert json.loads(answer.stdout.strip().splitlines()[-1]) == {"hooks": {}, "patched": [], "imported": []}


def test_a_server_that_is_given_no_nonce_makes_one_that_its_processes_share(monkeypatch):
    """By it a restart of a user's own server shows in its dumps."""
    monkeypatch.setitem(sys.modules, f"{capture.__name__}.hooks", SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(capture, "hooks", SimpleNamespace(install=lambda: None), raising=False)
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/dumps")
    monkeypatch.setenv("SGLANG_HS_NONCE", "")  # also restored after the test
    capture.register()
    nonce = os.environ["SGLANG_HS_NONCE"]
    capture.register()  # a child's, with the environment it inherited
    assert len(nonce) == 16 and os.environ["SGLANG_HS_NONCE"] == nonce
    monkeypatch.setenv("SGLANG_HS_NONCE", "ours")
    capture.register()
    assert os.environ["SGLANG_HS_NONCE"] == "ours"
