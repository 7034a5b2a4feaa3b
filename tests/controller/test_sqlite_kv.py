"""Decisions in SQLite: what a crash, a second controller and a full disk do to them."""

import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.controller.stores import Store, running, sqlite_store
from trimq.controller.kv import Compare, Delete, KvError, Put
from trimq.controller.sqlite_kv import SqliteKv, open_sqlite
from trimq.remoting.runtime.clock import ManualClock

CHILD = """
import os, sys, trio
from pathlib import Path
from trimq.controller.kv import Compare, Put
from trimq.controller.sqlite_kv import open_sqlite
from trimq.remoting.runtime.clock import ManualClock

async def main():
    kv = await open_sqlite(Path(sys.argv[1]), ManualClock())
    lease = await kv.grant(3000)
    assert await kv.txn([], [Put("/t/alive", "1", lease.number), Put("/t/gone", "x")])
    revision = (await kv.range("/t/gone")).entries["/t/gone"].revision
    from trimq.controller.kv import Delete
    assert await kv.txn([Compare("/t/gone", revision)], [Delete("/t/gone"), Put("/t/last", "2")])
    os._exit(9)

trio.run(main)
"""


@asynccontextmanager
async def opened(path: Path, clock: ManualClock) -> AsyncIterator[SqliteKv]:
    kv = await open_sqlite(path, clock)
    try:
        yield kv
    finally:
        await kv.close()


async def test_what_was_done_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "controller.db"
    done = await trio.to_thread.run_sync(
        lambda: subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=False)
    )
    assert (done.returncode, done.stderr) == (9, "")
    clock = ManualClock()
    async with opened(path, clock) as kv:
        found = await kv.range("/t/")
        assert {key: entry.value for key, entry in found.entries.items()} == {"/t/alive": "1", "/t/last": "2"}
        last = found.entries["/t/last"]
        assert found.revision == last.revision > found.entries["/t/alive"].revision
        lease = found.entries["/t/alive"].lease
        assert lease != 0
        # How long the process was away is not known: the lease has its whole time again.
        clock.advance(2.9)
        assert set((await kv.range("/t/")).entries) == {"/t/alive", "/t/last"}
        clock.advance(0.2)
        assert set((await kv.range("/t/")).entries) == {"/t/last"}
        assert await kv.keep(lease) == 0
        assert await kv.txn([Compare("/t/last", last.revision)], [Put("/t/last", "3")])
    async with opened(path, clock) as kv:
        after = await kv.range("/t/")
        assert {key: entry.value for key, entry in after.entries.items()} == {"/t/last": "3"}
        assert after.revision == after.entries["/t/last"].revision > last.revision
        assert (await kv.grant(1000)).number > 0


async def test_a_watch_from_before_the_start_ends(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path / "c.db", clock) as kv:
        before = await kv.range("/t/")
        await kv.txn([], [Put("/t/a", "1")])
        await kv.txn([], [Delete("/t/a")])
    async with opened(tmp_path / "c.db", clock) as kv:
        with trio.fail_after(5):
            await kv.watch("/t/", before.revision, lambda _: None)


async def test_a_watch_from_before_many_deletions_ends(tmp_path: Path) -> None:
    async with running(await sqlite_store(tmp_path)) as store:
        since = await store.kv.range("/t/")
        await store.kv.txn([], [Put(f"/t/{number}", "") for number in range(1001)])
        put = await store.kv.range("/t/")
        await store.kv.txn([], [Delete(f"/t/{number}") for number in range(1000)])
        seen: list[str] = []
        with trio.move_on_after(0.5) as watching:
            await store.kv.watch("/t/", put.revision, seen.append)
        assert watching.cancelled_caught
        assert len(seen) == 1000
        await store.kv.txn([], [Delete("/t/1000")])
        with trio.fail_after(5):
            await store.kv.watch("/t/", since.revision, lambda _: None)


