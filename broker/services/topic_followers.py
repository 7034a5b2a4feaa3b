"""A change of a topic is on the members of the SyncStateSet before it is answered: a new master would lack it.

``TopicFollowers`` is the master's side, ``TopicWatch`` a slave's: it holds a request at the master until there is a
change, takes the topics, and says with its next request which version it has on disk.

RocketMQ's slaves ask at intervals, so what was created just before a failover is lost there.
"""

from collections.abc import Awaitable, Callable, Container
from typing import Final, Protocol

import structlog
import trio

from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import Leadership
from trimq.protocol.body import DataVersion
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

KNOWN_TOPICS: Final = "trimqKnownTopics"
"""Ext field of GET_ALL_TOPIC_CONFIG (21): reply when the topics are other ones than this version; they are not sent."""
FOLLOWER_ID: Final = "trimqFollowerId"
"""The broker id of the slave that asks."""
TOPICS_VERSION: Final = "trimqTopicsVersion"
"""Ext field of the reply."""
_HOLD: Final = 1.5
"""Seconds for which a request is held; less than the timeout of the slave's requests."""
_FIRST: Final = 1.0
"""Seconds for which a member is waited for that has not asked yet: RocketMQ's never do."""
_MOST_DIGITS: Final = 19
_LOOK: Final = 0.05
_AGAIN: Final = 0.3
_QUICK: Final = 0.05
"""Seconds: taking the topics may last this long without a pause after it."""
_PAUSE: Final = 4.0
"""How many times longer than taking them a slave pauses: all of a large table comes for each new topic."""
_LONGEST_PAUSE: Final = 5.0

Version = tuple[int, int, int]
_NONE: Final = (-1, -1, -1)


def version_text(version: DataVersion) -> str:
    """What a slave says that it has, as ``epoch-counter-timestamp``."""
    return f"{version.state_version}-{version.counter}-{version.timestamp}"


def _number(text: str) -> int:
    """-1 if it is none that a broker would write."""
    return int(text) if len(text) <= _MOST_DIGITS and text.isdecimal() else -1


def _parse(text: str) -> Version:
    match [_number(part) for part in text.split("-", 3)]:
        case [epoch, counter, timestamp] if min(epoch, counter, timestamp) >= 0:
            return epoch, counter, timestamp
    return _NONE


def _has(known: Version, target: Version) -> bool:
    """Whether a table of the version ``known`` has the changes of ``target``.

    The same epoch and counter at another time is another table: of a master that has lost its disk, for example.
    """
    return known == target or known[:2] > target[:2]


