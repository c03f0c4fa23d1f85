"""37,312 samples of a realistic length mix (91 M tokens) through writer, ledger, resume, verify and batches.

    .venv/bin/python benchmarks/store_scale.py [--samples 37312] [--folder outputs/bench-scale]

The hidden size is tiny (2), so that the 91 M tokens fit; what is measured is what grows with samples: seconds and
resident memory per 1,000 samples must be as flat at the end as at the start. As in a real corpus ids come in no order,
and the hundreds of shards are more than a reader holds open.
"""

import argparse
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch

from eagle3_utils.draft.training.build import token_counts
from eagle3_utils.states.dataset import PackedDataset
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

HIDDEN, NUM_AUX, LONGEST = 2, 3, 8192
META = StoreMeta(HIDDEN, list(range(NUM_AUX)), fingerprint="scale")


def lengths_of(num_samples: int) -> np.ndarray:
    """Lognormal, mean about 2,440 tokens, cut at 8,192: 37,312 of them are 91 M tokens."""
    return np.random.default_rng(0).lognormal(7.55, 0.75, num_samples).clip(32, LONGEST).astype(int)


def samples_of(lengths: np.ndarray):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 163_840, LONGEST).astype(np.int32)
    states = torch.randn(LONGEST, NUM_AUX + 1, HIDDEN).bfloat16()
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        aux, final = states[:length, :NUM_AUX].contiguous(), states[:length, NUM_AUX].contiguous()
        sample_id = f"sample-{number * 2654435761 % 2**32:010d}"
        yield Sample(sample_id, np.roll(ids[:length], number), mask, aux, final, source="mix")


def resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


def timed(name: str, work):
    started = time.perf_counter()
    result = work()
    print(f"{name:40}{time.perf_counter() - started:8.1f} s {resident_mib():8.0f} MiB resident", flush=True)
    return result


def write(folder: Path, lengths: np.ndarray) -> None:
    with StoreWriter(folder, META, shard_bytes=4 << 20) as writer:
        started = time.perf_counter()
        for number, sample in enumerate(samples_of(lengths), start=1):
            writer.add(sample)
            if number % 4000 == 0 or number == len(lengths):
                rate = (time.perf_counter() - started) / (number % 4000 or 4000) * 1000
                print(f"  after {number:6,} samples: {rate:6.2f} s per 1,000, {resident_mib():6.0f} MiB", flush=True)
                started = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=37_312)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench-scale"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    lengths = lengths_of(arguments.samples)
    print(f"{len(lengths):,} samples, {lengths.sum():,} tokens")
    timed("write", lambda: write(arguments.folder, lengths))
    timed("open again for writing (resume)", lambda: StoreWriter(arguments.folder, META).close())
    timed("verify", lambda: verify_store(arguments.folder).require())
    timed("verify --deep", lambda: verify_store(arguments.folder, deep=True).require())
    (arguments.folder / "ledger.sqlite").unlink()
    timed("rebuild a lost ledger", lambda: verify_store(arguments.folder, repair=True))
    reader = timed("open for reading", lambda: StoreReader(arguments.folder))
    assert len(reader) == len(lengths) and reader.num_tokens == lengths.sum()
    timed("count its tokens", lambda: token_counts(reader, SimpleNamespace(vocab_size=163_840)))
    dataset = PackedDataset(reader, max_tokens=LONGEST)
    batches = timed("plan an epoch", lambda: dataset.plan(0))
    print(f"{len(batches):,} batches, {reader.num_tokens / (len(batches) * LONGEST):.1%} full")
    count = timed("read an epoch", lambda: sum(len(batch.sample_ids) for batch in dataset.epoch(0)))
    assert count == len(lengths)
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
