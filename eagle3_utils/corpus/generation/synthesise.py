"""Prompts a chat model makes up itself: fed only the opening of a user turn, it writes what users write.

The idea is Magpie's (Xu et al. 2024, arXiv:2406.08464): an aligned model, given its template up to and including the
user header, samples an instruction and ends the turn. No prompt data set is needed, and the prompts have the
distribution the model knows best. `PromptFilter` keeps those of a usable length and language; duplicates go too.

Stage 00 keeps them in a file of prompts, line by line, with the number of the draw that brought each, so that an
interrupted run goes on with the next draw: `read_made`, then `make_missing`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_utils.config import GenerateConfig
from eagle3_utils.corpus.dedupe import NearDuplicates, words_of
from eagle3_utils.corpus.generation.endpoints import EndpointPool, Reply, Request, RequestFailed, Sampling
from eagle3_utils.corpus.generation.generate import stage_pool
from eagle3_utils.corpus.generation.responses import Prompt, open_for_more, read_prompts
from eagle3_utils.errors import UserError

_MARK = "\ue000user-text\ue001"  # private-use characters: no template rewrites them
# The most frequent English function words; a sentence of eight words almost never has none of them.
_FUNCTION_WORDS = """the of and to a in is it you that he was for on are with as i his they be at one have this from or
    had by not but what some we can out other were all there when up use your how said an each she which do their if
    will way about many then them would like so these her my make could me write please explain"""
_ENGLISH = frozenset(_FUNCTION_WORDS.split())
_WORDS = {"english": re.compile(r"[A-Za-z']+").findall, "any": words_of}


@dataclass(frozen=True)
class PromptFilter:
    """Which self-made prompts are kept. Lengths in words (letters, where a script has no spaces between words)
    and characters, shares in 0…1; the first two shares are asked of `language` "english", not of "any"."""

    min_words: int = 4
    max_words: int = 120
    max_characters: int = 800
    min_ascii_share: float = 0.97
    min_english_share: float = 0.15
    max_repeated_share: float = 0.35  # of the commonest word
    language: str = "english"

    def reason_against(self, text: str, finish_reason: str = "stop") -> str | None:
        """Why a prompt is not kept, in a word or two; None when it is kept."""
        words = _WORDS[self.language](text.lower())
        if finish_reason != "stop":
            return "unfinished"
        if len(words) < self.min_words:
            return "too short"
        if len(words) > self.max_words or len(text) > self.max_characters:
            return "too long"
        if self.language == "english":
            num_ascii, num_known = sum(map(str.isascii, text)), sum(word in _ENGLISH for word in words)
            if num_ascii < self.min_ascii_share * len(text) or num_known < self.min_english_share * len(words):
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


def read_made(path: Path, config: GenerateConfig, fingerprint: str) -> list[Prompt]:
    """The self-made prompts that an earlier run left in a file, `config.synthesise_prompts` at most.

    Raises `UserError` when another model, seed or language made them, or when the endpoints cannot make any.
    """
    if not config.synthesise_prompts:
        return []
    if config.api != "sglang":
        raise UserError("only SGLang's native API goes on from token ids", "synthesise_prompts", exit_code=2)
    identity = {"model_fingerprint": fingerprint, "seed": config.seed, "language": config.synthesise_language}
    open_for_more(path, identity)
    return read_prompts([path])[: config.synthesise_prompts]


async def make_missing(
    path: Path, made: list[Prompt], urls: list[str], tokenizer, config: GenerateConfig, progress: Callable[..., None]
) -> list[Prompt]:
    """Draw what `made` lacks of `config.synthesise_prompts`; each is written to `path` as soon as it is kept.

    Raises `UserError` as `synthesise_prompts`.
    """
    missing, fresh = config.synthesise_prompts - len(made), []
    if missing <= 0:
        return []
    with open(path, "a") as out:

        def write(draw: int, text: str) -> None:
            name = f"self-made-{config.seed}-{len(made) + len(fresh):06d}"
            prompt = {"id": name, "source": "self_made", "split": "train", "draw": draw}
            fresh.append(prompt | {"messages": [{"role": "user", "content": text}]})
            out.write(json.dumps(fresh[-1], ensure_ascii=False) + "\n")
            out.flush()
            progress(done=len(fresh), total=missing, unit="prompts")

        async with stage_pool(urls, config) as pool:
            await synthesise_prompts(
                pool,
                tokenizer,
                missing,
                seed=config.seed,
                prompt_filter=PromptFilter(language=config.synthesise_language),
                num_concurrent=config.num_concurrent,
                first_draw=made[-1]["draw"] + 1 if made else 0,
                known=[prompt["messages"][-1]["content"] for prompt in made],
                on_kept=write,
            )
    return fresh


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
    first_draw: int = 0,
    known: Iterable[str] = (),
    on_kept: Callable[[int, str], None] = lambda draw, text: None,
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
    first_draw, known : where an earlier run stopped, and the prompts it kept.
    on_kept : told the draw and the text of each prompt that is kept.

    Raises
    ------
    UserError
        When too few of `max_draws` are usable: the model was probably not trained on user turns.
    """
    prompt_filter, special = prompt_filter or PromptFilter(), _special_tokens(tokenizer)
    opening_ids = tokenizer(opening_of_user_turn(tokenizer), add_special_tokens=False)["input_ids"]
    sampling = Sampling(temperature=1.0, max_new_tokens=max_new_tokens)
    result, duplicates = Synthesis(), NearDuplicates(threshold=0.7)
    for number, text in enumerate(known):
        duplicates.find_or_add(f"known {number}", text)
    draws = range(first_draw, first_draw + (max_draws or 5 * num_wanted))
    requests = ((draw, Request([], opening_ids, sampling, seed + draw)) for draw in draws)
    async with aclosing(_in_order(pool, requests, num_concurrent)) as replies:
        async for draw, reply in replies:
            result.drawn += 1
            if reply is None:
                result.rejected["failed"] += 1
                continue
            text, finish = _first_turn(reply, special)
            if _keep_or_count(text, finish, prompt_filter, usable, duplicates, result):
                on_kept(draw, text)
            if len(result.prompts) >= num_wanted:
                return result
    raise UserError(f"only {len(result.prompts)} of {result.drawn} self-made prompts are usable")


