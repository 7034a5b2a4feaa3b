"""HAService: a master's side of replication. It accepts slaves, and knows how far enough of them have the log.

Source: RocketMQ's DefaultHAService. There an offset above what was sent is believed, and acknowledgements count per
connection.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog
import trio

from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.replication.ha_connection import HAConfig, HAConnection, SlaveState
from trimq.broker.store.replication.offset_times import SAMPLE_SECONDS, OffsetTimes
from trimq.broker.store.replication.reminders import Reminders
from trimq.broker.store.running_flags import Flag, RunningFlags
from trimq.protocol.ha_proof import HAProofError

_log = structlog.get_logger(__name__)

_ACCEPT_AGAIN: Final = 1.0
_ADMISSION_SECONDS: Final = 10.0
_MOST_WAITING: Final = 32
"""Connections that wait for admission, from all addresses; ``_MOST_OF_ONE`` from one address."""
_MOST_OF_ONE: Final = 8
_NO_SLAVE: Final = "set haAllowedAddresses if it is one of this master's"
_NOT_SAID: Final = (
    "the name servers do not say in time which brokers are slaves: see that they can be reached, or set "
    "haAllowedAddresses"
)
_MANY_WAIT: Final = (
    f"{_MOST_WAITING} connections, or {_MOST_OF_ONE} from this address, have not proved themselves yet: find out what "
    "connects to haListenPort; a slave tries again by itself"
)
_CLOSE: Final = 4 << 20
"""A slave that is up to this many bytes behind may be named to consumers."""

Proof = Callable[[trio.abc.Stream, str], Awaitable[trio.abc.Stream]]
"""The stream of a slave at an IP address, when the slave has proved itself. Raises HAProofError, OSError."""

Admission = Callable[[str], Awaitable[int]]
"""Returns how many slaves may connect from an IP address; 0 for none."""


class InSync(NamedTuple):
    """How many copies, the master's own included, a message needs (inSyncReplicas and what belongs to it).

    ``wanted``: inSyncReplicas. ``least``: minInSyncReplicas. ``adapts``: enableAutoInSyncReplicas.
    """

    wanted: int
    least: int
    adapts: bool

    def needed(self, in_sync: int) -> int:
        """The copies that a message needs while ``in_sync`` replicas are in sync, the master included."""
        return max(self.least, min(self.wanted, in_sync)) if self.adapts else self.wanted


class MasterState(NamedTuple):
    """A master's replication: the copies that a message needs, those in sync, and each slave.

    ``sent_bytes`` (of the log) and ``refused`` (connections) count since the start.
    """

    needed: int
    in_sync: int
    replicated_offset: int
    sent_bytes: int
    refused: int
    slaves: list[SlaveState]


class HAService:
    """The slaves of a master. Belongs to the event loop.

    ``replicated_offset``: enough slaves have acknowledged everything below. It never goes back. ``on_replicated`` is
    called when it has moved. ``end_offset`` is what slaves may get.
    """

    def __init__(
        self,
        log: CommitLog,
        flags: RunningFlags,
        config: HAConfig,
        in_sync: InSync | None,
        end_offset: Callable[[], int],
        *,
        replicated_offset: int,
    ) -> None:
        """``in_sync``: None if no message waits for slaves (ASYNC_MASTER).

        ``replicated_offset``: what is known to be on enough slaves at the start.
        """
        self.log = log
        self.config = config
        self.replicated_offset = replicated_offset
        self.on_replicated: Callable[[], None] = lambda: None
        self.connections: list[HAConnection] = []
        """Those of slaves that are admitted, oldest first."""
        self.refused = 0
        """Connections of addresses that are not admitted, or beyond what waits for admission."""
        self.times = OffsetTimes()
        self._waiting: Counter[str] = Counter()
        """Connections that wait for admission, by address."""
        self._refusals = Reminders()
        self._sent_bytes = 0
        """Sent on connections that have ended."""
        self._flags = flags
        self._in_sync = in_sync
        self._end_offset = end_offset
        self._notified = 0
        self._reported = trio.Event()
        """Set when a slave has reported, or has disconnected."""
        self._counted = 0
        """The replicas in sync when the flag was set."""

    @property
    def end_offset(self) -> int:
        """The end of what slaves may get."""
        return self._end_offset()

    @property
    def in_sync(self) -> int:
        """The replicas in sync, the master included."""
        return 1 + sum(connection.in_sync for connection in self.connections)

    @property
    def has_close_slave(self) -> bool:
        """Whether a slave in sync has nearly all of the log, so that consumers may read there."""
        return any(found.in_sync and found.behind <= _CLOSE for found in self.connections)

    @property
    def needed(self) -> int:
        """The copies that a message needs now, the master's included."""
        return 1 if self._in_sync is None else self._in_sync.needed(self.in_sync)

    @property
    def confirmed_offset(self) -> int:
        """As many replicas as a message needs have everything below."""
        return self.replicated_offset if self.needed > 1 else self.log.max_offset

    def state(self) -> MasterState:
        """What there is to know of the replication."""
        slaves = [connection.state() for connection in self.connections]
        sent = self._sent_bytes + sum(connection.sent_bytes for connection in self.connections)
        return MasterState(self.needed, self.in_sync, self.replicated_offset, sent, self.refused, slaves)

    def start(self) -> None:
        """Before puts are served: refuse them until there are enough slaves."""
        self._update()

    async def serve(
        self,
        listener: trio.abc.Listener[trio.abc.Stream],
        peer_of: Callable[[trio.abc.Stream], str],
        admission: Admission,
        proof: Proof | None = None,
    ) -> None:
        """Accept slaves until cancelled. ``peer_of`` returns the IP address of a connection's peer.

        ``proof``: None if slaves prove nothing.
        """
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(self._sample)
            while True:
                try:
                    stream = await listener.accept()
                except OSError as error:  # no descriptor is left, for example
                    _log.warning("slave_not_accepted", reason=str(error))
                    await trio.sleep(_ACCEPT_AGAIN)
                    continue
                nursery.start_soon(self._accepted, stream, peer_of, admission, proof)

    async def _accepted(
        self,
        stream: trio.abc.Stream,
        peer_of: Callable[[trio.abc.Stream], str],
        admission: Admission,
        proof: Proof | None,
    ) -> None:
        try:
            await self._serve(stream, peer_of(stream), admission, proof)
        except trio.Cancelled:
            # Its end must not wait until the memory of the connection is freed.
            await trio.aclose_forcefully(stream)
            raise
        except OSError:
            await trio.aclose_forcefully(stream)  # it has disconnected before its address could be asked for
        except Exception:  # noqa: BLE001 - a fault with one slave must not end the broker
            _log.exception("slave_failed")
            await trio.aclose_forcefully(stream)

    async def _serve(self, stream: trio.abc.Stream, address: str, admission: Admission, proof: Proof | None) -> None:
        advice = _MANY_WAIT
        slaves, proved = 0, stream
        async with self._waits(address) as waits:
            if waits:
                slaves, advice = await self._admitted(address, admission)
            if slaves and proof is not None:
                try:
                    proved = await proof(stream, address)
                except (HAProofError, OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    slaves, advice = 0, str(error) or type(error).__name__
        if not slaves:
            self.refused += 1
            if self._refusals.is_due(address, trio.current_time()):
                _log.warning("slave_refused", address=address, advice=advice)
            await trio.aclose_forcefully(stream)
            return
        stream = proved
        connection = self._connection(stream, address)
        self._make_room(address, slaves)
        self.connections.append(connection)
        _log.info("slave_connected", address=address)
        try:
            await connection.run()
        finally:
            if connection in self.connections:
                self._forget(connection)
            self._reported.set()
            self._update()
            _log.info("slave_disconnected", address=address, reason=connection.closed)

    def _connection(self, stream: trio.abc.Stream, address: str) -> HAConnection:
        return HAConnection(self, stream, address)

    def _make_room(self, address: str, slaves: int, /) -> None:
        """End connections of an address from which ``slaves`` may connect, since another one has come."""
        same = [found for found in self.connections if found.address == address]
        # One that reconnects before the end of its old connection was noticed must not count twice.
        for old in same[: max(0, len(same) + 1 - slaves)]:
            self._replace(old)

    def _replace(self, old: HAConnection) -> None:
        old.close("another connection of this slave has come")
        self._forget(old)

    @asynccontextmanager
    async def _waits(self, address: str) -> AsyncIterator[bool]:
        """Count a connection as one that waits for admission and proof. False if there are too many of them."""
        waiting = self._waiting
        if waiting.total() >= _MOST_WAITING or waiting[address] >= _MOST_OF_ONE:
            yield False
            return
        waiting[address] += 1
        try:
            yield True
        finally:
            waiting[address] -= 1
            if not waiting[address]:
                del waiting[address]

    async def _admitted(self, address: str, admission: Admission) -> tuple[int, str]:
        """How many slaves may connect from ``address``, and what to do if none. 0 too if that takes too long."""
        with trio.move_on_after(_ADMISSION_SECONDS):
            return await admission(address), _NO_SLAVE
        return 0, _NOT_SAID

    def _forget(self, connection: HAConnection) -> None:
        self.connections.remove(connection)
        self._sent_bytes += connection.sent_bytes

    async def _sample(self) -> None:
        """Note each second what lags and rates are made of."""
        while True:
            self.times.note(self.log.max_offset, trio.current_time())
            for connection in self.connections:
                connection.sample(SAMPLE_SECONDS)
            await trio.sleep(SAMPLE_SECONDS)

    def acknowledged(self) -> None:
        """A slave has reported: see Master."""
        self._reported.set()
        self._update()

    async def finish(self, seconds: float) -> list[str]:
        """Before a stop, when nothing is appended any more: wait until the slaves in sync have all of the log.

        Returns the addresses of those that do not have it after ``seconds``.
        """
        with trio.move_on_after(seconds):
            while self._lacking():
                self._reported = trio.Event()
                for connection in self.connections:
                    connection.notify()
                await self._reported.wait()
        return self._lacking()

    def _lacking(self) -> list[str]:
        return [found.address for found in self.connections if found.in_sync and found.behind > 0]

    def notify(self) -> None:
        """There may be more to send."""
        end = self._end_offset()
        if end != self._notified:
            self._notified = end
            self._update()  # a slave may have fallen behind
            for connection in self.connections:
                connection.notify()

    def _update(self) -> None:
        if self._in_sync is None:
            return
        in_sync = self.in_sync
        needed = self._in_sync.needed(in_sync)
        if needed > in_sync:
            missing = f"{needed - 1} slave(s) must have a message before it is acknowledged, {in_sync - 1} in sync"
            advice = "start the slaves, or set inSyncReplicas or enableAutoInSyncReplicas"
            if self._flags.has(Flag.REPLICAS) and in_sync == self._counted:
                return
            self._counted = in_sync
            self._flags.set(Flag.REPLICAS, f"in-sync replicas not enough: {missing}; {advice}")
        else:
            self._flags.clear(Flag.REPLICAS)
        if needed <= 1:
            offset = self.log.max_offset
        else:
            acks = sorted((found.ack_offset for found in self.connections if found.in_sync), reverse=True)
            if len(acks) < needed - 1:
                return
            offset = acks[needed - 2]
        if offset > self.replicated_offset:
            self.replicated_offset = offset
            self.on_replicated()
