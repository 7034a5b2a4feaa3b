"""Senders, readers and askers at a broker that may go away at any moment."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final, TypeVar

import trio

from tests.broker.wire_client import WireClient, properties_text, send_ext
from tests.crash.ledger import ACKNOWLEDGED, SEEN, SENT, Lane, Losses, Reader, find_losses
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_messages

_QUERY_NOT_FOUND: Final = 22
_AGAIN: Final = 0.05
_BATCH: Final = 5
_REPLY_SECONDS: Final = 30.0

_T = TypeVar("_T")


class GoneError(Exception):
    """The broker went away while something waited for it."""


class Load:
    """Everything that a run sends and reads, over the lives of a broker at one address.

    ``rate`` bounds the messages a second of all lanes together; None sends as fast as replies come.
    """

    def __init__(
        self,
        address: tuple[str, int],
        lanes: Sequence[Lane],
        *,
        seed: int,
        rate: float | None = None,
        asks_for: int = ACKNOWLEDGED,
    ) -> None:
        """``asks_for``: messages in this state have to be found by their keys while all this goes on."""
        self.address = address
        self.lanes = lanes
        self.random = Random(seed)
        self.readers = [Reader(lane) for lane in lanes]
        self.faults: list[str] = []
        self.took: list[float] = []
        """Seconds from each send to its reply."""
        self.accepted = 0
        self.queries = 0
        self.refused: dict[str, int] = {}
        """Sends that the broker refused, by what it said."""
        self.unanswered = 0
        """Requests that a broker which lived did not answer in time."""
        self._asks_for = asks_for
        self._pause = len(lanes) / rate if rate is not None else 0.0
        self._stopping = False
        self._changed = trio.Event()

    async def progress(self, count: int, timeout: float = 60) -> None:
        """Wait until ``count`` more messages have been acknowledged."""
        wanted = self.accepted + count
        with trio.fail_after(timeout):
            while self.accepted < wanted:
                self._changed = trio.Event()
                await self._changed.wait()

    def take_times(self) -> list[float]:
        """Seconds of all sends since this was called last."""
        took, self.took = self.took, []
        return took

    # -- the parts

    async def run(self) -> None:
        """Until ``stop``: every lane sends and is read, and keys are asked for."""
        async with trio.open_nursery() as nursery:
            for lane in self.lanes:
                nursery.start_soon(self._again, self._send, lane)
            for reader in self.readers:
                nursery.start_soon(self._again, self._read, reader)
            nursery.start_soon(self._again, self._ask, None)

    def stop(self) -> None:
        """Let everything end that runs."""
        self._stopping = True

    async def _again(self, work: Callable[[WireClient, _T], Awaitable[None]], subject: _T) -> None:
        """Do it on a connection, on another one when that is gone."""
        while not self._stopping:
            try:
                async with WireClient.connect(self.address) as client:
                    await work(client, subject)
            except* (GoneError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except* trio.TooSlowError:
                self.unanswered += 1
            await trio.sleep(_AGAIN)

    async def _send(self, client: WireClient, lane: Lane) -> None:
        random = self.random
        due = time.monotonic() + random.random() * self._pause
        while not self._stopping:
            if random.random() < 0.1:
                numbers = [lane.take() for _ in range(_BATCH)]
                await self._send_batch(client, lane, numbers)
            else:
                numbers = [lane.take()]
                await self._send_one(client, lane, numbers[0])
            due = max(due + len(numbers) * self._pause, time.monotonic() - 5)
            await trio.sleep(max(0.0, due - time.monotonic()))

    async def _send_one(self, client: WireClient, lane: Lane, number: int) -> None:
        properties = {"KEYS": lane.key(number), "TAGS": f"T{number % 3}"}
        began = time.monotonic()
        with _at_a_broker():
            opaque = await client.post(
                RequestCode.SEND_MESSAGE_V2,
                send_ext(lane.topic, properties, queue_id=lane.queue_id),
                lane.body(number),
            )
            reply = await client.reply(opaque, _REPLY_SECONDS)
        self._answered(lane, [number], reply, began)

    async def _send_batch(self, client: WireClient, lane: Lane, numbers: list[int]) -> None:
        body = encode_batch(
            (0, lane.body(number), properties_text({"KEYS": lane.key(number)}).encode()) for number in numbers
        )
        began = time.monotonic()
        with _at_a_broker():
            reply = await client.send(
                lane.topic, body, queue_id=lane.queue_id, batch="true", code=RequestCode.SEND_BATCH_MESSAGE
            )
        self._answered(lane, numbers, reply, began)

    def _answered(self, lane: Lane, numbers: list[int], reply: RemotingCommand, began: float) -> None:
        now = time.monotonic()
        self.took.append(now - began)
        if reply.code:
            text = f"{reply.code} {reply.remark}"
            self.refused[text] = self.refused.get(text, 0) + 1
            return
        offset = int(reply.ext_fields()["queueOffset"])
        for at, number in enumerate(numbers):
            lane.acknowledge(number, offset + at, now)
        self.accepted += len(numbers)
        self._changed.set()

    async def _read(self, client: WireClient, reader: Reader) -> None:
        lane = reader.lane
        while not self._stopping:
            with _at_a_broker():
                reply = await client.pull(
                    lane.topic, reader.offset, queueId=lane.queue_id, sysFlag=6, suspendTimeoutMillis=1000
                )
            if not reply.code:
                for stored in decode_messages(bytes(reply.body)):
                    reader.read(stored.body, stored.queue_offset)
            elif reply.code in (17, 19, 20):  # no such topic yet, nothing new, nothing that matches
                await trio.sleep(_AGAIN)
            else:
                self.faults.append(f"{lane.name}: a pull at {reader.offset} was answered {reply.code} {reply.remark}")
                return
            if self._pause:
                await trio.sleep(self._pause)  # several at once, as where a consumer has something to do

    async def _ask(self, client: WireClient, _: None) -> None:
        while not self._stopping:
            lane = self.random.choice(self.lanes)
            number = self.random.randrange(len(lane.state)) if lane.state else 0
            if lane.state and lane.state[number] & self._asks_for:
                await self._ask_for(client, lane, number)
            await trio.sleep(max(self._pause, 0.02))

    async def _ask_for(self, client: WireClient, lane: Lane, number: int) -> None:
        fields = {"topic": lane.topic, "key": lane.key(number), "maxNum": 8, "beginTimestamp": 0}
        with _at_a_broker():
            reply = await client.ask(RequestCode.QUERY_MESSAGE, {**fields, "endTimestamp": 1 << 62})
        found = [] if reply.code == _QUERY_NOT_FOUND else decode_messages(bytes(reply.body))
        if [stored.body for stored in found] != [lane.body(number)]:
            answer = f"{reply.code} {reply.remark or ''}, {len(found)} messages"
            self.faults.append(f"{lane.key(number)} was asked for by key: {answer}")
        self.queries += 1

    # -- the judgement

    async def verify(self, *, keys: int = 200) -> list[Losses]:
        """Read all queues again from their beginnings and ask for keys; what is missing of each lane."""
        async with WireClient.connect(self.address) as client:
            for lane in self.lanes:
                before = bytes(lane.state)
                lane.state = bytearray(state & ~SEEN for state in before)
                self.faults += (await self._read_all(client, lane)).faults
                gone = [at for at, old in enumerate(before) if old & SEEN and not lane.state[at] & SEEN]
                if gone:
                    self.faults.append(f"{lane.name}: {len(gone)} were delivered and are gone, the first is {gone[0]}")
            for _ in range(keys):
                lane = self.random.choice(self.lanes)
                present = [at for at, state in enumerate(lane.state) if state == SENT | ACKNOWLEDGED | SEEN]
                if present:
                    await self._ask_for(client, lane, self.random.choice(present))
        for reader in self.readers:
            self.faults += reader.faults
        return [find_losses(lane) for lane in self.lanes]

    @staticmethod
    async def _read_all(client: WireClient, lane: Lane) -> Reader:
        reader = Reader(lane)
        while True:
            reply = await client.pull(lane.topic, reader.offset, queueId=lane.queue_id)
            if reply.code:
                return reader
            for stored in decode_messages(bytes(reply.body)):
                reader.read(stored.body, stored.queue_offset)


@contextmanager
def _at_a_broker() -> Iterator[None]:
    """A broker that goes away is part of the plan."""
    try:
        yield
    except AssertionError as error:  # how WireClient says it
        raise GoneError from error
