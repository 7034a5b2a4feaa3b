"""Ends of transactions: END_TRANSACTION (37), RESUME_CHECK_HALF_MESSAGE (323).

Source: RocketMQ's EndTransactionProcessor, AdminBrokerProcessor.resumeCheckHalfMessage. Unlike there, a half is ended
once. The same end again is acknowledged and stores nothing, as long as the broker knows how the half was ended: for a
million halves after it, until the broker stops, and after a restart if the commit record was read back. Another end,
and one of a half of which only is known that it is ended, is refused: the producer must not take it for delivered.
So is a commit to a topic that was deleted: RocketMQ acknowledges it, and stores a message that no client can read.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import structlog

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.common import no_such_topic
from trimq.broker.processors.send.send_codes import refusal_code
from trimq.broker.services.stats import BrokerStats
from trimq.broker.services.topics import TopicConfigManager
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.services.transaction.resumed import ResumedHalves
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.auth.rules import PUB, UPDATE
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.transaction import EndTransactionRequestHeader, ResumeCheckHalfMessageRequestHeader
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.property_names import PROPERTY_CHECK_IMMUNITY_TIME
from trimq.protocol.record import RecordError, decode_head
from trimq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_NOT, TRANSACTION_ROLLBACK
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE, Half, NotAHalfError, decode_half, number_of
from trimq.remoting.auth.permit import OPEN, Permit
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, Outcome

_log = structlog.get_logger("broker.transaction")

_ENDS: Final = {TRANSACTION_COMMIT: State.COMMITTED, TRANSACTION_ROLLBACK: State.ROLLED_BACK}
_EXPIRED_TOPIC: Final = TRANS_CHECK_MAX_TIME_TOPIC.encode()
_HALF_TOPIC: Final = TRANS_HALF_TOPIC.encode()
_WORDS: Final = {
    State.COMMITTING: "is being committed",
    State.COMMITTED: "has been committed",
    State.ROLLED_BACK: "has been rolled back",
    State.EXPIRED: "was checked too often and is in TRANS_CHECK_MAX_TIME_TOPIC",
    State.MOVED: "has been stored again at a later offset, which stands for it now",
    State.UNREADABLE: "could not be read when the broker started: until the next start it is not ended nor resumed",
    State.ENDED: "is not pending any more: it was ended, or stored again at a later offset",
}


class EndTransactionProcessor:
    """Serves commits and rollbacks."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        transactions: TransactionalMessageService,
        store: MessageStore,
        topics: TopicConfigManager,
        stats: BrokerStats,
        clock: Clock,
        permit: Permit = OPEN,
    ) -> None:
        self._permit = permit
        self._configuration = configuration
        self.transactions = transactions
        self._resumed = ResumedHalves(store, HeldHalves(store, transactions.halves))
        self._store = store
        self._topics = topics
        self._count = stats.topic_put
        self._clock = clock
        self._log_budget = LogBudget(clock)

    def register(self, table: HandlerTable) -> None:
        """Register the handler of 323; that of 37 is registered by the sends, with which it is served together."""
        table.register(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume)

    def end(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """END_TRANSACTION (37). The state UNKNOWN (0) changes nothing: the producer is asked again.

        INVALID_PARAMETER for a commitOrRollback other than 8, 12 and 0 (RocketMQ does not answer it, nor 0),
        SYSTEM_ERROR for a half that is not there, does not match the request or has been ended otherwise,
        TOPIC_NOT_EXIST for a commit of a half whose topic was deleted,
        ILLEGAL_OPERATION for a half with CHECK_IMMUNITY_TIME_IN_SECONDS after that time, and the code of a send if the
        commit record cannot be stored.
        """
        header = command.header(EndTransactionRequestHeader)
        if header.commit_or_rollback not in _ENDS:
            if header.commit_or_rollback != TRANSACTION_NOT:
                raise RemotingError(
                    ResponseCode.INVALID_PARAMETER,
                    f"commitOrRollback is {header.commit_or_rollback}: expected {TRANSACTION_COMMIT} (commit),"
                    f" {TRANSACTION_ROLLBACK} (rollback) or {TRANSACTION_NOT} (unknown)",
                )
            return command.reply()
        data = self._store.look_message(header.commit_log_offset)
        units = self._store.look_units(TRANS_HALF_TOPIC, QUEUE, header.tran_state_table_offset, 1)
        if data is None or units is None or (not (len(data) and units) and self._is_unreadable(header)):
            return self._end_later(connection, command, header)
        return self._end(connection, command, _half_of(header, data, units), header)

    def _is_unreadable(self, header: EndTransactionRequestHeader) -> bool:
        """Whether the half was acknowledged, and cannot be read yet (transient store pool, WAIT=false)."""
        return (
            header.commit_log_offset < self._store.appended_offset
            and header.tran_state_table_offset >= self.transactions.halves.end
        )

    async def _end_later(
        self, connection: Connection, command: RemotingCommand, header: EndTransactionRequestHeader
    ) -> Any:
        if self._is_unreadable(header):
            await self.transactions.until_readable(header.tran_state_table_offset)
        try:
            units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, header.tran_state_table_offset, 1)
            data = await self._store.look_message_cold(header.commit_log_offset)  # last: it may be a view
        except OSError as error:
            raise _unreadable(header.commit_log_offset, error) from None
        return self._end(connection, command, _half_of(header, data, units), header)

    def _end(
        self, connection: Connection, command: RemotingCommand, half: Half, header: EndTransactionRequestHeader
    ) -> Outcome:
        # The gate has checked the topic in the header, which RocketMQ 4's producers do not send.
        self._permit.require_topic(connection, command, half.topic, PUB)
        self._check_time(header, half)
        wanted = _ENDS[header.commit_or_rollback]
        state = self.transactions.halves.end_of(half.origin, half.offset)
        if state is not State.PENDING:
            if state is wanted:
                return command.reply()
            self.transactions.counters.refused += 1
            raise _not_pending(half, state)
        if wanted is State.ROLLED_BACK:
            self.transactions.roll_back(half)
            return command.reply()
        self._check_topic(half)
        result = self.transactions.commit(half, partial(self._later, connection, command, half.topic))
        if result is None:
            command.drop_buffers()
            return None if command.is_oneway else DEFERRED
        return self.answer(command, half.topic, result)

    def _check_topic(self, half: Half) -> None:
        """Raises TOPIC_NOT_EXIST for a topic that was deleted: the half waits until it is created again."""
        if self._topics.get(half.topic) is None:
            if self._log_budget.allows():  # most producers do not wait for the reply
                _log.warning("half_message_without_topic", topic=half.topic, offset=half.offset, group=half.group)
            raise RemotingError(
                ResponseCode.TOPIC_NOT_EXIST,
                f"{no_such_topic(half.topic).remark}: the half message at {half.physical_offset} stays pending until"
                " the topic is created again (mqadmin updateTopic), it is rolled back, or it expires after"
                " transactionCheckMax checks",
            )

    def _later(self, connection: Connection, command: RemotingCommand, topic: str, result: PutMessageResult) -> None:
        answer = self.answer(command, topic, result)
        if not command.is_oneway:
            connection.complete(answer)

    def answer(self, command: RemotingCommand, topic: str, result: PutMessageResult) -> RemotingCommand:
        """Count a commit record, and make the reply to the request that asked for it."""
        if not result.ok:
            return command.reply(refusal_code(result.status), result.remark or result.status.name)
        self._count(topic, 1, result.size)
        return command.reply()

    def _check_time(self, header: EndTransactionRequestHeader, half: Half) -> None:
        """Raises ILLEGAL_OPERATION for a half with an immunity of its own after that time.

        From then on only an answer to a check may end it.
        """
        seconds = half.properties.get(PROPERTY_CHECK_IMMUNITY_TIME)
        if header.from_transaction_check or not seconds:
            return
        timeout = self._configuration.section(BrokerConfig).transaction_time_out
        immune = max(number_of(seconds, 0) * 1000, timeout)
        age = self._clock.wall_ms() - half.since
        if age > immune:
            raise RemotingError(
                ResponseCode.ILLEGAL_OPERATION,
                f"the half message was prepared {age} ms ago and may be ended without a check for {immune} ms"
                " (CHECK_IMMUNITY_TIME_IN_SECONDS, transactionTimeOut): wait for the check",
            )

    # resuming

    async def resume(self, connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """RESUME_CHECK_HALF_MESSAGE (323): count the checks of a half from 0 again.

        The message is a pending half, or one in TRANS_CHECK_MAX_TIME_TOPIC, of which a new half is made: once.
        SYSTEM_ERROR for any other message, and if the store does not take it.
        """
        header = command.header(ResumeCheckHalfMessageRequestHeader)
        try:
            _, physical_offset = decode_offset_id(header.msg_id)
        except ValueError as error:
            raise _mismatch(str(error)) from None
        half, expired = await self._resumable(physical_offset)
        self._permit.require_topic(connection, command, half.topic, UPDATE)
        if expired:
            result = await self._resume_expired(physical_offset)
        else:
            state = self.transactions.halves.state(half.offset)
            if state is not State.PENDING:
                raise _not_pending(half, state)
            _, result = await self.transactions.store_again(half, 0)
        if not result.ok:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, result.remark or result.status.name)
        return command.reply()

    async def _resumable(self, physical_offset: int) -> tuple[Half, bool]:
        """The half at a log offset, valid until the next await, and whether it has expired. Raises SYSTEM_ERROR."""
        try:
            half, expired = _half_or_expired(await self._store.look_message_cold(physical_offset), physical_offset)
            # A client may have sent a body with the bytes of such a record: the queue does not lead to it.
            topic = TRANS_CHECK_MAX_TIME_TOPIC if expired else TRANS_HALF_TOPIC
            units = await self._store.queue_units(topic, QUEUE, half.offset, 1)
            if not units or units[0][0] != physical_offset:
                raise _mismatch(f"message {half.offset} of {topic} is not at the commit log offset {physical_offset}")
            return _half_or_expired(await self._store.look_message_cold(physical_offset), physical_offset)
        except OSError as error:
            raise _unreadable(physical_offset, error) from None

    async def _resume_expired(self, physical_offset: int) -> PutMessageResult:
        async with self._resumed.lock:  # two at a time would make two halves
            try:
                found = await self._resumed.find(physical_offset)
            except OSError as error:
                raise _mismatch(
                    f"whether the message at {physical_offset} has been resumed is not known, because a half message"
                    f" behind it cannot be read: {error}"
                ) from None
            if found >= 0:
                raise _mismatch(f"the message at {physical_offset} has been resumed already, as half message {found}")
            half, _ = await self._resumable(physical_offset)
            result = await self.transactions.resume(half)
            if result.ok:
                self._resumed.note(physical_offset, result.queue_offset)
            return result


