"""After a start: puts the keys into the tier's index that a power cut or a kill took from it.

The index knows up to which position of a queue's stream its keys are durable. The records behind it are read again.
Keys that are put twice do no harm: a query returns each message once.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import structlog
import trio

from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import FlatMessageFile
from trimq.protocol.index_batch import make_batch
from trimq.protocol.message_keys import index_keys_of
from trimq.protocol.record import MAGIC_V1, MAGIC_V2, OVERHEAD_V1, SIZE_MAGIC, RecordError, decode_head
from trimq.protocol.tiered_index_batch import KeyItems, KeysOfMessage, items_of

_log: Final = structlog.get_logger(__name__)

_READ: Final = 1024 * 1024
_AT_ONCE: Final = 64


class CompletableIndex(Protocol):
    """The key index (IndexStoreService)."""

    def indexed_until(self, topic_id: int, queue_id: int) -> int | None:
        """See IndexStoreService."""
        ...

    def put_items(self, topic_id: int, queue_id: int, items: KeyItems, end: int) -> None:
        """See IndexStoreService."""
        ...

    def put_messages(self, messages: Sequence[KeysOfMessage]) -> None:
        """See IndexStoreService."""
        ...

    async def fill(self) -> None:
        """See IndexStoreService. Raises OSError."""
        ...

    async def flush(self) -> None:
        """See IndexStoreService."""
        ...


async def complete_index(index: CompletableIndex, flat_files: FlatFileStore) -> int:
    """Put the missing keys of all queues. Returns the number of messages read. Raises OSError."""
    count = 0
    for file in flat_files.all():
        end = file.commit_log.commit_offset
        begin = index.indexed_until(file.topic_id, file.queue_id)
        if begin is None:
            # RocketMQ's broker kept the index until now, and counts as complete.
            index.put_items(file.topic_id, file.queue_id, items_of(make_batch(), []), end)
        elif begin < end:
            count += await _complete(index, file, max(begin, file.commit_log.min_offset), end)
    await index.flush()
    if count:
        _log.info("tiered_index_completed", messages=count)
    return count


async def _complete(index: CompletableIndex, file: FlatMessageFile, at: int, end: int) -> int:
    count = 0
    messages: list[KeysOfMessage] = []
    data, base = b"", at
    while at < end:
        if at - base + OVERHEAD_V1 > len(data):
            data, base = await _read(file, at, _READ), at
        size, magic = SIZE_MAGIC.unpack_from(data, at - base) if len(data) - (at - base) >= OVERHEAD_V1 else (0, 0)
        if size < OVERHEAD_V1 or magic not in (MAGIC_V1, MAGIC_V2):
            break  # not the begin of a record: RocketMQ's broker has left something there
        if at - base + size > len(data):
            data, base = await _read(file, at, max(size, _READ)), at
        try:
            head = decode_head(data, at - base)
        except RecordError:
            pass  # damaged: readers skip it
        else:
            text = str(data[head.properties_at : head.properties_end], "utf-8", "replace")
            keys = index_keys_of(text)
            messages.append(
                KeysOfMessage(file.topic, file.topic_id, file.queue_id, keys, at, size, head.store_timestamp)
            )
        at += size
        count += 1
        if len(messages) >= _AT_ONCE:
            index.put_messages(messages)
            messages = []
            await index.fill()
            await trio.lowlevel.checkpoint()
    if messages:
        index.put_messages(messages)
    return count


async def _read(file: FlatMessageFile, position: int, length: int) -> bytes:
    try:
        return await file.commit_log.read(position, length)
    except LookupError:
        return b""
