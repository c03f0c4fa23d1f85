"""Reading one or several stores as one dataset. Open one reader per process and thread; it pickles without its maps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import xxhash

from eagle3_utils.errors import UserError
from eagle3_utils.runs import resolve_path
from eagle3_utils.states.codec import decode
from eagle3_utils.states.shards.ledger import Ledger, Place
from eagle3_utils.states.shards.shard import DamagedShard, Shard, shard_name
from eagle3_utils.states.store import Sample, read_meta

MAX_OPEN_SHARDS = 128  # each holds three file descriptors; of the others only the headers are kept


class StoreReader:
    """The done samples of one store or several, in order of their ids, whatever order they were stored in.

    Attributes: `ids` list[str], `sources` list[str], `lengths` int32 [S], `checksums` list[str], `meta`, `num_bytes`,
    `codec` of all stores, None when they differ.
    Raises `UserError` for stores of different models or layers, and for a sample that two of them hold.
    """

    def __init__(self, folders: Path | str | list):
        self.folders = [Path(f) for f in (folders if isinstance(folders, list | tuple) else [folders])]
        metas = [read_meta(folder) for folder in self.folders]
        self.meta, self._codecs = metas[0], [meta.codec for meta in metas]
        self.codec = self.meta.codec if len(set(self._codecs)) == 1 else None
        entries: list[tuple[int, Place]] = []  # store and place in it
        for number, (folder, meta) in enumerate(zip(self.folders, metas, strict=True)):
            self._check_same_states(meta, folder)
            ledger = folder / "ledger.sqlite"
            if not ledger.is_file():
                raise UserError("the ledger is missing", str(folder), f"rebuild it: eagle3 verify {folder} --repair")
            with Ledger(ledger, read_only=True) as opened:
                entries += [(number, place) for place in opened.places()]
        entries.sort(key=lambda entry: entry[1].sample_id)
        places = [place for _, place in entries]
        for (left, place), (right, other) in pairwise(entries):
            if place.sample_id == other.sample_id:
                both = f"{self.folders[left]} and {self.folders[right]}"
                raise UserError(f"sample {place.sample_id!r} is in both {both}")
        self.ids = [place.sample_id for place in places]
        self.sources = [place.source for place in places]
        self.lengths = np.array([place.num_tokens for place in places], dtype=np.int32)
        self.checksums = [place.checksum for place in places]
        self.num_bytes = sum(place.num_bytes for place in places)
        self._places = [(number, place.shard, place.row) for number, place in entries]
        self._shards: dict[tuple[int, int], Shard] = {}
        self._open_shards: OrderedDict[tuple[int, int], None] = OrderedDict()  # the one used last at the end

    @classmethod
    def of_split(cls, split: str, data: Path, more_data: Iterable[str] = ()) -> StoreReader:
        """The states of "train" or "val" under a run's data folder and under those of other runs, as one dataset."""
        return cls([folder / "hidden_states" / split for folder in (data, *map(resolve_path, more_data))])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def index_of(self, sample_id: str) -> int:
        """Position of a sample; KeyError when it is not stored."""
        low = int(np.searchsorted(self.ids, sample_id))
        if low == len(self.ids) or self.ids[low] != sample_id:
            raise KeyError(sample_id)
        return low

    def read(self, index: int) -> Sample:
        """Read one sample. States of a bf16 store are views of a private memory map: copied only when touched."""
        arrays = self.stored(index)
        return Sample(
            id=self.ids[index],
            source=self.sources[index],
            input_ids=arrays["input_ids"],
            loss_mask=arrays["loss_mask"],
            aux=decode(arrays["aux"], arrays.get("aux_scale")),
            final=decode(arrays["final"], arrays.get("final_scale")),
            final_rows=arrays["final_rows"].astype(bool),
        )

    def stored(self, index: int) -> dict[str, np.ndarray]:
        """The arrays of one sample as they are stored (bits and scales), without decoding."""
        store, shard, row = self._places[index]
        return self._open(store, shard).arrays(row)

    def index_arrays(self, index: int) -> dict[str, np.ndarray]:
        """`input_ids` int32 [T], `loss_mask` uint8 [T] and `final_rows` uint8 [T] of one sample.

        Of an fp8 store also `aux_scale` float32 [T, L] and `final_scale` float32 [M].
        """
        store, shard, row = self._places[index]
        return self._open(store, shard).index_arrays(row)

    def copy_states(self, index: int, aux: torch.Tensor, final: torch.Tensor, wanted: np.ndarray) -> None:
        """Fill parts of a batch with one sample's states; what is not decoded goes straight from the file into them.

        Parameters
        ----------
        aux, final : bf16 [T, L, H] and [number of `wanted`, H], contiguous, on the CPU. Both may be uint8 for an fp8
            store, to get its codes; the scales are in `index_arrays`.
        wanted : bool [M], which of the stored final rows.
        """
        store, number, row = self._places[index]
        shard = self._open(store, number)
        encoded = aux.dtype == torch.uint8
        if encoded and self._codecs[store] != "fp8":
            raise ValueError(f"{self.ids[index]}: there are no codes in a store of {self._codecs[store]}")
        if not encoded and self._codecs[store] == "fp8":
            arrays = shard.arrays(row)
            aux.copy_(decode(arrays["aux"], arrays["aux_scale"]))
            final.copy_(decode(arrays["final"][wanted], arrays["final_scale"][wanted]))
            return
        shard.read_into(row, "aux", aux.view(torch.uint8).numpy())
        bounds, done = np.flatnonzero(np.diff(wanted, prepend=False, append=False)), 0
        for first, last in bounds.reshape(-1, 2).tolist():
            shard.read_into(row, "final", final[done : done + last - first].view(torch.uint8).numpy(), first)
            done += last - first
        if done != len(final):
            raise ValueError(f"{self.ids[index]}: {len(final)} final states wanted, {done} are stored")

    def in_stored_order(self) -> list[int]:
        """Indices in the order of the shards' rows: a pass over everything opens each shard once."""
        return sorted(range(len(self)), key=self._places.__getitem__)

    def content_hash(self) -> str:
        """xxh3 over the sorted (id, checksum) pairs: the same states give the same hash in any shard layout."""
        digest = xxhash.xxh3_64()
        for sample_id, checksum in zip(self.ids, self.checksums, strict=True):
            digest.update(f"{sample_id}\0{checksum}\n".encode())
        return digest.hexdigest()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_shards": {}, "_open_shards": OrderedDict()}

    def _open(self, store: int, number: int) -> Shard:
        key, folder = (store, number), self.folders[store]
        try:
            if key not in self._shards:
                self._shards[key] = Shard(folder / shard_name(number))
            self._shards[key].open()
        except DamagedShard as error:
            raise UserError(str(error), str(folder), f"eagle3 verify {folder} --repair, then stage 03") from error
        self._open_shards[key] = None
        self._open_shards.move_to_end(key)
        if len(self._open_shards) > MAX_OPEN_SHARDS:
            self._shards[self._open_shards.popitem(last=False)[0]].release()
        return self._shards[key]

    def _check_same_states(self, meta, folder: Path) -> None:
        for key in ("hidden_size", "aux_layers", "fingerprint", "final_is_post_norm"):
            if getattr(meta, key) != getattr(self.meta, key):
                raise UserError(
                    f"{key} is {getattr(meta, key)!r} here but {getattr(self.meta, key)!r} in {self.folders[0]}",
                    str(folder),
                )