async def test_a_second_controller_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = partial(sqlite3.connect, timeout=0.1)
    monkeypatch.setattr(sqlite3, "connect", connect)
    path = tmp_path / "c.db"
    async with opened(path, ManualClock()) as kv:
        with pytest.raises(KvError, match=r"c\.db cannot be opened: database is locked"):
            await open_sqlite(path, ManualClock())
        assert await kv.txn([], [Put("/t/a", "1")])
    async with opened(path, ManualClock()) as kv:
        assert set((await kv.range("/t/")).entries) == {"/t/a"}


async def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"this is not a database, but longer than a header" * 100)
    with pytest.raises(KvError, match="file is not a database"):
        await open_sqlite(tmp_path / "c.db", ManualClock())
    (tmp_path / "file").touch()
    with pytest.raises(KvError, match=r"Not a directory|File exists"):
        await open_sqlite(tmp_path / "file" / "c.db", ManualClock())


class TestFullDisk:
    """``max_page_count`` is SQLite's own limit: it answers as if the disk were full."""

    @asynccontextmanager
    async def full(self, tmp_path: Path) -> AsyncIterator[tuple[Store, ManualClock]]:
        clock = ManualClock()
        kv = await open_sqlite(tmp_path / "c.db", clock)
        async with running(Store(kv, "/t/", clock)) as store:
            lease = await kv.grant(1000)
            assert await kv.txn([], [Put("/t/alive", "1", lease.number), Put("/t/a", "1")])
            pages = kv._database._connection.execute("PRAGMA page_count").fetchone()[0]
            kv._database._connection.execute(f"PRAGMA max_page_count={pages}")
            yield store, clock

    async def test_a_change_is_refused_whole(self, tmp_path: Path) -> None:
        async with self.full(tmp_path) as (store, _):
            before = await store.kv.range("/t/")
            with pytest.raises(KvError, match="database or disk is full") as caught:
                await store.kv.txn([], [Put("/t/a", "2"), Put("/t/large", "x" * 100_000)])
            assert not caught.value.sent
            assert await store.kv.range("/t/") == before
            assert await store.kv.txn([], [Put("/t/a", "2")]), "it goes on as soon as there is space"
        async with opened(tmp_path / "c.db", ManualClock()) as kv:
            assert set((await kv.range("/t/")).entries) == {"/t/alive", "/t/a"}

    async def test_leases_that_cannot_be_ended_do_not_stop_the_store(self, tmp_path: Path) -> None:
        async with self.full(tmp_path) as (store, clock):
            kv = store.kv
            assert isinstance(kv, SqliteKv)
            kv._database._connection.execute("PRAGMA query_only=1")
            clock.advance(2)
            await trio.testing.wait_all_tasks_blocked(0.05)  # the store's task has tried to end the lease
            with pytest.raises(KvError, match="readonly"):
                await kv.range("/t/")
            kv._database._connection.execute("PRAGMA query_only=0")
            clock.advance(1)
            await store.gone("alive")

    async def test_an_error_at_the_commit_may_have_been_done(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Failing:
            def __init__(self, connection: sqlite3.Connection) -> None:
                self._connection = connection

            @property
            def in_transaction(self) -> bool:
                return self._connection.in_transaction

            def execute(self, sql: str, *arguments: tuple[object, ...]) -> object:
                if sql == "COMMIT":
                    raise sqlite3.OperationalError("disk I/O error")
                return self._connection.execute(sql, *arguments)

        async with running(await sqlite_store(tmp_path)) as store:
            kv = store.kv
            assert isinstance(kv, SqliteKv)
            with monkeypatch.context() as patch:
                patch.setattr(kv._database, "_connection", Failing(kv._database._connection))
                with pytest.raises(KvError, match="disk I/O error") as caught:
                    await kv.txn([], [Put("/t/a", "1")])
            assert caught.value.sent
            assert await store.keys() == set()
            assert await kv.txn([Compare("/t/a", 0)], [Put("/t/a", "2")])


async def test_a_change_is_finished_even_if_its_request_is_cancelled(tmp_path: Path) -> None:
    async with running(await sqlite_store(tmp_path)) as store:
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.kv.txn([], [Put("/t/a", "1")])
        kv = store.kv
        assert isinstance(kv, SqliteKv)
        stored = {key for (key,) in kv._database._connection.execute("SELECT key FROM entry")}
        assert {f"/t/{key}" for key in await store.keys()} == stored
