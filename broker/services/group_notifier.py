"""Telling the members of a consumer group that it has changed (NOTIFY_CONSUMER_IDS_CHANGED, 40), not too often.

RocketMQ tells all members at each change, so that 2,000 consumers that start together cost two million notifications.
Here the first change is told at once, and further ones of that group together when ``PAUSE_SECONDS`` have passed, or
longer where the group is large: about ``MEMBERS_A_SECOND`` are told, but never later than after
``LONGEST_PAUSE_SECONDS``. The last change is always told. A client that hears of nothing looks by itself every 20 s, so
that a pause of a few seconds is no loss.
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
"""Between two notifications of a small group."""
MEMBERS_A_SECOND: Final = 1000
"""A group with more than ``PAUSE_SECONDS`` times this has a longer pause."""
LONGEST_PAUSE_SECONDS: Final = 10.0
"""However large the group is: half of the time after which clients look by themselves."""
_SLICE_SECONDS: Final = 0.001
_CLOSE_ENOUGH: Final = 1e-6
"""Seconds that a sleep may end early, by the rounding of clocks."""


class GroupNotifier:
    """``members`` gives the connections of a group, none where it is gone."""

    def __init__(self, clock: Clock, members: Callable[[str], Iterable[Connection]]) -> None:
        self._clock = clock
        self._members = members
        self._changed: dict[str, None] = {}
        self._not_before: dict[str, float] = {}
        self._waiting = trio.CancelScope()

    def changed(self, group: str) -> None:
        """Tell the members of ``group`` as soon as it is their time."""
        if group not in self._changed:
            self._changed[group] = None
            self._waiting.cancel()

    def forget(self, group: str) -> None:
        """Nobody is left to be told."""
        self._changed.pop(group, None)

    async def run(self) -> None:
        """Tell of changes, for ever."""
        while True:
            await self.tell_due()
            with trio.CancelScope() as self._waiting:
                if self._changed:  # during the look too
                    await self._clock.sleep_until(min(self._not_before.get(group, 0.0) for group in self._changed))
                else:
                    await trio.sleep_forever()

    async def tell_due(self) -> None:
        """Tell of all changes whose time has come."""
        now = self._clock.monotonic()
        self._not_before = {group: at for group, at in self._not_before.items() if at - now > _CLOSE_ENOUGH}
        for group in [group for group in self._changed if group not in self._not_before]:
            if group in self._changed:  # else it was forgotten meanwhile
                del self._changed[group]  # before it is told: it may change again meanwhile
                await self._tell(group)

    async def _tell(self, group: str) -> None:
        members = list(self._members(group))
        pause = min(max(PAUSE_SECONDS, len(members) / MEMBERS_A_SECOND), LONGEST_PAUSE_SECONDS)
        self._not_before[group] = self._clock.monotonic() + pause
        began = time.perf_counter()
        for connection in members:
            tell(connection, group)
            if time.perf_counter() - began > _SLICE_SECONDS:
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()


def tell(connection: Connection, group: str) -> None:
    """Tell one member, now or when it takes its replies again: once then, however often the group changes meanwhile."""
    header = NotifyConsumerIdsChangedRequestHeader(consumer_group=group)
    request = RemotingCommand.request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, oneway=True)
    if not connection.send_oneway(request):
        connection.when_drained(("ids_changed", group), partial(tell, connection, group))
