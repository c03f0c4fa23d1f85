"""One immutable HDF5 file of about 2 GiB: flat rows of many samples, no padding, contiguous, little-endian.

HDF5 lays the file out; the bytes go in and come out through plain file offsets (`dataset.id.get_offset()`), so
writing runs at the speed of `pwrite` and reading at that of `pread` or a memory map, without HDF5's global lock.
Metadata carry checksums (HDF5 1.10's format) and strings have fixed lengths: else damage could crash the library.

Datasets, with N rows of tokens, S samples, L auxiliary layers, H hidden, M rows with a final state:

    input_ids int32 [N]    loss_mask uint8 [N]    final_rows uint8 [N] (1: the row has a final state)
    aux uint16 [N, L, H] (bf16 bits) or uint8 (e4m3 bits) with aux_scale float32 [N, L]
    final uint16 [M, H] or uint8 with final_scale float32 [M]
    offsets int64 [S + 1] into the rows    final_offsets int64 [S + 1] into `final`
    sample_id, source: fixed bytes [S]     checksum uint64 [S]: xxh3 of the id and the stored bytes of that sample
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import xxhash

from eagle3_utils.runs import sync

FORMAT, VERSION = "eagle3-states", 1
PER_ROW = ("input_ids", "loss_mask", "final_rows", "aux", "aux_scale")  # indexed by offsets
PER_FINAL = ("final", "final_scale")  # indexed by final_offsets
PAGE = 4096
READ_AHEAD_BYTES = 16 << 20  # per dataset, for a reader who takes one sample after the other
READ_AHEAD_ROW_BYTES = 256  # only of what is large: states
_DAMAGE = (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError)  # as h5py says it


class DamagedShard(Exception):
    """A shard that cannot be opened, or whose header does not fit together."""


@dataclass
class EncodedSample:
    """A sample as it is stored. Arrays may be views of a staged file; bf16 has no scales."""

    id: str
    source: str
    arrays: dict[str, np.ndarray]
    checksum: int = field(init=False)

    def __post_init__(self):
        self.checksum = checksum_of(self.id, self.arrays)

    @property
    def num_tokens(self) -> int:
        return len(self.arrays["input_ids"])

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def checksum_of(sample_id: str, arrays: dict[str, np.ndarray]) -> int:
    """xxh3 (64 bit) of a sample's id and stored bytes, in the order of PER_ROW then PER_FINAL."""
    digest = xxhash.xxh3_64(sample_id.encode())
    for name in PER_ROW + PER_FINAL:
        if name in arrays and arrays[name].size:
            digest.update(memoryview(np.ascontiguousarray(arrays[name])).cast("B"))
    return digest.intdigest()


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.h5"


def shard_number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))


def write_shard(path: Path, samples: list[EncodedSample], attributes: dict) -> int:
    """Write a shard so that the final name only ever holds a whole, synced file; returns its size in bytes.

    Temporary file → close → write rows → fsync → rename → fsync of the folder.
    """
    temporary = path.with_suffix(".h5.tmp")
    columns = {name for sample in samples for name in sample.arrays}
    lengths = [sample.num_tokens for sample in samples]
    finals = [len(sample.arrays["final"]) for sample in samples]
    small = {
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype("<i8"),
        "final_offsets": np.concatenate([[0], np.cumsum(finals)]).astype("<i8"),
        "sample_id": np.array([sample.id.encode() for sample in samples], dtype="S"),
        "source": np.array([sample.source.encode() or b"-" for sample in samples], dtype="S"),
        "checksum": np.array([sample.checksum for sample in samples], dtype="<u8"),
    }
    shapes = {}
    for name in columns:
        first = samples[0].arrays[name]
        num_rows = sum(lengths) if name in PER_ROW else sum(finals)
        shapes[name] = ((num_rows, *first.shape[1:]), first.dtype.newbyteorder("<"))
    positions = _lay_out(temporary, small, shapes, attributes)
    descriptor = os.open(temporary, os.O_WRONLY)
    try:
        for name, position in positions.items():
            for sample in samples:
                position += _write_at(descriptor, sample.arrays[name], position)
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    sync(path.parent)
    return size


