"""fsck for a store: what `eagle3 verify` runs."""

from __future__ import annotations

import os
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle3_utils.config import STAGES
from eagle3_utils.errors import UserError
from eagle3_utils.runs import is_run_folder, read_done, recorded_data
from eagle3_utils.states.shards.ledger import Ledger, Place
from eagle3_utils.states.shards.recover import row_problem, shards_on_disk
from eagle3_utils.states.shards.shard import DamagedShard, Shard, shard_name
from eagle3_utils.states.store import StoreMeta, StoreWriter, read_meta

MAX_THREADS = 16
_ENTRY_SECONDS = 1.0


@dataclass
class VerifyReport:
    """What `verify_store` found. `bad` maps a sample's id to what is wrong with it."""

    folder: str = ""
    num_samples: int = 0
    num_tokens: int = 0
    num_shards: int = 0
    num_pending: int = 0
    num_failed: int = 0
    bad: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of shards and ledger rather than of one sample
    repaired: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing that claims to be stored is wrong (pending and failed samples are no damage)."""
        return not self.bad and not self.problems

    def require(self) -> None:
        """Raise `UserError` that names the first damage and what mends it."""
        if not self.ok:
            first = (self.problems or [f"{sample_id}: {reason}" for sample_id, reason in self.bad.items()])[0]
            raise UserError(
                f"{len(self.bad)} bad samples; {first}", self.folder, f"eagle3 verify {self.folder} --deep --repair"
            )

    def to_json(self) -> dict:
        """For --json."""
        return asdict(self) | {"ok": self.ok}

    def text(self) -> str:
        """The summary, then every problem and every bad sample by name."""
        lines = [
            f"{self.folder}: {self.num_samples:,} samples, {self.num_tokens:,} tokens in {self.num_shards} shards; "
            f"{self.num_pending} pending, {self.num_failed} failed: {'whole' if self.ok else 'DAMAGED'}"
        ]
        lines += self.problems + [f"{sample_id}: {reason}" for sample_id, reason in sorted(self.bad.items())]
        if self.repaired and not self.ok:
            lines.append("put back to pending: the next run of stage 03 extracts them again")
        return "\n".join(lines)


def stores_under(folder: Path) -> list[Path]:
    """The store in a folder, or all stores of a run's or a data folder. Raises `UserError` when there is none."""
    if is_run_folder(folder):  # its data may lie elsewhere
        done = next(filter(None, (read_done(folder, stage) for stage in STAGES)), None)
        folder = recorded_data(folder, done)
    for pattern in ("store.json", "*/store.json", "hidden_states/*/store.json", "data/hidden_states/*/store.json"):
        if found := sorted(path.parent for path in folder.glob(pattern)):
            return found
    raise UserError("not a hidden-state store, and no run with one: no store.json", str(folder), exit_code=2)


def verify_store(folder: Path, deep: bool = False, repair: bool = False) -> VerifyReport:
    """Check a store: headers, sizes, ledger and lineage; with `deep` every checksum and every value.

    With `repair`, bad samples go back to pending, so that the next run of stage 03 extracts only those; shards that
    cannot be read are set aside as `.damaged`, and a lost ledger is rebuilt. The report is of the state before.
    """
    folder = Path(folder)
    meta, report = read_meta(folder), VerifyReport(str(folder), repaired=repair)
    if not (folder / "ledger.sqlite").is_file():
        report.problems.append("ledger.sqlite is missing")
        if repair:
            StoreWriter(folder, meta).close()
        return report
    with ExitStack() as stack:
        readers = stack.enter_context(ThreadPoolExecutor(_num_threads())) if deep else None
        if repair:
            writer = stack.enter_context(StoreWriter(folder, meta))
            _check(folder, meta, writer.ledger, readers, report)
            _put_back(folder, writer.ledger, report)
        else:
            ledger = stack.enter_context(Ledger(folder / "ledger.sqlite", read_only=True))
            _check(folder, meta, ledger, readers, report)
    return report


def _check(folder: Path, meta: StoreMeta, ledger: Ledger, readers: Executor | None, report: VerifyReport) -> None:
    counts, known, files = ledger.counts(), ledger.shards(), shards_on_disk(folder)
    report.num_pending, report.num_failed, report.num_shards = counts["pending"], counts["failed"], len(files)
    if unknown := files.keys() - known.keys():  # an extraction at work puts a shard in its place, then enters it
        time.sleep(_ENTRY_SECONDS)
        unknown -= ledger.shards().keys()
    report.problems += [f"{shard_name(number)} is not in the ledger" for number in sorted(unknown)]
    by_shard: dict[int, list[Place]] = {}
    for place in ledger.places():
        by_shard.setdefault(place.shard, []).append(place)
        report.num_samples += 1
        report.num_tokens += place.num_tokens
    for number in sorted(known):
        places = by_shard.get(number, [])
        problem = None
        if number not in files:
            problem = f"{shard_name(number)} is missing"
        elif files[number].stat().st_size != known[number][1]:
            problem = f"{shard_name(number)} is {files[number].stat().st_size} bytes, not {known[number][1]}"
        elif places:
            problem = _check_shard(files[number], meta, places, readers, report)
        if problem is not None:
            report.problems.append(problem)
            report.bad |= {place.sample_id: problem for place in places}


def _check_shard(path: Path, meta, places: list[Place], readers: Executor | None, report: VerifyReport) -> str | None:
    """Check the samples the ledger places in a shard; returns a problem of the whole shard, if any.

    With `readers`, every sample is read in full by these threads.
    """
    try:
        shard = Shard(path)
    except DamagedShard as error:
        return str(error)
    for key, expected in meta.attributes().items():
        if shard.attributes.get(key) != expected:
            return f"{path.name}: {key} is {shard.attributes.get(key)!r}, store.json says {expected!r}"
    for place in places:
        row, told = place.row, f"{path.name} row {place.row}"
        if row >= len(shard) or shard.ids[row] != place.sample_id:
            report.bad[place.sample_id] = f"{told} holds another sample"
        elif f"{int(shard.checksums[row]):016x}" != place.checksum:
            report.bad[place.sample_id] = f"{told}: its checksum differs from the ledger's"
        elif shard.offsets[row + 1] - shard.offsets[row] != place.num_tokens:
            report.bad[place.sample_id] = f"{told}: length differs from the ledger's"
        elif shard.sources[row] != (place.source or "-"):  # as write_shard puts it
            report.bad[place.sample_id] = f"{told}: its source differs from the ledger's"
    if readers is not None:
        good = [place for place in places if place.sample_id not in report.bad]
        problems = readers.map(lambda place: row_problem(shard, place.row), good)
        for place, problem in zip(good, problems, strict=True):
            if problem:
                report.bad[place.sample_id] = f"{path.name} row {place.row}: {problem}"
    return None


def _num_threads() -> int:
    """Threads that read: checksums and checks for finite values run outside Python's lock."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _put_back(folder: Path, ledger: Ledger, report: VerifyReport) -> None:
    ledger.put_back(report.bad)
    still_used = {place.shard for place in ledger.places()}
    files = shards_on_disk(folder)
    for number in ledger.shards():
        if number in still_used:
            continue
        if number in files:
            files[number].rename(files[number].with_suffix(".h5.damaged"))
        ledger.forget_shard(number)
