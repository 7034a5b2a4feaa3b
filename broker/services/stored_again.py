"""Messages that the broker stores again: those of a delay level or of the timer, for their real topics."""

from collections.abc import Callable
from typing import Final, Protocol

import trio

from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutCallback, PutMessageResult
from trimq.protocol import hashing, record
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import PROPERTY_REAL_QID, PROPERTY_REAL_TOPIC, PROPERTY_TAGS
from trimq.protocol.real_place import RealPlace, real_place

_CANCELLED_SECONDS: Final = 2.0

QueuesOf = Callable[[str], int | None]


def place_of(properties: dict[str, str], queues_of: QueuesOf | None = None) -> RealPlace | str:
    """The real topic and queue of a message, or why it has none that a client may send to: a text for the log.

    ``queues_of`` returns how many queues a topic has, None for a topic that does not exist: then no client can read
    the message. A queue that is none, or that the topic has no more, becomes queue 0. This broker stores no message for
    another place; RocketMQ lets a client write to the topics where they wait.
    """
    topic = properties.get(PROPERTY_REAL_TOPIC)
    place = real_place(topic, properties.get(PROPERTY_REAL_QID))
    if isinstance(place, str):
        place = real_place(topic, None)
    if isinstance(place, str) or queues_of is None:
        return place
    queues = queues_of(place.topic)
    if queues is None:
        return f"the topic {place.topic} does not exist"
    return place if place.queue_id < queues else RealPlace(place.topic, 0)


def stored_again(
    view: memoryview,
    head: record.RecordHead,
    properties: dict[str, str],
    place: RealPlace,
    text: bytes,
    *,
    store_host: bytes,
    indexes_tags: bool,
    prepared_transaction_offset: int = 0,
) -> MessageInner:
    """The message of a record, with ``text`` as its properties, for another topic and queue.

    ``indexes_tags``: whether it can be found by its tag. ``store_host``: the packed address, b"" for the record's own.
    Its body is a view of the record: it has to be put before the view is released.
    """
    topic, queue_id = place
    tags = properties.get(PROPERTY_TAGS)
    return MessageInner(
        topic=topic,
        queue_id=queue_id,
        body=view[head.body_at : head.body_end],
        properties=text,
        born_timestamp=head.born_timestamp,
        born_host=head.born_host,
        store_host=store_host or head.store_host,
        flag=head.flag,
        sys_flag=head.sys_flag,
        reconsume_times=head.reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        tags_code=hashing.tags_code(tags) if tags else 0,
        keys=index_keys(properties, tags=indexes_tags),
        wait=False,
    )


class PutStore(Protocol):
    """The part of MessageStore that is used."""

    def put_message(self, message: MessageInner, on_done: PutCallback) -> PutMessageResult | None:
        """See MessageStore."""
        ...


def _ignore(_result: PutMessageResult) -> None:
    pass


async def put_again(store: PutStore, message: MessageInner, stored: PutCallback = _ignore) -> PutMessageResult:
    """Put a message, and wait until it is stored. ``stored`` hears of it at once.

    When cancelled it still waits for a moment: the record may be in the log already, and the caller's offset has to
    follow it. Not for longer, since what answers may be cancelled too, as after a stop that takes too long.
    """
    done = trio.Event()
    outcome: list[PutMessageResult] = []

    def on_done(result: PutMessageResult) -> None:
        stored(result)
        outcome.append(result)
        done.set()

    result = store.put_message(message, on_done)
    if result is not None:
        stored(result)
        return result
    try:
        await done.wait()
    except trio.Cancelled:
        with trio.move_on_after(_CANCELLED_SECONDS, shield=True):
            await done.wait()
        if not outcome:
            raise
    return outcome[0]
