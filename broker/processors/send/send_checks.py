"""The checks of a send before it is stored, and the placement of retried, dead and delayed messages.

Source: RocketMQ's AbstractSendMessageProcessor.msgCheck, SendMessageProcessor.handleRetryAndDLQ, HookUtils.
"""

import random
from collections.abc import Callable
from typing import Final, TypeAlias

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.processors.send.message_properties import delay_level, park
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.rebalance_lock import RebalanceLockManager
from trimq.broker.services.timer import TimerMessageService
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol import sysflag
from trimq.protocol.body import PERM_READ, PERM_WRITE, TopicConfig
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.property_names import (
    NOT_IN_A_BATCH,
    PROPERTY_DELAY,
    PROPERTY_INNER_NUM,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRAN_MSG,
)
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.timer_layout import out_time
from trimq.protocol.timer_message import TIMER_NAMES, TimerTextError, deliver_time, is_delete_mark
from trimq.protocol.topic_rules import (
    MAX_TOPIC_LENGTH,
    NO_SEND_TOPICS,
    RETRY_PREFIX,
    TIMER_TOPIC,
    dlq_topic,
    topic_problem,
)
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_NEVER_IN_A_BATCH: Final = NOT_IN_A_BATCH - {PROPERTY_DELAY, PROPERTY_TRAN_MSG}

SendHeader: TypeAlias = SendMessageRequestHeader | SendMessageRequestHeaderV2

V3_4_9: Final = 121
"""The first version whose clients send the number of permitted retries."""
UNIT_TOPIC: Final = 1
UNIT_RETRY: Final = 2


