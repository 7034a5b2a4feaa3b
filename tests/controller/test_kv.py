"""The five operations do the same in memory, in SQLite and in etcd."""

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.controller.stores import Store, etcd_store, local_store, running, sqlite_store
from trimq.controller.kv import Compare, Delete, Put, Snapshot

_numbers = itertools.count()


@pytest.fixture(params=["local", "sqlite", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "etcd":
        found = etcd_store(request.getfixturevalue("etcd"), f"/test-{next(_numbers)}/")
    elif request.param == "sqlite":
        found = await sqlite_store(tmp_path)
    else:
        found = local_store()
    async with running(found):
        yield found


async def put(store: Store, key: str, value: str = "v", lease: int = 0) -> None:
    assert await store.kv.txn([], [Put(store.root + key, value, lease)])


async def test_a_range_has_what_was_done_before(store: Store) -> None:
    assert await store.keys() == set()
    await put(store, "a", "ä1")
    await put(store, "b", "")
    first = await store.kv.range(store.root)
    assert {key: entry.value for key, entry in first.entries.items()} == {f"{store.root}a": "ä1", f"{store.root}b": ""}
    assert first.entries[f"{store.root}a"].revision < first.entries[f"{store.root}b"].revision == first.revision
    await put(store, "a", "2")
    after = await store.kv.range(store.root)
    assert after.entries[f"{store.root}a"].value == "2"
    assert after.entries[f"{store.root}a"].revision == after.revision > first.revision
    assert after.entries[f"{store.root}b"] == first.entries[f"{store.root}b"]


async def test_a_range_has_only_what_is_below_its_prefix(store: Store) -> None:
    for key in ("a/1", "a/2", "a", "a0", "b/1"):
        await put(store, key)
    found = await store.kv.range(f"{store.root}a/")
    assert set(found.entries) == {f"{store.root}a/1", f"{store.root}a/2"}


async def test_a_transaction_compares(store: Store) -> None:
    kv, key = store.kv, f"{store.root}k"
    assert not await kv.txn([Compare(key, 1)], [Put(key, "1")]), "there is no such key"
    assert await kv.txn([Compare(key, 0)], [Put(key, "1")])
    assert not await kv.txn([Compare(key, 0)], [Put(key, "2")]), "it is there"
    revision = await store.revision("k")
    assert not await kv.txn([Compare(key, revision - 1)], [Put(key, "2")])
    assert not await kv.txn([Compare(key, revision), Compare(f"{key}x", revision)], [Put(key, "2")])
    assert await store.revision("k") == revision, "nothing of it was done"
    assert await kv.txn([Compare(key, revision), Compare(f"{key}x", 0)], [Put(key, "2"), Put(f"{key}x", "3")])
    assert await store.revision("k") == await store.revision("kx") > revision
    assert await kv.txn([Compare(key, await store.revision("k"))], [Delete(key), Delete(f"{store.root}absent")])
    assert await store.keys() == {"kx"}


async def test_one_of_many_transactions_on_the_same_state_wins(store: Store) -> None:
    await put(store, "k", "0")
    revision = await store.revision("k")
    won = []

    async def attempt(number: int) -> None:
        if await store.kv.txn([Compare(f"{store.root}k", revision)], [Put(f"{store.root}k", str(number))]):
            won.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(1, 9):
            nursery.start_soon(attempt, number)
    assert len(won) == 1
    assert (await store.kv.range(store.root)).entries[f"{store.root}k"].value == str(won[0])


async def test_a_lease_ends_and_takes_its_keys(store: Store) -> None:
    lease = await store.kv.grant(1000)
    assert lease.ttl_ms >= 1000
    await put(store, "a", lease=lease.number)
    await put(store, "b", lease=lease.number)
    await put(store, "stays")
    assert (await store.kv.range(store.root)).entries[f"{store.root}a"].lease == lease.number
    store.pass_time(lease)
    await store.gone("a")
    assert await store.keys() == {"stays"}
    assert await store.kv.keep(lease.number) == 0
    assert not await store.kv.txn([], [Put(f"{store.root}late", "v", lease.number)]), "a lease that has ended"
    assert await store.keys() == {"stays"}


async def test_keep_renews(store: Store) -> None:
    lease, other = await store.kv.grant(60_000), await store.kv.grant(1000)
    assert lease.number != other.number
    await put(store, "kept", lease=lease.number)
    await put(store, "other", lease=other.number)
    assert await store.kv.keep(lease.number) == lease.ttl_ms == 60_000
    store.pass_time(other)
    await store.gone("other")
    assert await store.kv.keep(lease.number) == 60_000
    assert await store.keys() == {"kept"}


async def test_a_lease_that_never_was(store: Store) -> None:
    assert await store.kv.keep(123_456_789) == 0


async def test_a_key_leaves_its_lease_with_a_new_value(store: Store) -> None:
    lease = await store.kv.grant(1000)
    await put(store, "a", lease=lease.number)
    await put(store, "b", lease=lease.number)
    await put(store, "a", "2")
    store.pass_time(lease)
    await store.gone("b")
    assert await store.keys() == {"a"}


class TestWatch:
    async def watched(self, store: Store, nursery: trio.Nursery, since: Snapshot) -> trio.MemoryReceiveChannel[str]:
        send, receive = trio.open_memory_channel[str](100)
        nursery.start_soon(store.kv.watch, store.root, since.revision, send.send_nowait)
        return receive

    async def test_it_reports_deletions_since_the_snapshot(self, store: Store) -> None:
        for key in ("before", "between", "after"):
            await put(store, key)
        await store.kv.txn([], [Delete(f"{store.root}before")])
        since = await store.kv.range(store.root)
        await store.kv.txn([], [Delete(f"{store.root}between")])
        async with trio.open_nursery() as nursery:
            deleted = await self.watched(store, nursery, since)
            with trio.fail_after(20):
                assert await deleted.receive() == f"{store.root}between"
                await put(store, "between", "a put is not reported")
                await store.kv.txn([], [Delete(f"{store.root}after"), Delete(f"{store.root}absent")])
                assert await deleted.receive() == f"{store.root}after"
            nursery.cancel_scope.cancel()

    async def test_it_reports_keys_of_leases_that_have_ended(self, store: Store) -> None:
        since = await store.kv.range(store.root)
        async with trio.open_nursery() as nursery:
            deleted = await self.watched(store, nursery, since)
            await trio.testing.wait_all_tasks_blocked(0.01)
            lease = await store.kv.grant(1000)
            await put(store, "alive", lease=lease.number)
            store.pass_time(lease)  # and the store is asked nothing more
            with trio.fail_after(20):
                assert await deleted.receive() == f"{store.root}alive"
            nursery.cancel_scope.cancel()

    async def test_it_does_not_report_what_is_elsewhere(self, store: Store) -> None:
        await put(store, "a/1")
        await put(store, "b/1")
        since = await store.kv.range(store.root)
        send, receive = trio.open_memory_channel[str](100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.kv.watch, f"{store.root}b/", since.revision, send.send_nowait)
            await store.kv.txn([], [Delete(f"{store.root}a/1")])
            await store.kv.txn([], [Delete(f"{store.root}b/1")])
            with trio.fail_after(20):
                assert await receive.receive() == f"{store.root}b/1"
            nursery.cancel_scope.cancel()
