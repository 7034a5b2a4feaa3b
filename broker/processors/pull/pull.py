"""Pulls: PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361), with long polling.

This is the full path, which knows every case. Small replies are copied into one buffer; larger ones are sent as views
of the commit log's mapped files. Data that is not in memory is read by a coroutine.

Source: RocketMQ's PullMessageProcessor and DefaultPullMessageResultHandler.
"""

from typing import Any, Final

from msgspec.structs import replace

from trimq.broker.config import BrokerConfig
from trimq.broker.filters.sql import NOTHING, Compiled
from trimq.broker.filters.tag import ALL, TAG
from trimq.broker.processors.common import check_commit_offset, invalid, no_such_topic
from trimq.broker.processors.pull.back_to_master import back_to_master
from trimq.broker.processors.pull.pull_fast_path import COPIED, PullFastPath
from trimq.broker.processors.pull.pull_filters import NotCompiledError, PullFilters
from trimq.broker.processors.pull.pull_reply import (
    BROKER_FORBIDDEN,
    GROUP_FORBIDDEN,
    MOVED,
    NOT_FOUND,
    TOPIC_FORBIDDEN,
    PullForbiddenError,
    ask_again,
    code_of,
    forbidden,
    pull_head,
)
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.long_polling import PullRequest, PullRequestHoldService
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, MessageFilter
from trimq.protocol.body import PERM_READ
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Gate
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import HELD, Outcome
from trimq.remoting.server.out_buffer import SMALL

_FEW: Final = 2
_MAX_BYTES: Final = 128 * 1024 * 1024
_LITE: Final = int(RequestCode.LITE_PULL_MESSAGE)
_FOUND: Final = GetMessageStatus.FOUND


