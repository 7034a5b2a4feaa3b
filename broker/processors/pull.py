"""Pulling: PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361), with long polling.

What is found goes out as views into the commit log's mapped files; a body is never copied here. Cold data is read by a
coroutine. Source: RocketMQ's PullMessageProcessor and DefaultPullMessageResultHandler.
"""

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from broker.config import BrokerConfig
from broker.filters.tag import SubscriptionError, TagFilter, filter_for, is_tag_type, parse_tags
from broker.processors.common import invalid, let_go, no_such_group, no_such_topic
from broker.services.consumers import BROADCASTING
from broker.services.long_polling import PullRequest
from broker.store.types import GetMessageResult, GetMessageStatus
from protocol.body import PERM_READ, SubscriptionData, SubscriptionGroupConfig, TopicConfig
from protocol.codes import VERSION, RequestCode, ResponseCode
from protocol.command import LANGUAGE, RemotingCommand
from protocol.errors import RemotingError
from protocol.frame import encode_head
from protocol.headers.pull import PullMessageRequestHeader
from protocol.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND
from remoting.connection import Connection
from remoting.handlers import HELD, HandlerTable, Outcome
from remoting.out_buffer import SMALL

if TYPE_CHECKING:
    from broker.parts import BrokerParts

BROKER_FORBIDDEN: Final = 1
GROUP_FORBIDDEN: Final = 2
TOPIC_FORBIDDEN: Final = 3
BROADCASTING_FORBIDDEN: Final = 4
SUBSCRIPTION_FORBIDDEN: Final = 5

_FILTERS_KEPT: Final = 10_000
_NOT_FOUND: Final = int(ResponseCode.PULL_NOT_FOUND)
_MOVED: Final = int(ResponseCode.PULL_OFFSET_MOVED)
_LONGEST_CACHED: Final = 256
_FEW: Final = 2
_MAX_BYTES: Final = 128 * 1024 * 1024
_pack_words: Final = struct.Struct(">II").pack
_TEMPLATE: Final = (
    '{"code":%d,"extFields":{"groupSysFlag":"%d","maxOffset":"%d","minOffset":"%d","nextBeginOffset":"%d",'
    f'"suggestWhichBrokerId":"0","topicSysFlag":"%d"}},"flag":1,"language":"{LANGUAGE}","opaque":%d,'
    f'"remark":"%s","serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
_BY_STATUS: Final = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.NO_MATCHED_LOGIC_QUEUE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_RESET: ResponseCode.PULL_OFFSET_MOVED,
}
_CODES: Final = tuple(int(_BY_STATUS[status]) for status in GetMessageStatus)
_NAMES: Final = tuple(status.name.encode() for status in GetMessageStatus)
_EMPTY_QUEUE: Final = (GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, GetMessageStatus.NO_MESSAGE_IN_QUEUE)


class PullForbiddenError(RemotingError):
    """NO_PERMISSION with RocketMQ's number of the reason in the reply's header."""

    def __init__(self, forbidden_type: int, remark: str) -> None:
        super().__init__(ResponseCode.NO_PERMISSION, remark)
        self.forbidden_type = forbidden_type


def _parsed_filter(text: str | None) -> TagFilter | None:
    return filter_for(parse_tags("", text))


_cached_filter: Final = lru_cache(maxsize=4096)(_parsed_filter)


