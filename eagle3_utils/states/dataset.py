"""Packed batches from stores: documents end to end without padding, in an order fixed by seed and epoch.

    dataset = PackedDataset(StoreReader(folder), max_tokens=2048, seed=0)
    for batch in dataset.epoch(0):
        ...

Legend: T tokens in the batch, S samples, L auxiliary layers, H hidden, M rows with a final state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.codec import supervised_rows
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.fp8 import from_fp8_on_device

WINDOW = 256  # samples among which a batch is put together; small enough to keep batches random


@dataclass
class PackedBatch:
    """Whole samples end to end. Row r of `final` is the teacher of token r + 1; -1 in `final_index`: none needed.

    With scales, `aux` and `final` are encoded: uint8 e4m3 codes of the same shapes, until `to` decodes them.
    """

    input_ids: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # bool [T]
    position_ids: torch.Tensor  # int64 [T], from 0 in every document
    document_ids: torch.Tensor  # int64 [T], 0 … S-1
    cu_seqlens: torch.Tensor  # int32 [S + 1]
    aux: torch.Tensor  # bf16 [T, L, H]
    final: torch.Tensor  # bf16 [M, H], only the rows whose prediction is supervised
    final_index: torch.Tensor  # int64 [T], row of `final`, or -1
    sample_ids: list[str]
    sources: list[str]  # per sample
    embeds: torch.Tensor | None = None  # [T, H] of `input_ids`, when a `prepare` looked them up
    aux_scale: torch.Tensor | None = None  # float32 [T, L]
    final_scale: torch.Tensor | None = None  # float32 [M]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def to(self, device, **kwargs) -> PackedBatch:
        """The same batch with its tensors on another device; encoded states are decoded there."""
        moved = {name: tensor.to(device, **kwargs) for name, tensor in self._tensors().items()}
        for name in ("aux", "final"):
            scale = moved.pop(f"{name}_scale", None)
            if scale is not None:
                moved[name] = from_fp8_on_device(moved[name], scale)
        return replace(self, **{"aux_scale": None, "final_scale": None} | moved)

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked memory, from which copies to a GPU run beside its work."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if torch.is_tensor(value)}


def pack(lengths: np.ndarray, max_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Put every sample into one batch of at most `max_tokens`; the order of batches and of samples is random.

    Samples are shuffled, then packed best-fit-decreasing within windows, which fills batches to 95 % and more.
    """
    order, batches = rng.permutation(len(lengths)), []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        bins: list[list[int]] = []
        room: list[int] = []
        for index in window[np.argsort(-lengths[window], kind="stable")]:
            length = int(lengths[index])
            fitting = [number for number, space in enumerate(room) if space >= length]
            if fitting:
                best = min(fitting, key=room.__getitem__)
                bins[best].append(int(index))
                room[best] -= length
            else:
                bins.append([int(index)])
                room.append(max_tokens - length)
        batches += bins
    return [batches[number] for number in rng.permutation(len(batches))]


def even_out(batches: list[list[int]], multiple_of: int) -> list[list[int]]:
    """Split batches until their number is a multiple of `multiple_of`, so that no sample is dropped or repeated."""
    batches = [list(batch) for batch in batches]
    while len(batches) % multiple_of:
        largest = max(range(len(batches)), key=lambda number: len(batches[number]))
        if len(batches[largest]) < 2:
            raise UserError(
                f"too few samples for {multiple_of} batches", fix="use fewer batches or ranks, more samples"
            )
        half = len(batches[largest]) // 2
        batches.append(batches[largest][half:])
        batches[largest] = batches[largest][:half]
    return batches


