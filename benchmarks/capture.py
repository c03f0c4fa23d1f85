"""Speed of capture, beside prefill without it and beside the naive way, with the same flags and the same samples.

    python benchmarks/capture.py      # SmolLM2 on the CPU: about 6 minutes on two quiet cores
    python benchmarks/capture.py --device cuda --samples 192 --mean-tokens 1554 --max-tokens 8192 --rounds 5 \\
        --server-args="--attention-backend triton --sampling-backend pytorch --grammar-backend none"

bare    a server of its own that loads no plugin; ordinary requests, 32 at a time
ours    a server with the capture plugin; the same samples as `hs-` requests, 32 at a time; each dump is taken (deleted)
        after its answer, and the clock stops with the last one
idle    ordinary requests to that server, 32 at a time: what capture costs those whom it does not capture
one     bare, one request at a time: what the naive way could reach at best
naive   one request at a time; inside the server a blocking `.cpu()` and one `torch.save` per tensor

Both servers live side by side (idle ones sleep) and the rounds of all ways are interleaved, so that a machine that
slows down slows all of them. Two starts of one server still differ by some per cent on shared cores: `idle` and `ours`
come from one start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.launch.flags import LONGER_CONTEXT_VARIABLE, capture_flags
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.target import Target, load_target

NUM_CONCURRENT = 32
NAIVE_PREFIX = "naive-"
WAYS = {  # name → server, requests in flight
    "bare": ("bare", NUM_CONCURRENT),
    "ours": ("capturing", NUM_CONCURRENT),
    "idle": ("capturing", NUM_CONCURRENT),
    "one": ("bare", 1),
    "naive": ("capturing", 1),
}
RID_PREFIXES = {"ours": "hs-bench-", "naive": NAIVE_PREFIX}


def register() -> None:
    """The naive way as an SGLang plugin: rows of `naive-` requests are saved where capture would record."""
    import torch

    from eagle3_utils.serving.capture import recorder

    record, folder = recorder.Recorder.record, Path(os.environ["EAGLE3_NAIVE_DIR"])

    def naive_record(self, forward):
        row = 0
        for rid, extend in zip(forward.rids, forward.extend_lens, strict=True):
            if rid.startswith(NAIVE_PREFIX):
                for name, tensor in [("final", forward.final), *enumerate(forward.aux)]:
                    torch.save(tensor[row : row + extend].cpu().clone(), folder / f"{rid}-{row}-{name}.pt")
            row += extend
        record(self, forward)

    recorder.Recorder.record = naive_record


def main() -> None:
    arguments = parse_arguments()
    target = load_target(arguments.model)
    with tempfile.TemporaryDirectory(prefix="capture-bench-") as scratch, start(arguments, target, scratch) as servers:
        rates = run(servers, sample_lengths(arguments), target.vocab_size, arguments.rounds, arguments.serial_share)
        print_result(rates, servers["capturing"].handshake)


@contextmanager
def start(arguments: argparse.Namespace, target: Target, scratch: str) -> Iterator[dict[str, Server]]:
    """Both servers, with the same flags; only one of them is told to capture."""
    folder = Path(scratch)
    naive_folder = folder / "naive"
    naive_folder.mkdir()
    # The KV cache is bounded, so that two servers fit on one device.
    config = ProbeConfig(
        run_dir=scratch, device=arguments.device, max_seq_len=arguments.max_tokens, dtype=arguments.dtype,
        chunked_prefill_size=arguments.chunk, staging_max_bytes=arguments.staging_bytes,
        staging_dir=arguments.staging_dir,
        extra_server_args=["--max-total-tokens", str(NUM_CONCURRENT * arguments.max_tokens), *arguments.server_args],
    )  # fmt: skip
    spec = capture_spec(config, target, "bench")
    plain = {"SGLANG_PLUGINS": "none", LONGER_CONTEXT_VARIABLE: "1"}
    paths = [install_naive(folder / "plugin"), os.environ.get("PYTHONPATH")]
    naive = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EAGLE3_NAIVE_DIR": str(naive_folder)}
    with (
        Server(config, target, folder / "capturing.log", folder / "capturing", spec, environment=naive) as capturing,
        Server(
            config, target, folder / "bare.log", folder / "bare",
            extra_args=capture_flags(config, target), environment=plain,
        ) as bare,
    ):  # fmt: skip
        capturing.naive_folder = naive_folder
        yield {"bare": bare, "capturing": capturing}


def run(
    servers: dict[str, Server], lengths: list[int], vocab_size: int, num_rounds: int, serial_share: int
) -> dict[str, list[float]]:
    """Tokens per second of each way, one figure per round; the first round of each warms up and is dropped."""
    rng = random.Random(0)
    samples = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
    few = samples[::serial_share]
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(num_rounds + 1):
        for name, (server_name, num_concurrent) in WAYS.items():
            server, some = servers[server_name], few if num_concurrent == 1 else samples
            prefix = f"{RID_PREFIXES.get(name, name + '-')}{number}-"
            rate = measure(server.client, prefix, some, num_concurrent, name == "ours")
            if name == "naive":
                check_naive(server.naive_folder, len(some))
            if number:
                rates[name].append(rate)
    return rates


def measure(client: Client, prefix: str, samples: list[list[int]], num_concurrent: int, takes_dumps: bool) -> float:
    """Tokens per second from the first request to the last answer, and to the last dump where there are dumps."""

    def request(item: tuple[int, list[int]]) -> Future | None:
        rid = f"{prefix}{item[0]}"
        client.generate(item[1], rid=rid)
        return takers.submit(lambda: client.wait_for_dump(rid).unlink()) if takes_dumps else None

    started = time.monotonic()
    with ThreadPoolExecutor(4) as takers, ThreadPoolExecutor(num_concurrent) as pool:
        for taken in list(pool.map(request, enumerate(samples))):
            if taken:
                taken.result()
        seconds = time.monotonic() - started
    return sum(map(len, samples)) / seconds


def check_naive(folder: Path, num_samples: int) -> None:
    """Every sample has left its files, or the naive way was not what ran; then delete them."""
    paths = list(folder.iterdir())
    if len({path.name.split("-")[2] for path in paths}) != num_samples:
        raise RuntimeError(f"{len(paths)} files of {num_samples} naive requests")
    for path in paths:
        path.unlink()


def print_result(rates: dict[str, list[float]], facts: dict) -> None:
    """A table of medians and ranges, then one JSON line for LOG.md."""
    bytes_per_token = (len(facts["boundaries"]) + 1) * facts["hidden_size"] * 2
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{facts['model_class']} in {facts['model_dtype']} on {facts['device']}, {bytes_per_token:,} B a token")
    print(f"{'':8}{'tokens/s':>12}{'range':>22}{'MB/s':>10}{'of bare':>10}")
    for name, values in rates.items():
        low_high = f"{min(values):,.0f}-{max(values):,.0f}"
        speed = f"{median[name] * bytes_per_token / 1e6:,.1f}" if name in RID_PREFIXES else "-"
        print(f"{name:8}{median[name]:12,.0f}{low_high:>22}{speed:>10}{median[name] / median['bare']:10.2f}")
    # Per round, so that a slow minute of the machine falls on both sides of the ratio.
    ratio = statistics.median(ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True))
    result = {"tokens_per_second": median, "ours_to_bare": ratio, "ours_to_naive": median["ours"] / median["naive"],
              "rounds": len(rates["ours"])}  # fmt: skip
    print(json.dumps(result))


def sample_lengths(arguments: argparse.Namespace) -> list[int]:
    """Lognormal lengths (sigma 0.7) with the mean asked for, cut at the maximum; the same for every run."""
    rng, sigma = random.Random(1), 0.7
    scale = arguments.mean_tokens / 2.718281828 ** (sigma**2 / 2)
    return [
        min(arguments.max_tokens, max(1, int(scale * rng.lognormvariate(0, sigma)))) for _ in range(arguments.samples)
    ]


def install_naive(folder: Path) -> str:
    """Put this file and metadata that makes SGLang load its `register` into a folder for PYTHONPATH."""
    info = folder / "naive_capture-0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(__file__, folder / "naive_capture.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naive_capture\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnaive_capture = naive_capture:register\n")
    return str(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="example")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--mean-tokens", type=float, default=204)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serial-share", type=int, default=4, help="one in so many samples is sent one at a time")
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--staging-bytes", type=int, default=4 << 30)
    parser.add_argument("--staging-dir", default=None, help="where dumps go when /dev/shm is too small")
    parser.add_argument("--server-args", action="append", default=[], metavar='="--flag value …"', type=shlex.split)
    arguments = parser.parse_args()
    arguments.server_args = [word for words in arguments.server_args for word in words]
    return arguments


if __name__ == "__main__":
    main()
