"""Whole stores on a simulated disk, small enough to roll every kind of file."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio.testing

from tests.store.builders import Answers, message
from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageStatus, PutMessageResult, PutMessageStatus
from trimq.protocol.hashing import tags_code
from trimq.protocol.message import StoredMessage, decode_messages
from trimq.remoting.runtime.clock import ManualClock

TOPIC = "TopicTest"
FAR = 1 << 62


def settings(root: str = "/store", *, sync: bool = False, **more: object) -> MessageStoreConfig:
    fields: dict[str, object] = {
        "mapped_file_size_commit_log": 8192,
        "mapped_file_size_consume_queue": 200,
        "commit_log_reserve_step": 4096,
        "max_hash_slot_num": 16,
        "max_index_num": 20,
        "max_message_size": 4000,
        "flush_disk_type": FlushDiskType.SYNC_FLUSH if sync else FlushDiskType.ASYNC_FLUSH,
    }
    return MessageStoreConfig(store_path_root_dir=root, **(fields | more))  # type: ignore[arg-type]


@asynccontextmanager
async def opened(
    disk: Disk,
    config: MessageStoreConfig | None = None,
    clock: ManualClock | None = None,
    *,
    accept_missing_log: bool = False,
) -> AsyncIterator[MessageStore]:
    """A running store."""
    store = MessageStore(
        config or settings(),
        disk=disk,
        clock=clock or ManualClock(),
        sync_place=SyncPlace.THREAD,
        accept_missing_log=accept_missing_log,
    )
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        yield store


@asynccontextmanager
async def killed(
    disk: SimDisk,
    config: MessageStoreConfig | None = None,
    *,
    loss: Loss = Loss.NOTHING,
    accept_missing_log: bool = False,
) -> AsyncIterator[MessageStore]:
    """A store whose process is killed at the end (``loss``: the power fails). ``disk.power_cut()`` is the disk then."""
    try:
        async with opened(disk, config, accept_missing_log=accept_missing_log) as store:
            yield store
            disk.power_cut(loss)
    except* PowerCut:
        pass


async def put(
    store: MessageStore,
    body: bytes = b"body",
    *,
    topic: str = TOPIC,
    queue_id: int = 0,
    tag: str = "",
    unique: str = "",
    keys: str = "",
    sys_flag: int = 0,
    more: str = "",
) -> PutMessageResult:
    """Store one message, wait for its result and return it."""
    named = {"TAGS": tag, "UNIQ_KEY": unique, "KEYS": keys}
    text = "".join(f"{name}\x01{value}\x02" for name, value in named.items() if value) + more
    index_keys = tuple(word for word in (unique, *keys.split(" ")) if word)
    if tag and store.indexes_tags:
        index_keys += (f"T#{tag}",)
    inner = message(
        body,
        topic,
        queue_id,
        properties=text.encode(),
        tags_code=tags_code(tag),
        keys=index_keys,
        sys_flag=sys_flag,
    )
    answers = Answers()
    result = store.put_message(inner, answers.later)
    if result is None:
        await answers.changed.wait()
        result = answers.results[0]
    assert result.status is PutMessageStatus.PUT_OK, result
    return result


async def fill(store: MessageStore, count: int, *, topic: str = TOPIC, queue_id: int = 0, first: int = 0) -> None:
    """Store ``count`` messages of 200 bytes with keys ``u<n>`` and ``k<n % 7>``."""
    for number in range(first, first + count):
        body = f"{topic}-{queue_id}-{number}-".encode().ljust(100, b".")
        await put(
            store, body, topic=topic, queue_id=queue_id, unique=f"u{topic}{queue_id}-{number}", keys=f"k{number % 7}"
        )


async def until_dispatched(store: MessageStore) -> None:
    """Wait until all messages can be read.

    Under SYNC_FLUSH a message that does not wait for the disk is acknowledged before; the transient store pool commits
    by real time.
    """
    with trio.fail_after(30):
        while store.dispatched_offset < store.appended_offset:  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(0.001)


async def drain(store: MessageStore, topic: str = TOPIC, queue_id: int = 0) -> list[StoredMessage]:
    """All messages of a queue, as a consumer gets them. Checks that their offsets are those requested."""
    offset = store.min_offset(topic, queue_id)
    found: list[StoredMessage] = []
    while True:
        result = store.get_message(topic, queue_id, offset, 32, 1 << 20, None)
        if result is None:
            result = await store.get_message_cold(topic, queue_id, offset, 32, 1 << 20, None)
        if result.status is GetMessageStatus.FOUND:
            for buffer in result.buffers:
                found += decode_messages(bytes(buffer))
        result.release()
        if result.status not in (GetMessageStatus.FOUND, GetMessageStatus.MESSAGE_WAS_REMOVING):
            return found
        offset = result.next_begin_offset


async def by_key(store: MessageStore, key: str, topic: str = TOPIC) -> list[StoredMessage]:
    """The messages that a query by key finds."""
    result = store.query_message(topic, key, 64, 0, FAR)
    if result is None:
        result = await store.query_message_cold(topic, key, 64, 0, FAR)
    found = [stored for buffer in result.buffers for stored in decode_messages(bytes(buffer))]
    result.release()
    return found


async def check_all(store: MessageStore, expected: dict[tuple[str, int], int]) -> None:
    """Check that each queue holds the messages of ``fill`` at their offsets, and that each is found by its keys."""
    for (topic, queue_id), count in expected.items():
        stored = await drain(store, topic, queue_id)
        assert [one.queue_offset for one in stored] == list(range(count))
        for number, one in enumerate(stored):
            assert one.body.startswith(f"{topic}-{queue_id}-{number}-".encode())
            unique = await by_key(store, f"u{topic}{queue_id}-{number}", topic)
            assert [found.commit_log_offset for found in unique] == [one.commit_log_offset]
            assert one.commit_log_offset in {
                found.commit_log_offset for found in await by_key(store, f"k{number % 7}", topic)
            }
