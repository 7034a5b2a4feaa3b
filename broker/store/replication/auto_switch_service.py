"""AutoSwitchHAService: a master's side of replication when controllers assign the roles.

A message is confirmed when every member of the SyncStateSet has it, and only while no other broker can be the master.
Source: RocketMQ's AutoSwitchHAService. There acknowledgements count per connection, a set may grow by a slave that
lacks what is confirmed meanwhile, and a master that was frozen goes on to confirm.
"""

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import trio

from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.replication.auto_switch_connection import AutoSwitchHAConnection
from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.broker.store.replication.ha_connection import HAConfig, HAConnection
from trimq.broker.store.replication.ha_service import HAService
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.running_flags import Flag, RunningFlags

_MOST_UNKNOWN: Final = 32
"""Connections whose slaves have not said yet who they are."""


class Membership(NamedTuple):
    """How a master treats the set. Times are seconds.

    ``period``: checkSyncStateSetPeriod. ``patience``: haMaxTimeSlaveNotCatchup. ``least``: minInSyncReplicas.
    """

    period: float
    patience: float
    least: int


class AutoSwitchHAService(HAService):
    """The slaves of a master, by their broker ids. Belongs to the event loop."""

    def __init__(
        self,
        log: CommitLog,
        flags: RunningFlags,
        config: HAConfig,
        membership: Membership,
        leadership: Leadership,
        epochs: EpochFileCache,
        end_offset: Callable[[], int],
        *,
        replicated_offset: int,
    ) -> None:
        """See HAService. ``epochs`` has the entry of this master's epoch."""
        super().__init__(log, flags, config, None, end_offset, replicated_offset=replicated_offset)
        self.leadership = leadership
        self.epochs = epochs
        self._membership = membership
        self._slaves: dict[int, AutoSwitchHAConnection] = {}
        """The newest connection of each broker id."""
        self._joining: set[int] = set()
        """Brokers that are about to be members: they are waited for already.

        Otherwise more could be confirmed between the wish and the answer, and the set would have a member without it.
        """
        self._seen: dict[int, float] = {}
        """When each member was last found connected, or became a member."""
        self._looked_at = self._resumed_at = trio.current_time()
        """Times at which this process did not run count against no slave: its loop was late, or it was frozen."""
        self._announced = replicated_offset
        self._short = ""
        leadership.on_changed = self._changed

    # -- what is confirmed

    @property
    def in_sync(self) -> int:
        """The members of the set that are connected, the master included."""
        return 1 + sum(slave.in_sync for slave in self._slaves.values())

    @property
    def slave_ids(self) -> Collection[int]:
        """The slaves that are connected."""
        return self._slaves.keys()

    @property
    def needed(self) -> int:
        """The copies that a message needs now, the master's included."""
        return len(self._awaited() | {self.leadership.broker_id})

    @property
    def confirmed_offset(self) -> int:
        """Every member has everything below. It moves only while no other broker can be the master.

        To be asked again right before a reply or a read: the time without a lease begins by itself.
        """
        # With too few members nothing more is confirmed: also what was appended while there were enough.
        if self.leadership.holds() and len(self.leadership.members) >= self._membership.least:
            covered = self._covered()
            self.replicated_offset = max(self.replicated_offset, covered)
        return self.replicated_offset

    def _awaited(self) -> frozenset[int] | set[int]:
        awaited = self.leadership.awaited
        return awaited | self._joining if self._joining else awaited

    def _covered(self) -> int:
        """How far this master and all that are waited for have the log."""
        offset = self.log.max_offset
        for broker_id in self._awaited():
            if broker_id != self.leadership.broker_id:
                slave = self._slaves.get(broker_id)
                offset = min(offset, slave.ack_offset if slave is not None else -1)
        return offset

    # -- connections

    def greeted(self, connection: AutoSwitchHAConnection) -> None:
        """See AutoSwitchMaster. A newer connection of a broker replaces the older one, and its acknowledgements."""
        old = self._slaves.get(connection.broker_id)
        if old is not None:
            self._replace(old)
        self._slaves[connection.broker_id] = connection
        self._update()  # what the older connection had acknowledged counts no more, for a wish either

    def _connection(self, stream: trio.abc.Stream, address: str) -> HAConnection:
        return AutoSwitchHAConnection(self, stream, address)

    def _make_room(self, _address: str, _slaves: int) -> None:
        """Slaves count by their ids, not by their addresses; but not all of them have said theirs."""
        unknown = [
            found for found in self.connections if isinstance(found, AutoSwitchHAConnection) and found.broker_id < 0
        ]
        for old in unknown[: max(0, len(unknown) + 1 - _MOST_UNKNOWN)]:
            self._replace(old)

    def _forget(self, connection: HAConnection) -> None:
        super()._forget(connection)
        if isinstance(connection, AutoSwitchHAConnection) and self._slaves.get(connection.broker_id) is connection:
            del self._slaves[connection.broker_id]
            self._joining.discard(connection.broker_id)

    # -- the set

    async def watch(self) -> None:
        """Look at the members at intervals, until cancelled."""
        while True:
            self.look()
            await trio.sleep(self._membership.period)

    def look(self) -> None:
        """Note where the log ends, who is close to its end, and who is lost."""
        now = trio.current_time()
        if now - self._looked_at > 2 * self._membership.period:
            self._resumed_at = now
        self._looked_at = now
        self.times.note(self.log.max_offset, now)
        self._seen = {member: self._seen.get(member, now) for member in self.leadership.members}
        self._joining = {found.broker_id for found in self._slaves.values() if self._may_join(found, now)}
        self._update()

    def _may_join(self, slave: AutoSwitchHAConnection, now: float) -> bool:
        """Whether it is no member, and had reached the end of the log a moment ago.

        It is waited for from now on, so that it can catch up with what is confirmed while there are always new
        messages. If it stops, it is no longer waited for at the next look.
        """
        if slave.learner or slave.ack_offset < 0 or slave.broker_id in self.leadership.members:
            return False
        return self.times.age(slave.ack_offset, now) < self._membership.period and slave.ack_offset >= self._epoch_start

    @property
    def _epoch_start(self) -> int:
        return self.epochs.entries[-1].start if self.epochs.entries else 0

    def _is_lost(self, broker_id: int, now: float) -> bool:
        """Whether a member lags, or has no connection, for too long; or has lost what was confirmed.

        The latter has come back with less: after a power cut, or a RocketMQ that has cut its log. If it were elected
        now, acknowledged messages would be gone.
        """
        slave = self._slaves.get(broker_id)
        if slave is None or slave.ack_offset < 0:
            missed = now - max(self._seen.get(broker_id, now), self._resumed_at)
        else:
            self._seen[broker_id] = now
            if slave.ack_offset < self.replicated_offset:
                return True
            missed = min(self.times.age(slave.ack_offset, now), now - self._resumed_at)
        return missed > self._membership.patience

    def _wish(self) -> None:
        """Ask for the set as it should be."""
        leadership, now = self.leadership, trio.current_time()
        me = leadership.broker_id
        wanted = {member for member in leadership.members if member == me or not self._is_lost(member, now)}
        confirmed = self.replicated_offset
        for broker_id, slave in self._slaves.items():
            # One that lacks what is confirmed must never be elected.
            if slave.ack_offset >= confirmed and self._may_join(slave, now):
                wanted.add(broker_id)
                self._joining.add(broker_id)
        leadership.want(frozenset(wanted))

    def _changed(self) -> None:
        self._joining -= self.leadership.members
        self._update()

    def _update(self) -> None:
        self._check_size()
        offset = self.confirmed_offset
        self._wish()
        if offset > self._announced:
            self._announced = offset
            self.on_replicated()

    def _check_size(self) -> None:
        members, least = self.leadership.members, self._membership.least
        if len(members) >= least:
            self._flags.clear(Flag.REPLICAS)
            return
        short = (
            f"in-sync replicas not enough: {least} member(s) must have a message (minInSyncReplicas), the SyncStateSet "
            f"has {len(members)}; start the other brokers of this name"
        )
        if short != self._short or not self._flags.has(Flag.REPLICAS):
            self._short = short
            self._flags.set(Flag.REPLICAS, short)
