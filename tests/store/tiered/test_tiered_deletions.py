"""A topic of the tier in a directory is created anew while the old one of its name is deleted."""

import pytest
import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.test_tiered_message_store import all_offsets, get, opened, uploaded_store
from trimq.broker.store.types import GetMessageStatus


@pytest.mark.parametrize("act", ["delete", "clean"])
async def test_a_topic_that_is_created_anew_while_the_old_one_is_deleted(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SimDisk()) as store:
        await uploaded_store(store)
        known: set[str] = set()
        noted = trio.Event()
        monkeypatch.setattr(store._clean, "_save_checkpoint", noted.wait)
        async with trio.open_nursery() as nursery:
            if act == "delete":
                nursery.start_soon(store.delete_topic, TOPIC)
            else:
                nursery.start_soon(store.clean_unused_topics, known)
            await trio.testing.wait_all_tasks_blocked()
            known.add(TOPIC)
            await fill(store, 3)
            await until_dispatched(store)
            await store.flush()
            await store.flush_queues.write()
            for key, waiting in list(store.uploads.waiting.pending.items()):
                store.uploads.waiting.drop_done(key, waiting)
            assert (await get(store, 3)).status is not GetMessageStatus.FOUND  # that of the old one
            monkeypatch.undo()
            noted.set()
        await store.uploads.upload_all()
        assert store.tier_range(TOPIC, 0) == (0, 3)
        assert len(await all_offsets(store, 0, 3)) == 3


async def test_unused_topics_go_though_the_deletion_of_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        for topic in ("First", "Second", TOPIC):
            await fill(store, 5, topic=topic)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        persist, failures = store.tier_queues.metadata.persist, [OSError("no space")]

        async def fail_once() -> None:
            if failures:
                raise failures.pop()
            await persist()

        monkeypatch.setattr(store.tier_queues.metadata, "persist", fail_once)
        with pytest.raises(OSError, match="no space"):
            await store.clean_unused_topics({TOPIC})
        assert sorted(store.tier_queues.topics()) == ["First", TOPIC]
        assert await store.clean_unused_topics({TOPIC}) == ["First"]
        assert list(store.tier_queues.topics()) == [TOPIC]
