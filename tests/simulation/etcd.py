"""An etcd of the simulation: the product's LocalKv on a machine of its own, and a Kv that reaches it by the network.

Its machine stands for a quorum: it is never lost, but can be cut off from single controllers. Requests and replies are
lines of JSON. An operation whose reply does not come has an unknown outcome: it may be done later.

Most of what controllers send is for it. So no task serves a connection: each request is answered as it arrives.
"""

import errno
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, cast

import msgspec
import trio

from tests.simulation.network import NodeNetwork, SimStream
from tests.simulation.sockets import SimSocket
from tests.simulation.times import VirtualClock
from trimq.controller.kv import Compare, Delete, Entry, KvError, Lease, Put, Snapshot
from trimq.controller.local_kv import LocalKv
from trimq.remoting.network import Network
from trimq.remoting.runtime.clock import Clock

ETCD_PORT: Final = 2379
_ANSWER: Final = 0.8
"""Seconds that a controller waits for a reply."""
_SILENCE: Final = 10.0
"""Seconds after which a silent watch ends."""
_BROKEN: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


class _Lines:
    """The messages that arrive on a stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.rest = b""

    async def send(self, message: Any) -> None:
        await self.stream.send_all(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Any:
        """The next message. Raises OSError at the end of the stream, and as the stream does."""
        while b"\n" not in self.rest:
            data = await self.stream.receive_some()
            if not data:
                raise OSError("the stream has ended")
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\n")
        return msgspec.json.decode(line)


class _Free:
    """A lock that is always free, so that no operation waits: without a ``save`` each is done at once."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass


def _done(operation: Coroutine[Any, Any, Any]) -> Any:
    """The result of an operation that does not wait."""
    try:
        operation.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(f"{operation} waits")


