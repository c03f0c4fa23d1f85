"""Self-made prompts: where they start, which are kept, and why the others are not."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from transformers import AutoTokenizer

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
