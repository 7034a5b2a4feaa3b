"""Messages that the broker stores again: those of a delay level or of the timer, for their real topics."""

from trimq.broker.store.log.puts import MessageInner
from trimq.protocol import hashing, record
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_names import PROPERTY_REAL_QID, PROPERTY_REAL_TOPIC, PROPERTY_TAGS
from trimq.protocol.topic_rules import NO_SEND_TOPICS, topic_problem


def real_place(properties: dict[str, str]) -> tuple[str, int] | None:
    """The real topic and queue of a message; None if it has none that a client may send to.

    This broker stores no such message; RocketMQ lets a client write to the topics where they wait.
    """
    topic = properties.get(PROPERTY_REAL_TOPIC, "")
    if topic in NO_SEND_TOPICS or topic_problem(topic) is not None:
        return None
    text = properties.get(PROPERTY_REAL_QID, "0")
    return topic, int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def stored_again(
    view: memoryview,
    head: record.RecordHead,
    properties: dict[str, str],
    place: tuple[str, int],
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
