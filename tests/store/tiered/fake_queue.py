"""A queue of the tier in a list, whose reads a test can hold up or let fail."""

import trio

from trimq.broker.store.tiered.container.message_runs import Fetched, Messages, TieredMessage
from trimq.protocol.record import encode_record

TOPIC = "TT"


def record(offset: int, *, body: bytes = b"b", time: int = 0, properties: bytes = b"", queue_id: int = 0) -> bytes:
    return encode_record(
        topic=TOPIC.encode(),
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=offset * 1000,
        body=body,
        properties=properties,
        sys_flag=0,
        flag=0,
        born_timestamp=time,
        born_host=bytes(8),
        store_timestamp=time,
        store_host=bytes(8),
        reconsume_times=0,
        prepared_transaction_offset=0,
    )


class FakeQueue:
    """Messages of the offsets from ``first`` on; None: there is no message at that offset."""

    def __init__(self, messages: list[TieredMessage | None], *, first: int = 0, queue_id: int = 0) -> None:
        self.topic, self.queue_id, self.topic_id = TOPIC, queue_id, 0
        self.messages = messages
        self.min_offset = first
        self.first = first
        self.reads: list[tuple[int, int]] = []
        self.under_way: list[range] = []
        self.most_under_way = 0
        self.failing: set[int] = set()
        """Offsets at which reads fail."""
        self.failing_records: set[int] = set()
        self.gates: dict[int, trio.Event] = {}
        """Reads that begin at these offsets wait."""
        self.time_reads = 0

    @property
    def commit_offset(self) -> int:
        return self.first + len(self.messages)

    async def read_messages(self, offset: int, count: int, max_bytes: int) -> Fetched:
        assert count > 0
        wanted = range(offset, offset + count)
        for other in self.under_way:
            assert wanted.stop <= other.start or other.stop <= wanted.start, "a range is read twice at the same time"
        self.reads.append((offset, count))
        self.under_way.append(wanted)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            await trio.lowlevel.checkpoint()
            if offset in self.gates:
                await self.gates[offset].wait()
            if offset in self.failing:
                raise OSError("the provider has failed")
            if not self.min_offset <= offset < self.commit_offset:
                raise LookupError("no such message")
            found: list[TieredMessage] = []
            total = 0
            at = offset
            while at < min(self.commit_offset, offset + count):
                message = self.messages[at - self.first]
                if message is not None:
                    total += len(message.record)
                    if found and total > max_bytes:
                        break
                    found.append(message)
                at += 1
            return Fetched(Messages.of(found), at)
        finally:
            self.under_way.remove(wanted)

    async def narrow(self, first: int, end: int, later: int) -> tuple[int, int]:
        await trio.lowlevel.checkpoint()
        return first, end

    def behind_gap(self, offset: int) -> int:
        return offset

    async def store_time(self, offset: int) -> int:
        await trio.lowlevel.checkpoint()
        self.time_reads += 1
        message = self.messages[offset - self.first] if self.min_offset <= offset < self.commit_offset else None
        return -1 if message is None else int.from_bytes(message.record[56:64], "big")

    async def read_record(self, position: int, size: int) -> bytes | None:
        await trio.lowlevel.checkpoint()
        if position in self.failing_records:
            raise OSError("the provider has failed")
        message = self.messages[position] if position < len(self.messages) else None
        return None if message is None or len(message.record) != size else message.record


def filled(count: int, *, body: bytes = b"b", first: int = 0, queue_id: int = 0) -> FakeQueue:
    """A queue of ``count`` messages; the tags code is the offset modulo 10, the store time ten times the offset."""
    messages: list[TieredMessage | None] = [
        TieredMessage(offset, offset % 10, record(offset, body=body, time=10 * offset, queue_id=queue_id))
        for offset in range(first, first + count)
    ]
    return FakeQueue(messages, first=first, queue_id=queue_id)