class PackedDataset:
    """The samples of a reader as packed batches; every sample once an epoch, over all ranks together.

    Parameters
    ----------
    max_tokens : tokens per batch, at most; no sample may be longer (`UserError`).
    seed, rank, num_ranks : the ranks share the batches of one plan, made of seed and epoch.
    multiple_of : of what an epoch's batches are a multiple; the batches are the same for any number of ranks. Where
        that divides it, every rank gets as many; else (1, say, for validation) one may have one less, or none.
        Default: num_ranks.
    shuffle : false for validation: the same order in every epoch.
    prefetch : batches read ahead by a background thread.
    prepare : called there with every batch; what it returns is handed out.
    pin_memory : states are read into page-locked memory, for copies to a GPU. Where all stores are fp8 they stay
        encoded (`encoded`) until they are there: one thread decodes fewer tokens than a GPU trains on.
    """

    def __init__(
        self,
        reader: StoreReader,
        max_tokens: int,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        shuffle: bool = True,
        prefetch: int = 2,
        multiple_of: int | None = None,
        prepare: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
        pin_memory: bool = False,
    ):
        self.reader, self.max_tokens, self.seed = reader, max_tokens, seed
        self.rank, self.num_ranks, self.shuffle = rank, num_ranks, shuffle
        self.prefetch, self.prepare, self.pin_memory = prefetch, prepare, pin_memory
        self.multiple_of = multiple_of or num_ranks
        self.encoded = pin_memory and reader.codec == "fp8"
        if len(reader) == 0:
            raise UserError("the store holds no samples", str(reader.folders[0]), "run stage 03 first")
        longest = int(reader.lengths.argmax())
        if reader.lengths[longest] > max_tokens:
            raise UserError(
                f"sample {reader.ids[longest]!r} has {reader.lengths[longest]} tokens, a batch at most {max_tokens}",
                fix="raise max_tokens_per_step or lower max_seq_len",
            )

    def plan(self, epoch: int) -> list[list[int]]:
        """This rank's batches of an epoch, as lists of reader indices."""
        rng = np.random.default_rng([self.seed, epoch if self.shuffle else 0])
        batches = even_out(pack(self.reader.lengths, self.max_tokens, rng), self.multiple_of)
        return batches[self.rank :: self.num_ranks]

    def num_batches(self, epoch: int) -> int:
        """Batches of this rank in an epoch (see `multiple_of`; it may differ by a few between epochs)."""
        return len(self.plan(epoch))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[PackedBatch]:
        """The batches of an epoch from number `start` on."""
        plan = self.plan(epoch)[start:]
        if self.prefetch == 0:
            yield from map(self._load_prepared, plan)
            return
        on_device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if self.pin_memory else (None, ())
        with ThreadPoolExecutor(1, "batch-reader", *on_device) as pool:  # a thread begins on the first GPU
            waiting = [pool.submit(self._load_prepared, indices) for indices in plan[: self.prefetch]]
            try:
                for number in range(len(plan)):
                    batch = waiting.pop(0).result()
                    if number + self.prefetch < len(plan):
                        waiting.append(pool.submit(self._load_prepared, plan[number + self.prefetch]))
                    yield batch
            finally:
                for future in waiting:
                    future.cancel()

    def _load_prepared(self, indices: list[int]) -> PackedBatch:
        return self.prepare(self.load(indices))

    def load(self, indices: list[int]) -> PackedBatch:
        """Read the given samples into one batch; the states go from the files straight into its tensors."""
        stored = [self.reader.index_arrays(index) for index in indices]
        needed = [supervised_rows(arrays["loss_mask"]) for arrays in stored]
        needed_T = torch.from_numpy(np.concatenate(needed))
        wanted = [rows[arrays["final_rows"] != 0] for rows, arrays in zip(needed, stored, strict=True)]
        lengths = self.reader.lengths[indices]
        starts = [0, *np.cumsum(lengths).tolist()]
        final_starts = [0, *np.cumsum([rows.sum() for rows in needed]).tolist()]
        aux, final = self._empty(starts[-1], len(self.reader.meta.aux_layers)), self._empty(final_starts[-1])
        for number, index in enumerate(indices):
            self.reader.copy_states(
                index,
                aux[starts[number] : starts[number + 1]],
                final[final_starts[number] : final_starts[number + 1]],
                wanted[number],
            )
        scales = {}
        if self.encoded:
            of_final = [arrays["final_scale"][rows] for arrays, rows in zip(stored, wanted, strict=True)]
            scales["aux_scale"] = torch.from_numpy(np.concatenate([arrays["aux_scale"] for arrays in stored]))
            scales["final_scale"] = torch.from_numpy(np.concatenate(of_final))
        return PackedBatch(
            input_ids=torch.from_numpy(np.concatenate([arrays["input_ids"] for arrays in stored]).astype(np.int64)),
            loss_mask=torch.from_numpy(np.concatenate([arrays["loss_mask"] for arrays in stored]) != 0),
            position_ids=torch.cat([torch.arange(length) for length in lengths]),
            document_ids=torch.repeat_interleave(torch.arange(len(indices)), torch.from_numpy(lengths)),
            cu_seqlens=torch.tensor(starts, dtype=torch.int32),
            aux=aux,
            final=final,
            final_index=torch.where(needed_T, needed_T.cumsum(0) - 1, -1),
            sample_ids=[self.reader.ids[index] for index in indices],
            sources=[self.reader.sources[index] for index in indices],
            **scales,
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        """bf16, or uint8 for codes, [*shape, H]. Page-locked memory is torch's pool: used again once the batch and its
        copies are done."""
        dtype = torch.uint8 if self.encoded else torch.bfloat16
        return torch.empty(*shape, self.reader.meta.hidden_size, dtype=dtype, pin_memory=self.pin_memory)