def _lay_out(path: Path, small: dict, shapes: dict, attributes: dict) -> dict[str, int]:
    """Create the HDF5 file with its small datasets filled; returns the byte position of each large, empty one."""
    positions = {}
    with h5py.File(path, "w", libver="v110", alignment_threshold=PAGE, alignment_interval=PAGE) as file:
        for name, value in {"format": FORMAT, "version": VERSION, **attributes}.items():
            file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        for name, values in small.items():
            file.create_dataset(name, data=values)
        for name, (shape, dtype) in sorted(shapes.items()):
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_layout(h5py.h5d.CONTIGUOUS)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            kind = h5py.h5t.py_create(dtype, logical=True)
            dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), properties)
            if np.prod(shape):
                positions[name] = dataset.get_offset()
    return positions


def _write_at(descriptor: int, array: np.ndarray, position: int) -> int:
    if not array.size:
        return 0
    rest = memoryview(np.ascontiguousarray(array)).cast("B")
    while rest:  # one pwrite moves at most 2 GiB
        written = os.pwrite(descriptor, rest, position)
        rest, position = rest[written:], position + written
    return array.nbytes


@dataclass
class _Column:
    position: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self):
        self.values_per_row = math.prod(self.shape[1:])
        self.row_bytes = self.values_per_row * self.dtype.itemsize


