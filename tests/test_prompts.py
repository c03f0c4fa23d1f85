"""The prompts and responses that come with the repository are what their descriptions say."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest

from eagle3_utils.config import GenerateConfig
from eagle3_utils.corpus.dedupe import ngram_hashes, words_of
from eagle3_utils.corpus.generation.responses import answers, read_prompts, read_responses
from eagle3_utils.corpus.generation.synthesise import PromptFilter
from eagle3_utils.runs import resolve_path
from eagle3_utils.target import load_target, load_tokenizer

SOURCES = ("chat", "maths", "code")
CONFIG = GenerateConfig()


@pytest.fixture(scope="module")
def prompts():
    return read_prompts(map(resolve_path, CONFIG.prompts), split=None)


def text(prompt) -> str:
    return prompt["messages"][-1]["content"]


def test_three_sources_with_sixty_prompts_each_for_evaluation(prompts):
    for source in SOURCES:
        mine = [prompt for prompt in prompts if prompt["source"] == source]
        assert len(mine) == 300
        assert sum(prompt["split"] == "eval" for prompt in mine) == 60
    assert len({text(prompt) for prompt in prompts}) == 900


@pytest.mark.parametrize("source", SOURCES)
def test_evaluation_prompts_share_no_eight_words_with_training_prompts(prompts, source):
    grams = {"train": set(), "eval": set()}
    for prompt in prompts:
        if prompt["source"] == source:
            grams[prompt["split"]] |= ngram_hashes(words_of(text(prompt)), 8)
    assert not grams["train"] & grams["eval"]


def test_further_prompts_are_new_different_and_apart_from_the_evaluation_prompts(prompts, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(resolve_path("data/prompts"))
    make_prompts = importlib.import_module("make_prompts")
    make_prompts.make_more(SimpleNamespace(out=tmp_path, count=400, seed=3, sources=["code"]))
    made = read_prompts([tmp_path / "code.jsonl"])
    known = {text(prompt) for prompt in prompts}
    assert len({text(prompt) for prompt in made} - known) == len(made) == 400
    evaluation = set()
    for prompt in prompts:
        if prompt["split"] == "eval":
            evaluation |= ngram_hashes(words_of(text(prompt)), 8)
    assert not any(ngram_hashes(words_of(text(prompt)), 8) & evaluation for prompt in made)


def test_self_made_prompts_pass_the_recorded_filter(prompts):
    about = json.loads(resolve_path("data/prompts/prompts.json").read_text())["chat"]
    assert about["kept"] + sum(about["rejected"].values()) <= about["drawn"] + about["kept"]
    recorded = PromptFilter(**about["filter"])
    assert all(recorded.reason_against(text(prompt)) is None for prompt in prompts if prompt["source"] == "chat")


def test_responses_belong_to_training_prompts_and_leave_some_to_be_generated(prompts):
    file = resolve_path(CONFIG.earlier_responses[0])
    assert file.stat().st_size <= 4 << 20
    made, by_id = read_responses(file), {prompt["id"]: prompt for prompt in prompts}
    assert all(answers(response, by_id[name]) and by_id[name]["split"] == "train" for name, response in made.items())
    left = [prompt for prompt in prompts if prompt["split"] == "train" and prompt["id"] not in made]
    assert len(left) >= 48 and {prompt["source"] for prompt in left} == set(SOURCES)


def test_responses_are_the_example_targets_own_and_their_ids_are_its_text():
    target = load_target("example")
    file = resolve_path(CONFIG.earlier_responses[0])
    about = json.loads(file.with_name(file.name.replace(".jsonl.zst", ".json")).read_text())
    assert about["model_fingerprint"] == target.fingerprint
    tokenizer = load_tokenizer(target)
    for response in list(read_responses(file).values())[::25]:
        prompt = tokenizer.apply_chat_template(response["messages"], add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(response["prompt_ids"]) == prompt
        assert tokenizer.decode(response["output_ids"], skip_special_tokens=True) == response["text"]
