"""Lives of brokers on one store with a clock that the test moves, and a producer of transactions in single frames."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import trio
import trio.testing

from tests.broker.wire_client import WireClient
from tests.store.stores import until_dispatched
from trimq.broker.controller import BrokerController
from trimq.broker.services.transaction.service import Counters, TransactionalMessageService
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import StoredMessage, decode_messages
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server.gate import Feature, Sees

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

HALF, OP, EXPIRED = TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC
COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
CHECK = RequestCode.CHECK_TRANSACTION_STATE
SETTINGS = {"serverChannelMaxIdleTimeSeconds": "1000000", "channelExpiredTimeout": "1000000000"}


FULL = Feature("full path only", lambda _connection, _command: None, Sees.HEADER)


class CountingDisk(RealDisk):
    """Counts the disk's active threads: to trio, a task that waits for one is merely blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.active = 0

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        self.active += 1
        try:
            return await super().run(fn, *args)
        finally:
            self.active -= 1


class Place(NamedTuple):
    """A half, as its producer knows it."""

    queue_offset: int
    log_offset: int
    message_id: str


class Life:
    """Brokers on one store, one after the other; ``broker`` and ``client`` are those of the present one."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.changes = SETTINGS | changes
        self.clock = ManualClock()
        self.disk = CountingDisk()
        self._lives = 0
        self.broker: BrokerController
        self.client: WireClient

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Life"]:
        async with (
            running_broker(self.directory, clock=self.clock, disk=self.disk, **self.changes) as broker,
            WireClient.connect(broker.endpoint) as client,
        ):
            self.broker, self.client = broker, client
            await self.settled()
            yield self

    async def settled(self) -> None:
        """Return when the broker is idle until the clock moves or a request comes."""
        await trio.testing.wait_all_tasks_blocked()
        while self.disk.active:
            await trio.testing.wait_all_tasks_blocked(0.001)

    async def advance(self, seconds: float) -> None:
        await self.settled()
        self.clock.advance(seconds)
        await self.settled()

    async def kill(self) -> None:
        """Make the store what a SIGKILL would leave now, for the next broker."""
        await self.settled()  # no file may be replaced while it is copied
        self._lives += 1
        before, self.directory = self.directory, self.directory.with_name(f"life{self._lives}")
        shutil.copytree(before, self.directory, ignore=shutil.ignore_patterns("*.tmp"))

    @property
    def transactions(self) -> TransactionalMessageService:
        return self.broker.context.transactions

    @property
    def counters(self) -> Counters:
        return self.transactions.counters

    @property
    def pending(self) -> int:
        return self.transactions.halves.pending

    def offset(self, topic: str) -> int:
        """The offset of the transactions' group."""
        return self.broker.context.offsets.query("CID_RMQ_SYS_TRANS", topic, 0)

    def take_full_paths(self) -> None:
        """Serve all requests by their full paths from now on: for tests that replace what only these call."""
        self.broker.gate.register(FULL)

    # the producer

    async def join(self, group: str = "P", client: WireClient | None = None, name: str = "c") -> None:
        assert (await (client or self.client).heartbeat(name, producers=[group])).code == 0

    async def prepare(
        self, body: bytes = b"half", topic: str = "T", properties: dict[str, str] | None = None, **more: Any
    ) -> Place:
        """Send a half, as Java does."""
        marks = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": f"u{body.hex()}", "WAIT": "true"}
        reply = await self.client.send(topic, body, marks | (properties or {}), **{"sys_flag": 4} | more)
        assert reply.code == 0, reply.remark
        return place_of(reply)

    async def end(
        self, half: Place, state: int = COMMIT, *, check: bool = False, flag: int = 0, **changes: Any
    ) -> RemotingCommand:
        """Commit or roll back, and wait for the reply."""
        return await self.client.ask(
            RequestCode.END_TRANSACTION, end_ext(half, state, check=check, **changes), flag=flag
        )

    async def round(self) -> list[RemotingCommand]:
        """One round of checks; returns those that came over ``client``."""
        await self.broker.context.transaction_checks.check()
        return await self.client_checks()

    async def client_checks(self) -> list[RemotingCommand]:
        """The checks that have come over ``client`` since the last call."""
        await self.settled()
        asked, self.client.asked = self.client.asked, []
        return [command for command in asked if command.code == CHECK]

    async def answer(self, check: RemotingCommand, state: int) -> RemotingCommand:
        return await self.end(asked_for(check), state, check=True)

    # what is stored

    async def stored(self, topic: str = "T", queues: Iterable[int] = range(4)) -> list[StoredMessage]:
        """All messages of a topic."""
        await self.settled()
        store = self.broker.context.store
        await until_dispatched(store)
        found: list[StoredMessage] = []
        for queue_id in queues:
            offset = store.min_offset(topic, queue_id)
            while offset < store.max_offset(topic, queue_id):
                result = await store.get_message_cold(topic, queue_id, offset, 32, 1 << 20, None)
                for buffer in result.buffers:
                    found += decode_messages(bytes(buffer))
                result.release()
                offset = result.next_begin_offset
        return found

    async def bodies(self, topic: str = "T") -> list[bytes]:
        return sorted(message.body for message in await self.stored(topic))

    async def ops(self) -> list[bytes]:
        return [message.body for message in await self.stored(OP, [0])]


def place_of(reply: RemotingCommand) -> Place:
    ext = reply.ext_fields()
    return Place(int(ext["queueOffset"]), int(ext["msgId"][16:], 16), ext["transactionId"])


def asked_for(check: RemotingCommand) -> Place:
    ext = check.ext_fields()
    return Place(int(ext["tranStateTableOffset"]), int(ext["commitLogOffset"]), ext["msgId"])


def end_ext(half: Place, state: int, *, check: bool = False, **changes: Any) -> dict[str, Any]:
    """Ext fields of END_TRANSACTION as Java sends them."""
    return {
        "topic": "T",
        "producerGroup": "P",
        "tranStateTableOffset": half.queue_offset,
        "commitLogOffset": half.log_offset,
        "commitOrRollback": state,
        "fromTransactionCheck": str(check).lower(),
        "msgId": half.message_id,
        "transactionId": half.message_id,
    } | changes


OK = ResponseCode.SUCCESS
