"""Bringing a store's disk and ledger together again after a kill, a power cut or a lost ledger."""

from __future__ import annotations

import logging
from pathlib import Path

from eagle3_utils.errors import UserError
from eagle3_utils.states.codec import count_not_finite_stored
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.shard import DamagedShard, Shard, shard_number

log = logging.getLogger(__name__)


def shards_on_disk(folder: Path) -> dict[int, Path]:
    """Shard number → path, for the files that have their final name."""
    return {shard_number(path): path for path in sorted(Path(folder).glob("shard-*.h5"))}


def recover(folder: Path, meta, ledger: Ledger) -> int:
    """Bring disk and ledger together after a kill; returns the number of samples taken in from shards.

    Unfinished temporary files are removed. A shard that was renamed but not committed (or all of them, when the
    ledger was lost) is read in full; every sample whose checksum holds is taken in.
    Raises `UserError` when a shard belongs to another model.
    """
    for leftover in folder.glob("*.tmp"):
        leftover.unlink()
    known, stored, taken = ledger.shards(), ledger.ids("done"), 0
    for number, path in shards_on_disk(folder).items():
        if number in known:
            continue
        try:
            shard = Shard(path)
        except DamagedShard as error:
            path.rename(path.with_suffix(".h5.damaged"))
            log.warning("set aside %s: its samples will be extracted again (%s)", path.name, error)
            continue
        if shard.attributes["fingerprint"] != meta.fingerprint:
            raise UserError(f"{path.name} was made with another model, layers or server settings", str(folder))
        rows = [row for row in _rows(shard) if row["id"] not in stored and row_problem(shard, row["row"]) is None]
        ledger.commit_shard(number, path.stat().st_size, rows)
        stored |= {row["id"] for row in rows}
        taken += len(rows)
    if taken:
        log.info("took in %d samples of shards that the ledger did not know", taken)
    return taken


def row_problem(shard: Shard, row: int) -> str | None:
    """What is wrong with the bytes of one sample (read in full), or None."""
    if shard.actual_checksum(row) != int(shard.checksums[row]):
        return "the bytes do not match their checksum"
    arrays = shard.arrays(row)
    for name in ("aux", "final"):
        if bad := count_not_finite_stored(arrays[name], arrays.get(f"{name}_scale")):
            return f"{name} has {bad} values that are not finite"
    return None


def _rows(shard: Shard) -> list[dict]:
    rows = []
    for row, sample_id in enumerate(shard.ids):
        num_bytes = shard.num_bytes(row)
        length = int(shard.offsets[row + 1] - shard.offsets[row])
        rows.append({"id": sample_id, "source": shard.sources[row], "num_tokens": length, "row": row})
        rows[-1] |= {"checksum": int(shard.checksums[row]), "num_bytes": num_bytes}
    return rows
