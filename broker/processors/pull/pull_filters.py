"""The filter of a pull: from the subscription in the request, or from the one that the group's heartbeats carry.

Source: RocketMQ's PullMessageProcessor, whose checks these are, in its order.
"""

from functools import lru_cache
from typing import Final

from trimq.broker.config import BrokerConfig
from trimq.broker.filters.sql import NOTHING, Compiled, RetrySqlFilter
from trimq.broker.filters.tag import SubscriptionError, TagFilter, filter_for, is_tag_type, parse_tags
from trimq.broker.processors.pull.pull_reply import BROADCASTING_FORBIDDEN, SUBSCRIPTION_FORBIDDEN, PullForbiddenError
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.consumers import BROADCASTING, ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.store.types import MessageFilter
from trimq.protocol.body import SubscriptionData
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.sysflag import PULL_SUBSCRIPTION
from trimq.protocol.topic_rules import RETRY_PREFIX
from trimq.remoting.config.configuration import Configuration

_MAX_FILTERS: Final = 10_000
_LONGEST_CACHED: Final = 256
"""Longer subscription texts are parsed at each pull, so that clients cannot fill memory with the cache."""


def _parsed_filter(text: str | None) -> TagFilter | None:
    return filter_for(parse_tags("", text))


_cached_filter: Final = lru_cache(maxsize=4096)(_parsed_filter)


class NotCompiledError(RemotingError):
    """Expressions that the pull needs have to be compiled in a thread first (ConsumerFilterManager.prepare).

    A pull is compiled once. It is answered with this error if others are needed then: too many of the client's wait, or
    a heartbeat has changed them meanwhile.
    """

    def __init__(self, texts: list[str]) -> None:
        super().__init__(ResponseCode.SYSTEM_BUSY, "the expressions of this pull have to be compiled first: try again")
        self.texts = texts


