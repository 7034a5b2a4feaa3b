"""Clients of a simulated cluster: producers and consumers, on the SDK's connections, which report to the ledger.

They do by hand what the SDK's producers and consumers do with many tasks: routes from the name server, sends that are
not tried again under the same body, pulls with a long poll, offsets committed after each.
"""

import json
from random import Random
from typing import Any, Final

import trio

from tests.broker.wire_client import pull_ext, send_ext
from tests.simulation.ledger import Ledger, QueueKey
from tests.simulation.machines import NAMESRV_PORT, Life
from tests.simulation.sockets import BODY_PADDING
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.message import decode_messages
from trimq.protocol.topic_rules import AUTO_CREATE_TOPIC
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.runtime.log_setup import StructuredLog

TOPIC: Final = "T"
LATER_TOPIC: Final = "L"
"""The topic of delayed and timed messages."""
GROUP: Final = "G"
QUEUES: Final = 2
_PAUSE: Final = 0.1
_LAST: Final = 3
"""Messages of each producer when all faults are over."""


class Caller:
    """Requests of one client machine."""

    def __init__(self, life: Life, namesrv_hosts: list[str]) -> None:
        self.remoting = RemotingClient(
            clock=life.clock, network=life.network, log=StructuredLog(), credentials=life.credentials
        )
        self._namesrv = [f"{host}:{NAMESRV_PORT}" for host in namesrv_hosts]
        self.trace = life.trace
        self.masters: dict[str, str] = {}
        """Addresses of the masters by broker name, according to the last route."""

    async def ask(
        self, address: str, code: int, ext: dict[str, Any], body: bytes = b"", timeout: float = 1.0
    ) -> RemotingCommand:
        """Send a request and wait for the reply. Raises RemotingTransportError."""
        fields = {name: str(value) for name, value in ext.items() if value is not None}
        return await self.remoting.invoke(address, RemotingCommand(int(code), ext=fields, body=body), timeout)

    async def find_masters(self) -> None:
        """Ask the name servers for the brokers that create topics, and keep the old answer if none answers."""
        for address in self._namesrv:
            try:
                reply = await self.ask(address, RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": AUTO_CREATE_TOPIC})
            except RemotingTransportError:
                continue
            if reply.code == ResponseCode.SUCCESS:
                brokers = json.loads(bytes(reply.body))["brokerDatas"]
                # One that is missing is down: its clients try its last address until there is another one.
                self.masters |= {
                    found["brokerName"]: found["brokerAddrs"]["0"] for found in brokers if "0" in found["brokerAddrs"]
                }
                return


class Producer:
    """Sends ``count`` messages, one after the other, each with a body of its own.

    With ``later`` every other one is delayed, or timed.
    """

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        namesrv_hosts: list[str],
        rng: Random,
        count: int,
        *,
        later: bool = False,
        seeks: bool = False,
    ) -> None:
        """``seeks``: ask for the route after each failure, since there may be another master."""
        self.name = name
        self.sent = 0
        self._ledger = ledger
        self._namesrv_hosts = namesrv_hosts
        self._rng = rng
        self._count = count
        self._later = later
        self._seeks = seeks

    def finish(self) -> None:
        """Send only a few more: nothing disturbs the cluster any longer."""
        self._count = min(self._count, self.sent + _LAST)

    async def __call__(self, life: Life) -> None:
        """Send until all are sent."""
        caller = Caller(life, self._namesrv_hosts)
        async with caller.remoting:
            while self.sent < self._count:
                if not caller.masters or self._rng.random() < 0.05:
                    await caller.find_masters()
                if not caller.masters:
                    await trio.sleep(_PAUSE)
                    continue
                failures = self._ledger.refused + self._ledger.unknown
                await self._send(caller)
                if self._seeks:
                    await trio.sleep(self._rng.random() * 0.5)
                    if self._ledger.refused + self._ledger.unknown != failures:
                        await caller.find_masters()
                await trio.sleep(self._rng.random() * 0.2)

    async def _send(self, caller: Caller) -> None:
        rng, ledger = self._rng, self._ledger
        broker = rng.choice(sorted(caller.masters))
        queue: QueueKey = (broker, TOPIC, rng.randrange(QUEUES))
        self.sent += 1
        body = f"{self.name}-{self.sent}".encode().ljust(rng.choice((8, 100, 1000)), BODY_PADDING[:1])
        ledger.attempted.add(body)
        if self._later and rng.random() < 0.5:
            await self._send_later(caller, broker, body)
            return
        began = ledger.moment()
        try:
            reply = await caller.ask(
                caller.masters[broker], RequestCode.SEND_MESSAGE_V2, send_ext(TOPIC, queue_id=queue[2]), body
            )
        except RemotingTransportError:
            ledger.unknown += 1
            return
        if reply.code == ResponseCode.SUCCESS:
            ledger.add_acked(queue, body, int(reply.ext_fields()["queueOffset"]), began)
        else:
            ledger.refused += 1

    async def _send_later(self, caller: Caller, broker: str, body: bytes) -> None:
        kind, value, seconds = self._rng.choice(
            (
                ("DELAY", 1, 1.0),
                ("DELAY", 2, 5.0),
                ("TIMER_DELAY_MS", ms := self._rng.randrange(1000, 8_000 if self._seeks else 20_000), ms / 1000),
            )
        )
        ext = send_ext(LATER_TOPIC, {"UNIQ_KEY": body.decode(), kind: str(value)}, queue_id=self._rng.randrange(QUEUES))
        try:
            reply = await caller.ask(caller.masters[broker], RequestCode.SEND_MESSAGE_V2, ext, body)
        except RemotingTransportError:
            self._ledger.unknown += 1
            return
        if reply.code == ResponseCode.SUCCESS:
            self._ledger.add_later(broker, body, trio.current_time() + seconds)
        else:
            self._ledger.refused += 1


