"""Fixtures that several test files share: the example target, and a tiny random Llama that speaks its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_utils.target import load_target

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def example_target() -> Path:
    """Folder of SmolLM2-135M-Instruct; made once, kept between test runs."""
    return load_target("example").path


@pytest.fixture(scope="session")
def tiny_llama(example_target, tmp_path_factory) -> Path:
    """Folder of a random Llama (6 layers, H 64, untied lm_head) with the example target's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = AutoTokenizer.from_pretrained(example_target)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        bos_token_id=1, eos_token_id=tokenizer.eos_token_id, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
