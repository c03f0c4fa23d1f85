"""Reading and writing hidden states: this store beside one safetensors file and one `torch.save` file per sample.

    .venv/bin/python benchmarks/store.py [--hidden 576] [--gib 1.0] [--folder outputs/bench-store]

Every way ends with the sample's auxiliary and final states copied into a batch buffer, as training does. "cold" drops
the files' pages from the page cache first (posix_fadvise; the disk's own cache stays). The passes of all ways are
interleaved, so that a slow moment of the machine hits all of them: rates are the best of the rounds, ratios the median
over the rounds. At the end: how fast a core encodes and decodes, and how fast `verify --deep` reads.
"""

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3_utils.states.codec import decode, encode
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

NUM_AUX = 3


def make_samples(hidden: int, total_bytes: int) -> list[Sample]:
    """Lognormal lengths (mean about 900 tokens, at most 4,096); all states are cut from one random block."""
    rng = np.random.default_rng(0)
    block = torch.randn(4096, NUM_AUX + 1, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    samples, size = [], 0
    while size < total_bytes:
        length = int(np.clip(rng.lognormal(6.6, 0.6), 16, 4096))
        ids = rng.integers(0, 49_152, length).astype(np.int32)
        aux, final = block[:length, :NUM_AUX].contiguous(), block[:length, NUM_AUX].contiguous()
        samples.append(Sample(f"s{len(samples):06d}", ids, np.ones(length, np.uint8), aux, final))
        size += 2 * hidden * (NUM_AUX + 1) * length
    return samples


class Store:
    name = "this store"

    def __init__(self, folder: Path, hidden: int):
        self.folder, self.meta = folder / "store", StoreMeta(hidden, list(range(NUM_AUX)))

    def write(self, samples: list[Sample]) -> None:
        with StoreWriter(self.folder, self.meta) as writer:
            for sample in samples:
                writer.add(sample)

    def open(self) -> None:
        self.reader = StoreReader(self.folder)

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.reader.read(index)
        return sample.aux, sample.final


class SafetensorsFiles:
    name = "safetensors per sample"

    def __init__(self, folder: Path, hidden: int):
        self.folder = folder / "safetensors"

    def write(self, samples: list[Sample]) -> None:
        self.folder.mkdir(parents=True)
        for sample in samples:
            ids, mask = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask)
            tensors = {"aux": sample.aux, "final": sample.final, "input_ids": ids, "loss_mask": mask}
            save_file(tensors, self.folder / f"{sample.id}.safetensors")

    def open(self) -> None:
        self.paths = sorted(self.folder.iterdir())

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = load_file(self.paths[index])
        return tensors["aux"], tensors["final"]


class TorchFiles(SafetensorsFiles):
    name = "torch.save per sample"

    def __init__(self, folder: Path, hidden: int):
        self.folder = folder / "torch"

    def write(self, samples: list[Sample]) -> None:
        self.folder.mkdir(parents=True)
        for sample in samples:
            ids, mask = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.loss_mask)
            tensors = {"aux": sample.aux, "final": sample.final, "input_ids": ids, "loss_mask": mask}
            torch.save(tensors, self.folder / f"{sample.id}.pt")

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = torch.load(self.paths[index], weights_only=True)
        return tensors["aux"], tensors["final"]