class Administrator:
    """Makes users at the master and deletes most of them, one after another."""

    def __init__(self, ledger: Ledger, namesrv_hosts: list[str], rng: Random) -> None:
        self._ledger = ledger.users
        self._namesrv_hosts = namesrv_hosts
        self._rng = rng
        self._made = 0
        self._ends = False

    def finish(self) -> None:
        """Make no more."""
        self._ends = True

    async def __call__(self, life: Life) -> None:
        """Make and delete until ``finish``."""
        caller = Caller(life, self._namesrv_hosts)
        async with caller.remoting, trio.open_nursery() as nursery:
            while not self._ends:
                await caller.find_masters()
                self._made += 1
                name = f"user-{self._made}"
                if caller.masters and await self._make(caller, name):
                    caller.trace(f"{name} is made")
                    self._ledger.made.add(name)
                    if self._rng.random() < 0.7:
                        nursery.start_soon(self._delete, caller, name)
                await trio.sleep(self._rng.random() * 0.4)

    async def _make(self, caller: Caller, name: str) -> bool:
        body = json.dumps({"username": name, "password": f"secret of {name}", "userType": "Normal"}).encode()
        return await self._change(caller, RequestCode.AUTH_CREATE_USER, name, body)

    async def _delete(self, caller: Caller, name: str) -> None:
        # Sometimes before any slave has heard of the user.
        await trio.sleep(self._rng.choice((0.0, 0.5, 2.0)) * self._rng.random())
        self._ledger.begin_deletion(name)
        while not await self._change(caller, RequestCode.AUTH_DELETE_USER, name):
            await trio.sleep(_PAUSE)
            await caller.find_masters()
        caller.trace(f"{name} is deleted")
        self._ledger.deleted.add(name)

    async def _change(self, caller: Caller, code: int, name: str, body: bytes = b"") -> bool:
        """Whether it was acknowledged."""
        try:
            reply = await caller.ask(min(caller.masters.items())[1], code, {"username": name}, body)
        except RemotingTransportError:
            return False
        if reply.code != ResponseCode.SUCCESS:
            caller.trace(f"{name}: {reply.code} {reply.remark}")
        return reply.code == ResponseCode.SUCCESS