class PullMessageProcessor:
    """Checks a pull and reads the store, then replies or holds the request until a message arrives."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        filters: PullFilters,
        offsets: ConsumerOffsetManager,
        long_polling: PullRequestHoldService,
        stats: BrokerStats,
        store: MessageStore,
    ) -> None:
        self._section = configuration.section
        self._topics = topics.table
        self._find_group = groups.find
        self._groups = groups
        self._filter = filters.filter_of
        self._prepare = filters.prepare
        self._offsets = offsets
        self._commit_pull = offsets.commit_pull
        self._holds = long_polling
        self._count = stats.group_get
        self._store = store
        self._fast_path = PullFastPath(
            topics=topics, groups=groups, offsets=offsets, stats=stats, store=store, filter_of=filters.filter_of
        )
        self.prepare = self._fast_path.prepare
        self._handlers: HandlerTable | None = None
        self._terms = Gate().terms
        configuration.listeners.append(lambda _keys: self._register())

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family (main port only: the VIP port serves no pulls)."""
        self._handlers = table
        self._terms = table.gate.terms
        self._register()

    def _register(self) -> None:
        table = self._handlers
        if table is None:
            return
        config = self._section(BrokerConfig)
        fast = self._fast_path.serve if config.broker_permission & PERM_READ else None
        lite = fast if config.lite_pull_message_enable else None
        header = PullMessageRequestHeader
        table.register(RequestCode.PULL_MESSAGE, self.pull, header=header, fast=fast)
        table.register(RequestCode.LITE_PULL_MESSAGE, self.pull, header=header, fast=lite)

    def again(self, request: PullRequest) -> None:
        """Serve a held pull: a message has arrived, or its time is over. It is not held a second time.

        If the gate's terms are not those under which the pull was let through, the features have to check it again.
        That is impossible without the request's buffers, which are dropped: the client is asked to send it again.
        """
        connection, command = request.connection, request.command
        if self._terms(connection, command.code) != request.terms:
            connection.settle(command, ask_again(command, request.offset))
            return
        try:
            outcome = self._pull(connection, command, self._without_checked(request), None)
        except PullForbiddenError as error:
            outcome = forbidden(command, error)
        except RemotingError as error:
            outcome = command.reply(error.code, error.remark)
        connection.settle(command, outcome)

    def _without_checked(self, request: PullRequest) -> PullMessageRequestHeader:
        """The header of a held pull, from the first message on that has not been evaluated for it while it was held.

        Where few messages fulfil an expression, it would otherwise take many pulls to evaluate all of them again.
        """
        header = request.header
        if request.checked <= request.offset:
            return header
        try:
            is_same = self._filter(header) is request.filter
        except RemotingError:
            is_same = False
        return replace(header, queue_offset=request.checked) if is_same else header

    def pull(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """PULL_MESSAGE (11), LITE_PULL_MESSAGE (361)."""
        try:
            terms = self._terms(connection, command.code)
            return self._pull(connection, command, command.header(PullMessageRequestHeader), terms)
        except PullForbiddenError as error:
            return forbidden(command, error)

    def _pull(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        terms: object,
        compiled: Compiled | None = None,
    ) -> Outcome:
        """Serve a pull. ``terms`` are the gate's, stored with a held pull; None for a pull that was held already.

        ``compiled``: the expressions that were compiled for it, None if that was not necessary until now.
        """
        # A held pull is checked again: topic, group and permissions may have changed while it waited.
        flags = self._check(command, header)
        topic, group, queue_id = header.topic, header.consumer_group, header.queue_id
        if header.sys_flag & PULL_SUBSCRIPTION and header.subscription == ALL and header.expression_type == TAG:
            accept = None
        else:
            try:
                accept = self._filter(header, compiled or NOTHING)
            except NotCompiledError as error:
                if compiled is not None:
                    raise
                return self._pull_compiled(connection, command, header, terms, error.texts)
        # After all checks: a reset is returned once, and a refused pull must not use it up.
        if self._offsets.reset_offset_table:
            reset = self._offsets.take_reset(topic, group, queue_id)
            if reset is not None:
                return self._answer(connection, command, header, flags, accept, self._reset(header, reset), terms)
        limit = header.max_msg_bytes
        if not limit or not 0 < limit < _MAX_BYTES:
            limit = _MAX_BYTES
        result = self._store.get_message(
            topic, queue_id, header.queue_offset, header.max_msg_nums, limit, accept, group
        )
        if result is None:
            return self._pull_cold(connection, command, header, flags, accept, limit, terms)
        if result.status is not _FOUND:
            return self._answer(connection, command, header, flags, accept, result, terms)
        # A held pull committed its offset when it arrived; by now the group may have committed a later one.
        if terms is not None and header.sys_flag & PULL_COMMIT_OFFSET:
            self._commit(connection, header)
        return self._found(connection, command, header, flags, result)

    # checks, in RocketMQ's order

    def _check(self, command: RemotingCommand, header: PullMessageRequestHeader) -> tuple[int, int]:
        """Check that the group may pull from the queue. Returns the sysFlags of topic and group, for the reply.

        Raises RemotingError, and PullForbiddenError for missing permissions.
        """
        config = self._section(BrokerConfig)
        if not config.broker_permission & PERM_READ:
            raise PullForbiddenError(BROKER_FORBIDDEN, "this broker does not permit reading (brokerPermission)")
        if command.code == _LITE and not config.lite_pull_message_enable:
            raise PullForbiddenError(BROKER_FORBIDDEN, "this broker serves no lite pulls (litePullMessageEnable)")
        group = self._find_group(header.consumer_group)
        if group is None:
            raise self._groups.missing(header.consumer_group)
        if not group.consume_enable:
            raise PullForbiddenError(
                GROUP_FORBIDDEN, f"the group {header.consumer_group} may not consume (consumeEnable)"
            )
        topic = self._topics.get(header.topic)
        if topic is None:
            raise no_such_topic(header.topic)
        if not topic.perm & PERM_READ:
            raise PullForbiddenError(TOPIC_FORBIDDEN, f"the topic {header.topic} does not permit reading (perm)")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise invalid(
                f"the topic {header.topic} has {topic.read_queue_nums} read queues, and no queue {header.queue_id}"
            )
        if header.sys_flag & PULL_COMMIT_OFFSET:
            self._check_commit(header)
        return topic.topic_sys_flag, group.group_sys_flag

    def _check_commit(self, header: PullMessageRequestHeader) -> None:
        """Check the commit that comes with a pull. A commit that UPDATE_CONSUMER_OFFSET refuses fails the pull too."""
        try:
            check_commit_offset(header.commit_offset)
            self._offsets.check_group(header.consumer_group)
        except RemotingError:
            self._offsets.refused += 1
            raise

    # replies

    def _reset(self, header: PullMessageRequestHeader, offset: int) -> GetMessageResult:
        return GetMessageResult(
            GetMessageStatus.OFFSET_RESET,
            offset,
            self._store.min_offset(header.topic, header.queue_id),
            self._store.max_offset(header.topic, header.queue_id),
        )

    async def _pull_compiled(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        terms: object,
        texts: list[str],
    ) -> Any:
        """Serve a pull after its expressions were compiled."""
        compiled = await self._prepare(texts, connection)
        try:
            return self._pull(connection, command, header, terms, compiled)
        except PullForbiddenError as error:
            return forbidden(command, error)

    async def _pull_cold(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        flags: tuple[int, int],
        accept: MessageFilter | None,
        limit: int,
        terms: object,
    ) -> Any:
        result = await self._store.get_message_cold(
            header.topic,
            header.queue_id,
            header.queue_offset,
            header.max_msg_nums,
            limit,
            accept,
            header.consumer_group,
        )
        return self._answer(connection, command, header, flags, accept, result, terms)

    def _answer(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        flags: tuple[int, int],
        accept: MessageFilter | None,
        result: GetMessageResult,
        terms: object,
    ) -> Outcome:
        """Reply with the store's result, or hold the pull."""
        status = result.status
        code = code_of(status, header.queue_offset)
        if terms is not None:
            # No await between the store's look and this: a message dispatched in between would not wake the pull.
            held = (
                code == NOT_FOUND
                and header.sys_flag & PULL_SUSPEND
                and self._hold(connection, command, header, accept, terms)
            )
            if header.sys_flag & PULL_COMMIT_OFFSET and status is not GetMessageStatus.OFFSET_RESET:
                self._commit(connection, header)  # not after a reset, which the commit would undo
            if held:
                return HELD
        if status is _FOUND:
            return self._found(connection, command, header, flags, result)
        if code == MOVED and status is not GetMessageStatus.OFFSET_RESET and self._store.replication.is_slave:
            # The end of its queue is not that of the master's: a client would take it, and commit it there.
            result.release()
            return back_to_master(self._store, command, header)
        self._commit_pull(header.consumer_group, header.topic, header.queue_id, result.next_begin_offset)
        result.release()
        return pull_head(command, code, result, flags, 0)

    def _hold(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        accept: MessageFilter | None,
        terms: object,
    ) -> bool:
        command.drop_buffers()
        request = PullRequest(
            connection, command, header, header.topic, header.queue_id, header.queue_offset, accept, terms
        )
        return self._holds.hold(request, header.suspend_timeout_millis)

    def _suggested(self, group: str) -> int:
        """The broker for the next pull of a group that reads what has left memory: a slave, if slaves serve pulls."""
        if not self._store.replication.slaves_serve_pulls:
            return 0
        config = self._find_group(group)
        return config.which_broker_when_consume_slowly if config is not None else 0

    def _commit(self, connection: Connection, header: PullMessageRequestHeader) -> None:
        self._offsets.commit(
            connection.peer_text, header.consumer_group, header.topic, header.queue_id, header.commit_offset
        )

    def _found(
        self,
        connection: Connection,
        command: RemotingCommand,
        header: PullMessageRequestHeader,
        flags: tuple[int, int],
        result: GetMessageResult,
    ) -> Outcome:
        group, topic = header.consumer_group, header.topic
        self._commit_pull(group, topic, header.queue_id, result.next_begin_offset)
        if command.flag & 2:  # one-way: nothing is sent, so nothing is counted
            result.release()
            return None
        buffers, size = result.buffers, result.size
        self._count(group, topic, result.count, size)
        suggested = self._suggested(group) if result.suggest_slave else 0
        head = pull_head(command, 0, result, flags, size, suggested)
        if size <= COPIED or (len(buffers) > _FEW and size < len(buffers) * SMALL):
            reply = b"".join([head, *buffers])
            buffers.clear()
            result.release()
            return reply
        connection.reply_with([head, *buffers], result.release)
        return None
