"""A LocalKv whose changes are durable in an SQLite database: for one controller on one machine."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from trimq.controller.kv import Delete, Entry, KvError, Lease, Put
from trimq.controller.local_kv import LocalKv
from trimq.remoting.runtime.clock import Clock

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS revision (one INTEGER PRIMARY KEY CHECK (one = 1), number INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entry (key TEXT PRIMARY KEY, value TEXT NOT NULL, revision INTEGER NOT NULL,
    lease INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lease (number INTEGER PRIMARY KEY, ttl_ms INTEGER NOT NULL);
"""
_LOCKED: Final = 1.0
"""Seconds to wait for the process that has the database open: one that is being stopped."""


class _Database:
    """The database. Its calls block."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=_LOCKED)
        try:
            self._prepare()
        except sqlite3.Error:
            self.close()
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")  # a second controller on this file would decide by itself
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        self._connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")

    def load(self) -> tuple[int, dict[str, Entry], list[Lease]]:
        run = self._connection.execute
        row = run("SELECT number FROM revision").fetchone()
        entries = {key: Entry(*rest) for key, *rest in run("SELECT key, value, revision, lease FROM entry")}
        leases = [Lease(*found) for found in run("SELECT number, ttl_ms FROM lease")]
        return (row[0] if row else 1), entries, leases

    def save(
        self, revision: int, changes: Sequence[Put | Delete], granted: Sequence[Lease], ended: Sequence[int]
    ) -> None:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            run("INSERT OR REPLACE INTO revision VALUES (1, ?)", (revision,))
            for change in changes:
                if isinstance(change, Put):
                    row = (change.key, change.value, revision, change.lease)
                    run("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?)", row)
                else:
                    run("DELETE FROM entry WHERE key = ?", (change.key,))
            for lease in granted:
                run("INSERT INTO lease VALUES (?, ?)", lease)
            for number in ended:
                run("DELETE FROM lease WHERE number = ?", (number,))
        except BaseException:
            self._undo()
            raise
        try:
            run("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            # It may be in the log of the database all the same, and be found there after a restart.
            raise KvError(f"the database cannot be written: {error}", sent=True) from error

    def _undo(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


class SqliteKv(LocalKv):
    """See ``open_sqlite``."""

    def __init__(
        self, clock: Clock, database: _Database, revision: int, entries: dict[str, Entry], leases: list[Lease]
    ) -> None:
        super().__init__(clock, self._write, revision=revision, entries=entries, leases=leases)
        self._database = database

    async def _write(
        self, revision: int, changes: Sequence[Put | Delete], granted: Sequence[Lease], ended: Sequence[int]
    ) -> None:
        try:
            await trio.to_thread.run_sync(self._database.save, revision, changes, granted, ended)
        except sqlite3.Error as error:
            raise KvError(f"the database cannot be written: {error}", sent=False) from error

    async def close(self) -> None:
        """Close the database."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._database.close)


def open_now(path: Path, clock: Clock) -> SqliteKv:
    """Open the database, or make it; blocks. Raises KvError, also if another process has it open."""
    try:
        database = _Database(path)
        revision, entries, leases = database.load()
    except (sqlite3.Error, OSError) as error:
        raise KvError(f"the database {path} cannot be opened: {error}", sent=False) from error
    return SqliteKv(clock, database, revision, entries, leases)


async def open_sqlite(path: Path, clock: Clock) -> SqliteKv:
    """As ``open_now``, in a thread."""
    return await trio.to_thread.run_sync(open_now, path, clock)