class PullMessageProcessor:
    """Checks a pull, asks the store, answers or holds the request until something comes."""

    def __init__(self, parts: "BrokerParts") -> None:
        self._configuration = parts.configuration
        self._topics = parts.topics.table
        self._find_group = parts.groups.find
        self._groups = parts.groups
        self._group_info = parts.consumers.group
        self._offsets = parts.offsets
        self._holds = parts.long_polling
        self._count = parts.stats.group_get
        self._store = parts.store
        self._filters: dict[tuple[str, str], tuple[SubscriptionData, TagFilter | None]] = {}

    def register(self, table: HandlerTable) -> None:
        """Take the codes of this family (the main port only: the VIP port serves no pulls)."""
        table.register(RequestCode.PULL_MESSAGE, self.pull)
        table.register(RequestCode.LITE_PULL_MESSAGE, self.pull)

    def again(self, request: PullRequest) -> None:
        """Serve a held pull: something arrived, or its time is over. It is not held a second time."""
        command = request.command
        try:
            outcome = self._pull(request.connection, command, request.header, first=False)
        except PullForbiddenError as error:
            outcome = _forbidden(command, error)
        except RemotingError as error:
            outcome = command.reply(error.code, error.remark)
        request.connection.settle(command, outcome)

    def pull(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """PULL_MESSAGE (11), LITE_PULL_MESSAGE (361)."""
        try:
            return self._pull(connection, command, command.header(PullMessageRequestHeader), first=True)
        except PullForbiddenError as error:
            return _forbidden(command, error)

    def _pull(
        self, connection: Connection, command: RemotingCommand, header: PullMessageRequestHeader, *, first: bool
    ) -> Outcome:
        group, topic = self._check(command, header)
        accept = self._filter(header, group)
        arguments = (
            header.topic,
            header.queue_id,
            header.queue_offset,
            header.max_msg_nums,
            _max_bytes(header),
            accept,
        )
        reset = self._offsets.take_reset(header.topic, header.consumer_group, header.queue_id)
        result = self._reset(header, reset) if reset is not None else self._store.get_message(*arguments)
        pull = _Pull(connection, command, header, topic.topic_sys_flag, group.group_sys_flag, accept, first)
        if result is None:
            return self._pull_cold(pull)
        return self._answer(pull, result)

    # checks, in RocketMQ's order

    def _check(
        self, command: RemotingCommand, header: PullMessageRequestHeader
    ) -> tuple[SubscriptionGroupConfig, TopicConfig]:
        config = self._configuration.section(BrokerConfig)
        if not config.broker_permission & PERM_READ:
            raise PullForbiddenError(BROKER_FORBIDDEN, "this broker hands out no messages (brokerPermission)")
        if command.code == RequestCode.LITE_PULL_MESSAGE and not config.lite_pull_message_enable:
            raise PullForbiddenError(BROKER_FORBIDDEN, "this broker serves no lite pulls (litePullMessageEnable)")
        group = self._find_group(header.consumer_group)
        if group is None:
            raise no_such_group(header.consumer_group)
        if not group.consume_enable:
            raise PullForbiddenError(
                GROUP_FORBIDDEN, f"the group {header.consumer_group} may not consume (consumeEnable)"
            )
        topic = self._topics.get(header.topic)
        if topic is None:
            raise no_such_topic(header.topic)
        if not topic.perm & PERM_READ:
            raise PullForbiddenError(TOPIC_FORBIDDEN, f"the topic {header.topic} hands out no messages (perm)")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise invalid(f"the topic {header.topic} has {topic.read_queue_nums} queues to read, no {header.queue_id}")
        return group, topic

    def _filter(self, header: PullMessageRequestHeader, group: SubscriptionGroupConfig) -> TagFilter | None:
        """What the pull lets through, by the subscription in the request or by that of the group's heartbeats."""
        if header.sys_flag & PULL_SUBSCRIPTION:
            if not is_tag_type(header.expression_type):
                raise _no_such_filter(header.expression_type)
            text = header.subscription
            try:
                if text is None or len(text) <= _LONGEST_CACHED:
                    return _cached_filter(text)
                return _parsed_filter(text)
            except SubscriptionError as error:
                raise RemotingError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from None
        subscription = self._subscription(header, group)
        key = (header.consumer_group, header.topic)
        known = self._filters.get(key)
        if known is not None and known[0] is subscription:
            return known[1]
        if not is_tag_type(subscription.expression_type):
            raise _no_such_filter(subscription.expression_type)
        if len(self._filters) >= _FILTERS_KEPT:
            self._filters.clear()
        accept = filter_for(subscription)
        self._filters[key] = (subscription, accept)
        return accept

    def _subscription(self, header: PullMessageRequestHeader, group: SubscriptionGroupConfig) -> SubscriptionData:
        name, topic = header.consumer_group, header.topic
        info = self._group_info(name)
        if info is None:
            raise RemotingError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"no heartbeat of the consumer group {name} has come yet"
            )
        if not group.consume_broadcast_enable and info.message_model == BROADCASTING:
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
                ResponseCode.SUBSCRIPTION_NOT_LATEST, f"the subscription of {name} to {topic} is an older one"
            )
        return subscription

    # answers

    def _reset(self, header: PullMessageRequestHeader, offset: int) -> GetMessageResult:
        return GetMessageResult(
            GetMessageStatus.OFFSET_RESET,
            offset,
            self._store.min_offset(header.topic, header.queue_id),
            self._store.max_offset(header.topic, header.queue_id),
        )

    async def _pull_cold(self, pull: "_Pull") -> Any:
        header = pull.header
        result = await self._store.get_message_cold(
            header.topic, header.queue_id, header.queue_offset, header.max_msg_nums, _max_bytes(header), pull.accept
        )
        return self._answer(pull, result)

    def _answer(self, pull: "_Pull", result: GetMessageResult) -> Outcome:
        header = pull.header
        status = result.status
        code = _CODES[status]
        if status in _EMPTY_QUEUE and header.queue_offset != 0:
            code = _MOVED
        if pull.first:
            if code == _NOT_FOUND and header.sys_flag & PULL_SUSPEND and self._hold(pull):
                self._commit(pull)
                return HELD
            if status is not GetMessageStatus.OFFSET_RESET:
                self._commit(pull)
        self._offsets.commit_pull(header.consumer_group, header.topic, header.queue_id, result.next_begin_offset)
        if status is GetMessageStatus.FOUND:
            return self._found(pull, result)
        result.release()
        return _head(pull, code, result, 0)

    def _hold(self, pull: "_Pull") -> bool:
        header = pull.header
        let_go(pull.command)
        request = PullRequest(
            pull.connection,
            pull.command,
            header,
            header.topic,
            header.queue_id,
            header.queue_offset,
            pull.accept,
        )
        return self._holds.hold(request, header.suspend_timeout_millis)

    def _commit(self, pull: "_Pull") -> None:
        header = pull.header
        if header.sys_flag & PULL_COMMIT_OFFSET:
            self._offsets.commit(
                pull.connection.peer_text, header.consumer_group, header.topic, header.queue_id, header.commit_offset
            )

    def _found(self, pull: "_Pull", result: GetMessageResult) -> Outcome:
        header = pull.header
        if pull.command.flag & 2:
            result.release()
            return None
        self._count(header.consumer_group, header.topic, result.count, result.size)
        head = _head(pull, 0, result, result.size)
        if len(result.buffers) > _FEW and result.size < len(result.buffers) * SMALL:
            # one copy of many small records costs less than so many buffers do on their way to the socket
            reply = b"".join([head, *result.buffers])
            result.buffers.clear()
            result.release()
            return reply
        pull.connection.write_owned([head, *result.buffers], result.release)
        return None


