"""Speed of capture, beside prefill without it and beside the naive way, on one server and the same samples.

    python benchmarks/capture.py                                                       # SmolLM2 on the CPU, 3 minutes
    python benchmarks/capture.py --device cuda --samples 192 --mean-tokens 1554 --max-tokens 8192 --rounds 5

bare    ordinary requests on the same server, 32 at a time: nothing is recorded
ours    the same samples as `hs-` requests, 32 at a time; each dump is taken (deleted) when it arrives
naive   one request at a time; inside the server `.cpu()` of each tensor and one `torch.save` file per tensor
one     bare, one request at a time: what the naive way could reach at best

Rounds of the four are interleaved, since two starts of a server differ more than what is measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.target import load_target

NAIVE_PREFIX = "naive-"


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
    with tempfile.TemporaryDirectory(prefix="capture-bench-") as scratch:
        folder = Path(scratch)
        config = ProbeConfig(
            run_dir=scratch,
            device=arguments.device,
            chunked_prefill_size=arguments.chunk,
            staging_max_bytes=arguments.staging_bytes,
            extra_server_args=arguments.server_args,
        )
        environment = {"PYTHONPATH": install_naive(folder / "plugin"), "EAGLE3_NAIVE_DIR": make(arguments.naive_dir)}
        spec = capture_spec(config, target, "bench")
        with Server(config, target, folder / "server.log", folder, spec, environment=environment) as server:
            print_result(run(server, sample_lengths(arguments), target.vocab_size, arguments), server, arguments)


def run(server: Server, lengths: list[int], vocab_size: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each way, one figure per round; the first round of each warms up and is dropped."""
    rng = random.Random(0)
    samples = [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]
    few = samples[: max(1, len(samples) // arguments.serial_share)]
    ways = {"bare": ("bare-", 32, samples), "ours": ("hs-bench-", 32, samples),
            "one": ("one-", 1, few), "naive": (NAIVE_PREFIX, 1, few)}  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, (prefix, num_concurrent, some) in ways.items():
            rate = measure(server.client, f"{prefix}{number}-", some, num_concurrent)
            for path in Path(arguments.naive_dir).glob(f"{NAIVE_PREFIX}*"):
                path.unlink()
            if number:
                rates[name].append(rate)
    return rates


def measure(client: Client, prefix: str, samples: list[list[int]], num_concurrent: int) -> float:
    """Tokens per second from the first request to the last answer, or the last dump where there is one."""

    def one(item: tuple[int, list[int]]) -> None:
        number, ids = item
        client.generate(ids, rid=f"{prefix}{number}")
        if prefix.startswith("hs-"):
            client.wait_for_dump(f"{prefix}{number}").unlink()

    started = time.monotonic()
    with ThreadPoolExecutor(num_concurrent) as pool:
        list(pool.map(one, enumerate(samples)))
    return sum(map(len, samples)) / (time.monotonic() - started)


def print_result(rates: dict[str, list[float]], server: Server, arguments: argparse.Namespace) -> None:
    """A table of medians and ranges, then one JSON line for LOG.md."""
    facts = server.handshake
    bytes_per_token = (len(facts["boundaries"]) + 1) * facts["hidden_size"] * 2
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{facts['model_class']} on {facts['device']}, {bytes_per_token:,} B of states a token")
    print(f"{'':8}{'tokens/s':>12}{'range':>22}{'MB/s':>10}{'of bare':>10}")
    for name, values in rates.items():
        low_high = f"{min(values):,.0f}-{max(values):,.0f}"
        speed = median[name] * bytes_per_token / 1e6
        print(f"{name:8}{median[name]:12,.0f}{low_high:>22}{speed:10,.1f}{median[name] / median['bare']:10.2f}")
    result = {"tokens_per_second": median, "ours_to_bare": median["ours"] / median["bare"],
              "ours_to_naive": median["ours"] / median["naive"], "rounds": arguments.rounds}  # fmt: skip
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


def make(folder: str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="example")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--mean-tokens", type=float, default=204)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serial-share", type=int, default=4, help="one in so many samples is sent one at a time")
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--staging-bytes", type=int, default=4 << 30)
    parser.add_argument("--naive-dir", default=str(Path(tempfile.gettempdir()) / "naive-capture"))
    parser.add_argument("--server-args", nargs="*", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
