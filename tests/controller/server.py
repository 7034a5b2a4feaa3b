"""A controller on its own port, with a store that can fail, and brokers that only hear notifications."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.namesrv.server import Wire
from trimq.controller.config import load_controller
from trimq.controller.kv import Compare, Delete, Kv, KvError, Lease, Put, Snapshot
from trimq.controller.local_kv import LocalKv
from trimq.controller.server import ControllerManager
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.remoting.runtime.clock import ManualClock

CLUSTER = "c"
NAME = "broker-a"


class FailingKv(LocalKv):
    """A store in memory that fails with ``failure``, or at decisions only with ``undecided``."""

    failure: KvError | None = None
    undecided: KvError | None = None

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def grant(self, ttl_ms: int) -> Lease:
        self._check()
        return await super().grant(ttl_ms)

    async def keep(self, lease: int) -> int:
        self._check()
        return await super().keep(lease)

    async def range(self, prefix: str) -> Snapshot:
        self._check()
        return await super().range(prefix)

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        self._check()
        if self.undecided is not None:
            raise self.undecided
        return await super().txn(compares, changes)


class Server:
    """A running controller; the test moves its ``clock``."""

    def __init__(self, controller: ControllerManager, clock: ManualClock, kv: FailingKv | None, wire: Wire) -> None:
        self.controller = controller
        self.clock = clock
        self._kv = kv
        self.wire = wire
        """A connection."""

    @property
    def kv(self) -> FailingKv:
        assert self._kv is not None
        return self._kv

    @property
    def address(self) -> str:
        assert self.controller.address is not None
        host, port = self.controller.address
        return f"{host}:{port}"

    async def ask(
        self, code: RequestCode, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Code, fields and body of the reply."""
        reply = await self.wire.ask(code, fields, body)
        return reply.code, reply.ext_fields(), bytes(reply.body)

    async def heartbeat(self, broker_id: int, **fields: str) -> dict[str, str]:
        """A heartbeat that asks for a lease; the reply's fields."""
        code, found, _ = await self.ask(RequestCode.BROKER_HEARTBEAT, heartbeat(broker_id, trimqLease="1", **fields))
        assert code == 0
        return found

    async def join(self, broker_id: int, address: str = "") -> None:
        """Assign an id, and send a heartbeat."""
        address = address or f"127.0.0.1:{1000 + broker_id}"
        fields = {"appliedBrokerId": str(broker_id), "registerCheckCode": f"{address};5"}
        code, _, _ = await self.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, name(**fields))
        assert code == 0
        await self.heartbeat(broker_id)

    async def led_by_1(self, *addresses: str) -> None:
        """Brokers 1 to N, all in the set, with master 1."""
        for at, address in enumerate(addresses, 1):
            await self.join(at, address)
        code, _, _ = await self.ask(RequestCode.CONTROLLER_ELECT_MASTER, name(brokerId="1"))
        assert code == 0
        members = ",".join(str(at) for at in range(1, len(addresses) + 1))
        if len(addresses) > 1:
            body = f'{{"syncStateSet":[{members}],"syncStateSetEpoch":1}}'.encode()
            fields = {"brokerName": NAME, "masterBrokerId": "1", "masterEpoch": "1"}
            code, _, _ = await self.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, fields, body)
            assert code == 0


def name(**fields: str) -> dict[str, str]:
    return {"clusterName": CLUSTER, "brokerName": NAME, **fields}


def heartbeat(broker_id: int, **fields: str) -> dict[str, str]:
    return (
        name(
            brokerAddr=f"127.0.0.1:{1000 + broker_id}",
            brokerId=str(broker_id),
            epoch="0",
            maxOffset="0",
            confirmOffset="0",
            heartbeatTimeoutMills="3000",
            electionPriority="2147483647",
        )
        | fields
    )


def configuration_keys(folder: Path, **config: str) -> dict[str, str]:
    return {
        "bindAddress": "127.0.0.1",
        "listenPort": "0",
        "controllerStorePath": str(folder / "controller.db"),
        "configStorePath": str(folder / "controller.properties"),
        **config,
    }


def manager(folder: Path, clock: ManualClock, kv: Kv | None, **config: str) -> ControllerManager:
    keys = configuration_keys(folder, **config)
    configuration = load_controller(flags={key: (value, "test") for key, value in keys.items()})
    return ControllerManager(configuration, clock, kv=kv)


@asynccontextmanager
async def running(folder: Path, *, sqlite: bool = False, **config: str) -> AsyncIterator[Server]:
    """Run a controller with its files in ``folder``; ``config`` has RocketMQ's keys."""
    clock = ManualClock()
    kv = None if sqlite else FailingKv(clock)
    controller = manager(folder, clock, kv, **config)
    async with trio.open_nursery() as nursery:
        await nursery.start(controller.run)
        assert controller.address is not None
        async with await trio.open_tcp_stream(*controller.address) as stream:
            yield Server(controller, clock, kv, Wire(stream))
        controller.shutdown()


class ScriptedBroker:
    """Hears notifications, and answers them, or not."""

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers
        self._send, self.notified = trio.open_memory_channel[RemotingCommand](100)
        self.address = ""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        host, port = listener.socket.getsockname()
        self.address = f"{host}:{port}"
        task_status.started()
        await trio.serve_listeners(self._serve, [listener])

    async def _serve(self, stream: trio.SocketStream) -> None:
        decoder = FrameDecoder()
        async for data in stream:
            for command in decoder.feed(data):
                command.copy_buffers()
                if command.code == RequestCode.NOTIFY_BROKER_ROLE_CHANGED:
                    self._send.send_nowait(command)
                if self._answers:
                    await stream.send_all(encode(command.reply()))
