"""SlaveSynchronize: a slave takes over its master's topics, groups, offsets, modes, users and timer checkpoint.

What says that the master has delivered or ended something - delay offsets, the offsets of transactions, the checkpoint
of the timers - is taken only when the log has what was delivered. Otherwise a slave that becomes the master would
neither have it nor deliver it.

Nothing is taken from a master whose log is not the one that this slave has: it may have lost its disk, and would delete
the only copy of all messages.

Source: RocketMQ's SlaveSynchronize. There all of it comes once a minute, the timer checkpoint every three seconds, and
at once; and the topics of the system go if the master does not list them.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import structlog
import trio

from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.broker.services.state_file import StateFileError, load_data_version
from trimq.broker.services.topic_followers import version_text
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.protocol import lenient_json
from trimq.protocol.auth.auth_file import SEAL, seal_of
from trimq.protocol.body import DELETED_TOPICS, WITH_DELETED_TOPICS
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.timer_handover import TimerHandover, decode_handover
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError, UnusableFileError
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_OFFSETS_SECONDS: Final = 1.0
_TIMERS_EVERY: Final = 3
"""Rounds of the offsets between two checkpoints of the timers."""
_MOST_QUEUES: Final = 16
"""Of a topic whose queues are known by a property only, which a client may have written. The master says the rest."""
_REST_EVERY: Final = 10
"""Rounds of the offsets between two rounds of everything."""

Follow = Callable[[dict[str, Any]], None]
"""Takes the parsed state of the master. Raises StateFileError if it is not one."""


class _Later(NamedTuple):
    """A state of the master that is taken when the log has reached ``log_end``."""

    code: RequestCode
    state: Any
    take: Callable[[], Awaitable[None]]


class FollowedLog(Protocol):
    """The part of HAClient that this task uses."""

    @property
    def follows(self) -> bool:
        """Whether the master is connected, and its log has been found to begin with that of this slave."""
        ...

    async def still_follows(self) -> bool:
        """Ask the master again. Raises OSError if it does not answer."""
        ...


class SlaveSynchronize:
    """Asks the master each second for the offsets, and every ten seconds, or after ``wake``, for the rest."""

    def __init__(  # noqa: PLR0913 - all that a slave takes over meets here
        self,
        master: SlaveMaster,
        log: FollowedLog,
        clock: Clock,
        *,
        store: MessageStore,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        modes: MessageRequestModeManager,
        schedule: ScheduleMessageService,
        timers: SlaveTimers,
        users: AuthStore | None = None,
    ) -> None:
        """``users``: None while authentication is off."""
        self._master = master
        self._log = log
        self._clock = clock
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._schedule = schedule
        self._timers = timers
        self._users = users
        self._users_taken = (-1, "")
        """The generation of the users that were taken last, and the seal of their file."""
        self._users_refused = ("", "")
        """The seal of the master's file that cannot be used here, and why: it is not fetched each second."""
        self._arrived: set[str] = set()
        """The topics of messages that have come since the topics were asked for."""
        self._seldom: tuple[tuple[RequestCode, Follow], ...] = (
            (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, groups.follow),
            (RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, modes.follow),
        )
        self._failed: dict[RequestCode, str] = {}
        self._woken = False
        self._asked_all = False
        """Whether the last round asked for everything."""
        self._sleep: trio.CancelScope | None = None
        self._turn = trio.Lock()
        """One task at a time takes what the master says, in the order of its questions."""
        self.topics_version = ""
        """That of the master's topics which are on disk here."""
        self._taken: dict[RequestCode, Any] = {}
        """The states that were taken last, of those that wait for the log."""
        self._until_timers = 0
        """Rounds until the checkpoint of the timers is asked for. A round that waits for the log does not ask."""
        self._later: list[_Later] = []
        self._log_end = 0
        """Where the log has to be for ``_later``."""
        self.rounds = 0
        """Rounds in which the master has answered everything that it was asked, and the log had what that needs."""

    def message_arriving(self, topic: str, queue_id: int, _next: int, _tags: int, _timestamp: int) -> None:
        """A message has come with the log: its topic may be newer than what this slave knows."""
        self._arrived.add(topic)
        if self._topics.follow_queue(topic, queue_id):
            self.wake()

    def message_waits(self, topic: str, queue_id: int) -> None:
        """A message for a queue has come that waits for its time: as a master this broker must know the queue then."""
        self.message_arriving(topic, min(queue_id, _MOST_QUEUES - 1), 0, 0, 0)

    def wake(self) -> None:
        """Ask for everything now; if that has just been done, in the next round."""
        self._woken = True
        if self._sleep is not None and not self._asked_all:
            self._sleep.cancel()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask until cancelled."""
        task_status.started()
        number = 0
        while True:
            if not self._log.follows:
                self._later.clear()
                number = 0
            else:
                all_of_it = self._woken or number % _REST_EVERY == 0
                self._woken = False
                self._asked_all = all_of_it
                async with self._turn:
                    good = await self._whole_round(all_of_it=all_of_it)
                # What the master did not answer is asked for in the next round.
                number = number + 1 if good or not all_of_it else 0
                self.rounds += good and not self._later
            with trio.CancelScope() as self._sleep:
                await self._clock.sleep(_OFFSETS_SECONDS)
            self._sleep = None

    async def _whole_round(self, *, all_of_it: bool) -> bool:
        good = await self._round()
        if self._users is not None:
            # A master that does not send its users is no reason to ask for everything else again and again.
            await self._attempt(RequestCode.AUTH_GET_FILE, partial(self._follow_users, self._users))
        if all_of_it:
            good &= await self._attempt(RequestCode.GET_ALL_TOPIC_CONFIG, self._follow_topics)
        for code, follow in self._seldom if all_of_it else ():
            good &= await self._take(code, follow)
        return good

    async def take_topics(self) -> bool:
        """Take the topics now. Returns whether the master has answered as it should."""
        async with self._turn:
            return await self._attempt(RequestCode.GET_ALL_TOPIC_CONFIG, self._follow_topics)

    async def _follow_topics(self) -> None:
        """Take the topics; the queues and offsets of those that the master does not have any more go too."""
        self._arrived.clear()
        state = await self._ask(RequestCode.GET_ALL_TOPIC_CONFIG, {WITH_DELETED_TOPICS: "true"})
        if not state:
            return
        before = set(self._topics.table)
        complete = self._topics.follow(state, keep=self._arrived)
        deleted = state.get(DELETED_TOPICS) or {}
        gone = await self._store.follow_deletions({str(topic): int(position) for topic, position in deleted.items()})
        # Also if the topic is there again: the master has removed these too, and says in the next round which it has.
        for topic in {*gone, *(before - set(self._topics.table))}:
            self._offsets.remove_topic(topic)
        for topic in await self._store.clean_unused_topics(self._topics.table):
            _log.info("followed_topic_deleted", topic=topic)
            self._offsets.remove_topic(topic)
        await self._topics.persisted()
        # A deletion that is not made here must not be confirmed.
        if complete:
            self.topics_version = version_text(load_data_version(state.get("dataVersion"), "the master's topics"))

    async def _follow_users(self, users: AuthStore) -> None:
        """Take the users and policies: in place of changes that were made here, too. Their file is encrypted."""
        generation, seal = self._users_taken
        refused, why = self._users_refused
        known = refused or (seal if users.generation == generation else "")
        reply = await self._reply(RequestCode.AUTH_GET_FILE, {SEAL: known})
        if reply.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return  # RocketMQ's broker, whose users stay there
        _check(reply)
        data = bytes(reply.body)
        if not data:
            if refused:
                raise OSError(why)
            return
        self._users_refused = "", ""
        try:
            await users.adopt(data)
        except UnusableFileError as error:
            self._users_refused = seal_of(data), str(error)
            raise OSError(str(error)) from error
        except AuthStoreError as error:
            raise OSError(str(error)) from error
        self._users_taken = users.generation, seal_of(data)
        _log.info("followed_users", users=len(users.users))

    # what waits for the log

    async def _round(self) -> bool:
        """Ask for the offsets, and for the checkpoint of the timers. Take what the log is far enough for."""
        self._until_timers -= 1
        await self._take_later()
        waits = bool(self._later)  # then only the offsets of consumers are taken: newer states would never be
        good = await self._take(RequestCode.GET_ALL_CONSUMER_OFFSET, lambda state: self._take_offsets(state, waits))
        if waits:
            return good
        good &= await self._take(RequestCode.GET_ALL_DELAY_OFFSET, self._take_delays)
        if self._until_timers <= 0:
            self._until_timers = _TIMERS_EVERY
            good &= await self._attempt(RequestCode.GET_TIMER_CHECK_POINT, self._ask_timers)
        if self._later and not await self._attempt(RequestCode.GET_BROKER_RUNTIME_INFO, self._ask_end):
            self._later.clear()
            return False
        await self._take_later()
        return good

    def _take_offsets(self, state: dict[str, Any], waits: bool) -> None:
        own = self._offsets.follow(state)
        if not waits:
            self._put_off(RequestCode.GET_ALL_CONSUMER_OFFSET, own, lambda: self._offsets.follow_own(own))

    def _take_delays(self, state: dict[str, Any]) -> None:
        self._put_off(RequestCode.GET_ALL_DELAY_OFFSET, state, lambda: self._schedule.follow(state))

    async def _ask_timers(self) -> None:
        reply = await self._reply(RequestCode.GET_TIMER_CHECK_POINT)
        if reply.code == ResponseCode.SYSTEM_ERROR:
            return  # its timers are off (timerWheelEnable=false)
        _check(reply)
        handover = decode_handover(reply.ext_fields(), bytes(reply.body))
        if handover != self._taken.get(RequestCode.GET_TIMER_CHECK_POINT):
            self._later.append(_Later(RequestCode.GET_TIMER_CHECK_POINT, handover, lambda: self._follow(handover)))

    async def _follow(self, handover: TimerHandover) -> None:
        await self._timers.follow(handover)

    def _put_off(self, code: RequestCode, state: Any, take: Callable[[], None]) -> None:
        async def taken() -> None:
            take()

        if state != self._taken.get(code):
            self._later.append(_Later(code, state, taken))

    async def _ask_end(self) -> None:
        # After the states: what they say was delivered is in the master's log by now.
        end = await self._master.log_end()
        await self._check_log()
        self._log_end = end

    async def _take_later(self) -> None:
        """Take what has waited, if the log is far enough. On disk: these states are there before the log is flushed."""
        if not self._later or self._store.appended_offset < self._log_end or not await self._store.flush():
            return
        later, self._later = self._later, []
        for code, state, take in later:
            if await self._attempt(code, take):
                self._taken[code] = state

    # requests

    async def _take(self, code: RequestCode, follow: Follow) -> bool:
        async def step() -> None:
            if state := await self._ask(code):
                follow(state)

        return await self._attempt(code, step)

    async def _attempt(self, code: RequestCode, step: Callable[[], Awaitable[None]]) -> bool:
        """False, with an event in the log, if the master does not answer as it should."""
        try:
            await step()
        except (OSError, ValueError, StateFileError) as error:
            if self._failed.get(code) != str(error):
                _log.warning("not_synchronized", request=code.name, master=self._master.address, reason=str(error))
            self._failed[code] = str(error)
            return False
        except Exception:  # noqa: BLE001 - an odd answer of the master must not end the broker
            if code not in self._failed:
                _log.exception("synchronization_failed", request=code.name, master=self._master.address)
            self._failed[code] = "a defect"
            return False
        self._failed.pop(code, None)
        return True

    async def _reply(self, code: RequestCode, ext: dict[str, str] | None = None) -> RemotingCommand:
        """The master's reply. Raises OSError, also if the master is another one by now, or has another log."""
        address = self._master.address
        reply = await self._master.ask(code, ext)
        if address != self._master.address:
            raise OSError(f"{address} is not the master any more")
        await self._check_log()
        return reply

    async def _check_log(self) -> None:
        """After a reply: what a master says that has lost its log in the meantime must not be taken."""
        if not await self._log.still_follows():
            raise OSError("the log of this slave is not the master's")

    async def _ask(self, code: RequestCode, ext: dict[str, str] | None = None) -> dict[str, Any]:
        """The master's state; empty if it has none. Raises OSError, ValueError, StateFileError."""
        reply = await self._reply(code, ext)
        _check(reply)
        # RocketMQ's broker writes numbers as keys without quotes.
        state = lenient_json.loads(bytes(reply.body)) if len(reply.body) else {}
        if not isinstance(state, dict):
            raise StateFileError("not an object")
        return state


def _check(reply: RemotingCommand) -> None:
    if reply.code != ResponseCode.SUCCESS:
        raise OSError(f"the master answers {reply.code}: {reply.remark}")
