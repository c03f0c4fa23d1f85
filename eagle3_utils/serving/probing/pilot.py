"""The pilot: real samples at full concurrency through a capturing server, for the planner's rates."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from eagle3_utils.serving.client import Client


def run_pilot(client: Client, sequences: list[list[int]], num_concurrent: int) -> dict[str, float]:
    """Prefill and capture every sequence; the rate over the whole run, and the range it went through.

    Returns
    -------
    tokens_per_second, tokens_per_second_low, tokens_per_second_high, bytes_per_second, bytes_per_token, num_samples,
    num_tokens, seconds. Bytes are those of the dump files.

    Raises
    ------
    DumpError
        When a request fails or its dump does not arrive.
    """
    started = time.monotonic()
    arrivals: list[tuple[float, int]] = []
    total_bytes = 0
    with ThreadPoolExecutor(num_concurrent) as pool:
        futures = {pool.submit(_one, client, f"hs-pilot-{i}", ids): len(ids) for i, ids in enumerate(sequences)}
        for future in as_completed(futures):
            total_bytes += future.result()
            arrivals.append((time.monotonic() - started, futures[future]))
    seconds = max(arrivals[-1][0], 1e-9)
    num_tokens = sum(tokens for _, tokens in arrivals)
    rates = _running_rates(arrivals)
    return {
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_second_low": min(rates),
        "tokens_per_second_high": max(rates),
        "bytes_per_second": total_bytes / seconds,
        "bytes_per_token": total_bytes / num_tokens,
        "num_samples": len(sequences),
        "num_tokens": num_tokens,
        "seconds": seconds,
    }


def _one(client: Client, rid: str, input_ids: list[int]) -> int:
    client.generate(input_ids, rid=rid)
    path = client.wait_for_dump(rid)
    size = path.stat().st_size
    path.unlink()
    return size


def _running_rates(arrivals: list[tuple[float, int]]) -> list[float]:
    """Tokens per second from the start up to each arrival, once a quarter of the samples is there.

    Answers of one batch arrive together, so rates between arrivals would be near nothing or near infinity.
    """
    first, total, rates = len(arrivals) // 4, 0, []
    for number, (elapsed, tokens) in enumerate(arrivals):
        total += tokens
        if number >= first:
            rates.append(total / max(elapsed, 1e-9))
    return rates