class PullFilters:
    """Finds the filters of pulls. One for a group and topic is made once for each change of the subscription."""

    def __init__(
        self,
        configuration: Configuration,
        groups: SubscriptionGroupManager,
        consumers: ConsumerManager,
        expressions: ConsumerFilterManager,
    ) -> None:
        self._section = configuration.section
        self._groups = groups
        self._find_group = groups.find
        self._group_info = consumers.group
        self._expressions = expressions
        self.prepare = expressions.prepare
        self._filters: dict[tuple[str, str], tuple[SubscriptionData, TagFilter | None]] = {}

    def filter_of(self, header: PullMessageRequestHeader, compiled: Compiled = NOTHING) -> MessageFilter | None:
        """The filter; None if all messages are wanted. ``compiled``: what was prepared for the pull.

        Raises RemotingError, NotCompiledError for an expression.
        """
        if header.sys_flag & PULL_SUBSCRIPTION:
            return self._from_request(header, compiled)
        subscription = self._subscription(header)
        key = (header.consumer_group, header.topic)
        known = self._filters.get(key)
        if known is not None and known[0] is subscription:  # a heartbeat with a new version replaces the object
            return known[1]
        if not is_tag_type(subscription.expression_type):
            return self._registered(header, subscription, compiled)
        if len(self._filters) >= _MAX_FILTERS:
            self._filters.clear()
        accept = filter_for(subscription)
        self._filters[key] = (subscription, accept)
        return accept

    # tags and expressions

    def _from_request(self, header: PullMessageRequestHeader, compiled: Compiled) -> MessageFilter | None:
        text = header.subscription
        try:
            if is_tag_type(header.expression_type):
                if text is None or len(text) <= _LONGEST_CACHED:
                    return _cached_filter(text)
                return _parsed_filter(text)
            if text:  # an expression that is missing is refused as such, whether or not others would be served
                check_property_filter(self._section(BrokerConfig), header.expression_type)
                is_slow = text not in compiled and self._expressions.is_slow(header.expression_type, text)
                self._check_compiled(header, [text] if is_slow else [], compiled)
            accept = self._expressions.filter(header.expression_type, text, compiled)
        except SubscriptionError as error:
            raise RemotingError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
        return self._of_retries(header, compiled) or accept

    def _registered(
        self, header: PullMessageRequestHeader, subscription: SubscriptionData, compiled: Compiled
    ) -> MessageFilter:
        """The filter that a group's heartbeats have registered. RocketMQ looks for it before it checks the switch."""
        group, topic = header.consumer_group, header.topic
        entry = self._expressions.get(topic, group)
        if entry is not None:
            is_slow = entry.expression not in compiled and self._expressions.is_not_compiled(entry)
            self._check_compiled(header, [entry.expression] if is_slow else [], compiled)
        accept = None if entry is None else self._expressions.compiled(entry, compiled)
        if entry is None or accept is None:
            raise RemotingError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"the broker has no valid expression of the consumer group {group} for the topic {topic}: "
                "the one in its last heartbeat may be wrong (CHECK_CLIENT_CONFIG gives the reason)",
            )
        if entry.client_version < header.sub_version:
            raise RemotingError(
                ResponseCode.FILTER_DATA_NOT_LATEST,
                f"the broker has an older expression of the consumer group {group} for {topic} than this pull",
            )
        check_property_filter(self._section(BrokerConfig), subscription.expression_type)
        return self._of_retries(header, compiled) or accept

    def _of_retries(self, header: PullMessageRequestHeader, compiled: Compiled) -> RetrySqlFilter | None:
        """For a retry topic under filterSupportRetry: the filter that looks at each message's real topic."""
        group = self._retrying_group(header)
        return None if group is None else self._expressions.retry_filter(group, compiled)

    def _retrying_group(self, header: PullMessageRequestHeader) -> str | None:
        topic = header.topic
        if not topic.startswith(RETRY_PREFIX) or not self._section(BrokerConfig).filter_support_retry:
            return None
        return topic.removeprefix(RETRY_PREFIX)

    def _check_compiled(self, header: PullMessageRequestHeader, slow: list[str], compiled: Compiled) -> None:
        """Raises NotCompiledError for ``slow``, together with what the filter of a retry topic needs."""
        group = self._retrying_group(header)
        if group is not None:
            slow = [*slow, *self._expressions.not_compiled(group, compiled)]
        if slow:
            raise NotCompiledError(slow)

    # subscriptions

    def _subscription(self, header: PullMessageRequestHeader) -> SubscriptionData:
        name, topic = header.consumer_group, header.topic
        info = self._group_info(name)
        if info is None:
            raise RemotingError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer group {name} has not sent a heartbeat yet"
            )
        group = self._find_group(name)
        if info.message_model == BROADCASTING and (group is None or not group.consume_broadcast_enable):
            raise PullForbiddenError(BROADCASTING_FORBIDDEN, f"the group {name} may not broadcast")
        if not self._groups.may_read(name, topic):
            raise PullForbiddenError(SUBSCRIPTION_FORBIDDEN, f"the group {name} may not read the topic {topic}")
        subscription = info.subscriptions.get(topic)
        if subscription is None:
            raise RemotingError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"the last heartbeat of the consumer group {name} does not subscribe to {topic}:"
                " all members of a group have to subscribe to the same topics",
            )
        if subscription.sub_version < header.sub_version:
            raise RemotingError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"the last heartbeat of the consumer group {name} has an older subscription to {topic} than this pull",
            )
        return subscription


def check_property_filter(config: BrokerConfig, expression_type: str | None) -> None:
    """Raises RemotingError unless the broker filters by expressions."""
    if not config.enable_property_filter:
        raise RemotingError(
            ResponseCode.SYSTEM_ERROR,
            f"the broker does not support consumers that filter by {expression_type}: "
            "use tags, or set enablePropertyFilter=true in the broker's configuration",
        )