class _Answers:
    """Answers what arrives on a connection, as soon as it does."""

    def __init__(self, sock: SimSocket, kv: LocalKv, request: Any, rest: bytes) -> None:
        self._sock = sock
        self._kv = kv
        self._rest = rest
        self._answer(request)
        sock.listener = self
        self()

    def __call__(self) -> None:
        """The socket has changed."""
        try:
            while self._sock.is_readable and not self._sock.closed:
                self._read()
        except OSError:
            self._sock.close()

    def _read(self) -> None:
        data = self._sock.recv(65_536)
        if not data:
            raise OSError("the stream has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._answer(msgspec.json.decode(line))

    def _answer(self, request: dict[str, Any]) -> None:
        answer = msgspec.json.encode(_done(self._result(request))) + b"\n"
        sent = self._sock.send(answer)
        assert sent == len(answer), "a connection has one request at a time"

    async def _result(self, request: dict[str, Any]) -> Any:
        match request["op"]:
            case "grant":
                return list(await self._kv.grant(request["ttl"]))
            case "keep":
                return await self._kv.keep(request["lease"])
            case "range":
                found = await self._kv.range(request["prefix"])
                return [found.revision, found.entries]
        compares = [Compare(*compare) for compare in request["compares"]]
        changes = [Put(*change) if len(change) > 1 else Delete(*change) for change in request["changes"]]
        return await self._kv.txn(compares, changes)


class EtcdService:
    """Serves a LocalKv at a port of one node."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.kv = LocalKv(clock)
        self.kv._lock = cast("trio.Lock", _Free())
        self._network = network

    async def run(self) -> None:
        """Serve until cancelled."""
        sock = self._network.bind("0.0.0.0", ETCD_PORT)
        listener = self._network.listener(sock)
        self._network.open_port(sock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.kv.run)
            while True:
                nursery.start_soon(self._serve, await listener.accept())

    async def _serve(self, stream: trio.abc.Stream) -> None:
        """A connection is for one watch, or for all else. What comes first says it."""
        lines = _Lines(stream)
        try:
            request = await lines.receive()
            if request["op"] == "watch":
                await self._watch(lines, request["prefix"], request["revision"])
            else:
                _Answers(cast("SimStream", stream).socket, self.kv, request, lines.rest)
        except _BROKEN:
            await trio.aclose_forcefully(stream)

    async def _watch(self, lines: _Lines, prefix: str, revision: int) -> None:
        """Send deletions. Raises OSError if the revision is too old, and as the stream does."""
        send, receive = trio.open_memory_channel[str](math.inf)

        async def watch() -> None:
            with send:
                await self.kv.watch(prefix, revision, send.send_nowait)

        failure: Exception = OSError("the revision is too old")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                async for key in receive:
                    await lines.send(key)
            except _BROKEN as error:  # not left to the nursery, which would wrap it
                failure = error
            nursery.cancel_scope.cancel()
        raise failure


async def _line(sock: SimSocket, until: float) -> bytes:
    """What arrives, to the end of its line. Raises OSError at the end of the stream, and after ``until``."""
    found = b""
    while not found.endswith(b"\n"):
        if not sock.is_readable:
            if trio.current_time() >= until:
                raise TimeoutError(errno.ETIMEDOUT, f"nothing in {_ANSWER:g} s")
            await sock.woken()
            continue
        data = sock.recv(65_536)
        if not data:
            raise OSError("the stream has ended")
        found += data
    return found


class SimKv:
    """Implements Kv for one controller: the service at ``host``. Connections are kept for further requests."""

    def __init__(self, network: NodeNetwork, host: str) -> None:
        self._network = network
        self._host = host
        self._idle: list[SimSocket] = []

    async def _ask(self, op: str, **fields: Any) -> Any:
        request = msgspec.json.encode({"op": op, **fields}) + b"\n"
        clock = cast("VirtualClock", trio.lowlevel.current_clock())
        # No cancel scope for each request: it would cost as much as all the rest.
        until = clock.now + _ANSWER
        sock = self._idle.pop() if self._idle else await self._connected()
        late = clock.at(until, sock.wake)
        try:
            sock.send(request)
            reply = await _line(sock, until)
        except _BROKEN as error:
            sock.close()
            raise KvError(f"etcd does not answer: {error!r}", sent=True) from error
        finally:
            late[2] = None
        self._idle.append(sock)
        return msgspec.json.decode(reply)

    async def _connected(self) -> SimSocket:
        try:
            with trio.move_on_after(_ANSWER):
                return cast("SimStream", (await self._open()).stream).socket
        except _BROKEN as error:
            raise KvError(f"etcd does not answer: {error!r}", sent=False) from error
        raise KvError(f"etcd does not answer in {_ANSWER:g} s", sent=False)

    async def _open(self) -> _Lines:
        return _Lines(await self._network.open_stream(self._host, ETCD_PORT))

    async def grant(self, ttl_ms: int) -> Lease:
        """See Kv."""
        return Lease(*await self._ask("grant", ttl=ttl_ms))

    async def keep(self, lease: int) -> int:
        """See Kv."""
        return int(await self._ask("keep", lease=lease))

    async def range(self, prefix: str) -> Snapshot:
        """See Kv."""
        revision, entries = await self._ask("range", prefix=prefix)
        return Snapshot(revision, {key: Entry(*entry) for key, entry in entries.items()})

    async def txn(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> bool:
        """See Kv."""
        return bool(await self._ask("txn", compares=compares, changes=changes))

    async def watch(self, prefix: str, revision: int, deleted: Callable[[str], None]) -> None:
        """See Kv. Returns when it was silent for long."""
        try:
            with trio.move_on_after(_ANSWER) as opening:
                lines = await self._open()
                await lines.send({"op": "watch", "prefix": prefix, "revision": revision})
            if opening.cancelled_caught:
                raise KvError("etcd does not answer", sent=False)
            while True:
                with trio.move_on_after(_SILENCE) as silence:
                    deleted(await lines.receive())
                if silence.cancelled_caught:
                    await trio.aclose_forcefully(lines.stream)
                    return
        except _BROKEN as error:
            raise KvError(f"etcd ends a watch: {error!r}", sent=False) from error

    async def run(self) -> None:
        """There is nothing to do in between."""

    async def close(self) -> None:
        """Close the connections."""
        for sock in self._idle:
            sock.close()