class PlainFile:
    """The bound: one file of the same bytes, read from start to end into a buffer."""

    name = "plain file, 8 MiB reads"

    def __init__(self, folder: Path):
        self.folder = folder / "plain"

    def write(self, samples: list[Sample]) -> None:
        self.folder.mkdir(parents=True)
        with open(self.folder / "bytes", "wb", buffering=0) as file:
            for sample in samples:
                for states in (sample.aux, sample.final):
                    file.write(memoryview(states.view(torch.uint8).numpy()).cast("B"))

    def open(self) -> None:
        self.buffer = memoryview(bytearray(1 << 23))

    def read_all(self) -> None:
        with open(self.folder / "bytes", "rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass


def drop_pages(folder: Path) -> None:
    """Write back and forget the cached pages of every file of a folder."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_pass(way, order: np.ndarray, aux_buffer: torch.Tensor, final_buffer: torch.Tensor) -> None:
    for index in order:
        aux, final = way.read(int(index))
        aux_buffer[: len(aux)].copy_(aux)
        final_buffer[: len(final)].copy_(final)


def write_all(ways: list, hidden: int, total_bytes: int) -> tuple[int, int]:
    """Write the same samples in every way; returns their number and their bytes. They are not kept in memory."""
    samples = make_samples(hidden, total_bytes)
    tokens = sum(len(sample.input_ids) for sample in samples)
    num_bytes = tokens * 2 * hidden * (NUM_AUX + 1)
    print(f"{len(samples)} samples, {tokens:,} tokens, hidden {hidden}, {num_bytes / 2**30:.2f} GiB of states")
    for way in ways:
        seconds = timed(lambda way=way: (way.write(samples), drop_pages(way.folder)))
        print(f"{way.name:26}write and sync {num_bytes / seconds / 1e9:8.2f} GB/s")
    print_codec(samples)
    return len(samples), num_bytes


def read_rounds(ways: list, order: np.ndarray, buffers, num_rounds: int) -> dict[tuple, list[float]]:
    """Seconds of every pass: {(name, cold or warm, sequential or random): one figure per round}."""
    shuffled, seconds = np.random.default_rng(1).permutation(order), {}
    for way in ways:  # into the page cache; a cold pass leaves it full as well
        way.open()
        way.read_all() if isinstance(way, PlainFile) else read_pass(way, order, *buffers)
    for _ in range(num_rounds):
        for state in ("warm", "cold"):
            for sequence in ("sequential", "random"):
                for way in ways:
                    if isinstance(way, PlainFile) and sequence == "random":
                        continue
                    way.open()
                    if state == "cold":
                        drop_pages(way.folder)
                    chosen = order if sequence == "sequential" else shuffled
                    plain = isinstance(way, PlainFile)
                    work = way.read_all if plain else lambda way=way, o=chosen: read_pass(way, o, *buffers)
                    seconds.setdefault((way.name, state, sequence), []).append(timed(work))
    return seconds


def print_reads(seconds: dict[tuple, list[float]], num_bytes: int) -> None:
    """One row per way and kind of pass: best rate, and the median ratio of its time to what it is compared with."""
    print(f"\n{'':26}{'':18}{'GB/s':>8}  compared with")
    for (name, state, sequence), values in seconds.items():
        other = SafetensorsFiles.name if sequence == "random" else PlainFile.name
        base = seconds[other, state, sequence]
        ratio = statistics.median(mine / theirs for mine, theirs in zip(values, base, strict=True))
        note = f"{ratio:.2f} x the time" if sequence == "random" else f"{1 / ratio:.2f} x the rate"
        print(f"{name:26}{state + ' ' + sequence:18}{num_bytes / min(values) / 1e9:8.2f}  {note} of {other}")


def print_codec(samples: list[Sample]) -> None:
    """GB/s of bf16 that one core turns into fp8 and back (processor time, best of three)."""
    states = [sample.aux for sample in samples[:32]]
    stored = [encode(aux, "fp8") for aux in states]
    num_bytes, best = sum(aux.nbytes for aux in states), {}
    for _ in range(3):
        for name, work in (
            ("encode fp8", lambda: [encode(aux, "fp8") for aux in states]),
            ("decode fp8", lambda: [decode(*pair) for pair in stored]),
        ):
            started = time.process_time()
            work()
            best[name] = min(best.get(name, 1e9), time.process_time() - started)
    print("\n" + ", ".join(f"{name} {num_bytes / seconds / 1e9:.2f} GB/s per core" for name, seconds in best.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench-store"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    ways = [kind(arguments.folder, arguments.hidden) for kind in (Store, SafetensorsFiles, TorchFiles)]
    ways.append(PlainFile(arguments.folder))
    num_samples, num_bytes = write_all(ways, arguments.hidden, int(arguments.gib * 2**30))
    buffers = (torch.empty(4096, NUM_AUX, arguments.hidden).bfloat16(), torch.empty(4096, arguments.hidden).bfloat16())
    print_reads(read_rounds(ways, np.arange(num_samples), buffers, arguments.rounds), num_bytes)
    seconds = timed(lambda: verify_store(ways[0].folder, deep=True).require())
    print(f"\nverify --deep {num_bytes / seconds / 1e9:.2f} GB/s with {len(os.sched_getaffinity(0))} cores")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
