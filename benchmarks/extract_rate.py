"""Extraction from a real server to closed shards, beside bare prefill of the same samples with the same flags.

    python benchmarks/extract_rate.py --tokens 3000 --mean-tokens 100 --max-tokens 256   # SmolLM2 on the CPU
    python benchmarks/extract_rate.py --device cuda --tokens 8000000 --disk outputs/bench-rate \\
        --server-args="--attention-backend triton --sampling-backend pytorch --grammar-backend none"

bare      a server of its own that loads no plugin; ordinary requests, as many tokens in flight as the extraction has
bf16      `extract` into a store in memory (`--memory`), every state in bf16
compact   `extract` into a store on the disk (`--disk`), fp8 and the final state of supervised rows only

The token ids are random, since a prefill does not look at what they say. The clock of an extraction runs until the
last shard is synced and in the ledger. Rounds of all ways are interleaved; ratios are medians over the rounds.
"""

import argparse
import queue
import shlex
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from eagle3_utils.config import ExtractConfig, ProbeConfig
from eagle3_utils.corpus.records import Record
from eagle3_utils.serving.launch.flags import LONGER_CONTEXT_VARIABLE, capture_flags
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.states.extract import extract
from eagle3_utils.states.extraction.connection import Connection, generate_body
from eagle3_utils.states.extraction.pool import in_buckets
from eagle3_utils.states.extraction.report import ExtractReport
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import StoreMeta
from eagle3_utils.target import load_target


