"""Prompts → responses.jsonl, by any endpoint, line by line, so that an interrupted run goes on where it stopped.

    summary = asyncio.run(generate(prompts, path, pool, tokenizer, settings))

In a conversation of several turns the user turns are replayed and every assistant turn is generated anew.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from eagle3_utils.config import GenerateConfig
from eagle3_utils.corpus.generation.endpoints import EndpointPool, Reply, Request, RequestFailed, Sampling
from eagle3_utils.corpus.generation.responses import GenerateSettings, Prompt, Response
from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.formats import Unusable
from eagle3_utils.errors import UserError

_CARRIED = ("id", "source", "split", "messages", "tools")


@dataclass
class GenerateSummary:
    """What a run of `generate` did."""

    generated: int = 0
    failed: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    finish_reasons: Counter = field(default_factory=Counter)
    num_retries: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return counts | {"tokens_per_second": round(self.tokens_per_second, 1), "seconds": round(self.seconds, 1)}


def settings_from(config: GenerateConfig, fingerprint: str) -> GenerateSettings:
    """What stage 00's parameters say about how responses are drawn."""
    return GenerateSettings(
        model_fingerprint=fingerprint,
        sampling=Sampling(config.temperature, config.top_p, config.max_new_tokens),
        seed=config.seed,
        max_prompt_tokens=config.max_seq_len,
        api=config.api,
        api_model=config.api_model,
        extra_body=config.extra_body or None,
    )


def stage_pool(urls: list[str], config: GenerateConfig, **options) -> EndpointPool:
    """Endpoints with the protocol, concurrency and retries of stage 00."""
    limits = (config.max_retries, config.request_timeout_seconds, config.num_concurrent)
    return EndpointPool(urls, config.api, config.api_model, *limits, **options)


async def answer_all(
    prompts: list[Prompt],
    path: Path,
    urls: list[str],
    tokenizer,
    settings: GenerateSettings,
    config: GenerateConfig,
    progress: Callable[..., None],
) -> GenerateSummary:
    """`generate` with the endpoints, concurrency and retries of stage 00; nothing is asked when nothing is missing."""
    if not prompts:
        return GenerateSummary()
    async with stage_pool(urls, config, extra_body=config.extra_body) as pool:
        return await generate(
            prompts, path, pool, tokenizer, settings, num_concurrent=config.num_concurrent, progress=progress
        )


