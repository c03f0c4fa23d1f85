"""Which sample is where: one SQLite row per sample, pending → done (shard, row) or failed (reason, tries).

The ledger is the last thing written: a shard counts once its rows are committed here. It can be rebuilt from the
shards (recover.py), because they carry the ids and checksums themselves.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from eagle3_utils.errors import UserError

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS samples (
  id TEXT PRIMARY KEY,
  source TEXT NOT NULL,
  num_tokens INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('pending', 'done', 'failed')),
  shard INTEGER,
  row INTEGER,
  checksum TEXT,
  num_bytes INTEGER,
  tries INTEGER NOT NULL DEFAULT 0,
  reason TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_by_place ON samples (shard, row);
CREATE TABLE IF NOT EXISTS shards (
  number INTEGER PRIMARY KEY,
  num_samples INTEGER NOT NULL,
  file_bytes INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS runs (token TEXT PRIMARY KEY, num_tokens INTEGER NOT NULL, seconds REAL NOT NULL);
"""


class Place(NamedTuple):
    """Where a done sample is. checksum: 16 hex digits; num_bytes: of its arrays as stored."""

    sample_id: str
    source: str
    num_tokens: int
    shard: int
    row: int
    checksum: str
    num_bytes: int


class Ledger:
    """The ledger of one store (WAL, synchronous = FULL). Safe to call from several threads.

    With `read_only` it changes nothing on disk and may be open beside a running writer.
    """

    def __init__(self, path: Path, read_only: bool = False):
        self.path, self.read_only = path, read_only
        self._lock = threading.Lock()
        if read_only:
            address = f"{path.resolve().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            return
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            with self._troubles_named():
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
                self._connection.executescript(SCHEMA)
        except BaseException:
            self._connection.close()
            raise

    def register(self, samples: Iterable[tuple[str, str, int]]) -> None:
        """Add (id, source, num_tokens) as pending; samples already known keep their state."""
        rows = list(samples)
        self._write("INSERT OR IGNORE INTO samples (id, source, num_tokens, state) VALUES (?, ?, ?, 'pending')", rows)

    def commit_shard(self, number: int, file_bytes: int, rows: list[dict]) -> None:
        """Record a shard and its samples as done, in one transaction.

        Parameters
        ----------
        rows : dicts with id, source, num_tokens, row, checksum (int), num_bytes.
        """
        with self._lock, self._troubles_named(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("INSERT OR REPLACE INTO shards VALUES (?, ?, ?)", (number, len(rows), file_bytes))
            self._connection.executemany(
                "INSERT INTO samples (id, source, num_tokens, state, shard, row, checksum, num_bytes)"
                " VALUES (:id, :source, :num_tokens, 'done', :shard, :row, :hex, :num_bytes)"
                " ON CONFLICT (id) DO UPDATE SET state = 'done', shard = excluded.shard, row = excluded.row,"
                " checksum = excluded.checksum, num_bytes = excluded.num_bytes, num_tokens = excluded.num_tokens,"
                " source = excluded.source, reason = NULL",
                [row | {"shard": number, "hex": f"{row['checksum']:016x}"} for row in rows],
            )

    def fail(self, sample_id: str, reason: str, tries: int) -> None:
        """Record that a sample was given up, and why."""
        self._write(
            "UPDATE samples SET state = 'failed', reason = ?, tries = tries + ? WHERE id = ? AND state != 'done'",
            [(reason, tries, sample_id)],
        )

    def retry_failed(self) -> None:
        """Make every failed sample pending again."""
        self._write("UPDATE samples SET state = 'pending' WHERE state = ?", [("failed",)])

    def put_back(self, reasons: dict[str, str]) -> None:
        """Make done samples pending again, with the reason (used by repair)."""
        self._write(
            "UPDATE samples SET state = 'pending', shard = NULL, row = NULL, checksum = NULL, num_bytes = NULL,"
            " reason = ? WHERE id = ?",
            [(reason, sample_id) for sample_id, reason in reasons.items()],
        )

    def forget_shard(self, number: int) -> None:
        """Drop a shard that no longer exists; its samples must have been put back before."""
        self._write("DELETE FROM shards WHERE number = ?", [(number,)])

    def note_run(self, token: str, num_tokens: int, seconds: float) -> None:
        """Keep how far a run came, so that a killed and resumed extraction still has a rate."""
        self._write("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", [(token, num_tokens, seconds)])

    def run_totals(self) -> tuple[int, int, float]:
        """(runs, tokens, seconds) of all extractions into this store."""
        return self._read("SELECT count(*), coalesce(sum(num_tokens), 0), coalesce(sum(seconds), 0.0) FROM runs")[0]

    def counts(self) -> dict[str, int]:
        """Number of samples by state: pending, done, failed."""
        rows = self._read("SELECT state, count(*) FROM samples GROUP BY state")
        return {"pending": 0, "done": 0, "failed": 0} | dict(rows)

    def ids(self, state: str) -> set[str]:
        """Ids of the samples in one state."""
        return {row[0] for row in self._read("SELECT id FROM samples WHERE state = ?", (state,))}

    def failures(self) -> dict[str, str]:
        """Failed samples and their reasons."""
        return dict(self._read("SELECT id, reason FROM samples WHERE state = 'failed' ORDER BY id"))

    def shards(self) -> dict[int, tuple[int, int]]:
        """Shard number → (samples, file bytes)."""
        return {row[0]: row[1:] for row in self._read("SELECT number, num_samples, file_bytes FROM shards")}

    def places(self) -> list[Place]:
        """Done samples by id."""
        columns = "id, source, num_tokens, shard, row, checksum, num_bytes"
        rows = self._read(f"SELECT {columns} FROM samples WHERE state = 'done' ORDER BY id")
        return [Place._make(row) for row in rows]

    def close(self) -> None:
        """Fold the journal into the one file, so that it can be read from a read-only disk."""
        with self._lock:
            try:
                if not self.read_only:
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    self._connection.execute("PRAGMA journal_mode = DELETE")
            except sqlite3.OperationalError as error:  # the journal holds all that was committed
                log.warning("the journal of %s stays beside it: %s", self.path.name, error)
            finally:
                self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def _troubles_named(self) -> Iterator[None]:
        """Say so when the disk is full (the transaction is rolled back) or the file is no ledger any more."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = error.sqlite_errorcode & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise UserError(
                    f"{self.path.name} is damaged: {error}; the shards hold what it knew",
                    str(self.path.parent),
                    f"remove {self.path.name}, and rebuild it: eagle3 verify {self.path.parent} --repair",
                ) from error
            if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                raise
            raise UserError(
                f"disk full (or failing) while writing {self.path.name}: {error}; every finished shard is whole",
                str(self.path.parent),
                "free space and start the stage again: it resumes",
            ) from error

    def _write(self, statement: str, rows: list[tuple]) -> None:
        with self._lock, self._troubles_named(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(statement, rows)

    def _read(self, statement: str, values: tuple = ()) -> list[tuple]:
        with self._lock, self._troubles_named():
            return self._connection.execute(statement, values).fetchall()
