"""Administration of timed messages: those of a topic that are not delivered yet."""

from typing import NamedTuple

from trimq.client.admin.base import AdminBase
from trimq.client.admin.messages import TOOLS_GROUP
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.pulling import PullCall, pull
from trimq.client.routes import MASTER_ID
from trimq.client.subscription import ALL, Subscription
from trimq.protocol.codes import RequestCode
from trimq.protocol.property_names import (
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
)
from trimq.protocol.timer_layout import decode_checkpoint
from trimq.protocol.topic_rules import TIMER_TOPIC

_PULL_MAX = 256


class PendingTimer(NamedTuple):
    """A timed message that waits: where it goes, when it is due (TIMER_OUT_MS, ms since the epoch), and its record.

    It is delivered within the broker's timerPrecisionMs after that. ``message`` is its record in the timer's topic.
    ``rolls`` is how often the timer has stored it again; ``recalled``: a recall of it waits too.
    """

    due: int
    queue: MessageQueue
    message: ReceivedMessage
    rolls: int
    recalled: bool


class TimerAdmin(AdminBase):
    """Timed messages that wait."""

    async def pending_timers(self, topic: str, *, max_messages: int = 1000) -> list[PendingTimer]:
        """The timed messages of a topic that are not delivered yet, the next one first.

        Reads the whole timer topic of each broker, by pulls; at most ``max_messages`` are kept, those that are due
        first. Those that wait although their slots are delivered already, because the broker refuses puts, are not
        among them. Raises TopicNotFoundError, and UsageError for a broker whose timer is off.

        >>> async def example(admin: "Admin") -> list[str]:
        ...     return [timer.message.message_id for timer in await admin.pending_timers("Orders")]
        """
        found: list[PendingTimer] = []
        route = await self.route(topic)
        for broker in route.broker_datas:
            address = broker.broker_addrs.get(MASTER_ID)
            if address is not None:
                found += await self._pending(address, broker.broker_name, topic, max_messages)
        return sorted(found, key=_order)[:max_messages]

    async def _pending(self, address: str, broker_name: str, topic: str, most: int) -> list[PendingTimer]:
        reply = await self.client.request(address, RequestCode.GET_TIMER_CHECK_POINT, {})
        delivered_before = decode_checkpoint(bytes(reply.body)).read_time
        place = MessageQueue(topic=TIMER_TOPIC, broker_name=broker_name, queue_id=0)
        call = PullCall(
            TOOLS_GROUP, place, Subscription(TIMER_TOPIC, ALL, 0), _PULL_MAX, with_subscription=True, hold=0
        )
        waiting: dict[str, PendingTimer] = {}
        recalled: set[tuple[int, str]] = set()
        offset, end = 0, 1
        while offset < end:
            pulled = await pull(self.client, address, call, offset)
            for message in pulled.block(ReceivedMessage) or ():
                timer = _timer(message, topic, delivered_before)
                if timer is None:
                    continue
                mark = message.all_properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
                if mark is None:
                    waiting[message.message_id] = timer  # one that was stored again replaces its earlier record
                else:
                    recalled.add((timer.due, mark))
            if len(waiting) > 2 * most:
                waiting = {one.message.message_id: one for one in sorted(waiting.values(), key=_order)[:most]}
            if pulled.next_offset <= offset:
                break
            offset, end = pulled.next_offset, pulled.max_offset
        keys = ("", f"{topic}+")  # appendTopicForTimerDeleteKey
        return [
            timer._replace(recalled=any((timer.due, key + message_id) in recalled for key in keys))
            for message_id, timer in waiting.items()
        ]


def _order(timer: PendingTimer) -> tuple[int, int]:
    return timer.due, timer.message.queue_offset


def _timer(message: ReceivedMessage, topic: str, delivered_before: int) -> PendingTimer | None:
    """The timer of a record of the timer's topic; None if it is of another topic, or delivered."""
    properties = message.all_properties
    due, queue_id, rolls = (
        properties.get(name, "0") for name in (PROPERTY_TIMER_OUT_MS, PROPERTY_REAL_QID, PROPERTY_TIMER_ROLL_TIMES)
    )
    if properties.get(PROPERTY_REAL_TOPIC) != topic or not (due.isdigit() and queue_id.isdigit() and rolls.isdigit()):
        return None
    if int(due) < delivered_before:
        return None
    queue = MessageQueue(topic=topic, broker_name=message.broker_name, queue_id=int(queue_id))
    return PendingTimer(int(due), queue, message, int(rolls), recalled=False)