async def generate(
    prompts: list[Prompt],
    path: Path,
    pool: EndpointPool,
    tokenizer,
    settings: GenerateSettings,
    *,
    num_concurrent: int = 32,
    progress: Callable[..., None] = lambda **_: None,
) -> GenerateSummary:
    """Answer every prompt and append a line for each to `path` as soon as it is there.

    A prompt that cannot be answered is counted by reason and left for the next run; nothing is written for it.

    Raises
    ------
    UserError
        When no prompt can be answered: the key is refused, or the address has no such API.
    """
    summary, started = GenerateSummary(), time.monotonic()
    renderer, waiting = ChatRenderer(tokenizer), iter(prompts)
    with open(path, "a") as out:

        async def work() -> None:
            for prompt in waiting:
                try:
                    response, replies = await _converse(prompt, pool, renderer, settings)
                except (RequestFailed, Unusable) as error:
                    summary.failed[str(error).split(" from ")[0][:80]] += 1
                    continue
                cost = sum(reply.cost for reply in replies)
                response |= {"cost": cost} if cost else {}
                out.write(json.dumps(response, ensure_ascii=False) + "\n")
                out.flush()
                _count(summary, replies, time.monotonic() - started)
                progress(**_how_far(summary, len(prompts)))

        tasks = [asyncio.create_task(work()) for _ in range(min(num_concurrent, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    summary.seconds, summary.num_retries = time.monotonic() - started, pool.num_retries
    return summary


def check_failures(summary: GenerateSummary, num_prompts: int, max_fraction: float) -> None:
    """Stop when more than `max_fraction` of the prompts of this run got no answer; the rest is on disk."""
    failed = summary.failed.total()
    if failed > max_fraction * num_prompts:
        reason, times = summary.failed.most_common(1)[0]
        raise UserError(
            f"{failed} of {num_prompts} prompts got no answer, most ({times}) because of: {reason}",
            fix="run the stage again to try them once more, or raise max_failed_fraction",
        )


def by_source(responses: list[Response], tokenizer) -> dict[str, list[Response]]:
    """Responses by source, each with its number of generated `tokens` (counted from the text where ids are unknown)."""
    grouped: dict[str, list[Response]] = {}
    for response in responses:
        ids = response.get("output_ids") or tokenizer.encode(response["text"], add_special_tokens=False)
        grouped.setdefault(response.get("source", ""), []).append(response | {"tokens": len(ids)})
    return dict(sorted(grouped.items()))


def describe(responses: list[Response], earlier: set[str], tokenizer) -> list[dict[str, Any]]:
    """One row per source: how many responses, how many from before, their tokens and cost, and how they ended."""
    rows = []
    for source, members in by_source(responses, tokenizer).items():
        tokens = sum(response["tokens"] for response in members)
        rows.append(
            {
                "source": source,
                "responses": len(members),
                "generated_earlier": sum(response["id"] in earlier for response in members),
                "tokens": tokens,
                "mean_tokens": round(tokens / len(members), 1),
                "cost": round(sum(response.get("cost", 0.0) for response in members), 6),
                "ended_by_itself": round(sum(r["finish_reason"] == "stop" for r in members) / len(members), 3),
            }
        )
    return rows


async def _converse(
    prompt: Prompt, pool: EndpointPool, renderer: ChatRenderer, settings: GenerateSettings
) -> tuple[dict[str, Any], list[Reply]]:
    """One prompt, turn by turn: the line to write and the replies behind it."""
    messages: list[dict[str, Any]] = []
    ids: list[int] | None = []
    rendered, spans, replies = "", [], []
    turns = [message for message in prompt["messages"] if message["role"] != "assistant"]
    if any(message["role"] == "tool" for message in turns):
        raise Unusable("results of tools cannot be replayed: other calls may be made now")
    for number, message in enumerate(turns):
        messages.append(message)
        if message["role"] != "user" or (number + 1 < len(turns) and turns[number + 1]["role"] != "user"):
            continue
        text = renderer.prompt(messages, prompt.get("tools"))
        ids, kept = _continue_ids(renderer.tokenizer, ids, rendered, text)
        spans = spans if kept else []  # ids of earlier turns that stand in this prompt as they were generated
        if settings.max_prompt_tokens is not None and len(ids) > settings.max_prompt_tokens:
            raise Unusable(f"a prompt longer than {settings.max_prompt_tokens} tokens")
        seed = (settings.seed + xxhash.xxh3_64_intdigest(f"{prompt['id']}\0{number}".encode())) % 2**31
        reply = await pool.ask(Request(list(messages), ids, settings.sampling, seed, prompt.get("tools")))
        replies.append(reply)
        prompt_ids, answer = ids, {"role": "assistant", "content": reply.text}
        if number == len(turns) - 1:
            break
        if renderer.opens_reasoning:  # the text begins within the reasoning
            thought, answer["content"] = renderer.split(answer | {"reasoning_content": reply.reasoning})
            if settings.api == "sglang" and thought is None:
                break  # it never came to an answer: the conversation ends here
            if settings.api == "sglang":  # other servers are told answers only, as their makers ask for
                answer["reasoning_content"] = thought
        messages.append(answer)
        if reply.output_ids is not None:
            spans.append([len(ids), len(ids) + len(reply.output_ids)])
            ids, rendered = ids + reply.output_ids, text + reply.text
    if not replies:
        raise Unusable("no user turn")
    response = {key: prompt[key] for key in _CARRIED if key in prompt} | {"messages": messages}
    reply = replies[-1]
    if reply.output_ids is not None:
        response |= {"prompt_ids": prompt_ids, "output_ids": reply.output_ids}
        response |= {"output_spans": spans} if spans else {}
    unasked = len(turns) - 1 - number
    response |= {"text": reply.text, "finish_reason": reply.finish_reason, "unasked_turns": unasked}
    known = {"reasoning_content": reply.reasoning, "tool_calls": reply.tool_calls}
    known |= {"completion_tokens": reply.completion_tokens} if reply.output_ids is None else {}
    return response | {name: value for name, value in known.items() if value}, replies


def _how_far(summary: GenerateSummary, total: int) -> dict[str, Any]:
    done, rate = summary.generated, summary.generated / summary.seconds
    eta_seconds = round((total - done - summary.failed.total()) / rate)
    counts = {"done": done, "total": total, "unit": "responses", "rate": round(rate, 2), "eta_seconds": eta_seconds}
    return counts | {"tokens_per_second": round(summary.tokens_per_second, 1), "failed": summary.failed.total()}


def _continue_ids(tokenizer, ids: list[int], rendered: str, text: str) -> tuple[list[int], bool]:
    """Ids of a prompt that goes on from ids already generated (only what the template adds is tokenised), and True.

    Where the template rewrites earlier turns (many leave their reasoning out), all of the prompt is tokenised: False.
    """
    if not ids or not text.startswith(rendered):
        return tokenizer.encode(text, add_special_tokens=False), False
    added = tokenizer.encode(text[len(rendered) :], add_special_tokens=False)
    return ids + (added[1:] if added[:1] == ids[-1:] else added), True


def _count(summary: GenerateSummary, replies: list[Reply], seconds: float) -> None:
    summary.generated += 1
    summary.seconds = seconds
    summary.finish_reasons[replies[-1].finish_reason] += 1
    for reply in replies:
        summary.prompt_tokens += reply.prompt_tokens
        summary.completion_tokens += reply.completion_tokens
        summary.cost += reply.cost
