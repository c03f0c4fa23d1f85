"""The pilot: real samples at full concurrency through a capturing server, for the planner's rates."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, as_completed

from eagle3_utils.serving.client import Client

_NUM_WINDOWS = 4


def run_pilot(client: Client, sequences: list[list[int]], num_concurrent: int) -> dict[str, float]:
    """Prefill and capture every sequence; rates over the whole run, and the lowest and highest of four windows.

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
    windows = _window_rates(arrivals)
    return {
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_second_low": min(windows),
        "tokens_per_second_high": max(windows),
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


def _window_rates(arrivals: list[tuple[float, int]]) -> list[float]:
    """Tokens per second of consecutive groups of arrivals, about `_NUM_WINDOWS` of them."""
    size = max(1, len(arrivals) // _NUM_WINDOWS)
    rates, previous = [], 0.0
    for start in range(0, len(arrivals) - size + 1, size):
        group = arrivals[start : start + size]
        elapsed = max(group[-1][0] - previous, 1e-9)
        rates.append(sum(tokens for _, tokens in group) / elapsed)
        previous = group[-1][0]
    return rates