def make_records(num_tokens: int, mean_tokens: int, max_tokens: int, vocab_size: int) -> list[Record]:
    """Samples of random ids and lognormal lengths, the second half of each supervised."""
    rng, records, total = np.random.default_rng(0), [], 0
    while total < num_tokens:
        length = int(np.clip(rng.lognormal(np.log(mean_tokens) - 0.25, 0.7), 4, max_tokens))
        mask = [int(position >= length // 2) for position in range(length)]
        records.append(Record(f"s{len(records):06d}", "bench", rng.integers(0, vocab_size, length).tolist(), mask))
        total += length
    return records


def prefill(url: str, records: list[Record], num_concurrent: int) -> None:
    """Ordinary requests, so many at a time, over kept-open connections; raises when one is not answered well."""
    waiting, problems = queue.SimpleQueue(), []
    for record in in_buckets(records):
        waiting.put(record)

    def work():
        connection = Connection(url, 600.0)
        while not problems:
            try:
                record = waiting.get_nowait()
            except queue.Empty:
                return
            status, content = connection.post("/generate", generate_body(f"bare-{record.id}", record.input_ids))
            if status != 200:
                problems.append(content[:300])

    threads = [threading.Thread(target=work) for _ in range(num_concurrent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems or not waiting.empty():
        raise RuntimeError(f"bare prefill failed: {problems or 'a thread ended early'}")


class Bench:
    """Both servers, side by side (idle ones sleep), and the ways to send the samples through them."""

    def __init__(self, arguments, target, bare: Server, capturing: Server, config):
        self.arguments, self.target, self.bare, self.capturing, self.config = arguments, target, bare, capturing, config

    def run(self, way: str, records: list[Record]) -> tuple[float, float, float]:
        """Tokens per second, busy cores of this process, and of the processes that build shards, of one way."""
        tokens = sum(len(record.input_ids) for record in records)
        started, used, built = time.monotonic(), time.process_time(), 0.0
        if way == "bare":
            mean = tokens / len(records)
            concurrent = min(192, max(1, int(self.arguments.tokens_in_flight / mean)), len(records))
            prefill(self.bare.url, records, concurrent)
        else:
            built = self._extract(way, records).builders_cpu_seconds
        seconds, used = time.monotonic() - started, time.process_time() - used
        if way != "bare":
            verify_store(self._folder(way)).require()
            shutil.rmtree(self._folder(way))
        return tokens / seconds, used / seconds, built / seconds

    def _folder(self, way: str) -> Path:
        return (self.arguments.memory if way == "bf16" else self.arguments.disk) / "bench-rate-store"

    def _extract(self, way: str, records: list[Record]) -> ExtractReport:
        shutil.rmtree(self._folder(way), ignore_errors=True)
        layers = self.capturing.handshake["layers"]
        codec = ("bf16", "all") if way == "bf16" else ("fp8", "supervised")
        meta = StoreMeta(self.target.hidden_size, layers, *codec, fingerprint="bench")
        return extract([self.capturing], records, self._folder(way), meta, self.config)


def main() -> None:
    arguments = parse_arguments()
    target = load_target(arguments.model)
    records = make_records(arguments.tokens, arguments.mean_tokens, arguments.max_tokens, target.vocab_size)
    few = records[:: max(1, len(records) // 50)]
    tokens = sum(len(record.input_ids) for record in records)
    print(f"{len(records):,} samples, {tokens:,} tokens, longest {max(len(r.input_ids) for r in records)}")
    with tempfile.TemporaryDirectory(prefix="rate-bench-") as scratch:
        folder = Path(scratch)
        config = probe_config(arguments, scratch)
        spec = capture_spec(config, target, "rate")
        plain = {"SGLANG_PLUGINS": "none", LONGER_CONTEXT_VARIABLE: "1"}
        flags = capture_flags(config, target)
        with (
            Server(config, target, folder / "capturing.log", folder / "capturing", spec) as capturing,
            Server(
                config, target, folder / "bare.log", folder / "bare", extra_args=flags, environment=plain
            ) as bare,
        ):  # fmt: skip
            bench = Bench(arguments, target, bare, capturing, extract_config(arguments))
            rates: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ("bare", "bf16", "compact")}
            for way in rates:
                bench.run(way, few)
            for _ in range(arguments.rounds):
                for way, measured in rates.items():
                    measured.append(bench.run(way, records))
                    print(f"  {way:8} {measured[-1][0]:12,.0f} tokens/s", flush=True)
            print_result(rates, capturing.handshake)


def print_result(rates: dict[str, list[tuple[float, float, float]]], facts: dict) -> None:
    bytes_per_token = (len(facts["boundaries"]) + 1) * facts["hidden_size"] * 2
    print(f"{facts['model_class']} on {facts['device']}, {bytes_per_token:,} B a token from the server")
    for way, rounds in rates.items():
        rate, client, builders = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        share = statistics.median(one[0] / bare[0] for one, bare in zip(rounds, rates["bare"], strict=True))
        print(
            f"{way:8} {rate:12,.0f} tokens/s  {rate * bytes_per_token / 1e9:6.2f} GB/s of dumps  {share:5.2f} of bare  "
            f"{client:5.2f} cores in the client, {builders:5.2f} in processes that build shards"
        )


def probe_config(arguments, scratch: str) -> ProbeConfig:
    # The KV cache is bounded, so that two servers fit on one device.
    limit = ["--max-total-tokens", str(2 * arguments.tokens_in_flight + arguments.max_tokens)]
    return ProbeConfig(
        run_dir=scratch, device=arguments.device, max_seq_len=arguments.max_tokens, dtype=arguments.dtype,
        chunked_prefill_size=arguments.chunk, staging_max_bytes=arguments.staging_bytes,
        staging_dir=arguments.staging_dir, extra_server_args=[*limit, *arguments.server_args],
    )  # fmt: skip


def extract_config(arguments) -> ExtractConfig:
    return ExtractConfig(
        max_tokens_in_flight=arguments.tokens_in_flight, staging_max_bytes=arguments.staging_bytes, min_free_bytes=0,
        shard_builders=arguments.builders,
    )  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="example")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--mean-tokens", type=int, default=1554)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--tokens-in-flight", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--builders", type=int, default=None, help="shard_builders; left out: by the number of cores")
    parser.add_argument("--staging-bytes", type=int, default=8 << 30)
    parser.add_argument("--staging-dir", default=None, help="where dumps go when /dev/shm is too small")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where the bf16 store goes")
    parser.add_argument("--disk", type=Path, default=Path("outputs"), help="where the compact store goes")
    parser.add_argument("--server-args", action="append", default=[], metavar='="--flag value …"', type=shlex.split)
    arguments = parser.parse_args()
    arguments.server_args = [word for words in arguments.server_args for word in words]
    return arguments


if __name__ == "__main__":
    main()
