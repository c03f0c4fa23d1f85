"""Reading and writing hidden states: this store beside one safetensors file and one `torch.save` file per sample.

    .venv/bin/python benchmarks/store.py [--hidden 576] [--gib 1.0] [--folder outputs/bench-store]

Every way fills the same batches of 32,768 tokens with auxiliary and final states, as training does; the bound is a
plain file of the same bytes, read with `readinto` into the same tensors. "reused": the memory of one batch, used again
and again, as page-locked memory is. "fresh": new tensors for every batch, as without a GPU; for this store that is all
of `PackedDataset.load`, masks and positions included. "cold" drops the files' pages from the page cache first
(posix_fadvise; the disk's own cache stays). The passes of all ways are interleaved, so that a slow moment of the
machine hits all of them: rates are the best of the rounds, ratios the median over the rounds. Then an fp8 store of the
same samples, warm, into reused memory: states decoded by the loader, beside those left encoded for a GPU. Besides: how
fast a core encodes and decodes, and how fast `verify --deep` reads.
"""

import argparse
import os
import shutil
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3_utils.states.codec import decode, encode
from eagle3_utils.states.dataset import PackedDataset
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

NUM_AUX, BATCH_TOKENS = 3, 32_768


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
    name, codec = "this store", "bf16"

    def __init__(self, folder: Path, hidden: int):
        self.folder, self.meta = folder / self.codec, StoreMeta(hidden, list(range(NUM_AUX)), codec=self.codec)

    def write(self, samples: list[Sample]) -> None:
        with StoreWriter(self.folder, self.meta) as writer:
            for sample in samples:
                writer.add(sample)

    def open(self) -> None:
        self.reader = StoreReader(self.folder)
        self.dataset = PackedDataset(self.reader, BATCH_TOKENS)

    def fill(self, indices: list[int], aux: torch.Tensor, final: torch.Tensor) -> None:
        start = 0
        for index in indices:
            stop = start + int(self.reader.lengths[index])
            self.reader.copy_states(index, aux[start:stop], final[start:stop], np.ones(stop - start, bool))
            start = stop


class Fp8Store(Store):
    name, codec = "this store, fp8", "fp8"


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

    def fill(self, indices: list[int], aux: torch.Tensor, final: torch.Tensor) -> None:
        start = 0
        for index in indices:
            tensors = self.load(self.paths[index])
            stop = start + len(tensors["aux"])
            aux[start:stop].copy_(tensors["aux"])
            final[start:stop].copy_(tensors["final"])
            start = stop

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        return load_file(path)


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

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        return torch.load(path, weights_only=True)


class PlainFile:
    """The bound: one file of the same bytes, read from start to end into the tensors of the batches."""

    name = "plain file"

    def __init__(self, folder: Path, hidden: int):
        self.folder = folder / "plain"

    def write(self, samples: list[Sample]) -> None:
        self.folder.mkdir(parents=True)
        with open(self.folder / "bytes", "wb", buffering=0) as file:
            for sample in samples:
                for states in (sample.aux, sample.final):
                    file.write(memoryview(states.view(torch.uint8).numpy()).cast("B"))

    def open(self) -> None:
        self.file = open(self.folder / "bytes", "rb", buffering=0)  # noqa: SIM115 closed when the next pass opens it

    def fill(self, indices: list[int], aux: torch.Tensor, final: torch.Tensor) -> None:
        for states in (aux, final):
            assert self.file.readinto(memoryview(states.view(torch.uint8).numpy()).cast("B")) == states.nbytes


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


