"""Where the queues of a restored store begin: a topic that was deleted since then does not come back."""

import errno

import pytest
import structlog.testing

from tests.store.simdisk import Loss, SimDisk
from tests.store.stores import TOPIC, fill
from tests.store.tiered.bucket.stores import Objects, opened, uploaded
from tests.store.tiered.bucket.test_bucket_message_store import away, nothing, write
from trimq.broker.store.tiered.bucket import restore
from trimq.broker.store.tiered.bucket.restore import read_restored

GROUP_AT_50 = b'{"offsetTable":{"Read@G":{"0":50}}}'
"""A topic without a message in the bucket."""


async def with_a_topic_that_was_read(objects: Objects) -> None:
    disk = SimDisk()
    async with opened(disk, objects) as store:
        await fill(store, 100)
        disk.make_directory(f"{store.root}/config")
        write(disk, f"{store.root}/config/consumerOffset.json", GROUP_AT_50)
        await uploaded(store)


@pytest.mark.parametrize("act", ["delete", "clean"])
@pytest.mark.parametrize("topic", [TOPIC, "Read"])
async def test_a_topic_that_was_deleted_after_a_restore_does_not_come_back(act: str, topic: str) -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    other = ({TOPIC, "Read"} - {topic}).pop()
    async with opened(disk, objects) as store:
        assert (store.next_offset(TOPIC, 0), store.next_offset("Read", 0)) == (100, 50)
        if act == "delete":
            await store.delete_topic(topic)
        else:
            assert await store.clean_unused_topics({other}) == [topic]
        disk = disk.copy_after_cut(Loss.ALL)
    for _ in range(2):
        async with opened(disk, objects) as store:
            assert list(store.topics()) == [other]
            assert store.next_offset(other, 0) == {TOPIC: 100, "Read": 50}[other]
            assert store._starts.origin is not None


async def test_a_deletion_whose_start_was_not_forgotten_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    async with opened(disk, objects) as store:
        await fill(store, 1, topic="Log")  # a log without records keeps no notes
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
            patch.setattr(restore, "write_durably", refuse)
            await store.delete_topic("Read")
        assert [one["topics"] for one in logs if one["event"] == "deleted_topic_not_noted"] == [["Read"]]
        assert ("Read", 0) in read_restored(disk, store.root).starts
    async with opened(disk, objects) as store:
        assert not store.queue_exists("Read", 0)
        assert store.next_offset(TOPIC, 0) == 100
        assert ("Read", 0) not in read_restored(disk, store.root).starts


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


async def test_a_start_is_forgotten_though_the_bucket_is_away() -> None:
    objects, disk = Objects(), SimDisk()
    await with_a_topic_that_was_read(objects)
    async with opened(disk, objects) as store:
        objects.fail = away()
        with pytest.raises(OSError, match="no way to"):
            await store.delete_topic(TOPIC)
        objects.fail = nothing
        assert (TOPIC, 0) not in read_restored(disk, store.root).starts
