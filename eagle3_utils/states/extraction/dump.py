"""Reading what the capture plugin leaves, `DUMP_DIR/<rid>.safetensors`, and checking it against what was sent.

This happens where shards are built. The file is mapped, not read: `aux` and `final` stay in the page cache (or
/dev/shm) until a shard is written from them. The header is parsed here because safetensors' own reader keeps a file
descriptor or copies.

Legend: T tokens, L auxiliary layers, H hidden.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash

from eagle3_utils.errors import UserError
from eagle3_utils.states.shards.sample import StagedSample, UnfitSample, stored_bytes
from eagle3_utils.states.sizes import STAGING_SHARES, dump_bytes_per_token, format_bytes, held_limit, staging_needed
from eagle3_utils.states.store import Sample, StoreMeta, num_open_shards

_DTYPES = {"BF16": torch.bfloat16, "I64": torch.int64}
_MAX_HEADER_BYTES = 1 << 20
_STAGED = ("hs-*.safetensors", "hs-*.error")  # a .tmp is still the server's: it becomes one of these
DUMP_PATIENCE_SECONDS = 60.0  # between the HTTP answer and the dump


class BadDump(UnfitSample):
    """An answer or a dump that is not what was asked for; the message is the reason, for the ledger."""


@dataclass
class Dump:
    """One request's states as the server left them."""

    input_ids: np.ndarray  # int64 [T]
    aux: torch.Tensor  # bf16 [T, L, H]
    final: torch.Tensor  # bf16 [T, H], post-norm
    metadata: dict[str, str]


def read_dump(path: Path) -> Dump:
    """Map a dump. Raises `BadDump` when the file is not a whole safetensors file with the three tensors."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise BadDump(f"header length {length} in a file of {size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise BadDump(f"header is not JSON: {error}") from None
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name in ("input_ids", "aux", "final"):
        entry = header.get(name)
        if entry is None or entry["dtype"] not in _DTYPES:
            raise BadDump(f"tensor {name} is missing or has dtype {entry and entry['dtype']}")
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise BadDump(f"tensor {name} {shape} does not fit the file of {size} bytes")
        tensors[name] = data[8 + length + start : 8 + length + end].view(dtype).view(shape)
    ids = tensors["input_ids"]
    if ids.dtype != torch.int64:
        raise BadDump("input_ids are not int64")
    return Dump(ids.numpy(), tensors["aux"], tensors["final"], header.get("__metadata__", {}))


def take_sample(dump: Dump, record, rid: str, meta: StoreMeta, nonce: str | None) -> Sample:
    """The sample of a record, if the dump is its own: rid, token ids, length, layers, server.

    Shapes, dtypes and finite values are checked by the store itself (`Sample.problem`).
    Raises `BadDump` with the first difference.
    """
    said = dump.metadata
    if said.get("rid") != rid:
        raise BadDump(f"the dump is of request {said.get('rid')!r}, not {rid!r}")
    if nonce is not None and said.get("nonce") != nonce:
        raise BadDump(f"the dump was left by another server (nonce {said.get('nonce')})")
    if said.get("layers") != json.dumps(list(meta.aux_layers)):
        raise BadDump(f"the dump holds layers {said.get('layers')}, not {list(meta.aux_layers)}")
    wanted = np.frombuffer(array("q", record.input_ids), dtype=np.int64)
    if len(dump.input_ids) != len(wanted):
        raise BadDump(f"{len(dump.input_ids)} tokens came back, {len(wanted)} were sent")
    if (different := np.flatnonzero(dump.input_ids != wanted)).size:
        raise BadDump(f"token ids differ from position {different[0]} on")
    mask = np.frombuffer(bytes(record.loss_mask), dtype=np.uint8)
    sample = Sample(record.id, wanted.astype(np.int32), mask, dump.aux, dump.final, source=record.source)
    if problem := sample.problem(meta):
        raise BadDump(problem)
    return sample


def staged_sample(
    path: Path,
    held_bytes: int,
    record,
    rid: str,
    meta: StoreMeta,
    nonce: str | None,
    settle: Callable[[str | None], None],
) -> StagedSample:
    """A record whose dump has arrived, for `StoreWriter.add_staged`; the dump is not read here."""
    num_tokens, supervised = len(record.input_ids), record.loss_mask[1:]
    num_final = num_tokens if meta.final == "all" else len(supervised) - supervised.count(0)
    load = partial(load_sample, path, record, rid, nonce)
    return StagedSample(record.id, path, held_bytes, stored_bytes(num_tokens, num_final, meta), load, settle)


def load_sample(path: Path, record, rid: str, nonce: str | None, meta: StoreMeta) -> Sample:
    """The sample of a record from its dump. Raises `BadDump`, or `FileNotFoundError` when the dump has gone."""
    return take_sample(read_dump(path), record, rid, meta, nonce)


def file_name_of(sample_id: str) -> str:
    """A sample id as part of a file name; one that had to be changed gets a hash, so that two never become one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", sample_id)[:100]
    return plain if plain == sample_id else f"{plain}-{xxhash.xxh3_64_hexdigest(sample_id.encode())}"