class _Pull(NamedTuple):
    """A pull that has passed the checks."""

    connection: Connection
    command: RemotingCommand
    header: PullMessageRequestHeader
    topic_sys_flag: int
    group_sys_flag: int
    accept: TagFilter | None
    first: bool


def _head(pull: _Pull, code: int, result: GetMessageResult, body_size: int) -> bytes:
    """Length word and header of the reply; the body is sent behind it."""
    command = pull.command
    if command.encoding:
        ext = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(result.next_begin_offset),
            "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset),
            "topicSysFlag": str(pull.topic_sys_flag),
            "groupSysFlag": str(pull.group_sys_flag),
        }
        return encode_head(command.reply(code, result.status.name, ext), body_size)
    header = _TEMPLATE % (
        code,
        pull.group_sys_flag,
        result.max_offset,
        result.min_offset,
        result.next_begin_offset,
        pull.topic_sys_flag,
        command.opaque,
        _NAMES[result.status],
    )
    size = len(header)
    return _pack_words(size + 4 + body_size, size) + header


def _max_bytes(header: PullMessageRequestHeader) -> int:
    """What the client takes at most; the store has limits of its own."""
    wanted = header.max_msg_bytes
    return wanted if wanted and 0 < wanted < _MAX_BYTES else _MAX_BYTES


def _forbidden(command: RemotingCommand, error: PullForbiddenError) -> RemotingCommand:
    return command.reply(error.code, error.remark, {"forbiddenType": str(error.forbidden_type)})


def _no_such_filter(expression_type: str | None) -> RemotingError:
    return RemotingError(
        ResponseCode.SYSTEM_ERROR,
        f"the broker does not support consumers that filter by {expression_type}: subscribe by tags",
    )
