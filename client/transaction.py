"""TransactionProducer: messages that consumers see only if the program's own transaction succeeds.

The broker first stores the message where consumers do not see it. The program then does its work and commits or rolls
back. If the broker receives neither, it asks the producer, whose ``check`` answers from the program's durable state
(RocketMQ's TransactionMQProducer).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from inspect import isawaitable
from typing import TypeAlias

from trimq.client.compression import Compression
from trimq.client.core import Client, ClientOptions, Push
from trimq.client.decode import split_messages
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.interceptors import EndTransactionContext, Interceptor, call_all
from trimq.client.message import Message, MessageQueue, ReceivedMessage, SendReceipt
from trimq.client.producer import Producer
from trimq.client.sending import Prepared
from trimq.protocol import sysflag
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.transaction import CheckTransactionStateRequestHeader, EndTransactionRequestHeader
from trimq.protocol.message_id import decode_offset_id
from trimq.protocol.property_names import (
    PROPERTY_CHECK_IMMUNITY_TIME,
    PROPERTY_PGROUP,
    PROPERTY_TRAN_MSG,
)
from trimq.remoting.client.client_log import StandardLog

_log = StandardLog("trimq.client.transaction")


class TransactionState(Enum):
    """The result of a transaction. After UNKNOWN the broker asks again later.

    >>> TransactionState.COMMIT.value
    8
    """

    COMMIT = sysflag.TRANSACTION_COMMIT
    ROLLBACK = sysflag.TRANSACTION_ROLLBACK
    UNKNOWN = sysflag.TRANSACTION_NOT


Check: TypeAlias = Callable[[ReceivedMessage], "TransactionState | Awaitable[TransactionState]"]
"""Returns the state of a prepared message's transaction; a function or a coroutine function."""


class Transaction:
    """A prepared message. ``receipt`` is that of its send; the block may set ``state`` to choose the result.

    >>> async def example(producer: "TransactionProducer", message: Message) -> None:
    ...     async with producer.transaction(message) as transaction:
    ...         transaction.state = TransactionState.UNKNOWN  # the broker will ask
    """

    def __init__(self, message: Message, receipt: SendReceipt) -> None:
        self.message = message
        self.receipt = receipt
        self.state = TransactionState.COMMIT