def wait_for(path: Path) -> int:
    """Wait for a dump, and return its bytes: the HTTP answer may come before the file."""
    note, deadline, pause = path.with_suffix(".error"), time.monotonic() + DUMP_PATIENCE_SECONDS, 0.001
    while (num_bytes := _size_of(path)) is None:
        if note.exists():
            reason = _reason_in(note.read_text())
            note.unlink(missing_ok=True)
            raise BadDump(f"the server could not write the dump: {reason}")
        if time.monotonic() > deadline:
            raise BadDump(f"answered, but no dump within {DUMP_PATIENCE_SECONDS:.0f} s")
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return num_bytes


def _size_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _reason_in(note: str) -> str:
    try:
        return json.loads(note)["error"][:300]
    except (ValueError, KeyError, TypeError):
        return note[:300]  # cut off, or of another plugin


def share_staging(
    dump_dirs: list[Path], records: list, meta, config, num_processes: int = 0, handshakes: Sequence[dict] = ()
) -> tuple[int, int]:
    """Split the staging area between dumps in flight and dumps held until their shard is closed.

    Returns (bytes of dumps a shard may hold, tokens in flight per server). Some shards are written while the
    next fills, and all hold dumps; a dump in flight may exist as a host buffer and as a file. A server's own limit, in
    its handshake, counts where it is lower; its groups that write have equal shares of it.
    Raises `UserError` when the longest sample does not fit.
    """
    free = min(shutil.disk_usage(dump_dir).free for dump_dir in dump_dirs)
    limits = [(said["max_bytes"], said["ranks"]["writers"]) for said in handshakes if "max_bytes" in said]
    num_writers = max((writers for _, writers in limits), default=config.dp_size)
    servers = min((share * writers for share, writers in limits), default=config.staging_max_bytes)
    staging = min(config.staging_max_bytes, servers, free * 9 // 10)
    per_token = dump_bytes_per_token(meta.hidden_size, len(meta.aux_layers))
    longest = max((len(record.input_ids) for record in records), default=1)
    needed = staging_needed(longest, per_token, num_writers)
    if needed > staging:
        raise UserError(
            f"staging of {format_bytes(staging)} is too small: the longest sample needs {format_bytes(needed)}",
            str(dump_dirs[0]),
            f"set staging_max_bytes (of a server of yours SGLANG_HS_MAX_BYTES) to {needed} or more, on a staging_dir "
            "with that much room",
        )
    max_tokens = min(config.max_tokens_in_flight, staging // STAGING_SHARES // per_token)
    return held_limit(staging, num_open_shards(num_processes)), max_tokens


def sweep(dump_dirs: list[Path], keep: str | None = None) -> None:
    """Remove dumps that nobody will take: those of a dead run, or all but those of the run with token `keep`."""
    for dump_dir in dump_dirs:
        for pattern in _STAGED:
            for path in dump_dir.glob(pattern):
                if keep is None or not path.name.startswith(f"hs-{keep}-"):
                    path.unlink(missing_ok=True)
