"""Records waiting on disk while the corpus is decided: appended once, read back in any order.

A record costs 4 + 1 bytes per token in one scratch file and about 100 bytes of memory, so a million of them are fine.
Which are kept, which validate and in what order they stand depends on a hash of seed, source and id only: not on the
order of the input, and not on how many processes read it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from eagle3_utils.corpus.records import Record


class RecordSpool:
    """An append-only scratch file of records with an index in memory."""

    def __init__(self, path: Path, seed: int):
        self._path, self._seed = path, seed
        self._file = open(path, "wb+")  # noqa: SIM115 (closed by `close`)
        self._ids: list[str] = []
        self._labels: list[str] = []
        self._specs = array("i")
        self._lengths, self._offsets, self._keys = array("q"), array("q"), array("Q")

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, record: Record, spec_number: int) -> None:
        """Add a record of the `spec_number`-th entry of `sources`."""
        self._ids.append(record.id)
        self._labels.append(record.source)
        self._specs.append(spec_number)
        self._offsets.append(self._file.tell())
        self._lengths.append(record.num_tokens)
        self._keys.append(xxhash.xxh3_64_intdigest(f"{self._seed}\0{record.source}\0{record.id}".encode()))
        self._file.write(np.asarray(record.input_ids, "<i4").tobytes())
        self._file.write(np.asarray(record.loss_mask, "i1").tobytes())

    def read(self, number: int) -> Record:
        """The record that was appended as the `number`-th."""
        length = self._lengths[number]
        self._file.seek(self._offsets[number])
        ids = np.frombuffer(self._file.read(4 * length), "<i4")
        mask = np.frombuffer(self._file.read(length), "i1")
        return Record(self._ids[number], self._labels[number], ids.tolist(), mask.tolist())

    def choose(self, quotas: list[tuple[float, int | None]]) -> np.ndarray:
        """Numbers of the records kept, in shuffled order.

        Parameters
        ----------
        quotas : per entry of `sources` (weight, max_samples): the share kept (a weight above 1 keeps all; see
            `repeat`) and its upper limit.
        """
        keys, specs = np.asarray(self._keys, np.uint64), np.asarray(self._specs)
        kept = []
        for spec, (weight, max_samples) in enumerate(quotas):
            members = np.flatnonzero(specs == spec)
            wanted = round(min(weight, 1.0) * len(members))
            wanted = wanted if max_samples is None else min(wanted, max_samples)
            kept.append(members[np.argsort(_remix(keys[members], 1), kind="stable")][:wanted])
        chosen = np.concatenate(kept) if kept else np.zeros(0, np.int64)
        return chosen[np.argsort(keys[chosen], kind="stable")]

    def split(self, chosen: np.ndarray, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """(train, val) numbers in the order of `chosen`; the same share of each source validates, at least one record.

        Sources of a single record, which cannot both train and validate, are split together, as if they were one.
        """
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(self._labels[number], len(numbers)) for number in chosen.tolist()]
        groups = np.asarray(groups, np.int64)
        groups[np.bincount(groups)[groups] == 1] = len(numbers)
        sizes = np.bincount(groups)
        wanted = np.minimum(np.maximum(1, np.rint(val_fraction * sizes)), sizes - 1)
        order = np.lexsort((_remix(np.asarray(self._keys, np.uint64)[chosen], 2), groups))  # group by group
        places = np.empty(len(chosen), np.int64)  # of each record in its group
        places[order] = np.arange(len(chosen)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        validates = places < wanted[groups]
        return chosen[~validates], chosen[validates]

    def repeat(self, numbers: np.ndarray, weights: list[float]) -> np.ndarray:
        """`numbers` with those of entries weighted above 1 as often as their weight says, shuffled as a whole.

        With a weight of 2.3 all records come twice and three in ten of them once more.
        """
        keys, specs = np.asarray(self._keys, np.uint64), np.asarray(self._specs)
        parts, orders = [numbers], [keys[numbers]]
        for spec, weight in enumerate(weights):
            members = numbers[specs[numbers] == spec]
            members = members[np.argsort(_remix(keys[members], 3), kind="stable")]
            missing, copy = round((max(weight, 1.0) - 1.0) * len(members)), 4
            while missing > 0:
                parts.append(members[:missing])
                orders.append(_remix(keys[parts[-1]], copy))
                missing, copy = missing - len(parts[-1]), copy + 1
        return np.concatenate(parts)[np.argsort(np.concatenate(orders), kind="stable")]

    def close(self) -> None:
        """Delete the scratch file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> RecordSpool:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def records(self, numbers: np.ndarray) -> Iterator[Record]:
        """The records of these numbers, in this order; the second copy of a record `x` has the id `x~2`.

        Where the data have a record `x~2` of their own, the copy is `x~2~`.
        """
        taken = {name for name in self._ids if "~" in name}
        for number, copy in zip(numbers.tolist(), _copy_numbers(numbers).tolist(), strict=True):
            record = self.read(number)
            if copy:
                record.id = f"{record.id}~{copy + 1}"
                while record.id in taken:
                    record.id += "~"
            yield record


def _copy_numbers(numbers: np.ndarray) -> np.ndarray:
    """How often each value stood before in the array."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    copies = np.empty(len(numbers), np.int64)
    copies[order] = np.arange(len(numbers)) - np.repeat(firsts, np.diff(firsts, append=len(numbers)))
    return copies


def _remix(keys: np.ndarray, round_number: int) -> np.ndarray:
    """An independent order from the same keys (splitmix64's finaliser)."""
    mixed = keys + np.uint64(round_number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
