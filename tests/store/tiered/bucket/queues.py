"""Queues in a bucket for tests, and the plain search by time."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.store.tiered.bucket.buckets import MemoryBucket
from tests.store.tiered.bucket.records import TOPIC, Message, messages, stored
from trimq.broker.store.tiered.bucket.block_reader import BlockReader
from trimq.broker.store.tiered.bucket.bucket_queue import BucketQueue
from trimq.protocol.bucket_manifest import StoredObject, Stretch


class Entry(NamedTuple):
    """An object with messages of a queue."""

    object: StoredObject
    stretches: list[Stretch]
    messages: list[Message]


async def put(bucket: MemoryBucket, batches: Sequence[Sequence[Message]], generation: int = 0, epoch: int = 1) -> Entry:
    """One object with these batches of queue 0, and something of other queues before and behind it."""
    everything = [message for batch in batches for message in batch]
    physical = everything[0].physical
    queues = {
        ("A", 0): messages([1], physical=physical),
        (TOPIC, 0): everything,
        ("Z", 1): messages([1, 2], first=4, physical=physical),
    }
    found, stretches = await stored(bucket, queues, generation=generation, epoch=epoch)
    return Entry(found, [s for s in stretches if s.topic == TOPIC], everything)


def queue_of(bucket: MemoryBucket, *entries: Entry, reader: BlockReader | None = None) -> BucketQueue:
    queue = BucketQueue(TOPIC, 0, 7, reader or BlockReader(bucket, bucket.disk))
    for entry in entries:
        for stretch in entry.stretches:
            queue.add(entry.object, stretch)
    return queue


async def read_all(queue: BucketQueue, count: int = 4096, max_bytes: int = 1 << 24) -> list[Message]:
    """What a reader from the first message to the last gets."""
    found: list[Message] = []
    at = queue.min_offset
    while at < queue.commit_offset:
        fetched = await queue.read_messages(at, count, max_bytes)
        assert fetched.next_offset > at
        for message in fetched.messages:
            assert message.offset >= at
            data = message.record
            physical, time = int.from_bytes(data[28:36], "big"), int.from_bytes(data[56:64], "big")
            found.append(Message(message.offset, physical, time, message.tags_code, data))
        at = fetched.next_offset
    return found


def first_stored_from(model: dict[int, Message], first: int, end: int, later: int) -> int:
    """Behind the last message before the first one stored at that time or after it."""
    behind = first
    for offset, message in model.items():
        if first <= offset < end:
            if message.time >= later:
                return offset if offset - 1 in model and offset > first else behind
            behind = offset + 1
    return behind
