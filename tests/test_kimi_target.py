"""The rehearsal's target: Hugging Face loads every tensor, it repeats its last token, and its shape is Kimi-K2.5's."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_utils.draft.boundaries import aux_layers_of, layer_ids_for
from eagle3_utils.runs import repo_root
from eagle3_utils.target import load_embed_tokens, load_lm_head, load_target

sys.path.append(str(repo_root() / "benchmarks"))
import kimi_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    kimi_target.BLOCK_VALUES = 100_000  # so that the embedding is written in six blocks, the last one shorter
    kimi_target.make(folder, kimi_target.SHAPES["tiny"], num_samples=3, num_tokens=96, device="cpu", workers=2)
    return folder


def test_it_loads_without_a_missing_or_unknown_tensor_and_repeats_its_last_token(folder):
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    ids = torch.randint(4094, (1, 96), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        output = model(ids, output_hidden_states=True)
    assert torch.equal(output.logits.argmax(-1), ids)
    sizes = [state.square().mean().sqrt().item() for state in output.hidden_states[:-1]]
    assert sizes == sorted(sizes) and 7.5 < sizes[0] < sizes[-1] < 12, sizes  # every layer adds a little


def test_head_and_embedding_hold_the_same_numbers_at_two_scales(folder):
    target = load_target(str(folder))
    embedding, head = load_embed_tokens(target).float(), load_lm_head(target).float()
    torch.testing.assert_close(
        head * (kimi_target.EMBEDDING_SIZE * 128 / kimi_target.LOGIT), embedding, rtol=0.02, atol=0
    )
    assert abs(embedding.std().item() / 8.0 - 1) < 0.01 and len(embedding.unique(dim=0)) == 4096


def count(config) -> int:
    return sum(math.prod(part.shape) for file in kimi_target.shards(config) for part in file)


def test_the_rehearsal_is_kimi_k25_but_for_layers_and_expert_width(folder):
    """Kimi-K2.5's text model has 1.03e12 parameters; one layer with and 60 without a dense MLP add up to them."""
    one, two = (count(kimi_target.KIMI_K25 | {"num_hidden_layers": number}) for number in (1, 2))
    assert 1.02e12 < one + 60 * (two - one) < 1.03e12
    rehearsal = kimi_target.SHAPES["rehearsal"]
    different = {key for key, value in kimi_target.KIMI_K25.items() if rehearsal[key] != value}
    assert different == {"num_hidden_layers", "moe_intermediate_size"}
    assert 27e9 < 2 * count(rehearsal) < 28.5e9


def test_its_layers_are_captured_as_kimis_are_and_its_tokenizer_names_every_id(folder):
    target = load_target(str(folder))
    assert layer_ids_for(target, [2, 3, 4]) == [3, 4, 5] and aux_layers_of(target, [3, 4, 5]) == [2, 3, 4]
    assert (target.rope["rope_type"], target.rope["rope_theta"], target.rope["factor"]) == ("yarn", 50000.0, 64.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == target.vocab_size and tokenizer.eos_token_id == target.text_config["eos_token_id"] == 4095
    assert tokenizer.decode(tokenizer.encode("Prüfung 12 你好")) == "Prüfung 12 你好"


def test_samples_are_runs_of_equal_tokens_half_of_them_supervised(folder):
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["id"] for sample in samples] == ["long-0000", "long-0001", "long-0002"]
    for sample in samples:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        assert len(ids) == len(mask) == 96 and sum(mask) == 48
        assert [len(set(ids[start : start + 16])) for start in range(0, 96, 16)] == [1] * 6 and max(ids) < 4094
