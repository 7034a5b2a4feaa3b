"""The methods of a store's parts that processors on the hot path call directly, without a call in between."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from trimq.broker.store.log.puts import Put, WaitablePut
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.read.in_memory_getter import InMemory
from trimq.broker.store.read.query import InMemoryQuery
from trimq.broker.store.types import GetMessageResult, MessageFilter, PutCallback, PutMessageResult, QueryMessageResult


class GetMessage(Protocol):
    """(topic, queue id, offset, max count, max bytes, filter, group): messages of a queue for a consumer.

    ``group`` is the consumer group, empty for the broker's own reads: groups share the reads of the tier fairly.
    """

    def __call__(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        group: str = "",
        /,
    ) -> GetMessageResult | None:
        """None if the answer has to come from the device."""
        ...


class GetMessageCold(Protocol):
    """As GetMessage, waiting for the device."""

    def __call__(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        filter: MessageFilter | None,
        group: str = "",
        /,
    ) -> Awaitable[GetMessageResult]:
        """See GetMessage."""
        ...


class InMemoryCalls:
    """The docstrings of the parts apply. MessageStore sets these attributes when it has created its parts."""

    put_message: Callable[[WaitablePut, PutCallback], PutMessageResult | None]
    """Store a message or a batch: the result if it is ready immediately, else None and the callback gets it later."""
    put_now: Callable[[Put, PutCallback | None], PutMessageResult | None]
    """Store only if that needs no waiting, see WritePath.put_now."""
    find_queue: Callable[[str, int], ConsumeQueue | None]
    """The queue; None if it does not exist."""
    queue_exists: Callable[[str, int], bool]
    """See ConsumeQueueStore.exists."""
    low_offset: Callable[[ConsumeQueue], int] | None = None
    """Returns the first offset of a queue that consumers can read, if that is not its ``min_offset``: with a tier."""
    peek_max_offset: Callable[[str, int], int]
    """As MessageStore.max_offset, without loading the queue."""
    get_message: GetMessage
    get_message_cold: GetMessageCold
    get_in_memory: Callable[[ConsumeQueue, int, int, int, MessageFilter | None], InMemory | None]
    """The messages of a queue that are in memory from a readable offset on, see InMemoryGetter.get."""
    get_ahead: Callable[[ConsumeQueue, int, int, int], InMemory | None]
    """As ``get_in_memory``, without a filter and not counted, see InMemoryGetter.ahead."""
    count_found: Callable[[int], None]
    """Count messages that ``get_ahead`` has found and that are now sent."""
    look_properties: Callable[[str, int, int], bytes | None]
    """(topic, queue id, offset): the encoded properties of a message; None if it is not there, or not in memory."""
    query_in_memory: Callable[[str, str, int, int, int, int], InMemoryQuery | None]
    """See MessageFinder.query_in_memory."""
    query_message: Callable[[str, str, int, int, int], QueryMessageResult | None]
    """(topic, key, max number, begin ms, end ms): None if the answer has to come from the device."""
    query_message_cold: Callable[[str, str, int, int, int], Awaitable[QueryMessageResult]]
    """As ``query_message``, waiting for the device."""
