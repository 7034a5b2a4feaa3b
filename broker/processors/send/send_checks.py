"""What a send has to pass before it is stored, and what is done to messages that are not ordinary ones.

Source: RocketMQ's AbstractSendMessageProcessor.msgCheck, SendMessageProcessor.handleRetryAndDLQ, HookUtils.
"""

import random
from typing import Final, TypeAlias

from trimq.broker.config import BrokerConfig, MessageStoreConfig
from trimq.broker.processors.send.message_properties import delay_level, park
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.rebalance_lock import RebalanceLockManager
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
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TRAN_MSG,
)
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import MAX_TOPIC_LENGTH, NO_SEND_TOPICS, RETRY_PREFIX, dlq_topic, topic_problem
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_NEVER_IN_A_BATCH: Final = NOT_IN_A_BATCH - {PROPERTY_DELAY, PROPERTY_TRAN_MSG}

SendHeader: TypeAlias = SendMessageRequestHeader | SendMessageRequestHeaderV2

V3_4_9: Final = 121
"""The first version whose clients say themselves how often a message may be retried."""
TIMER_NAMES: Final = (PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS)
UNIT_TOPIC: Final = 1
UNIT_RETRY: Final = 2


class SendChecks:
    """The checks in the order in which RocketMQ makes them: each has its response code."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        locks: RebalanceLockManager,
        clock: Clock,
    ) -> None:
        self._configuration = configuration
        self._topics = topics
        self._groups = groups
        self._locks = locks
        self._clock = clock

    def started(self) -> None:
        """Raises SYSTEM_ERROR before the time from which sends are taken."""
        start = self._configuration.section(BrokerConfig).start_accept_send_request_time_stamp
        if self._clock.wall_ms() < start:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"the broker takes sends from {start} ms since 1970 on")

    def permission(self, header: SendHeader) -> None:
        """Raises NO_PERMISSION for an order topic where brokerPermission takes no writes.

        Sends to other topics pass, as in RocketMQ: clients that look at the route do not send them.
        """
        permission = self._configuration.section(BrokerConfig).broker_permission
        config = self._topics.get(header.topic)
        if config is not None and config.order and not permission & PERM_WRITE:
            raise RemotingError(
                ResponseCode.NO_PERMISSION,
                f"this broker takes no messages for the order topic {header.topic} (brokerPermission={permission})",
            )

    def topic(self, header: SendHeader) -> TopicConfig:
        """The topic of a send, made now where that is allowed.

        Raises INVALID_PARAMETER for its name, NO_PERMISSION for one that clients do not send to, TOPIC_NOT_EXIST.
        """
        problem = topic_problem(header.topic)
        if problem is not None:
            raise RemotingError(ResponseCode.INVALID_PARAMETER, problem)
        if header.topic in NO_SEND_TOPICS:
            raise RemotingError(ResponseCode.NO_PERMISSION, f"nobody sends to the broker's own topic {header.topic}")
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
                f" (autoCreateTopicEnable, model {header.default_topic}): create it first",
            )
        return made

    def flags(self, sys_flag: int, properties: dict[str, str], reconsume_times: int) -> int:
        """The sysFlag that is stored; without the bits that only the store sets.

        Raises NO_PERMISSION for half messages and MESSAGE_ILLEGAL for inner batches: this broker has neither.
        """
        if sys_flag & (sysflag.INNER_BATCH | sysflag.NEED_UNWRAP) or PROPERTY_INNER_NUM in properties:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "inner batches are not supported")
        prepared = properties.get(PROPERTY_TRAN_MSG, "").lower() == "true"
        resent = reconsume_times > 0 and delay_level(properties) > 0
        if sys_flag & sysflag.TRANSACTION_PREPARED or (prepared and not resent):
            raise RemotingError(ResponseCode.NO_PERMISSION, "transaction messages are not supported by this broker")
        return sys_flag & ~(sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6)

    def batch(self, header: SendHeader) -> None:
        """Raises MESSAGE_ILLEGAL for topics that batches cannot go to."""
        if len(header.topic) > MAX_TOPIC_LENGTH:
            raise RemotingError(
                ResponseCode.MESSAGE_ILLEGAL, f"the topic of a batch has at most {MAX_TOPIC_LENGTH} characters"
            )
        if header.topic.startswith(RETRY_PREFIX):
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be sent to a retry topic")

    def batch_item(self, properties: dict[str, str]) -> None:
        """Raises MESSAGE_ILLEGAL for messages that cannot be in a batch: delayed, timed or transactional ones.

        The table of properties says which names these have. Of two the value counts, of all others that they are there.
        """
        if delay_level(properties) > 0:
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a message in a batch cannot have a delay level")
        if properties.get(PROPERTY_TRAN_MSG, "").lower() == "true":
            raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, "a message in a batch cannot be part of a transaction")
        for name in properties:
            if name in _NEVER_IN_A_BATCH:
                raise RemotingError(ResponseCode.MESSAGE_ILLEGAL, f"a message in a batch cannot have {name}")

    def dead_letter(self, command: RemotingCommand, header: SendHeader) -> TopicConfig | None:
        """The dead-letter topic where a message that a consumer sends to its retry topic has used up its tries.

        None where it is to be tried again. Raises SUBSCRIPTION_GROUP_NOT_EXIST.
        """
        group = header.topic[len(RETRY_PREFIX) :]
        config = self._groups.find(group)
        if config is None:
            raise self._groups.missing(group)
        limit = config.retry_max_times
        if command.version >= V3_4_9 and header.max_reconsume_times is not None:
            limit = header.max_reconsume_times
        # a group that holds queue locks consumes in order: its messages must not come again later
        if (header.reconsume_times or 0) <= limit and not self._locks.any_live_lock(group):
            return None
        return self._topics.create_on_send_back(dlq_topic(group), 1, PERM_READ | PERM_WRITE)

    def place(self, properties: dict[str, str], topic: str, queue_id: int) -> tuple[str, int]:
        """Where a message is stored: its topic and queue, or the schedule topic when it has a delay level.

        Raises SYSTEM_ERROR for the timers' properties: there are no timers here.
        """
        level = delay_level(properties)
        if level > 0:
            for name in TIMER_NAMES:
                properties.pop(name, None)
            highest = len(self._configuration.section(MessageStoreConfig).delay_levels_ms) - 1
            return park(properties, topic, queue_id, min(level, highest))
        if PROPERTY_TIMER_OUT_MS not in properties:
            for name in TIMER_NAMES:
                if name in properties:
                    raise RemotingError(
                        ResponseCode.SYSTEM_ERROR,
                        f"the property {name} asks for a timer, and timers are not enabled: use a delay level (DELAY)",
                    )
        return topic, queue_id


def random_queue(config: TopicConfig) -> int:
    """A queue for a message whose producer leaves the choice to the broker."""
    return random.randrange(config.write_queue_nums) if config.write_queue_nums > 1 else 0  # noqa: S311 - spreads load


def properties_too_long(length: int) -> RemotingError:
    """MESSAGE_ILLEGAL for properties that no record can hold; found before they are looked through."""
    return RemotingError(
        ResponseCode.MESSAGE_ILLEGAL, f"the properties have {length} characters, a record holds {MAX_PROPERTIES} bytes"
    )


def illegal_queue(header: SendHeader, config: TopicConfig) -> RemotingError:
    """INVALID_PARAMETER for a queue id that the topic does not have."""
    return RemotingError(
        ResponseCode.INVALID_PARAMETER,
        f"the topic {config.topic_name} has no queue {header.queue_id}: it has {config.write_queue_nums} to write"
        f" and {config.read_queue_nums} to read",
    )
