"""Prompts a chat model makes up itself: fed only the opening of a user turn, it writes what users write.

The idea is Magpie's (Xu et al. 2024, arXiv:2406.08464): an aligned model, given its template up to and including the
user header, samples an instruction and ends the turn. No prompt data set is needed, and the prompts have the
distribution the model knows best. `PromptFilter` keeps those of a usable length and language; duplicates go too.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3_utils.corpus.dedupe import NearDuplicates
from eagle3_utils.corpus.generation.endpoints import EndpointPool, Reply, Request, RequestFailed, Sampling
from eagle3_utils.errors import UserError

_MARK = "\ue000user-text\ue001"  # private-use characters: no template rewrites them
# The most frequent English function words; a sentence of eight words almost never has none of them.
_FUNCTION_WORDS = """the of and to a in is it you that he was for on are with as i his they be at one have this from or
    had by not but what some we can out other were all there when up use your how said an each she which do their if
    will way about many then them would like so these her my make could me write please explain"""
_ENGLISH = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True)
class PromptFilter:
    """Which self-made prompts are kept. Lengths in words and characters, shares in 0…1."""

    min_words: int = 4
    max_words: int = 120
    max_characters: int = 800
    min_ascii_share: float = 0.97
    min_english_share: float = 0.15
    max_repeated_share: float = 0.35  # of the commonest word

    def reason_against(self, text: str, finish_reason: str = "stop") -> str | None:
        """Why a prompt is not kept, in a word or two; None when it is kept."""
        words = re.findall(r"[A-Za-z']+", text.lower())
        if finish_reason != "stop":
            return "unfinished"
        if len(words) < self.min_words:
            return "too short"
        if len(words) > self.max_words or len(text) > self.max_characters:
            return "too long"
        if sum(character.isascii() for character in text) < self.min_ascii_share * len(text):
            return "not English"
        if sum(word in _ENGLISH for word in words) < self.min_english_share * len(words):
            return "not English"
        if len(words) >= 12 and Counter(words).most_common(1)[0][1] > self.max_repeated_share * len(words):
            return "repetitive"
        return None


@dataclass
class Synthesis:
    """Self-made prompts, and what became of the others."""

    prompts: list[str] = field(default_factory=list)
    drawn: int = 0
    rejected: Counter = field(default_factory=Counter)

    def report(self, prompt_filter: PromptFilter) -> dict[str, Any]:
        """JSON for the file beside the prompts."""
        counts = {"drawn": self.drawn, "kept": len(self.prompts), "rejected": dict(self.rejected.most_common())}
        return counts | {"filter": asdict(prompt_filter)}


def opening_of_user_turn(tokenizer) -> str:
    """The chat template up to where the user's first word goes, default system prompt included."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    if text.count(_MARK) != 1:
        raise UserError("the chat template does not put the user's text in one place", "synthesise_prompts")
    return text[: text.index(_MARK)]


async def synthesise_prompts(
    pool: EndpointPool,
    tokenizer,
    num_wanted: int,
    *,
    seed: int = 0,
    prompt_filter: PromptFilter | None = None,
    max_new_tokens: int = 128,
    num_concurrent: int = 32,
    max_draws: int | None = None,
    usable: Callable[[str], bool] = lambda text: True,
) -> Synthesis:
    """Draw prompts at temperature 1 until `num_wanted` are kept.

    `num_concurrent` draws are always in flight, and what they bring is looked at in the order in which they were begun,
    so that which prompts are kept does not depend on who answers first.

    Parameters
    ----------
    pool : SGLang's native API, which continues token ids.
    seed : each draw has its own, counted from here; a server samples the same way again only if it honours it.
    max_draws : give up after as many; default 5 × num_wanted.
    usable : says no to texts that must not be kept, evaluation prompts for instance.

    Raises
    ------
    UserError
        When too few of `max_draws` are usable: the model was probably not trained on user turns.
    """
    prompt_filter = prompt_filter or PromptFilter()
    max_draws = max_draws or 5 * num_wanted
    opening_ids = tokenizer(opening_of_user_turn(tokenizer), add_special_tokens=False)["input_ids"]
    sampling = Sampling(temperature=1.0, max_new_tokens=max_new_tokens)
    result, duplicates = Synthesis(), NearDuplicates(threshold=0.7)
    gate, begun, waiting = asyncio.Semaphore(num_concurrent), 0, deque()

    async def draw(number: int) -> Reply:
        async with gate:
            return await pool.ask(Request([], opening_ids, sampling, seed + number))

    try:
        while len(result.prompts) < num_wanted:
            while len(waiting) < 2 * num_concurrent and begun < max_draws:
                waiting.append(asyncio.create_task(draw(begun)))
                begun += 1
            if not waiting:
                raise UserError(f"only {len(result.prompts)} of {result.drawn} self-made prompts are usable")
            result.drawn += 1
            try:
                reply = await waiting.popleft()
            except RequestFailed:
                result.rejected["failed"] += 1
            else:
                _keep_or_count(reply.text.strip(), reply.finish_reason, prompt_filter, usable, duplicates, result)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return result


def _keep_or_count(
    text: str,
    finish: str,
    prompt_filter: PromptFilter,
    usable: Callable[[str], bool],
    seen: NearDuplicates,
    result: Synthesis,
) -> None:
    reason = prompt_filter.reason_against(text, finish)
    if reason is None and not usable(text):
        reason = "not usable"
    if reason is None and seen.find_or_add(str(len(result.prompts)), text) is not None:
        reason = "duplicate"
    if reason is None:
        result.prompts.append(text)
    else:
        result.rejected[reason] += 1
