"""The whole broker on the simulated disk, in one trio run on an auto-jumping clock: sends, a power cut, a restart.

Reactor, processors, services and flush tasks are the real ones. The reactor waits in epoll for real sockets, so clients
connect over the loopback interface; everything else is in memory.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import trio
from structlog.testing import capture_logs

from tests.broker.wire_client import WireClient
from tests.crash.enumeration import simulate
from tests.crash.images import Found, RecordingDisk
from tests.crash.losses import Loss, survivor
from tests.store.simdisk import PowerCut
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.message import StoredMessage, decode_message, decode_messages
from trimq.protocol.message_id import decode_offset_id

TOPICS: Final = ("First", "Second", "Third")
_SETTINGS: Final = {
    "flushDiskType": "SYNC_FLUSH",
    "mappedFileSizeCommitLog": 32 * 1024,
    "commitLogReserveStep": 8192,
    "mappedFileSizeConsumeQueue": 20 * 10,
    "maxHashSlotNum": 16,
    "maxIndexNum": 40,
    "maxMessageSize": 8192,
    "flushIntervalConsumeQueue": 200,
    "flushConsumeQueueThoroughInterval": 700,
    "defaultTopicQueueNums": 2,
}
_WALL_MS: Final = 1_700_000_000_000
_SENDERS: Final = 3
_LOSSES: Final = tuple(loss for loss in Loss if loss not in (Loss.FLIP, Loss.ROT))


class LoopClock:
    """Derives the broker's wall clock and its monotonic clock from the trio run's own time."""

    def wall_ms(self) -> int:
        return _WALL_MS + int(trio.current_time() * 1000)

    def monotonic(self) -> float:
        return trio.current_time()

    def boot_seconds(self) -> float:
        return trio.current_time()

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(max(seconds, 0))

    async def sleep_until(self, deadline: float) -> None:
        await trio.sleep_until(max(deadline, trio.current_time()))


class Sent(NamedTuple):
    """A message that a client has sent, acknowledged or not."""

    topic: str
    queue_id: int
    key: str


@dataclass
class Round:
    """One round. ``acknowledged`` maps each body to its queue offset and log offset."""

    seed: int
    sent: dict[bytes, Sent] = field(default_factory=dict)
    acknowledged: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = Random(f"broker {self.seed}")
        self._number = itertools.count(1)

    async def run(self) -> None:
        disk = RecordingDisk(seed=self.seed, now_ms=LoopClock().wall_ms)
        disk.write_back = 0.02
        await self._until_the_cut(disk)
        found = self._survivor(disk)
        await self._compare(found)

    # before

    async def _until_the_cut(self, disk: RecordingDisk) -> None:
        try:
            async with running_broker(Path("/store"), clock=LoopClock(), disk=disk, **_SETTINGS) as broker:
                cut_at = disk.calls + self.random.randrange(1, 160)
                disk.wanted = lambda call: call == cut_at
                disk.cut_at = cut_at
                async with trio.open_nursery() as nursery:
                    for _ in range(_SENDERS):
                        nursery.start_soon(self._sender, broker.endpoint)
        except* PowerCut:
            pass
        assert disk.images, "the power was never cut"

    async def _sender(self, endpoint: tuple[str, int]) -> None:
        """Send until the broker loses its power."""
        try:
            async with WireClient.connect(endpoint) as client:
                while not client.closed:
                    await self._send(client)
                    if self.random.random() < 0.2:
                        await trio.sleep(self.random.choice((0.01, 0.3, 1.0)))
        except* (AssertionError, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the power cut closed the connection or left a send unanswered

    async def _send(self, client: WireClient) -> None:
        topic, queue_id = self.random.choice(TOPICS), self.random.randrange(2)
        number = next(self._number)
        body = number.to_bytes(4, "big") + self.random.randbytes(self.random.choice((10, 300, 3000)))
        self.sent[body] = Sent(topic, queue_id, f"key{number}")
        reply = await client.send(topic, body, {"KEYS": f"key{number}"}, queue_id=queue_id)
        if reply.code == 0:
            fields = reply.ext_fields()
            self.topics.add(topic)
            self.acknowledged[body] = (int(fields["queueOffset"]), decode_offset_id(fields["msgId"])[1])

    def _survivor(self, disk: RecordingDisk) -> Found:
        (image,) = disk.images.values()
        for loss in self.random.sample(_LOSSES, len(_LOSSES)):
            left = survivor(image, loss, self.random)
            if left is not None:
                return left.found
        raise AssertionError("no kind of loss applies to this image")

    # after

    async def _compare(self, found: Found) -> None:
        disk = found.disk(seed=self.seed, now_ms=LoopClock().wall_ms)
        async with (
            running_broker(Path("/store"), clock=LoopClock(), disk=disk, **_SETTINGS) as broker,
            WireClient.connect(broker.endpoint) as client,
        ):
            recovered = broker.context.store.recovered
            assert recovered is not None
            present: dict[bytes, StoredMessage] = {}
            for topic in TOPICS:
                for queue_id in range(2):
                    await self._pull(client, topic, queue_id, present, holes=bool(recovered.damaged))
            missing = [body[:4].hex() for body in self.acknowledged if body not in present]
            assert not missing, f"acknowledged and missing: {missing} of {len(self.acknowledged)}; {recovered}"
            for body, (queue_offset, physical_offset) in self.acknowledged.items():
                found_at = present[body]
                assert (found_at.queue_offset, found_at.commit_log_offset) == (queue_offset, physical_offset)
            for body, message in present.items():
                await self._look(client, self.sent[body], message)
            after = await client.send(TOPICS[0], b"after", {"KEYS": "after"})
            assert after.code == 0, after.remark
        disk.check_mapped_stores()

    async def _pull(
        self, client: WireClient, topic: str, queue_id: int, present: dict[bytes, StoredMessage], *, holes: bool
    ) -> None:
        place = {"topic": topic, "queueId": queue_id}
        end = int((await client.ask(RequestCode.GET_MAX_OFFSET, place)).ext_fields().get("offset", 0))
        offset, pulled = 0, list[StoredMessage]()
        while offset < end:
            reply = await client.pull(topic, offset, queueId=queue_id)
            assert reply.code == 0 or holes, (topic, queue_id, offset, reply.code, reply.remark)
            following = int(reply.ext_fields()["nextBeginOffset"])
            assert following > offset
            pulled += decode_messages(bytes(reply.body)) if reply.code == 0 else []
            offset = following
        offsets = [message.queue_offset for message in pulled]
        assert offsets == sorted(set(offsets))
        assert holes or offsets == list(range(end)), (topic, queue_id, offsets, end)
        for message in pulled:
            sent = self.sent[message.body]
            assert (sent.topic, sent.queue_id) == (message.topic, message.queue_id) == (topic, queue_id)
            assert message.body not in present
            present[message.body] = message

    async def _look(self, client: WireClient, sent: Sent, message: StoredMessage) -> None:
        """Find a stored message by its key and by its id."""
        query: dict[str, Any] = {
            "topic": sent.topic,
            "key": sent.key,
            "maxNum": 32,
            "beginTimestamp": 0,
            "endTimestamp": 1 << 60,
        }
        reply = await client.ask(RequestCode.QUERY_MESSAGE, query)
        assert reply.code == 0, (sent, reply.remark)
        assert [one.body for one in decode_messages(bytes(reply.body))] == [message.body]
        viewed = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": message.commit_log_offset})
        assert decode_message(bytes(viewed.body), 0).body == message.body


class Rounds(NamedTuple):
    """Totals of several rounds."""

    rounds: int
    sent: int
    acknowledged: int


def rounds(first: int, count: int) -> Rounds:
    """Run ``count`` rounds with the seeds from ``first`` on. A failure carries a note with its seed."""
    sent = acknowledged = 0
    for seed in range(first, first + count):
        current = Round(seed)
        try:
            with capture_logs():
                simulate(current.run, seed=("broker", seed))
        except BaseException as error:
            error.add_note(f'again: python -c "from tests.crash.broker_rounds import rounds; rounds({seed}, 1)"')
            raise
        sent += len(current.sent)
        acknowledged += len(current.acknowledged)
    return Rounds(count, sent, acknowledged)
