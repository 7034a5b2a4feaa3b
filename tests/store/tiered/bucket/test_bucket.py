"""The bucket as the tier uses it, with obstore's memory store."""

import threading
from typing import Any

import pytest
import trio
from obstore.store import MemoryStore

from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore


def two_brokers() -> tuple[Bucket, Bucket]:
    store = ObstoreStore(MemoryStore())
    return Bucket(store, SimDisk(), "C/a/"), Bucket(store, SimDisk(), "C/b/")


async def test_a_broker_has_the_objects_below_its_prefix() -> None:
    one, other = two_brokers()
    for bucket in (one, other):
        await bucket.create("log/1", [bucket.prefix.encode()])
        await bucket.create("log/2", [b""])
    await one.delete(["log/2"])
    assert (await one.read("log/1")).data == b"C/a/"
    assert bytes(await other.read_range("log/1", 2, 2)) == b"b/"
    assert [info.name for info in await one.list("log/")] == ["log/1"]
    assert [info.name for info in await other.list("log/", "log/1")] == ["log/2"]
    version = await one.replace("manifest/root", b"1", None)
    assert await one.read("manifest/root") == (b"1", version)
    with pytest.raises(FileNotFoundError):
        await other.read("manifest/root")


async def test_requests_are_counted() -> None:
    bucket, _ = two_brokers()
    for number in range(2001):
        await bucket.create(f"log/{number:04d}", [b""])
    assert len(await bucket.list("log/", "", 3000)) == 2001
    assert len(await bucket.list("log/", "log/1000")) == 1000
    await bucket.delete([f"log/{number:04d}" for number in range(1001)])
    await bucket.delete([])
    assert bucket.requests == {"put": 2001, "list": 4, "delete": 2}


@pytest.mark.parametrize(
    ("pieces", "requests"),
    [([], 1), ([999], 1), ([1000], 3), ([999, 1], 3), ([2500], 5), ([500, 1500, 1], 5), ([700] * 10, 9)],
)
async def test_parts_are_requests(pieces: list[int], requests: int) -> None:
    bucket, _ = two_brokers()
    writer = bucket.writer("segments/1", 1000)
    for piece in pieces:
        await writer.write(bytes(piece))
    await writer.finish()
    assert bucket.requests["put"] == requests
    assert len((await bucket.read("segments/1")).data) == sum(pieces)
    assert bucket.calls["put"].sizes.total == sum(pieces)


class Held:
    """An object store whose calls wait."""

    def __init__(self) -> None:
        self.called = 0
        self.began = threading.Event()
        self.go = threading.Event()

    def create(self, name: str, data: Any) -> None:
        self.called += 1
        self.began.set()
        assert self.go.wait(20)


async def test_a_call_that_is_cancelled_ends_with_its_request() -> None:
    held: Any = Held()
    bucket = Bucket(held, RealDisk().with_own_threads(), "C/a/")
    ended = trio.Event()

    async def create() -> None:
        try:
            await bucket.create("log/1", [b""])
        finally:
            ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(create)
        await trio.to_thread.run_sync(held.began.wait)
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert not ended.is_set()
            held.go.set()
            await ended.wait()
    assert held.called == 1


async def test_a_task_that_is_cancelled_sends_nothing() -> None:
    bucket, _ = two_brokers()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bucket.create("log/1", [b""])
    assert scope.cancelled_caught
    assert not bucket.requests