class SendChecks:
    """The checks, each with its response code. The caller makes them in RocketMQ's order."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        locks: RebalanceLockManager,
        timer: TimerMessageService,
        clock: Clock,
        pending_halves: Callable[[], int] = int,
    ) -> None:
        """``pending_halves``: the number of half messages that wait for their end."""
        self._configuration = configuration
        self._pending_halves = pending_halves
        self._topics = topics
        self._groups = groups
        self._locks = locks
        self._timer = timer
        self._clock = clock

    def started(self) -> None:
        """Raises SYSTEM_ERROR before startAcceptSendRequestTimeStamp."""
        start = self._configuration.section(BrokerConfig).start_accept_send_request_time_stamp
        if self._clock.wall_ms() < start:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the broker accepts sends from {start} ms since 1970 on")

    def permission(self, header: SendHeader) -> None:
        """Raises NO_PERMISSION for an order topic if brokerPermission does not permit writing.

        Sends to other topics pass, as in RocketMQ: clients that obey the route do not send them.
        """
        permission = self._configuration.section(BrokerConfig).broker_permission
        config = self._topics.get(header.topic)
        if config is not None and config.order and not permission & PERM_WRITE:
            raise RemotingError(
                ResponseCode.NO_PERMISSION,
                f"this broker does not permit writing to the order topic {header.topic}"
                f" (brokerPermission={permission})",
            )

    def topic(self, header: SendHeader) -> TopicConfig:
        """The topic of a send, created now if that is allowed.

        Raises INVALID_PARAMETER for an invalid name, NO_PERMISSION for a topic that clients must not send to,
        TOPIC_NOT_EXIST if the topic may not be created.
        """
        problem = topic_problem(header.topic)
        if problem is not None:
            raise RemotingError(ResponseCode.INVALID_PARAMETER, problem)
        if header.topic in NO_SEND_TOPICS:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, f"clients may not send to the broker's own topic {header.topic}"
            )
        known = self._topics.get(header.topic)
        return known if known is not None else self._create(header)

    def _create(self, header: SendHeader) -> TopicConfig:
        retry = header.topic.startswith(RETRY_PREFIX)
        sys_flag = (UNIT_RETRY if retry else UNIT_TOPIC) if header.unit_mode else 0
        made = self._topics.create_on_send(
            header.topic, header.default_topic, header.default_topic_queue_nums, sys_flag
        )
        if made is None and retry:
            made = self._topics.create_on_send_back(header.topic, 1, PERM_READ | PERM_WRITE, sys_flag)
        if made is None:
            raise RemotingError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"the topic {header.topic} does not exist and may not be created by a send"
                f" (autoCreateTopicEnable, template {header.default_topic}): create it first",
            )
        return made

    def flags(self, sys_flag: int, properties: dict[str, str]) -> int:
        """The sysFlag to store: the client's, without the bits that only the store sets.

        Raises MESSAGE_ILLEGAL for inner batches, which this broker does not support.
        """
        if sys_flag & (sysflag.INNER_BATCH | sysflag.NEED_UNWRAP) or PROPERTY_INNER_NUM in properties:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "inner batches are not supported")
        return sys_flag & ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6 | sysflag.TRANSACTION_MASK)

    def half(self, header: SendHeader, properties: dict[str, str]) -> bool:
        """Whether a message is the half of a transaction: marked in its sysFlag, or by TRAN_MSG alone (old clients).

        A message that a consumer sends to its retry topic may still have the TRAN_MSG of its first send.
        Raises NO_PERMISSION under rejectTransactionMessage, MESSAGE_ILLEGAL for a half that is delayed (RocketMQ would
        lose it) or leaves no room for the properties of later records, SYSTEM_BUSY at maxPendingHalfMessages.
        """
        kind = header.sys_flag & sysflag.TRANSACTION_MASK
        marked = properties.get(PROPERTY_TRAN_MSG, "").lower() == "true"
        if kind == sysflag.TRANSACTION_ROLLBACK:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "the sysFlag says that the message is rolled back")
        resent = (header.reconsume_times or 0) > 0 and (
            delay_level(properties) > 0 or header.topic.startswith(RETRY_PREFIX)
        )
        if kind != sysflag.TRANSACTION_PREPARED and (not marked or resent):
            return False
        config = self._configuration.section(BrokerConfig)
        if config.reject_transaction_message:
            raise RemotingError(
                ResponseCode.NO_PERMISSION, "this broker takes no transactional messages (rejectTransactionMessage)"
            )
        timed = [name for name in TIMER_NAMES if name in properties]
        if timed or delay_level(properties) > 0:
            name = timed[0] if timed else PROPERTY_DELAY
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, f"a transactional message cannot be delayed ({name})")
        if self._pending_halves() >= config.max_pending_half_messages:
            raise RemotingError(
                ResponseCode.SYSTEM_BUSY,
                f"{self._pending_halves()} half messages wait for their end, the limit is"
                f" {config.max_pending_half_messages} (maxPendingHalfMessages): end the older ones first",
            )
        return True

    def most_halves(self) -> int:
        """How many halves are accepted now."""
        config = self._configuration.section(BrokerConfig)
        if config.reject_transaction_message:
            return 0
        return max(0, config.max_pending_half_messages - self._pending_halves())

    def batch(self, header: SendHeader) -> None:
        """Raises MESSAGE_ILLEGAL for topics that a batch cannot be sent to."""
        if len(header.topic) > MAX_TOPIC_LENGTH:
            raise RemotingError(
                ResponseCode.MESSAGE_ILLEGAL, f"the topic of a batch has at most {MAX_TOPIC_LENGTH} characters"
            )
        if header.topic.startswith(RETRY_PREFIX):
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be sent to a retry topic")

    def batch_item(self, properties: dict[str, str]) -> None:
        """Raises MESSAGE_ILLEGAL for messages that cannot be in a batch: delayed, timed or transactional ones.

        The table of properties marks their names. DELAY and TRAN_MSG are refused by value, all others by presence.
        """
        if delay_level(properties) > 0:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a message in a batch cannot have a delay level")
        if properties.get(PROPERTY_TRAN_MSG, "").lower() == "true":
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a message in a batch cannot be part of a transaction")
        for name in properties:
            if name in _NEVER_IN_A_BATCH:
                raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, f"a message in a batch cannot have {name}")

    def dead_letter(self, command: RemotingCommand, header: SendHeader) -> TopicConfig | None:
        """The dead-letter topic, if a message that a consumer sends to its retry topic has no retries left.

        None if the message is to be retried. Raises SUBSCRIPTION_GROUP_NOT_EXIST.
        """
        group = header.topic[len(RETRY_PREFIX) :]
        config = self._groups.find(group)
        if config is None:
            raise self._groups.missing(group)
        limit = config.retry_max_times
        if command.version >= V3_4_9 and header.max_reconsume_times is not None:
            limit = header.max_reconsume_times
        # A group that holds queue locks consumes in order: a retry would deliver the message after its successors.
        if (header.reconsume_times or 0) <= limit and not self._locks.any_live_lock(group):
            return None
        return self._topics.create_on_send_back(dlq_topic(group), 1, PERM_READ | PERM_WRITE)

    def place(self, properties: dict[str, str], topic: str, queue_id: int) -> tuple[str, int]:
        """The topic and queue that store a message: its own, or those where a delayed or timed message waits.

        Raises SYSTEM_ERROR for a timed message if the timer is off or has too many messages for that time, and
        MESSAGE_ILLEGAL if its time is too far away or no number.
        """
        level = delay_level(properties)
        if level > 0:
            for name in TIMER_NAMES:  # as in RocketMQ, a delay level takes precedence over a timer
                properties.pop(name, None)
            highest = len(self._configuration.section(MessageStoreConfig).delay_levels_ms) - 1
            return park(properties, topic, queue_id, min(level, highest))
        if topic != TIMER_TOPIC and not properties.keys().isdisjoint(TIMER_NAMES):
            return self._place_timed(properties, topic, queue_id)
        return topic, queue_id

    def _place_timed(self, properties: dict[str, str], topic: str, queue_id: int) -> tuple[str, int]:
        """A message with a time (RocketMQ's HookUtils.transformTimerMessage). One that is due goes to its own topic."""
        now = self._clock.wall_ms()
        try:
            time = deliver_time(properties, now)
        except TimerTextError as error:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from None
        if time is None:
            return topic, queue_id
        timer, config = self._timer, self._configuration.section(MessageStoreConfig)
        if not timer.enabled:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                "timed messages are off on this broker (timerWheelEnable=false): use a delay level (DELAY)",
            )
        if time <= now:
            if is_delete_mark(properties):
                raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "the message to be recalled is already due")
            return topic, queue_id
        if time - now > config.timer_max_delay_sec * 1000:
            raise RemotingError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the message is to be delivered in {time - now} ms, the longest delay is"
                f" {config.timer_max_delay_sec * 1000} ms (timerMaxDelaySec)",
            )
        out = out_time(time, timer.precision)
        if not is_delete_mark(properties):
            self._check_congestion(timer.count_at(out), config.timer_congest_num_each_slot)
        properties[PROPERTY_TIMER_OUT_MS] = str(out)
        properties[PROPERTY_REAL_TOPIC] = topic
        properties[PROPERTY_REAL_QID] = str(queue_id)
        return TIMER_TOPIC, 0

    @staticmethod
    def _check_congestion(count: int, limit: int) -> None:
        """Refuse all above twice the limit, and between the two the more, the closer it is to the upper one."""
        if count > limit and (count >= 2 * limit or random.random() < (count - limit) / limit):  # noqa: S311 - spreads load
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"{count} messages wait for the same time; above {limit} (timerCongestNumEachSlot) some are refused,"
                f" above {2 * limit} all: choose another time, or send it again",
            )


def random_queue(config: TopicConfig) -> int:
    """A queue for a message whose producer leaves the choice to the broker."""
    return random.randrange(config.write_queue_nums) if config.write_queue_nums > 1 else 0  # noqa: S311 - spreads load


def properties_too_long(length: int) -> RemotingError:
    """The error MESSAGE_ILLEGAL for properties that no record can hold."""
    return RemotingError(
        ResponseCode.MESSAGE_ILLEGAL, f"the properties have {length} characters, a record holds {MAX_PROPERTIES} bytes"
    )


def illegal_queue(header: SendHeader, config: TopicConfig) -> RemotingError:
    """The error INVALID_PARAMETER for a queue id that the topic does not have."""
    return RemotingError(
        ResponseCode.INVALID_PARAMETER,
        f"the topic {config.topic_name} has no queue {header.queue_id}: it has {config.write_queue_nums} write queues"
        f" and {config.read_queue_nums} read queues",
    )
