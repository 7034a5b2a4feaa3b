"""Clients that send, read and query by key at a broker that may be killed at any moment."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final, TypeVar

import trio

from tests.broker.wire_client import WireClient, properties_text, send_ext
from tests.crash.ledger import ACKNOWLEDGED, SEEN, SENT, Losses, Reader, Stream, find_losses
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_messages

_QUERY_NOT_FOUND: Final = 22
_RETRY_SECONDS: Final = 0.05
_BATCH: Final = 5
_REPLY_SECONDS: Final = 30.0

_T = TypeVar("_T")


class GoneError(Exception):
    """The broker closed the connection while a client waited for a reply."""


class Load:
    """All senders and readers of a run, over several lives of a broker at one address.

    ``rate`` limits the messages per second of all streams together; None sends as fast as replies arrive.
    """

    def __init__(
        self,
        address: tuple[str, int],
        streams: Sequence[Stream],
        *,
        seed: int,
        rate: float | None = None,
        queryable: int = ACKNOWLEDGED,
    ) -> None:
        """``queryable``: messages with this state flag are queried by key during the run and must be found."""
        self.address = address
        self.streams = streams
        self.random = Random(seed)
        self.readers = [Reader(stream) for stream in streams]
        self.faults: list[str] = []
        self.latencies: list[float] = []
        """Seconds from each send request to its reply."""
        self.accepted = 0
        self.queries = 0
        self.refused: dict[str, int] = {}
        """The number of refused sends, by response code and remark."""
        self.unanswered = 0
        """The number of requests that a running broker did not answer in time."""
        self._queryable = queryable
        self._pause_seconds = len(streams) / rate if rate is not None else 0.0
        self._stopping = False
        self._changed = trio.Event()

    async def progress(self, count: int, timeout: float = 60) -> None:
        """Wait until ``count`` more messages have been acknowledged."""
        wanted = self.accepted + count
        with trio.fail_after(timeout):
            while self.accepted < wanted:
                self._changed = trio.Event()
                await self._changed.wait()

    def take_latencies(self) -> list[float]:
        """Return and clear the latencies of all sends since the last call, in seconds."""
        latencies, self.latencies = self.latencies, []
        return latencies

    # -- the clients

    async def run(self) -> None:
        """Until ``stop``: send to every stream, read every stream, and query messages by key."""
        async with trio.open_nursery() as nursery:
            for stream in self.streams:
                nursery.start_soon(self._reconnecting, self._send, stream)
            for reader in self.readers:
                nursery.start_soon(self._reconnecting, self._read, reader)
            nursery.start_soon(self._reconnecting, self._query_keys, None)

    def stop(self) -> None:
        """Let all clients end after their current request."""
        self._stopping = True

    async def _reconnecting(self, work: Callable[[WireClient, _T], Awaitable[None]], subject: _T) -> None:
        """Do the work on a connection, and on a new one each time that the connection is lost."""
        while not self._stopping:
            try:
                async with WireClient.connect(self.address) as client:
                    await work(client, subject)
            except* (GoneError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except* trio.TooSlowError:
                self.unanswered += 1
            await trio.sleep(_RETRY_SECONDS)

    async def _send(self, client: WireClient, stream: Stream) -> None:
        random = self.random
        due = time.monotonic() + random.random() * self._pause_seconds
        while not self._stopping:
            if random.random() < 0.1:
                numbers = [stream.take() for _ in range(_BATCH)]
                await self._send_batch(client, stream, numbers)
            else:
                numbers = [stream.take()]
                await self._send_one(client, stream, numbers[0])
            # After a restart a sender catches up with at most five seconds of its rate.
            due = max(due + len(numbers) * self._pause_seconds, time.monotonic() - 5)
            await trio.sleep(max(0.0, due - time.monotonic()))

    async def _send_one(self, client: WireClient, stream: Stream, number: int) -> None:
        properties = {"KEYS": stream.key(number), "TAGS": f"T{number % 3}"}
        began = time.monotonic()
        with _at_a_broker():
            opaque = await client.post(
                RequestCode.SEND_MESSAGE_V2,
                send_ext(stream.topic, properties, queue_id=stream.queue_id),
                stream.body(number),
            )
            reply = await client.reply(opaque, _REPLY_SECONDS)
        self._answered(stream, [number], reply, began)

    async def _send_batch(self, client: WireClient, stream: Stream, numbers: list[int]) -> None:
        body = encode_batch(
            (0, stream.body(number), properties_text({"KEYS": stream.key(number)}).encode()) for number in numbers
        )
        began = time.monotonic()
        with _at_a_broker():
            reply = await client.send(
                stream.topic, body, queue_id=stream.queue_id, batch="true", code=RequestCode.SEND_BATCH_MESSAGE
            )
        self._answered(stream, numbers, reply, began)

    def _answered(self, stream: Stream, numbers: list[int], reply: RemotingCommand, began: float) -> None:
        now = time.monotonic()
        self.latencies.append(now - began)
        if reply.code:
            text = f"{reply.code} {reply.remark}"
            self.refused[text] = self.refused.get(text, 0) + 1
            return
        offset = int(reply.ext_fields()["queueOffset"])
        for at, number in enumerate(numbers):
            stream.acknowledge(number, offset + at, now)
        self.accepted += len(numbers)
        self._changed.set()

    async def _read(self, client: WireClient, reader: Reader) -> None:
        stream = reader.stream
        while not self._stopping:
            with _at_a_broker():
                reply = await client.pull(
                    stream.topic, reader.offset, queueId=stream.queue_id, sysFlag=6, suspendTimeoutMillis=1000
                )
            if not reply.code:
                for stored in decode_messages(bytes(reply.body)):
                    reader.read(stored.body, stored.queue_offset)
            elif reply.code in (17, 19, 20):  # no such topic yet, nothing new, nothing that matches
                await trio.sleep(_RETRY_SECONDS)
            else:
                self.faults.append(f"{stream.name}: a pull at {reader.offset} was answered {reply.code} {reply.remark}")
                return
            if self._pause_seconds:
                # The next pull finds several messages, like that of a consumer which was busy with the last ones.
                await trio.sleep(self._pause_seconds)

    async def _query_keys(self, client: WireClient, _: None) -> None:
        while not self._stopping:
            stream = self.random.choice(self.streams)
            number = self.random.randrange(len(stream.state)) if stream.state else 0
            if stream.state and stream.state[number] & self._queryable:
                await self._query_key(client, stream, number)
            await trio.sleep(max(self._pause_seconds, 0.02))

    async def _query_key(self, client: WireClient, stream: Stream, number: int) -> None:
        fields = {"topic": stream.topic, "key": stream.key(number), "maxNum": 8, "beginTimestamp": 0}
        with _at_a_broker():
            reply = await client.ask(RequestCode.QUERY_MESSAGE, {**fields, "endTimestamp": 1 << 62})
        found = [] if reply.code == _QUERY_NOT_FOUND else decode_messages(bytes(reply.body))
        if [stored.body for stored in found] != [stream.body(number)]:
            answer = f"{reply.code} {reply.remark or ''}, {len(found)} messages"
            self.faults.append(f"{stream.key(number)} was queried by key: {answer}")
        self.queries += 1

    # -- the verification

    async def verify(self, *, keys: int = 200) -> list[Losses]:
        """Read all queues again from the start, query ``keys`` messages by key, and return each stream's losses."""
        async with WireClient.connect(self.address) as client:
            for stream in self.streams:
                before = bytes(stream.state)
                stream.state = bytearray(state & ~SEEN for state in before)
                self.faults += (await self._read_all(client, stream)).faults
                lost = [at for at, old in enumerate(before) if old & SEEN and not stream.state[at] & SEEN]
                if lost:
                    self.faults.append(
                        f"{stream.name}: {len(lost)} were delivered and then lost, the first is {lost[0]}"
                    )
            for _ in range(keys):
                stream = self.random.choice(self.streams)
                present = [at for at, state in enumerate(stream.state) if state == SENT | ACKNOWLEDGED | SEEN]
                if present:
                    await self._query_key(client, stream, self.random.choice(present))
        for reader in self.readers:
            self.faults += reader.faults
        return [find_losses(stream) for stream in self.streams]

    @staticmethod
    async def _read_all(client: WireClient, stream: Stream) -> Reader:
        reader = Reader(stream)
        while True:
            reply = await client.pull(stream.topic, reader.offset, queueId=stream.queue_id)
            if reply.code:
                return reader
            for stored in decode_messages(bytes(reply.body)):
                reader.read(stored.body, stored.queue_offset)


@contextmanager
def _at_a_broker() -> Iterator[None]:
    """Convert the failure of a request at a killed broker to GoneError: kills are part of the test."""
    try:
        yield
    except AssertionError as error:  # WireClient asserts that the connection is still open
        raise GoneError from error