def _half_or_expired(data: Any, physical_offset: int) -> tuple[Half, bool]:
    """The half in a record, and whether it has expired. Raises SYSTEM_ERROR for any other record."""
    if not len(data):
        raise _mismatch(f"no message starts at the commit log offset {physical_offset}")
    try:
        head = decode_head(data)
        expired = bytes(data[head.topic_at : head.topic_end]) == _EXPIRED_TOPIC
        return decode_half(data, _EXPIRED_TOPIC if expired else _HALF_TOPIC), expired
    except (NotAHalfError, RecordError) as error:
        raise _mismatch(f"the message at {physical_offset} cannot be resumed: {error}") from None


def _half_of(header: EndTransactionRequestHeader, data: Any, units: Sequence[tuple[int, int, int]]) -> Half:
    """The half that a request names. Raises SYSTEM_ERROR if the record is another one.

    ``units``: the unit at its offset in the half queue, if there is one. A client may have sent a body with the bytes
    of a half, which may name any half and any topic: the queue leads to no such record. Nor is one believed that names
    an offset that the queue does not have: as the first record of it, it could name a half of another user.
    """
    if not len(data):
        raise _mismatch(f"no message starts at the commit log offset {header.commit_log_offset}")
    try:
        half = decode_half(data)
    except (NotAHalfError, RecordError) as error:
        raise _mismatch(
            f"there is no half message at the commit log offset {header.commit_log_offset}: {error}"
        ) from None
    if half.group != header.producer_group:
        raise _mismatch(f"the half message is of another producer group than {header.producer_group[:255]}")
    if half.offset != header.tran_state_table_offset:
        raise _mismatch(
            f"the half message has the queue offset {half.offset}, the request {header.tran_state_table_offset}"
        )
    if not units:
        raise _mismatch(f"the half message {half.offset} is not in its queue")
    if units[0][0] != header.commit_log_offset:
        raise _mismatch(
            f"the half message {half.offset} is at the commit log offset {units[0][0]}, not {header.commit_log_offset}"
        )
    return half


def _not_pending(half: Half, state: State | None) -> RemotingError:
    word = "cannot be read yet" if state is None else _WORDS[state]
    return _mismatch(f"the half message at {half.physical_offset} {word}")


def _unreadable(physical_offset: int, error: OSError) -> RemotingError:
    return _mismatch(f"the message at {physical_offset} cannot be read: {error}")


def _mismatch(text: str) -> RemotingError:
    return RemotingError(ResponseCode.SYSTEM_ERROR, text)
