"""Reading and writing hidden states: this store beside one safetensors file and one `torch.save` file per sample.

    .venv/bin/python benchmarks/store.py [--hidden 576] [--gib 1.0] [--folder outputs/bench]

Every way ends with the sample's auxiliary and final states copied into a batch buffer, as training does. "cold" drops
the files' pages from the page cache first (posix_fadvise; the disk's own cache stays). Best of three passes.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3_utils.states.reader import StoreReader
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

    def write(self, num_bytes: int) -> None:
        self.folder.mkdir(parents=True)
        block = os.urandom(1 << 23)
        with open(self.folder / "bytes", "wb") as file:
            for _ in range(num_bytes >> 23):
                file.write(block)

    def read_all(self) -> int:
        buffer, total = memoryview(bytearray(1 << 23)), 0
        with open(self.folder / "bytes", "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
        return total


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


def best_seconds(way, order: np.ndarray, buffers, cold: bool) -> float:
    seconds = []
    for _ in range(3):
        way.open()
        if cold:
            drop_pages(way.folder)
        seconds.append(timed(lambda: read_pass(way, order, *buffers)))
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench-store"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    samples = make_samples(arguments.hidden, int(arguments.gib * 2**30))
    tokens = sum(len(sample.input_ids) for sample in samples)
    num_bytes = tokens * 2 * arguments.hidden * (NUM_AUX + 1)
    print(
        f"{len(samples)} samples, {tokens:,} tokens, hidden {arguments.hidden}, {num_bytes / 2**30:.2f} GiB of states"
    )
    buffers = (torch.empty(4096, NUM_AUX, arguments.hidden).bfloat16(), torch.empty(4096, arguments.hidden).bfloat16())
    order = np.arange(len(samples))
    shuffled = np.random.default_rng(1).permutation(order)
    print(f"{'GB/s':24}{'write':>8}{'sequential':>12}{'random':>8}{'seq. cold':>11}{'random cold':>13}")
    for kind in (Store, SafetensorsFiles, TorchFiles):
        way = kind(arguments.folder, arguments.hidden)
        rates = [num_bytes / timed(lambda way=way: (way.write(samples), drop_pages(way.folder)))]
        for cold in (False, True):
            for sequence in (order, shuffled):
                rates.append(num_bytes / best_seconds(way, sequence, buffers, cold))
        write, sequential, random, cold_sequential, cold_random = (rate / 1e9 for rate in rates)
        print(f"{way.name:24}{write:8.2f}{sequential:12.2f}{random:8.2f}{cold_sequential:11.2f}{cold_random:13.2f}")
        shutil.rmtree(way.folder)
    plain = PlainFile(arguments.folder)
    plain.write(num_bytes)
    warm = min(timed(plain.read_all) for _ in range(3))
    cold = min(timed(lambda: (drop_pages(plain.folder), plain.read_all())) for _ in range(3))
    print(f"{plain.name:24}{'':8}{num_bytes / warm / 1e9:12.2f}{'':8}{num_bytes / cold / 1e9:11.2f}")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