class TransactionProducer(Producer):
    """A producer of transactional messages.

    The broker asks for the state of a transaction if it has received neither commit nor rollback, for example because
    the program was killed; it may ask any producer of the group. ``check`` is then called with the prepared message and
    returns the state. It must decide from the program's durable state, such as its database, not from memory. An
    exception in it is logged and counts as UNKNOWN. The other arguments are those of Producer.

    >>> def check(message: ReceivedMessage) -> TransactionState:
    ...     return TransactionState.COMMIT if message.keys else TransactionState.ROLLBACK
    >>> async def example(namesrv: str) -> None:
    ...     async with TransactionProducer("orders", check, namesrv=namesrv) as producer:
    ...         async with producer.transaction(Message("Orders", b"1 book", keys="o-1")):
    ...             ...  # the program's own work: an exception rolls back
    """

    def __init__(  # noqa: PLR0913 - settings, each by keyword
        self,
        group: str,
        check: Check,
        *,
        namesrv: str | Iterable[str] | None = None,
        client: Client | None = None,
        options: ClientOptions | None = None,
        retries: int = 2,
        send_timeout: float = 3.0,
        compression: Compression | None = "zlib",
        compress_over: int = 4096,
        interceptors: Sequence[Interceptor] = (),
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
    ) -> None:
        super().__init__(
            group,
            namesrv=namesrv,
            client=client,
            options=options,
            retries=retries,
            send_timeout=send_timeout,
            compression=compression,
            compress_over=compress_over,
            interceptors=interceptors,
            enable_msg_trace=enable_msg_trace,
            customized_trace_topic=customized_trace_topic,
        )
        self._check = check
        self._after_end = [hook.after_end_transaction for hook in self._interceptors]

    def pushes(self) -> dict[int, Push]:
        """The handlers of a producer, and the one for a broker's transaction checks."""
        return {**super().pushes(), RequestCode.CHECK_TRANSACTION_STATE: self._asked}

    @asynccontextmanager
    async def transaction(
        self, message: Message, *, check_immunity_time_in_seconds: int | None = None
    ) -> AsyncIterator[Transaction]:
        """Prepares ``message`` and runs the block. At its end commits; after an exception rolls back and re-raises it.

        After a cancelled block, or one that sets ``state`` to UNKNOWN, the broker asks ``check``. If the commit or
        rollback does not reach the broker, that is logged and the broker asks too. Raises the same errors as ``send``,
        before the block runs, and UsageError for a delayed message.

        ``check_immunity_time_in_seconds``: the broker does not ask before this time has passed. It then refuses a
        commit or rollback of the block as too late, and asks. Default: the broker's transactionTimeOut, after which it
        still accepts them.

        >>> async def example(producer: TransactionProducer) -> None:
        ...     async with producer.transaction(Message("Orders", b"1 book")) as transaction:
        ...         print(transaction.receipt.transaction_id)
        """
        if message.is_delayed:
            raise UsageError("a transactional message cannot be delayed: brokers would lose it")
        await self._greet(message.topic)  # before the send: see there
        marks = {PROPERTY_TRAN_MSG: "true", PROPERTY_PGROUP: self.group}
        if check_immunity_time_in_seconds is not None:
            if check_immunity_time_in_seconds < 0:
                raise UsageError(f"check_immunity_time_in_seconds is {check_immunity_time_in_seconds}, at least 0")
            marks[PROPERTY_CHECK_IMMUNITY_TIME] = str(check_immunity_time_in_seconds)
        message.system_properties = marks
        try:
            receipt = await self.send(message)
        finally:
            message.system_properties = {}
        transaction = Transaction(message, receipt)
        try:
            yield transaction
        except Exception:  # not BaseException: a cancellation does not say whether the program's work took effect
            await self._end(transaction, TransactionState.ROLLBACK)
            raise
        await self._end(transaction, transaction.state)

    async def _greet(self, topic: str) -> None:
        """Sends a heartbeat to the topic's masters that have none yet.

        A broker checks a transaction over the connection of a heartbeat, so it has to know this producer before it
        stores the prepared message.
        """
        route = await self._route(topic)
        for name in route.brokers:
            address = route.master(name)
            if address is not None and not self.client.has_greeted(address):
                await self.client.heartbeat(address)

    async def deliver(
        self,
        prepared: Prepared,
        queue: MessageQueue | None,
        messages: Sequence[Message],
        context: object = None,
    ) -> list[SendReceipt]:
        """As ``Producer.deliver``; prepared messages are marked in their sysFlag."""
        if any(PROPERTY_TRAN_MSG in message.system_properties for message in messages):
            prepared = prepared._replace(sys_flag=prepared.sys_flag | sysflag.TRANSACTION_PREPARED)
        return await super().deliver(prepared, queue, messages, context)  # type: ignore[arg-type]

    async def _end(self, transaction: Transaction, state: TransactionState) -> None:
        """Sends commit, rollback or unknown to the broker. A failure is logged: the broker then asks by itself."""
        receipt = transaction.receipt
        context = EndTransactionContext(
            self.group,
            transaction.message,
            receipt.message_id,
            state.value,
            queue=receipt.queue,
            transaction_id=receipt.transaction_id,
        )
        try:
            route = await self.client.routes.get(receipt.queue.topic)
            address = await self.client.master(route, receipt.queue.broker_name)
            context.address = address
            header = EndTransactionRequestHeader(
                topic=receipt.queue.topic,
                producer_group=self.group,
                tran_state_table_offset=receipt.queue_offset,
                commit_log_offset=decode_offset_id(receipt.offset_message_id)[1],
                commit_or_rollback=state.value,
                msg_id=receipt.message_id,
                transaction_id=receipt.transaction_id,
                from_transaction_check=False,
            )
            if state is TransactionState.UNKNOWN:
                await self.client.oneway(address, RequestCode.END_TRANSACTION, header)
            else:
                await self.client.request(address, RequestCode.END_TRANSACTION, header)
        except RocketMQError as error:
            context.error = error
            self.client.outages.note("ending a transaction failed; the broker will ask", error, group=self.group)
        except BaseException as error:
            context.error = error
            raise
        finally:
            call_all(self._after_end, context)

    async def _asked(self, command: RemotingCommand) -> RemotingCommand | None:
        messages = split_messages(bytes(command.body), "", ReceivedMessage)
        if len(messages) != 1 or messages[0].all_properties.get(PROPERTY_PGROUP) != self.group:
            return None
        header = command.header(CheckTransactionStateRequestHeader)
        # In a background task of this producer: check() may take long, and must not outlive the producer.
        self.spawn(self._answer, header, messages[0])
        return None

    async def _answer(self, header: CheckTransactionStateRequestHeader, message: ReceivedMessage) -> None:
        state = TransactionState.UNKNOWN
        try:
            answer = self._check(message)
            state = await answer if isawaitable(answer) else answer
        except Exception as error:  # noqa: BLE001 - the program's own function: the broker will ask again
            _log.failed("check failed; the broker will ask again", error, message=message)
        end = EndTransactionRequestHeader(
            topic=message.topic,  # not the header's, that of all halves: with policies, brokers check this name
            producer_group=self.group,
            tran_state_table_offset=header.tran_state_table_offset,
            commit_log_offset=header.commit_log_offset,
            commit_or_rollback=state.value,
            msg_id=header.msg_id or message.message_id,
            transaction_id=header.transaction_id,
            from_transaction_check=True,
        )
        host, port = message.store_host
        context = EndTransactionContext(
            self.group,
            message,
            message.message_id,
            state.value,
            queue=message.queue,
            address=f"{host}:{port}",
            transaction_id=header.transaction_id,
            checked=True,
        )
        try:
            await self.client.oneway(f"{host}:{port}", RequestCode.END_TRANSACTION, end)
        except BaseException as error:
            context.error = error
            raise
        finally:
            call_all(self._after_end, context)
