"""After a start: puts the keys into the tier's index that are in none of its files.

These are the keys of messages that were uploaded behind the last uploaded index file, as far as no local file has them:
after a restore there is no local one. The objects are read again in the order of the log. Keys that are put twice do no
harm: a query returns each message once.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import structlog
import trio

from trimq.broker.store.tiered.bucket.backoff import Backoff
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.protocol.bucket_manifest import Entry, StretchRows
from trimq.protocol.bucket_object import Block, BucketFormatError, block_crc
from trimq.protocol.index_batch import make_batch
from trimq.protocol.message_keys import index_keys_of
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.record import RecordError, decode_head
from trimq.protocol.tiered_index_batch import KeyItems, KeysOfMessage, items_of

_log: Final = structlog.get_logger(__name__)

_READ: Final = 4 * 1024 * 1024
"""Blocks that follow each other are read together up to so many bytes."""
_AT_ONCE: Final = 64
_SLICE: Final = 200
"""So many stretches are looked at between two turns of the loop."""


class CompletableIndex(Protocol):
    """The key index (IndexStoreService)."""

    def indexed_until(self, topic_id: int, queue_id: int) -> int | None:
        """See IndexStoreService."""
        ...

    def put_items(self, topic_id: int, queue_id: int, items: KeyItems, end: int) -> None:
        """See IndexStoreService."""
        ...

    async def fill(self) -> None:
        """See IndexStoreService. Raises OSError."""
        ...

    async def flush(self) -> None:
        """See IndexStoreService."""
        ...


class Stoppable(Protocol):
    """What ends repetitions (BucketUploads)."""

    @property
    def is_stopping(self) -> bool:
        """See BucketUploads."""
        ...

    async def wait_until_stop(self, seconds: float) -> None:
        """See BucketUploads."""
        ...


async def repeated(steps: Sequence[Callable[[], Awaitable[None]]], stop: Stoppable, pauses: Backoff) -> None:
    """Call the steps that open the index, each until the bucket does not fail, or until the stop.

    After damaged objects the next step follows: keys of what they have may not be found.
    """
    for step in steps:
        while not stop.is_stopping:
            try:
                await step()
            except OSError as error:
                _log.error("tiered_index_not_completed", error=str(error))
                await stop.wait_until_stop(pauses.next())
                continue
            except BucketFormatError as error:
                _log.error("tiered_index_not_completed", error=str(error))
            break


class TopicIds(Protocol):
    """The numbers of topics in the index (BucketQueues)."""

    def topic_id(self, topic: str) -> int:
        """See BucketQueues."""
        ...


class _Run(NamedTuple):
    """Blocks of an object that follow each other there."""

    blocks: list[Block]

    @property
    def begin(self) -> int:
        return self.blocks[0].position

    @property
    def length(self) -> int:
        return self.blocks[-1].position + self.blocks[-1].length - self.begin


async def complete_index(
    index: CompletableIndex, upto: int, bucket: Bucket, manifest: Manifest, topics: TopicIds
) -> int:
    """Put the missing keys. ``upto``: all keys below this log offset are in uploaded files.

    What is damaged or missing is left out. Returns the number of messages read. Raises OSError.
    """
    count = 0
    for entry in list(manifest.entries):
        missing: set[tuple[str, int]] = set()
        rows = StretchRows.of(entry.stretches)
        late = np.flatnonzero((rows.rows["messages"] > 0) & (rows.rows["last_physical"] >= upto))
        await trio.lowlevel.checkpoint()
        for at in range(0, len(late), _SLICE):
            for stretch in StretchRows(rows.topics, rows.rows[late[at : at + _SLICE]]):
                if stretch.last_physical >= _begin(index, upto, topics, stretch.topic, stretch.queue_id):
                    missing.add((stretch.topic, stretch.queue_id))
            await trio.lowlevel.checkpoint()
        if missing:
            try:
                count += await _complete(index, upto, bucket, manifest, topics, entry, missing)
            except (BucketFormatError, FileNotFoundError) as error:  # its keys may not be found, those of others are
                _log.error("tiered_index_not_completed", error=str(error))
    await index.flush()
    if count:
        _log.info("tiered_index_completed", messages=count)
    return count


def _begin(index: CompletableIndex, upto: int, topics: TopicIds, topic: str, queue_id: int) -> int:
    return max(upto, index.indexed_until(topics.topic_id(topic), queue_id) or 0)


async def _complete(
    index: CompletableIndex,
    upto: int,
    bucket: Bucket,
    manifest: Manifest,
    topics: TopicIds,
    entry: Entry,
    missing: set[tuple[str, int]],
) -> int:
    directory = await manifest.read_directory(entry.object)
    begins = {key: _begin(index, upto, topics, *key) for key in missing}
    wanted = [
        block
        for block in directory.blocks()
        if (block.topic, block.queue_id) in begins and block.last_physical >= begins[block.topic, block.queue_id]
    ]
    count = 0
    for run in _runs(sorted(wanted, key=_position)):
        data = memoryview(await bucket.read_range(entry.object.name, run.begin, run.length))
        for block in run.blocks:
            at = block.position - run.begin
            part = data[at : at + block.length]
            if len(part) != block.length or block_crc(part, ()) != block.crc:
                raise BucketFormatError(
                    f"{entry.object.name} in the bucket: the messages of {block.topic}/{block.queue_id} from "
                    f"{block.offset} on are damaged"
                )
            count += await _put(index, topics, block, part, begins[block.topic, block.queue_id])
    return count


def _position(block: Block) -> int:
    return block.position


def _runs(blocks: Sequence[Block]) -> Iterator[_Run]:
    run: _Run | None = None
    for block in blocks:
        if run is not None and run.begin + run.length == block.position and run.length + block.length <= _READ:
            run.blocks.append(block)
            continue
        if run is not None:
            yield run
        run = _Run([block])
    if run is not None:
        yield run


async def _put(index: CompletableIndex, topics: TopicIds, block: Block, data: Any, begin: int) -> int:
    """Put the keys of a block. Returns the number of messages."""
    topic_id = topics.topic_id(block.topic)
    at = block.messages * UNIT_SIZE
    units = list(UNIT.iter_unpack(data[:at]))
    messages: list[KeysOfMessage] = []
    batch = make_batch()
    count = 0
    for number, (physical, size, _) in enumerate(units):
        record = bytes(data[at : at + size])
        at += size
        if physical >= begin:
            count += 1
            try:
                head = decode_head(record)
            except RecordError:
                pass  # damaged: readers skip it
            else:
                text = str(record[head.properties_at : head.properties_end], "utf-8", "replace")
                keys = index_keys_of(text)
                messages.append(
                    KeysOfMessage(block.topic, topic_id, block.queue_id, keys, physical, size, head.store_timestamp)
                )
        if len(messages) >= _AT_ONCE or (number == len(units) - 1 and count):
            index.put_items(topic_id, block.queue_id, items_of(batch, messages), physical + size)
            messages = []
            await index.fill()
            await trio.lowlevel.checkpoint()
    return count
