"""Makes the messages that a half turns into: its commit record, the half stored again, the one that has expired."""

from typing import Final

from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutMessageResult
from trimq.protocol import record, sysflag
from trimq.protocol.hashing import tags_code
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import PROPERTY_TAGS
from trimq.protocol.property_text import join_properties
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import (
    OP_PROPERTIES,
    OP_TAG,
    QUEUE,
    Half,
    again_properties,
    committed_properties,
    resumed_properties,
)

_OP_TAGS_CODE: Final = tags_code(OP_TAG)


class HalfMessages:
    """Makes messages for the store. ``store_host`` is this broker's packed address; ``tags``: the index has tags too.

    Bodies are views of the half's record: they are put in the turn in which the record was read.
    """

    def __init__(self, store_host: bytes, *, tags: bool) -> None:
        self._store_host = store_host
        self._tags = tags

    def committed(self, half: Half) -> MessageInner:
        """The commit record: the message for its real topic."""
        properties = committed_properties(half)
        flags = half.head.sys_flag & ~sysflag.TRANSACTION_MASK | sysflag.TRANSACTION_COMMIT
        return self._of(half, half.topic, half.queue_id, properties, sys_flag=flags)

    def again(self, half: Half, times: int) -> MessageInner:
        """The half once more, after ``times`` checks."""
        return self._of(half, TRANS_HALF_TOPIC, QUEUE, again_properties(half, times))

    def resumed(self, half: Half) -> MessageInner:
        """A new half made of one in TRANS_CHECK_MAX_TIME_TOPIC."""
        return self._of(half, TRANS_HALF_TOPIC, QUEUE, resumed_properties(half))

    def expired(self, half: Half) -> MessageInner:
        """The half for TRANS_CHECK_MAX_TIME_TOPIC: it was checked too often."""
        return self._of(half, TRANS_CHECK_MAX_TIME_TOPIC, 0, half.properties)

    def _of(
        self, half: Half, topic: str, queue_id: int, properties: dict[str, str], *, sys_flag: int | None = None
    ) -> MessageInner:
        head = half.head
        tags = properties.get(PROPERTY_TAGS)
        return MessageInner(
            topic,
            queue_id,
            half.body,
            join_properties(properties).encode(),
            head.born_timestamp,
            head.born_host,
            self._store_host,
            head.flag,
            head.sys_flag if sys_flag is None else sys_flag,
            head.reconsume_times,
            # RocketMQ writes it into commit records only. In all others it tells the start which half they end.
            head.physical_offset if topic != TRANS_HALF_TOPIC else 0,
            tags_code(tags) if tags else 0,
            index_keys(properties, tags=self._tags),
            wait=True,
        )

    def op(self, body: bytes, wall_ms: int) -> MessageInner:
        """An op record."""
        return MessageInner(
            TRANS_OP_HALF_TOPIC,
            QUEUE,
            body,
            OP_PROPERTIES,
            wall_ms,
            self._store_host,
            self._store_host,
            tags_code=_OP_TAGS_CODE,
            wait=True,
        )


def check_body(half: Half, body: bytes, copy: MessageInner, place: PutMessageResult) -> bytes:
    """The body of CHECK_TRANSACTION_STATE (39): the half as it was stored again, with its real topic and queue.

    ``body`` is that of ``half``, whose record may no longer be in memory.
    """
    head = half.head
    return record.encode_record(
        topic=half.topic.encode(),
        body=body,
        properties=copy.properties,
        queue_id=half.queue_id,
        queue_offset=place.queue_offset,
        physical_offset=place.physical_offset,
        born_timestamp=head.born_timestamp,
        born_host=head.born_host,
        store_timestamp=place.store_timestamp,
        store_host=copy.store_host,
        flag=head.flag,
        sys_flag=head.sys_flag & ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)
        | record.host_flags(head.born_host, copy.store_host),
        reconsume_times=head.reconsume_times,
    )
