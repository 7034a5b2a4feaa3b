"""Cuts the power at every request to the object store: uploads, roots, joins, deletions, expiry, index files, a claim.

The script runs once; before and after each request that changes the bucket, disk and bucket are copied as a power cut
would leave them. On each copy a store is opened: every durable message must be read there at its place, once. Then the
garbage is deleted, nothing is left that the manifest does not name, and an empty disk gets the same history.
"""

from dataclasses import dataclass

import pytest
import trio
import trio.testing

from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import TOPIC, by_key, fill, put, until_dispatched
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.tiered.bucket import index_objects, joiner, object_contents
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.garbage import find_garbage
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.remoting.runtime.clock import ManualClock

QUEUES = 2
CONFIG = {
    "tiered_storage_level": TieredStorageLevel.FORCE,
    "tiered_store_file_reserved_time": 10,
    "tiered_store_index_file_max_hash_slot_num": 16,
    "tiered_store_index_file_max_index_num": 40,
}
CHANGES = {"create", "replace", "writer", "finish", "delete"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 2000)
    monkeypatch.setattr(joiner, "JOIN_BYTES", 8000)
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 4)
    monkeypatch.setattr(joiner, "JOIN_SEGMENTS", 3)
    monkeypatch.setattr(joiner, "PART_SIZE", 1500)
    monkeypatch.setattr(index_objects, "PART_SIZE", 512)


@dataclass(frozen=True)
class Promise:
    """What holds at a moment: ``durable`` messages of each queue; those before ``first`` may have expired."""

    durable: int
    uploaded: int
    first: int


@dataclass(frozen=True)
class Moment:
    what: str
    disk: SimDisk
    objects: Objects
    promise: Promise
    wall_ms: int


class Script:
    def __init__(self) -> None:
        self.disk = SimDisk()
        self.objects = Objects()
        self.clock = ManualClock()
        self.promise = Promise(0, 0, 0)
        self.moments: list[Moment] = []

    def _note(self, call: str, name: str, done: bool) -> None:
        if call in CHANGES:
            what = f"{'after' if done else 'before'} {call} {name}"
            losses = Loss.NOTHING if len(self.moments) % 2 else Loss.ALL
            disk = self.disk.copy_after_cut(losses)
            self.moments.append(Moment(what, disk, self.objects.copy(), self.promise, self.clock.wall_ms()))

    async def run(self) -> None:
        self.objects.fail = self._note
        async with opened(self.disk, self.objects, tier(**CONFIG), clock=self.clock) as store:
            await self._fill(store, 0, 24)
            await self._join(store)
            assert store.tier_index is not None
            while await store.tier_index.upload_next():
                pass
            await self._fill(store, 24, 36)
            await drop_local(store)
            await self._join(store)
            await store.delete_topic("Other")
            self.promise = Promise(36, 36, 36)
            self.clock.set_wall_ms(self.clock.wall_ms() + 40_000_000)
            await self._fill(store, 36, 40)
            assert await store.expire_tier()
            self.clock.advance(3600)
            await store.bucket_queues.garbage.delete_due()
        async with opened(self.disk, self.objects, tier(**CONFIG), clock=self.clock) as store:
            await self._fill(store, 40, 44)

    async def _fill(self, store: BucketMessageStore, first: int, end: int) -> None:
        for number in range(first, end):
            for queue_id in range(QUEUES):
                await fill(store, 1, queue_id=queue_id, first=number)
            if number < 24:
                await put(store, b"x", topic="Other")
        await until_dispatched(store)
        await store.flush()
        self.promise = Promise(end, self.promise.uploaded, self.promise.first)
        await uploaded(store)
        self.promise = Promise(end, end, self.promise.first)

    async def _join(self, store: BucketMessageStore) -> None:
        while await store.upkeep.join():
            pass
        self.clock.advance(3600)
        await store.bucket_queues.garbage.delete_due()


async def check(store: BucketMessageStore, end: int, first: int) -> None:
    """Each message of the queues from ``first`` to ``end`` is there once, and found by its key."""
    for queue_id in range(QUEUES):
        low = store.min_offset(TOPIC, queue_id)
        assert low <= first
        found = await all_offsets(store, low, end, queue_id=queue_id)
        assert [offset for offset, _ in found] == list(range(low, end))
        physical = [place for _, place in found]
        assert physical == sorted(set(physical))
        for number in {first, end - 1} if first < end else ():
            messages = await by_key(store, f"u{TOPIC}{queue_id}-{number}")
            assert [message.queue_offset for message in messages] == [number]


@pytest.mark.slow
async def test_every_request_may_be_the_last(autojump_clock: trio.testing.MockClock) -> None:
    script = Script()
    await script.run()
    kinds = {moment.what.split(" /")[0].rsplit("/", 1)[0].rpartition("/")[2] for moment in script.moments}
    assert {"log", "segments", "manifest", "state", "index"} <= kinds, kinds
    assert sum("writer" in moment.what for moment in script.moments) > 4
    assert sum("delete" in moment.what for moment in script.moments) > 2
    assert len(script.moments) > 150
    for moment in script.moments:
        try:
            await _check_moment(moment)
        except Exception as error:
            error.add_note(moment.what)
            raise


async def _check_moment(moment: Moment) -> None:
    clock = ManualClock(moment.wall_ms)
    disk, objects, promise = moment.disk, moment.objects, moment.promise
    async with opened(disk, objects, tier(**CONFIG), clock=clock) as store:
        with trio.fail_after(60):
            await store.is_loaded.wait()
            await trio.testing.wait_all_tasks_blocked()
        assert store.tier_trouble() is None
        if promise.durable:
            await check(store, promise.durable, promise.first)
        # What is only local goes up, without a hole and without a message twice.
        await uploaded(store)
        if promise.durable:
            await check(store, promise.durable, promise.first)
        for info in await find_garbage(store.bucket, store.manifest, 1 << 60, -1):
            await store.bucket.delete([info.name])
        root = store.manifest.root
        assert root is not None
        named = {
            "manifest/root",
            root.state,
            root.indexes,
            *store.manifest.indexes,
            *(page.name for page in root.pages),
            *(entry.object.name for entry in store.manifest.entries if entry.object.length),
        }
        assert {name.removeprefix(store.bucket.prefix) for name in objects.named("")} == named - {""}
    async with opened(SimDisk(), objects, tier(**CONFIG), clock=clock) as store:
        with trio.fail_after(60):
            await store.is_loaded.wait()
            await trio.testing.wait_all_tasks_blocked()
        if promise.durable:
            await check(store, promise.durable, promise.first)


@pytest.mark.slow
async def test_a_restore_at_every_moment_has_what_was_uploaded(autojump_clock: trio.testing.MockClock) -> None:
    """The disk is gone: all that an upload had reported is there, and nothing is twice."""
    script = Script()
    await script.run()
    for moment in script.moments:
        async with opened(SimDisk(), moment.objects, tier(**CONFIG), clock=ManualClock(moment.wall_ms)) as store:
            with trio.fail_after(60):
                await store.is_loaded.wait()
                await trio.testing.wait_all_tasks_blocked()
            promise = moment.promise
            ends = [store.next_offset(TOPIC, queue_id) for queue_id in range(QUEUES)]
            assert min(ends) >= promise.uploaded, moment.what
            for queue_id, end in enumerate(ends):
                low = MessageStore.max_offset(store, TOPIC, queue_id) if not end else store.min_offset(TOPIC, queue_id)
                assert low <= max(promise.first, 0), moment.what
                found = [offset for offset, _ in await all_offsets(store, low, end, queue_id=queue_id)]
                assert found == list(range(low, end)), moment.what