def batches_of(order: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    """Samples in this order, cut into batches of at most BATCH_TOKENS."""
    batches, room = [], 0
    for index in order.tolist():
        if room < lengths[index]:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(index)
        room -= int(lengths[index])
    return batches


def new_batch(
    hidden: int, num_tokens: int = BATCH_TOKENS, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the states of a batch; uint8 for the codes of an fp8 store."""
    return torch.empty(num_tokens, NUM_AUX, hidden, dtype=dtype), torch.empty(num_tokens, hidden, dtype=dtype)


def read_pass(way, batches: list[list[int]], lengths: np.ndarray, hidden: int, reused=None) -> None:
    """Read batches one by one into the memory of `reused`, or each into its own."""
    for indices in batches:
        if reused is None and isinstance(way, Store):
            way.dataset.load(indices)
            continue
        num_tokens = int(lengths[indices].sum())
        aux, final = reused or new_batch(hidden, num_tokens)
        way.fill(indices, aux[:num_tokens], final[:num_tokens])


def write_all(ways: list, hidden: int, total_bytes: int) -> np.ndarray:
    """Write the same samples in every way; returns their lengths. They are not kept in memory."""
    samples = make_samples(hidden, total_bytes)
    lengths = np.array([len(sample.input_ids) for sample in samples])
    tokens = int(lengths.sum())
    num_bytes = tokens * 2 * hidden * (NUM_AUX + 1)
    print(f"{len(samples)} samples, {tokens:,} tokens, hidden {hidden}, {num_bytes / 2**30:.2f} GiB of states")
    for way in ways:
        seconds = timed(lambda way=way: (way.write(samples), drop_pages(way.folder)))
        print(f"{way.name:24}write and sync {num_bytes / seconds / 1e9:8.2f} GB/s")
    print_codec(samples)
    return lengths


def read_rounds(ways: list, lengths: np.ndarray, hidden: int, num_rounds: int) -> dict[tuple, list[float]]:
    """Seconds of every pass: {(kind of pass, name): one figure per round}."""
    in_order, reused, seconds = np.arange(len(lengths)), new_batch(hidden), {}
    sequential = batches_of(in_order, lengths)
    random = batches_of(np.random.default_rng(1).permutation(in_order), lengths)
    passes = (  # a pass depends on how the one before has left the page cache: the first, in order, is not timed
        ("cold", sequential, reused),
        ("cold sequential, reused", sequential, reused),
        ("cold sequential, fresh", sequential, None),
        ("warm sequential, fresh", sequential, None),
        ("warm sequential, reused", sequential, reused),
        ("warm random, reused", random, reused),
        ("cold random, reused", random, reused),
    )
    for number in range(num_rounds):
        first = number % len(ways)  # no way always comes first
        for kind, batches, memory in passes:
            for way in ways[first:] + ways[:first]:
                if isinstance(way, PlainFile) and batches is random:
                    continue
                if kind.startswith("cold"):
                    drop_pages(way.folder)
                way.open()
                work = partial(read_pass, way, batches, lengths, hidden, memory)
                seconds.setdefault((kind, way.name), []).append(timed(work))
    return {key: values for key, values in seconds.items() if key[0] != "cold"}


def print_reads(seconds: dict[tuple, list[float]], num_bytes: int) -> None:
    """One row per way and kind of pass: best rate, and the median ratio of its time to what it is compared with."""
    print(f"\n{'':24}{'':26}{'GB/s':>6}  compared with")
    for (kind, name), values in sorted(seconds.items()):
        is_random = "random" in kind
        other = SafetensorsFiles.name if is_random else PlainFile.name
        ratio = statistics.median(mine / theirs for mine, theirs in zip(values, seconds[kind, other], strict=True))
        note = f"{ratio:.2f} x the time" if is_random else f"{1 / ratio:.2f} x the rate"
        print(f"{name:24}{kind:26}{num_bytes / min(values) / 1e9:6.2f}  {note} of {other}")


def print_fp8_loader(way: Fp8Store, lengths: np.ndarray, hidden: int, num_rounds: int) -> None:
    """Tokens/s of one loader thread, the first round not counted: decoded states beside encoded ones."""
    way.open()
    batches, seconds = batches_of(np.arange(len(lengths)), lengths), ([], [])
    memory = new_batch(hidden), new_batch(hidden, dtype=torch.uint8)
    for _ in range(num_rounds + 1):
        for values, reused in zip(seconds, memory, strict=True):
            values.append(timed(partial(read_pass, way, batches, lengths, hidden, reused)))
    decoded, encoded = (values[1:] for values in seconds)
    ratio = statistics.median(one / other for one, other in zip(decoded, encoded, strict=True))
    rates = [f"{int(lengths.sum()) / min(values):,.0f} tokens/s" for values in (decoded, encoded)]
    print(f"\nfp8 store: decoded {rates[0]}, left encoded {rates[1]}, {ratio:.1f} x the rate")


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
    ways = [kind(arguments.folder, arguments.hidden) for kind in (Store, SafetensorsFiles, TorchFiles, PlainFile)]
    fp8 = Fp8Store(arguments.folder, arguments.hidden)
    lengths = write_all([*ways, fp8], arguments.hidden, int(arguments.gib * 2**30))
    num_bytes = int(lengths.sum()) * 2 * arguments.hidden * (NUM_AUX + 1)
    print_reads(read_rounds(ways, lengths, arguments.hidden, arguments.rounds), num_bytes)
    print_fp8_loader(fp8, lengths, arguments.hidden, arguments.rounds)
    seconds = timed(lambda: verify_store(ways[0].folder, deep=True).require())
    print(f"\nverify --deep {num_bytes / seconds / 1e9:.2f} GB/s with {len(os.sched_getaffinity(0))} cores")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