async def _in_order(
    pool: EndpointPool, requests: Iterable[tuple[int, Request]], num_concurrent: int
) -> AsyncIterator[tuple[int, Reply | None]]:
    """(number, reply) in the order of the requests, `num_concurrent` in flight; None for a request that failed."""
    gate, waiting, requests = asyncio.Semaphore(num_concurrent), deque(), iter(requests)

    async def ask(request: Request) -> Reply | None:
        async with gate:
            try:
                return await pool.ask(request)
            except RequestFailed:
                return None

    try:
        while True:
            for number, request in itertools.islice(requests, 2 * num_concurrent - len(waiting)):
                waiting.append((number, asyncio.create_task(ask(request))))
            if not waiting:
                return
            number, task = waiting.popleft()
            yield number, await task
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)


def _special_tokens(tokenizer) -> re.Pattern:
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")


def _first_turn(reply: Reply, special: re.Pattern) -> tuple[str, str]:
    """The text up to the first special token, which ends the user's turn also where no server stops at it."""
    found = special.search(reply.text)
    return (reply.text[: found.start()].strip(), "stop") if found else (reply.text.strip(), reply.finish_reason)


def _keep_or_count(
    text: str,
    finish: str,
    prompt_filter: PromptFilter,
    usable: Callable[[str], bool],
    seen: NearDuplicates,
    result: Synthesis,
) -> bool:
    reason = prompt_filter.reason_against(text, finish)
    if reason is None and not usable(text):
        reason = "not usable"
    if reason is None and seen.find_or_add(str(len(result.prompts)), text) is not None:
        reason = "duplicate"
    if reason is None:
        result.prompts.append(text)
    else:
        result.rejected[reason] += 1
    return reason is None