class Shard:
    """A shard open for reading: its header in memory, its rows as views of one private memory map.

    Raises `DamagedShard` when the file is missing, truncated or does not fit together.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with h5py.File(path, "r") as file:
                self.attributes = {key: _plain(value) for key, value in file.attrs.items()}
                self.offsets = file["offsets"][:]
                self.final_offsets = file["final_offsets"][:]
                self.ids = [value.decode() for value in file["sample_id"][:]]
                self.sources = [value.decode() for value in file["source"][:]]
                self.checksums = file["checksum"][:]
                self._columns = {
                    name: _Column(file[name].id.get_offset() or 0, file[name].shape, file[name].dtype)
                    for name in PER_ROW + PER_FINAL
                    if name in file or not name.endswith("_scale")
                }
        except _DAMAGE as error:
            raise DamagedShard(f"{path.name}: {error}") from error
        if self.attributes.get("format") != FORMAT:
            raise DamagedShard(f"{path.name}: not an {FORMAT} file")
        self._check_header()
        self._next_row = 0  # the row that a reader who goes from start to end will want
        self._asked_to = {name: column.position for name, column in self._columns.items()}
        self._map: mmap.mmap | None = None  # opened by the first read
        self._descriptors: dict[str, int] = {}
        self._closing: dict[str, weakref.finalize] = {}

    def open(self) -> None:
        """Open the files, if they are not; every read does. Raises `DamagedShard` when they are gone."""
        if self._map is not None:
            return
        try:
            for name in ("aux", "final"):
                descriptor = os.open(self.path, os.O_RDONLY)
                self._descriptors[name], self._closing[name] = descriptor, weakref.finalize(self, os.close, descriptor)
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise DamagedShard(f"{self.path.name}: {error}") from error

    def release(self) -> None:
        """Close the files, for a reader of thousands of shards; the header stays, the next read opens them again."""
        for close in self._closing.values():
            close()
        self._map, self._descriptors, self._closing = None, {}, {}

    def _check_header(self) -> None:
        num_samples = len(self.ids)
        if not len(self.offsets) == len(self.final_offsets) == num_samples + 1 == len(self.checksums) + 1:
            raise DamagedShard(f"{self.path.name}: the index columns differ in length")
        for bounds in (self.offsets, self.final_offsets):
            if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any():
                raise DamagedShard(f"{self.path.name}: the offsets do not rise from 0")
        size = self.path.stat().st_size
        for name, column in self._columns.items():
            expected = self.offsets[-1] if name in PER_ROW else self.final_offsets[-1]
            if column.shape[0] != expected:
                raise DamagedShard(f"{self.path.name}: {name} has {column.shape[0]} rows, the index says {expected}")
            if column.position + column.shape[0] * column.row_bytes > size:
                raise DamagedShard(f"{self.path.name}: {name} reaches beyond the end of the file")

    def __len__(self) -> int:
        return len(self.ids)

    def arrays(self, row: int) -> dict[str, np.ndarray]:
        """The stored arrays of one sample, as views of the memory map (private: writing to them changes no file)."""
        self.open()
        in_order, self._next_row = row == self._next_row, row + 1
        views = {}
        for name, column in self._columns.items():
            start, stop = self._bounds(name, row)
            self._ask_for(name, column, start, stop, in_order)
            views[name] = self._view(column, start, stop)
        return views

    def index_arrays(self, row: int) -> dict[str, np.ndarray]:
        """All but the states of one sample, as views: ids, masks, scales. The states are not asked from the disk."""
        self.open()
        rows = {name: self._bounds(name, row) for name in self._columns if name not in ("aux", "final")}
        return {name: self._view(self._columns[name], *bounds) for name, bounds in rows.items()}

    def num_bytes(self, row: int) -> int:
        """Stored bytes of one sample."""
        bounds = {name: self._bounds(name, row) for name in self._columns}
        return sum((stop - start) * self._columns[name].row_bytes for name, (start, stop) in bounds.items())

    def read_into(self, row: int, name: str, out: np.ndarray, first: int = 0) -> None:
        """Copy rows `first : first + len(out)` of one sample's `aux` or `final` into `out` (contiguous), past the map.

        Each of the two has a file descriptor of its own, so that the kernel sees it read in order and reads ahead in
        large folios; after MADV_WILLNEED it would copy page by page. Fast where `out` starts at a multiple of 64 bytes,
        as torch's tensors do: kernels copy several times slower to memory that is not aligned like the file.
        Raises `DamagedShard` when the file ends before.
        """
        self.open()
        column = self._columns[name]
        position = column.position + (self._bounds(name, row)[0] + first) * column.row_bytes
        rest = memoryview(out.reshape(-1).view(np.uint8))
        while rest:  # one preadv moves at most 2 GiB
            count = os.preadv(self._descriptors[name], [rest], position)
            if not count:
                raise DamagedShard(f"{self.path.name}: {name} reaches beyond the end of the file")
            rest, position = rest[count:], position + count

    def actual_checksum(self, row: int) -> int:
        """The checksum of the bytes now on disk, to compare with `checksums[row]`."""
        return checksum_of(self.ids[row], self.arrays(row))

    def _bounds(self, name: str, row: int) -> list[int]:
        return (self.offsets if name in PER_ROW else self.final_offsets)[row : row + 2].tolist()

    def _view(self, column: _Column, start: int, stop: int) -> np.ndarray:
        shape = (stop - start, *column.shape[1:])
        if stop == start:
            return np.zeros(shape, column.dtype)
        position, count = column.position + start * column.row_bytes, (stop - start) * column.values_per_row
        return np.frombuffer(self._map, column.dtype, count, position).reshape(shape)

    def _ask_for(self, name: str, column: _Column, start: int, stop: int, in_order: bool) -> None:
        """Have the disk read a whole range at once, not 128 KiB at a time; for a reader in order, what follows too."""
        begin, end = column.position + start * column.row_bytes, column.position + stop * column.row_bytes
        if column.row_bytes < READ_AHEAD_ROW_BYTES:
            return
        if in_order:
            if end + READ_AHEAD_BYTES // 2 <= self._asked_to[name]:
                return
            begin = max(begin, self._asked_to[name])
            end = min(end + READ_AHEAD_BYTES, column.position + column.shape[0] * column.row_bytes)
        self._asked_to[name] = end
        if end > begin:
            page = begin // PAGE * PAGE
            self._map.madvise(mmap.MADV_WILLNEED, page, end - page)


def _plain(value):
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return value.decode() if isinstance(value, bytes) else value
