"""Self-made prompts: where they start, which are kept, and why the others are not."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest
from transformers import AutoTokenizer

from eagle3_utils.config import GenerateConfig
from eagle3_utils.corpus.generation import synthesise
from eagle3_utils.corpus.generation.endpoints import Reply, RequestFailed
from eagle3_utils.corpus.generation.synthesise import PromptFilter, opening_of_user_turn, synthesise_prompts
from eagle3_utils.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


class Pool:
    """Answers with the given texts, over and over."""

    def __init__(self, *replies):
        self._replies, self.asked = itertools.cycle(replies), []

    async def ask(self, request):
        self.asked.append(request)
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Reply) else Reply(reply, None, "stop")


def test_the_opening_holds_the_default_system_prompt_and_ends_where_the_user_writes(tokenizer):
    opening = opening_of_user_turn(tokenizer)
    assert opening.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert opening.endswith("<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    "text, reason",
    [
        ("What is the best way to learn to play the guitar?", None),
        ("Hi", "too short"),
        ("word " * 130 + "the", "too long"),
        ("Écrivez une lettre à votre députée à propos de l'été", "not English"),
        ("Schreibe einen kurzen Aufsatz zum Thema Wald", "not English"),
        ("the " * 20, "repetitive"),
    ],
)
def test_filter(text, reason):
    assert PromptFilter().reason_against(text) == reason


@pytest.mark.parametrize(
    "text, reason",
    [
        ("Écrivez une lettre à votre députée à propos de l'été", None),
        ("请写一首关于春天的短诗", None),
        ("Напиши короткое письмо другу о лете", None),
        ("你好", "too short"),
        ("哈" * 20, "repetitive"),
        ("写" * 60 + "诗" * 61, "too long"),
    ],
)
def test_filter_of_any_language(text, reason):
    assert PromptFilter(language="any").reason_against(text) == reason


def test_an_unfinished_prompt_is_not_kept():
    assert PromptFilter().reason_against("What is the best way to learn?", "length") == "unfinished"


def test_prompts_are_drawn_until_enough_are_kept(tokenizer):
    good = [f"What is the best way to learn about {thing} at home?" for thing in ("birds", "chess", "maps", "tea")]
    pool = Pool(
        good[0], "Hi", good[1], good[0], RequestFailed("x"), good[2], Reply("What is the", None, "length"), good[3]
    )
    result = asyncio.run(synthesise_prompts(pool, tokenizer, 4, seed=5, num_concurrent=4))
    assert result.prompts == good
    assert result.rejected == {"too short": 1, "duplicate": 1, "failed": 1, "unfinished": 1}
    assert tokenizer.decode(pool.asked[0].prompt_ids) == opening_of_user_turn(tokenizer)
    assert [request.seed for request in pool.asked] == list(range(5, 13))
    assert pool.asked[0].sampling.temperature == 1.0
    report = result.report(PromptFilter())
    assert (report["drawn"], report["kept"], report["filter"]["min_words"]) == (8, 4, 4)


def test_what_is_kept_does_not_depend_on_who_answers_first(tokenizer):
    class Uneven:
        in_flight = most_in_flight = 0

        async def ask(self, request):
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            await asyncio.sleep(random.Random(request.seed).random() / 100)
            self.in_flight -= 1
            return Reply(
                f"What would you do with {request.seed} old and {request.seed // 2} new bicycles?", None, "stop"
            )

    pool = Uneven()
    wanted = synthesise_prompts(pool, tokenizer, 6, num_concurrent=3, usable=lambda text: " 4 old" not in text)
    result = asyncio.run(wanted)
    assert [int(text.split()[5]) for text in result.prompts] == [0, 1, 2, 3, 5, 6]
    assert result.rejected == {"not usable": 1} and pool.most_in_flight == 3


def test_a_model_that_makes_no_prompts_is_given_up(tokenizer):
    with pytest.raises(UserError, match="only 1 of 8"):
        asyncio.run(synthesise_prompts(Pool("What is the best way home?"), tokenizer, 2, num_concurrent=8, max_draws=8))


def test_a_special_token_ends_the_users_turn_also_where_the_server_goes_on(tokenizer):
    text = "What is the best way home?<|im_end|>\n<|im_start|>assistant\nWalk."
    result = asyncio.run(synthesise_prompts(Pool(Reply(text, None, "length")), tokenizer, 1, num_concurrent=1))
    assert result.prompts == ["What is the best way home?"]


class Numbered:
    """Says a prompt of its own to every seed but the fourth, at which the server goes."""

    def __init__(self, dies_at=None):
        self.seeds, self.dies_at = [], dies_at

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def ask(self, request):
        self.seeds.append(request.seed)
        if request.seed == self.dies_at:
            raise UserError("the server is gone")
        number = request.seed // 2  # every second one is said twice
        return Reply(f"What would you do with {number} old and {number + 70} new bicycles?", None, "stop")


def test_prompts_of_an_interrupted_run_are_kept_and_it_goes_on_as_if_it_had_not_stopped(
    tokenizer, tmp_path, monkeypatch
):
    config, told = GenerateConfig(synthesise_prompts=5, seed=10, num_concurrent=1), []

    def make(path, pool, config=config):
        monkeypatch.setattr(synthesise, "stage_pool", lambda urls, config: pool)
        made = synthesise.read_made(path, config, "model-1")
        progress = lambda **fields: told.append(fields["done"])  # noqa: E731
        return made, asyncio.run(synthesise.make_missing(path, made, [], tokenizer, config, progress))

    whole, path = tmp_path / "whole.jsonl", tmp_path / "made.jsonl"
    assert len(make(whole, Numbered())[1]) == 5 and told == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="gone"):
        make(path, Numbered(dies_at=15))
    with open(path, "a") as file:
        file.write('{"id": "self-made-10-0000')
    pool = Numbered()
    made, fresh = make(path, pool)
    assert (len(made), len(fresh)) == (3, 2) and pool.seeds[0] == 15  # 10, 12 and 14 had brought one each
    assert path.read_text() == whole.read_text()
    assert json.loads(path.read_text().splitlines()[4])["id"] == "self-made-10-000004"
    assert make(path, Numbered()) == (made + fresh, [])
    fewer = config.model_copy(update={"synthesise_prompts": 2})
    assert make(path, Numbered(), fewer) == (made[:2], [])
    with pytest.raises(UserError, match="seed"):
        make(path, Numbered(), config.model_copy(update={"seed": 11}))


def test_prompts_are_made_only_when_asked_for_and_only_by_the_native_api(tmp_path):
    path = tmp_path / "made.jsonl"
    assert synthesise.read_made(path, GenerateConfig(), "m") == [] and not path.exists()
    config = GenerateConfig(synthesise_prompts=1, api="openai", api_model="x")
    with pytest.raises(UserError, match="native API"):
        synthesise.read_made(path, config, "m")
