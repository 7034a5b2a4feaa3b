"""LostMasters: a master whose process has ended is replaced at once, not when its lease ends.

The kernel closes the connections of a process that ends, and refuses new ones. So when the connection closes on which
a master sends its heartbeats, a controller connects to the address of that master. If it is refused twice in a row, and
no other heartbeat has come meanwhile, another member of the set is elected. Anything else says nothing: with a
connection that is accepted, no answer, or no way to the address, the lease decides as before. So it does for a master
that is frozen or cut off: its connection stays.

Why this loses nothing, whatever a refusal means. It goes the way of an operator's election while the master lives: its
lease is neither ended nor waited for. All keys that it depends on are compared in one transaction, with the master's
epoch, so a process that was started again meanwhile keeps what it was given. If the old master still runs (its port is
closed while it stops, or while its role changes; a forwarder or a firewall refuses in its place), then each message
needs every member of its set, so the new master too. That one acknowledges nothing of an older epoch, and the old
master cannot take it out of the set, as the epoch is another one. What was acknowledged before is in the new master's
log. Until the old one hears of the new epoch, with its next heartbeat, or its lease ends, it can serve reads: of what
is confirmed, and of consumer offsets, of which it may take commits that are lost. That holds with each election by
hand. A queue of connections that is full is no refusal (Linux drops the request then).

The lease also shows, in its time, who else is gone. Here that is not known yet: only members are elected whose
connection to this controller stands, and which answer a request. Else one that has died together with its master, or
was frozen before, would be elected, as the only member of the new set.

Source: RocketMQ's controller elects as soon as the connection of a master closes, without a look at the master.
"""

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from trimq.controller.group_state import GroupState, UnreadableError
from trimq.controller.kv import KvError
from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.remoting.client.client_socket import ClientNetwork
from trimq.remoting.client.remoting_client import split_address
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.reactor import Connection

_log = structlog.get_logger("controller")

_GAP: Final = 0.03
"""Seconds between two connections to a master."""
_DEADLINE: Final = 0.3
"""The most seconds that one of them may take."""
_ENOUGH: Final = 2
"""Refusals in a row that show that a process is gone. So many accepted connections show that it is not."""
_AT_ONCE: Final = 16
_MOST_WAITING: Final = 1000
_BROKERS: Final = "brokers"
"""Where a connection has the brokers that have sent heartbeats on it."""

_Key = tuple[str, int]


class LostMasters:
    """Watches the connections of one controller's brokers.

    ``replace`` is called with a group, the id of its master that is gone, and the members of which one may follow.
    ``answers`` says whether the broker at an address answers a request: the kernel accepts connections of a frozen one.
    """

    def __init__(
        self,
        replicas: ReplicasInfoManager,
        network: ClientNetwork,
        clock: Clock,
        replace: Callable[[GroupState, int, set[int]], Awaitable[None]],
        answers: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._replicas = replicas
        self._network = network
        self._clock = clock
        self._replace = replace
        self._answers = answers
        self._connections: dict[_Key, Connection] = {}
        """Where the last heartbeat of a broker has come, while that is open."""
        self._lost: dict[_Key, str] = {}
        """Brokers that are looked at, or wait for it, and the host from which they were connected."""
        self._send, self._receive = trio.open_memory_channel[_Key](_MOST_WAITING)

    def heard(self, name: str, broker_id: int, connection: Connection) -> None:
        """Note that a heartbeat has come."""
        key = (name, broker_id)
        if connection.closed:
            self._replicas.silent.add(key)
            return
        self._connections[key] = connection
        brokers: set[_Key] = connection.data.setdefault(_BROKERS, set())
        if not brokers:
            connection.on_close.append(self._closed)
        brokers.add(key)

    def _closed(self, connection: Connection) -> None:
        for key in connection.data[_BROKERS]:
            if self._connections.get(key) is not connection:
                continue  # it has another one
            del self._connections[key]
            self._replicas.silent.add(key)
            if key in self._lost:
                continue
            try:
                self._send.send_nowait(key)
            except trio.WouldBlock:
                continue  # the lease decides
            self._lost[key] = connection.peer[0]

    async def run(self) -> None:
        """Look at the brokers whose connections have closed, until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._work)

    async def _work(self) -> None:
        async for key in self._receive:
            try:
                await self._look_at(key)
            except (KvError, UnreadableError) as error:
                _log.info("lost_connection_not_looked_at", broker_name=key[0], broker_id=key[1], reason=str(error))
            finally:
                del self._lost[key]

    async def _look_at(self, key: _Key) -> None:
        name, broker_id = key
        state = await self._replicas.state(name)
        if state.master != broker_id:
            return
        address = state.address(broker_id)
        if _is_loopback(address.rpartition(":")[0].strip("[]")) and not _is_loopback(self._lost[key]):
            return  # that is this machine, and the broker is on another one
        if not await self._is_gone(key, address):
            return
        others = await self._who_answer(state, broker_id)
        if key in self._connections:
            return
        _log.warning(
            "master_connection_refused",
            broker_name=name,
            broker_id=broker_id,
            address=address,
            answering=sorted(others),
        )
        if others:
            await self._replace(state, broker_id, others)

    async def _is_gone(self, key: _Key, address: str) -> bool:
        """Whether a process has ended. A port may close a little later than the connections."""
        refused = accepted = 0
        while True:
            if key in self._connections:
                return False
            answer = await self._accepts(address)
            if answer is None:
                return False
            refused = 0 if answer else refused + 1
            accepted += answer
            if refused == _ENOUGH:
                return True
            if accepted == _ENOUGH:
                return False
            await self._clock.sleep(_GAP)

    async def _who_answer(self, state: GroupState, lost: int) -> set[int]:
        """The members of the set, but the lost one, that are here."""
        found: set[int] = set()

        async def look_at(broker_id: int) -> None:
            if await self._answers(state.address(broker_id)):
                found.add(broker_id)

        async with trio.open_nursery() as nursery:
            for broker_id in state.members:
                if broker_id != lost and (state.name, broker_id) in self._connections:
                    nursery.start_soon(look_at, broker_id)
        return found

    async def _accepts(self, address: str) -> bool | None:
        """Whether a broker accepts a connection or refuses it; None if neither is known."""
        with trio.move_on_after(_DEADLINE):
            try:
                sock = await self._network.connect(*split_address(address))
            except ConnectionRefusedError:
                return False
            except (OSError, ValueError):  # ValueError: an address that is none
                return None
            sock.close()
            return True
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return host == "localhost"