class Consumer:
    """Pulls all queues of the topic, each in a task of its own, and commits what it has got."""

    def __init__(self, ledger: Ledger, namesrv_hosts: list[str]) -> None:
        self._ledger = ledger
        self._namesrv_hosts = namesrv_hosts

    async def __call__(self, life: Life) -> None:
        """Consume until cancelled."""
        caller = Caller(life, self._namesrv_hosts)
        queues: set[QueueKey] = set()
        async with caller.remoting, trio.open_nursery() as nursery:
            while True:
                await caller.find_masters()
                for broker in sorted(caller.masters):
                    for queue in ((broker, TOPIC, number) for number in range(QUEUES)):
                        if queue not in queues:
                            queues.add(queue)
                            nursery.start_soon(self._consume, caller, queue)
                await trio.sleep(1.0 if queues else _PAUSE)

    async def _consume(self, caller: Caller, queue: QueueKey) -> None:
        offset: int | None = None
        while True:
            try:
                if offset is None:
                    offset = await committed_offset(caller, queue) or 0
                offset = await self._pull(caller, queue, offset)
            except RemotingTransportError:
                offset = None
                await trio.sleep(_PAUSE)

    async def _pull(self, caller: Caller, queue: QueueKey, offset: int) -> int | None:
        """Pull once; returns the next offset. None: ask for the committed one."""
        broker, topic, queue_id = queue
        ext = pull_ext(topic, offset, group=GROUP, queueId=queue_id, sysFlag=6, suspendTimeoutMillis=1500)
        reply = await caller.ask(caller.masters[broker], RequestCode.PULL_MESSAGE, ext, timeout=2.5)
        if reply.code != ResponseCode.SUCCESS:
            if reply.code != ResponseCode.PULL_NOT_FOUND:
                await trio.sleep(_PAUSE)
            if reply.code == ResponseCode.PULL_OFFSET_MOVED:
                return int(reply.ext_fields()["nextBeginOffset"])
            return offset
        for message in decode_messages(bytes(reply.body)):
            self._ledger.add_seen(queue, message.queue_offset, message.body)
            offset = message.queue_offset + 1
        await caller.ask(
            caller.masters[broker],
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {"consumerGroup": GROUP, "topic": topic, "queueId": queue_id, "commitOffset": offset},
        )
        self._ledger.committed[GROUP, queue] = offset
        return offset


async def committed_offset(caller: Caller, queue: QueueKey) -> int | None:
    """The committed offset of a queue; None if there is none. Raises RemotingTransportError."""
    reply = await caller.ask(
        caller.masters[queue[0]],
        RequestCode.QUERY_CONSUMER_OFFSET,
        {"consumerGroup": GROUP, "topic": queue[1], "queueId": queue[2]},
    )
    return int(reply.ext_fields()["offset"]) if reply.code == ResponseCode.SUCCESS else None


async def offset_bounds(caller: Caller, queue: QueueKey) -> tuple[int, int]:
    """The first and the next offset of a queue."""
    ext = {"topic": queue[1], "queueId": queue[2]}
    low = await caller.ask(caller.masters[queue[0]], RequestCode.GET_MIN_OFFSET, ext)
    high = await caller.ask(caller.masters[queue[0]], RequestCode.GET_MAX_OFFSET, ext)
    return int(low.ext_fields()["offset"]), int(high.ext_fields()["offset"])


async def read_all(caller: Caller, queue: QueueKey, first: int, end: int) -> dict[int, bytes]:
    """The bodies of a queue's messages by offset. Raises RemotingTransportError."""
    found: dict[int, bytes] = {}
    while first < end:
        ext = pull_ext(queue[1], first, group="READER", queueId=queue[2])
        reply = await caller.ask(caller.masters[queue[0]], RequestCode.PULL_MESSAGE, ext)
        if reply.code != ResponseCode.SUCCESS:
            caller.trace(f"pull of {queue} from {first}: {reply.code} {reply.remark}")
            break
        for message in decode_messages(bytes(reply.body)):
            found[message.queue_offset] = message.body
            first = message.queue_offset + 1
    return found
