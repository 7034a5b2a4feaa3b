"""SlaveSynchronize: a slave takes over its master's topics, groups, offsets and modes.

Source: RocketMQ's SlaveSynchronize. There all of it comes once a minute, and the topics of the system go if the master
does not list them.
"""

import json
from collections.abc import Callable
from typing import Any, Final

import structlog
import trio

from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.services.state_file import StateFileError
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_OFFSETS_SECONDS: Final = 1.0
_REST_EVERY: Final = 10
"""Rounds of the offsets between two rounds of everything."""

Follow = Callable[[dict[str, Any]], None]
"""Takes the parsed state of the master. Raises StateFileError if it is not one."""


class SlaveSynchronize:
    """Asks the master each second for the offsets, and every ten seconds, or after ``wake``, for the rest."""

    def __init__(
        self,
        master: SlaveMaster,
        clock: Clock,
        *,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        offsets: ConsumerOffsetManager,
        modes: MessageRequestModeManager,
        schedule: ScheduleMessageService,
    ) -> None:
        self._master = master
        self._clock = clock
        self._topics = topics
        self._often: tuple[tuple[RequestCode, Follow], ...] = (
            (RequestCode.GET_ALL_CONSUMER_OFFSET, offsets.follow),
            (RequestCode.GET_ALL_DELAY_OFFSET, schedule.follow),
        )
        self._seldom: tuple[tuple[RequestCode, Follow], ...] = (
            (RequestCode.GET_ALL_TOPIC_CONFIG, topics.follow),
            (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, groups.follow),
            (RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, modes.follow),
        )
        self._failed: dict[RequestCode, str] = {}
        self._woken = False
        self._asked_all = False
        """Whether the last round asked for everything."""
        self._sleep: trio.CancelScope | None = None
        self.rounds = 0
        """Rounds in which the master has answered everything that it was asked."""

    def message_arriving(self, topic: str, queue_id: int, _next: int, _tags: int, _timestamp: int) -> None:
        """A message has come with the log: its topic may be newer than what this slave knows."""
        if self._topics.follow_queue(topic, queue_id):
            self.wake()

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
            if self._master.address:
                all_of_it = self._woken or number % _REST_EVERY == 0
                self._woken = False
                self._asked_all = all_of_it
                requests = (*self._often, *self._seldom) if all_of_it else self._often
                good = True
                for code, follow in requests:
                    good &= await self._take(code, follow)
                # What the master did not answer is asked for in the next round.
                number = number + 1 if good or not all_of_it else 0
                self.rounds += good
            with trio.CancelScope() as self._sleep:
                await self._clock.sleep(_OFFSETS_SECONDS)
            self._sleep = None

    async def _take(self, code: RequestCode, follow: Follow) -> bool:
        try:
            if state := await self._ask(code):
                follow(state)
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

    async def _ask(self, code: RequestCode) -> dict[str, Any]:
        """The master's state; empty if it has none. Raises OSError, ValueError, StateFileError."""
        reply = await self._master.ask(code)
        if reply.code != ResponseCode.SUCCESS:
            raise OSError(f"the master answers {reply.code}: {reply.remark}")
        state = json.loads(bytes(reply.body)) if len(reply.body) else {}
        if not isinstance(state, dict):
            raise StateFileError("not an object")
        return state
