"""How many responses a second stage 00's client can take, beside a bare HTTP client on the same requests.

    python benchmarks/client.py [--concurrent 512] [--num 6000]

A local endpoint in a process of its own answers every prompt after 0.2 s with 190 token ids, by SGLang's native
protocol. The bare rate posts the same bodies and reads the same answers with aiohttp, and does nothing else: what
rendering, tokenising, checking and writing the lines cost comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
from pathlib import Path
from time import perf_counter

import aiohttp
from aiohttp import web

from eagle3_utils.corpus.generation.endpoints import EndpointPool, Sampling
from eagle3_utils.corpus.generation.generate import generate
from eagle3_utils.corpus.generation.responses import GenerateSettings
from eagle3_utils.target import load_target, load_tokenizer

SECONDS, TOKENS = 0.2, 190
ANSWER = {
    "text": "word " * TOKENS,
    "output_ids": list(range(1000, 1000 + TOKENS)),
    "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 40, "completion_tokens": TOKENS},
}


def serve(connection) -> None:
    """Answer every POST on a free port, which goes through `connection`; ends with the process."""
    body = json.dumps(ANSWER).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(SECONDS)
        return web.Response(body=body, content_type="application/json")

    async def forever() -> None:
        application = web.Application()
        application.router.add_post("/generate", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(forever())


async def bare(url: str, prompts: list[dict], concurrent: int) -> float:
    """Seconds for the same bodies through aiohttp alone."""
    body, waiting = {"input_ids": list(range(45)), "sampling_params": {"temperature": 0.7}}, iter(prompts)
    start = perf_counter()

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in waiting:
            async with session.post(f"{url}/generate", json=body) as response:
                await response.json()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrent)) as session:
        await asyncio.gather(*(work(session) for _ in range(concurrent)))
    return perf_counter() - start


async def ours(url: str, prompts: list[dict], concurrent: int, tokenizer, folder: Path) -> float:
    """Seconds of `generate`, lines on disk included."""
    start = perf_counter()
    async with EndpointPool([url], max_connections=concurrent) as pool:
        settings = GenerateSettings("benchmark", Sampling())
        summary = await generate(
            prompts, folder / "responses.jsonl", pool, tokenizer, settings, num_concurrent=concurrent
        )
    if summary.generated != len(prompts):
        raise SystemExit(f"only {summary.generated} of {len(prompts)} answered: {dict(summary.failed)}")
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=512)
    parser.add_argument("--num", type=int, default=6000)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(load_target("example"))
    prompts = [
        {"id": f"p{i}", "source": "x", "messages": [{"role": "user", "content": f"What is {i} + {i}? Explain it."}]}
        for i in range(arguments.num)
    ]
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    bare_seconds = asyncio.run(bare(url, prompts, arguments.concurrent))
    with tempfile.TemporaryDirectory() as folder:
        our_seconds = asyncio.run(ours(url, prompts, arguments.concurrent, tokenizer, Path(folder)))
    server.terminate()
    figures = {
        "responses": arguments.num,
        "in_flight": arguments.concurrent,
        "possible_at_this_latency_per_second": round(arguments.concurrent / SECONDS),
        "bare_responses_per_second": round(arguments.num / bare_seconds),
        "responses_per_second": round(arguments.num / our_seconds),
        "ours_to_bare": round(bare_seconds / our_seconds, 3),
        "tokens_per_second": round(TOKENS * arguments.num / our_seconds),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
