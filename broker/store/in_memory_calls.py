"""What the processors of the hot path call of a store: methods of its parts, without a call in between."""

from collections.abc import Awaitable, Callable

from trimq.broker.store.log.puts import PatientPut, Put
from trimq.broker.store.queue.consume_queue import ConsumeQueue
from trimq.broker.store.read.get_message import InMemory
from trimq.broker.store.read.query import InMemoryQuery
from trimq.broker.store.types import GetMessageResult, MessageFilter, PutCallback, PutMessageResult, QueryMessageResult


class InMemoryCalls:
    """What the parts' docstrings say holds here. MessageStore sets them when it has made its parts."""

    put_message: Callable[[PatientPut, PutCallback], PutMessageResult | None]
    """Store a message or a batch: the result if it is ready at once, else None and the callback gets it later."""
    put_now: Callable[[Put, PutCallback | None], PutMessageResult | None]
    """Store it only where that needs no waiting, see WritePath.put_now."""
    find_queue: Callable[[str, int], ConsumeQueue | None]
    """A queue of a topic that has been put into or is on disk."""
    queue_exists: Callable[[str, int], bool]
    """See ConsumeQueueStore.exists."""
    peek_max_offset: Callable[[str, int], int]
    """As MessageStore.max_offset, without opening the queue."""
    get_message: Callable[[str, int, int, int, int, MessageFilter | None], GetMessageResult | None]
    """(topic, queue id, offset, max count, max bytes, filter): None where the answer has to come from the device."""
    get_message_cold: Callable[[str, int, int, int, int, MessageFilter | None], Awaitable[GetMessageResult]]
    """The same, waiting for the device."""
    get_in_memory: Callable[[ConsumeQueue, int, int, int, MessageFilter | None], InMemory | None]
    """What a queue has in memory from a readable offset on, see MessageGetter.in_memory."""
    get_ahead: Callable[[ConsumeQueue, int, int, int], InMemory | None]
    """The same without a filter and uncounted, see MessageGetter.ahead."""
    count_found: Callable[[int], None]
    """So many messages are given out that ``get_ahead`` has found."""
    query_in_memory: Callable[[str, str, int, int, int, int], InMemoryQuery | None]
    """See MessageFinder.query_in_memory."""
    query_message: Callable[[str, str, int, int, int], QueryMessageResult | None]
    """(topic, key, max number, begin ms, end ms): None where the answer has to come from the device."""
    query_message_cold: Callable[[str, str, int, int, int], Awaitable[QueryMessageResult]]
    """The same, waiting for the device."""
