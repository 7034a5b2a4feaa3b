"""Records of queues as the log has them, and objects that are built of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.object_builder import ObjectBuilder
from trimq.protocol.bucket_manifest import StoredObject, Stretch, stretches_of
from trimq.protocol.bucket_names import ObjectName
from trimq.protocol.bucket_object import Kind, ObjectHeader
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import MAGIC_V1, MAGIC_V2, encode_record
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

TOPIC = "TT"


class Message(NamedTuple):
    """A message of a queue: its offset, its place in the log, its store time, tags code, and the record."""

    offset: int
    physical: int
    time: int
    tags_code: int
    record: bytes

    @property
    def unit(self) -> bytes:
        return UNIT.pack(self.physical, len(self.record), self.tags_code)


def record(
    offset: int,
    physical: int,
    time: int,
    *,
    body: bytes = b"b",
    topic: str = TOPIC,
    queue_id: int = 0,
    sys_flag: int = 0,
    properties: bytes = b"",
    v2: bool = False,
) -> bytes:
    data = encode_record(
        topic=topic.encode(),
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=physical,
        body=body,
        properties=properties,
        sys_flag=sys_flag,
        flag=0,
        born_timestamp=time,
        born_host=bytes(20 if sys_flag & BORN_HOST_V6 else 8),
        store_timestamp=time,
        store_host=bytes(20 if sys_flag & STORE_HOST_V6 else 8),
        reconsume_times=0,
        prepared_transaction_offset=0,
    )
    if v2:
        name = topic.encode()
        magic = MAGIC_V1.to_bytes(4, "big"), MAGIC_V2.to_bytes(4, "big")
        head, end = data.rpartition(bytes([len(name)]) + name)[::2]
        data = head.replace(magic[0], magic[1], 1) + len(name).to_bytes(2, "big") + name + end
        data = len(data).to_bytes(4, "big") + data[4:]
    return data


def messages(
    times: Sequence[int],
    *,
    first: int = 0,
    physical: int = 1000,
    apart: int = 7,
    body: bytes = b"b",
    **more: Any,
) -> list[Message]:
    """Messages with these store times. In the log so many bytes of other queues lie between two of them."""
    found: list[Message] = []
    for number, time in enumerate(times):
        data = record(first + number, physical, time, body=body, **more)
        found.append(Message(first + number, physical, time, (first + number) % 10, data))
        physical += len(data) + apart
    return found


def add(builder: ObjectBuilder, batch: Sequence[Message], topic: str = TOPIC, queue_id: int = 0) -> None:
    """Add messages as one batch."""
    times = [message.time for message in batch]
    units = b"".join([message.unit for message in batch])
    data = b"".join([message.record for message in batch])
    builder.add(topic, queue_id, batch[0].offset, units, data, min(times), max(times))


async def stored(
    bucket: Bucket, queues: Mapping[tuple[str, int], Sequence[Message]], *, generation: int = 0, epoch: int = 1
) -> tuple[StoredObject, Sequence[Stretch]]:
    """An object in the bucket with these messages."""
    everything = [message for batch in queues.values() for message in batch]
    begin = min(message.physical for message in everything)
    end = max(message.physical + len(message.record) for message in everything)
    builder = ObjectBuilder(ObjectHeader(Kind.SEGMENT if generation else Kind.LOG, epoch, begin, end, 1))
    for (topic, queue_id), batch in queues.items():
        add(builder, batch, topic, queue_id)
    pieces, directory = builder.finish(b"state")
    name = ObjectName(begin, end, generation, epoch, 0)
    await bucket.create(str(name), pieces)
    return StoredObject(*name, directory.length, directory.position), stretches_of(directory)