class TopicFollowers:
    """What the members of the set know of a master's topics. Belongs to the event loop."""

    def __init__(
        self,
        topics: TopicConfigManager,
        leadership: Leadership | None,
        timeout: float,
        connected: Callable[[], Container[int]],
    ) -> None:
        """``leadership``: None on a slave, and without controllers.

        ``timeout``: seconds for which a change waits for the members at most, as a message does. ``connected``: the
        slaves that get the log now.
        """
        self._topics = topics
        self._leadership = leadership
        self._timeout = timeout
        self._connected = connected
        self._held: set[object] = set()
        """Connections with a held request."""
        self._known: dict[int, Version] = {}
        """What each slave has on its disk."""
        self._mute: set[int] = set()
        """Members that have not asked in time."""
        self._changed = trio.Event()
        self._asked = trio.Event()
        self._stopping = False
        topics.on_version.append(self._wake)

    def start(self) -> None:
        """From here on ``topics.persisted`` waits for the members."""
        if self._leadership is not None:
            self._topics.replicated = self.replicated

    def stop(self) -> None:
        """Hold no requests, and wait for none."""
        self._stopping = True
        self._wake()
        self._asked.set()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def hold(self, connection: object, command: RemotingCommand, known: str) -> RemotingCommand:
        """Answer a slave when the topics are others than it knows, or after a while."""
        broker_id = _number(command.ext_fields().get(FOLLOWER_ID, ""))
        if self._is_expected(broker_id):
            self._note(broker_id, _parse(known))
        if not self._stopping and known == version_text(self._topics.data_version):
            if connection in self._held:
                return command.reply(ResponseCode.SYSTEM_BUSY, "another request of this connection is held")
            self._held.add(connection)
            try:
                with trio.move_on_after(_HOLD):
                    await self._changed.wait()
            finally:
                self._held.remove(connection)
        if self._stopping:
            return command.reply(ResponseCode.SYSTEM_BUSY, "this broker stops")
        return command.reply(header={TOPICS_VERSION: version_text(self._topics.data_version)})

    def _is_expected(self, broker_id: int) -> bool:
        """Whether it is a member, or may be one soon. From where it asks says nothing: see brokerIP2."""
        leadership = self._leadership
        return leadership is not None and (broker_id in leadership.awaited or broker_id in self._connected())

    def _note(self, broker_id: int, known: Version) -> None:
        if not _has(_parse(version_text(self._topics.data_version)), known):
            known = _NONE  # of another master
        # Only those that may be asked for are remembered: brokers come with new ids.
        self._known = {each: version for each, version in self._known.items() if self._is_expected(each)}
        self._known[broker_id] = known
        self._mute.discard(broker_id)
        self._asked.set()
        self._asked = trio.Event()

    async def replicated(self) -> None:
        """Return when each member has the topics as they are now on its disk; or, with a warning, after the timeout.

        Raises RemotingError if the broker stops before that, or if another one may be the master by then.
        """
        leadership = self._leadership
        if leadership is None:
            return
        await self._wait(leadership)
        if not leadership.holds():
            raise RemotingError(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "the change is made here, but the lease of this master has ended: the next master may not have it; "
                "look at the topic there, and make the change again if it is missing",
            )

    async def _wait(self, leadership: Leadership) -> None:
        target = _parse(version_text(self._topics.data_version))
        began = trio.current_time()
        while lacking := self._lacking(leadership, target):
            if self._stopping:
                raise RemotingError(ResponseCode.SERVICE_NOT_AVAILABLE, "this broker stops; send to the next master")
            waited = trio.current_time() - began
            if waited >= _FIRST and (mute := lacking - self._known.keys()):
                self._mute |= mute
                _log.warning("topics_not_followed", members=sorted(mute), effect="they learn of new topics later")
                continue
            if waited >= self._timeout:
                _log.warning("topics_not_replicated", members=sorted(lacking), seconds=self._timeout)
                return
            # The set may change meanwhile.
            with trio.move_on_after(_LOOK):
                await self._asked.wait()

    def _lacking(self, leadership: Leadership, target: Version) -> set[int]:
        others = leadership.awaited - {leadership.broker_id} - self._mute
        return {member for member in others if not _has(self._known.get(member, _NONE), target)}


class Master(Protocol):
    """The part of SlaveMaster that is used."""

    is_rocketmq: bool

    async def ask(self, code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        """See SlaveMaster."""
        ...


class TopicWatch:
    """A slave's side. ``follows``: whether the master is connected, and is the right one.

    ``take`` takes the topics, and ``version`` is the one that is on disk then.
    """

    def __init__(
        self,
        master: Master,
        clock: Clock,
        broker_id: int,
        *,
        follows: Callable[[], bool],
        take: Callable[[], Awaitable[bool]],
        version: Callable[[], str],
    ) -> None:
        self._master = master
        self._clock = clock
        self._broker_id = broker_id
        self._follows = follows
        self._take = take
        self._version = version
        self._failed = False
        """Whether the last answer was odd: that is logged once."""

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            if self._master.is_rocketmq or not self._follows() or not await self._attempt():
                await self._clock.sleep(_AGAIN)

    async def _attempt(self) -> bool:
        """See ``_step``."""
        try:
            good = await self._step()
        except OSError:
            return False  # SlaveSynchronize asks it too, and says so
        except Exception:  # noqa: BLE001 - an odd answer of the master must not end the broker
            if not self._failed:
                _log.exception("topics_not_watched")
            self._failed = True
            return False
        self._failed = False
        return good

    async def _step(self) -> bool:
        """Wait for a change and take it. False if the master does not answer as it should. Raises OSError."""
        known = self._version()
        fields = {KNOWN_TOPICS: known, FOLLOWER_ID: str(self._broker_id)}
        reply = await self._master.ask(RequestCode.GET_ALL_TOPIC_CONFIG, fields)
        found = reply.ext_fields().get(TOPICS_VERSION)
        if reply.code != ResponseCode.SUCCESS or found is None:
            return False
        if found == known:
            return True
        began = trio.current_time()
        taken = await self._take()
        # What changes meanwhile is taken at once then: a large table must not hold up this broker's acknowledgements.
        pause = min(_LONGEST_PAUSE, _PAUSE * (trio.current_time() - began - _QUICK))
        if pause > 0:
            await self._clock.sleep(pause)
        return taken and self._version() != known
