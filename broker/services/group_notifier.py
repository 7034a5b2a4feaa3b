"""Notifies the members of a consumer group that it has changed (NOTIFY_CONSUMER_IDS_CHANGED, 40), at a limited rate.

RocketMQ notifies all members at each change, so 2,000 consumers that start together cost two million notifications.
Here the first change is notified immediately. Further changes of that group are combined until ``PAUSE_SECONDS`` have
passed, or longer if the group is large: about ``MEMBERS_A_SECOND`` members are notified per second, and a pause is at
most ``LONGEST_PAUSE_SECONDS``. The last change is always notified. Clients rebalance every 20 s without a notification
too, so a pause of a few seconds does no harm.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import trio

from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.client import NotifyConsumerIdsChangedRequestHeader
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection

PAUSE_SECONDS: Final = 0.2
"""The pause between two notifications of a small group."""
MEMBERS_A_SECOND: Final = 1000
"""A group with more than ``PAUSE_SECONDS`` times this has a longer pause."""
LONGEST_PAUSE_SECONDS: Final = 10.0
"""The pause of the largest groups: half of the interval at which clients rebalance without a notification."""
_SLICE_SECONDS: Final = 0.001
_CLOSE_ENOUGH: Final = 1e-6
"""Seconds that a sleep may end early because clocks are rounded."""


class GroupNotifier:
    """``members`` returns the connections of a group; none if the group has no members any more."""

    def __init__(self, clock: Clock, members: Callable[[str], Iterable[Connection]]) -> None:
        self._clock = clock
        self._members = members
        self._changed: dict[str, None] = {}
        self._not_before: dict[str, float] = {}
        self._waiting = trio.CancelScope()

    def changed(self, group: str) -> None:
        """Notify the members of ``group``, immediately or when the pause of the group ends."""
        if group not in self._changed:
            self._changed[group] = None
            self._waiting.cancel()

    def forget(self, group: str) -> None:
        """Drop a pending notification: the group has no members any more."""
        self._changed.pop(group, None)

    async def run(self) -> None:
        """Send notifications, forever."""
        while True:
            await self.notify_due()
            with trio.CancelScope() as self._waiting:
                if self._changed:  # groups in their pause, and changes that came while others were notified
                    await self._clock.sleep_until(min(self._not_before.get(group, 0.0) for group in self._changed))
                else:
                    await trio.sleep_forever()

    async def notify_due(self) -> None:
        """Send all notifications whose pause is over."""
        now = self._clock.monotonic()
        self._not_before = {group: at for group, at in self._not_before.items() if at - now > _CLOSE_ENOUGH}
        for group in [group for group in self._changed if group not in self._not_before]:
            if group in self._changed:  # it may have been forgotten while others were notified
                del self._changed[group]  # before the notification: a change during it is a new one
                await self._notify_members(group)

    async def _notify_members(self, group: str) -> None:
        members = list(self._members(group))
        pause = min(max(PAUSE_SECONDS, len(members) / MEMBERS_A_SECOND), LONGEST_PAUSE_SECONDS)
        self._not_before[group] = self._clock.monotonic() + pause
        began = time.perf_counter()
        for connection in members:
            notify(connection, group)
            if time.perf_counter() - began > _SLICE_SECONDS:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()


def notify(connection: Connection, group: str) -> None:
    """Notify one member: now, or when its connection has drained, and then once for all changes until then."""
    header = NotifyConsumerIdsChangedRequestHeader(consumer_group=group)
    request = RemotingCommand.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, oneway=True)
    if not connection.send_oneway(request) and connection.is_over():
        connection.when_drained(("ids_changed", group), partial(notify, connection, group))
