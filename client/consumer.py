"""Consumer: a member of a group, which receives its share of the messages of the group's topics."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from logging import INFO
from pathlib import Path
from typing import Final, Literal

import anyio
from anyio.lowlevel import checkpoint

from trimq.client.allocation import Allocation, average
from trimq.client.consumer_requests import ConsumerRequests
from trimq.client.core import Client, ClientOptions, Push, wall_ms
from trimq.client.delivery import Batch, ConsumerMessage, describe
from trimq.client.errors import NoBrokerError, RocketMQError, TopicNotFoundError, UsageError
from trimq.client.expression_check import check_in_broker
from trimq.client.interceptors import Interceptor, ProcessContext
from trimq.client.member import GroupMember
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.offsets import BrokerOffsets, LocalOffsets, OffsetStore, StartFrom, first_offset
from trimq.client.process_queue import Prefetch, ProcessQueue
from trimq.client.ready_queue import ReadyQueue
from trimq.client.rebalance import Rebalancer
from trimq.client.retries import Retries
from trimq.client.subscription import ALL, Sql, Subscription, parse_subscriptions
from trimq.protocol.body import ConsumerData, ProducerData
from trimq.protocol.topic_rules import retry_topic
from trimq.remoting.client.client_log import StandardLog

Model = Literal["clustering", "broadcasting"]

COMMIT_INTERVAL: Final = 5.0
"""Default seconds between two commits of offsets."""
_YIELD_AFTER: Final = 64
"""Messages after which an iteration lets other tasks run even if more messages are ready."""
_BATCH_WEIGHT: Final = 4
"""Messages for which a batch counts in that."""

_log = StandardLog("trimq.client.consumer")


class Consumer(GroupMember):
    """Receives messages of ``topics``: one topic, or topics with their tags, ``{"Orders": "paid || refunded"}``.

    In the ``clustering`` model each message goes to one member of the group, and is redelivered until it is
    acknowledged. In ``broadcasting`` each message goes to every member, and is not redelivered. An ``orderly`` consumer
    receives the messages of a queue one at a time, the next one only when the one before is acknowledged. Several tasks
    may iterate over the same consumer: each message goes to one of them.

    ``start`` is where a group without committed offsets starts: ``"first"``, ``"last"`` (only new messages), or a time.
    ``allocation`` is the strategy by which the members share queues; all members must use the same. ``prefetch`` bounds
    how much is read ahead. ``max_retries`` is the number of redeliveries after which a message becomes a dead letter;
    None leaves it to the group's configuration (16 by default), and means no limit for an orderly consumer. ``suspend``
    is the pause in seconds before an orderly consumer retries a message. Offsets are committed every
    ``commit_interval`` seconds. ``offsets_file`` stores the offsets of a broadcasting consumer; without it they are
    lost when it closes. ``enable_msg_trace`` reports the processing of each message to the trace topic, or to
    ``customized_trace_topic``; ``trace_dispatcher`` counts the reports.

    Raises UsageError for an invalid group, topic, subscription or model, and if no name server is given. Opening raises
    CredentialsError if the brokers do not accept the user. What an accepted user is not permitted is tried again until
    it is: see ``client.denied``.

    >>> async def example(namesrv: str) -> None:
    ...     async with Consumer("billing", {"Orders": "paid || refunded"}, namesrv=namesrv) as consumer:
    ...         async for message in consumer:
    ...             async with message.process():
    ...                 print(message.body)
    """

    def __init__(  # noqa: PLR0913 - settings, each by keyword
        self,
        group: str,
        topics: str | Mapping[str, str | Sql],
        *,
        namesrv: str | Iterable[str] | None = None,
        client: Client | None = None,
        options: ClientOptions | None = None,
        model: Model = "clustering",
        orderly: bool = False,
        start: StartFrom = "last",
        allocation: Allocation = average,
        prefetch: Prefetch | None = None,
        max_retries: int | None = None,
        suspend: float = 1.0,
        commit_interval: float = COMMIT_INTERVAL,
        offsets_file: Path | None = None,
        interceptors: Sequence[Interceptor] = (),
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
    ) -> None:
        super().__init__(group, namesrv, client, options)
        if model not in ("clustering", "broadcasting"):
            raise UsageError(f"model={model!r} is neither clustering nor broadcasting")
        self.model: Model = model
        self.orderly = orderly
        self.subscriptions: dict[str, Subscription] = parse_subscriptions(topics, wall_ms())
        self._clustering = model == "clustering"
        if self._clustering:
            again = Subscription(retry_topic(group), ALL, wall_ms())
            self.subscriptions[again.topic] = again
        self._start = start
        self._prefetch = prefetch or Prefetch()
        self._retries = Retries(self.client, group, max_retries, suspend, self.spawn)
        self._commit_interval = commit_interval
        if enable_msg_trace:
            interceptors = (*interceptors, self._traced("CONSUME", customized_trace_topic))
        self._interceptors = tuple(interceptors)
        self.before_process: list[Callable[[ProcessContext], None]] = [hook.before_process for hook in interceptors]
        self.after_process: list[Callable[[ProcessContext], None]] = [hook.after_process for hook in interceptors]
        self._offsets: OffsetStore = (
            BrokerOffsets(self.client, group) if self._clustering else LocalOffsets(offsets_file)
        )
        self._ready = ReadyQueue(self.client.read_arrived)
        self._since_yield = 0
        self._suspended = False
        self.rebalancer: Rebalancer = Rebalancer(
            self.client,
            group,
            lambda: list(self.subscriptions),
            allocation if self._clustering else None,
            self._open_process_queue,
            self._close_process_queue,
            orderly=orderly and self._clustering,
        )
        self._requests = ConsumerRequests(self)

    # -- opening and closing ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        # Routes first, since heartbeats go to the brokers of known routes. The heartbeat comes before the rebalance: a
        # broker counts this client among the group's members, and accepts its pulls, only after one.
        for topic in self.subscriptions:
            if topic == retry_topic(self.group):  # brokers create it at the group's first heartbeat
                continue
            try:
                await self.client.routes.refresh(topic)
            except (TopicNotFoundError, NoBrokerError):
                _log.info("the topic does not exist yet", group=self.group, topic=topic)
        self.client.join(self)
        for subscription in self.subscriptions.values():
            await check_in_broker(self.client, group=self.group, subscription=subscription)
        await self.client.heartbeat()
        self.client.check_accepted()
        self.client.routes.on_change.append(self.rebalancer.route_changed)
        self._start_trace()
        await self.rebalancer.rebalance()
        self.spawn(self.rebalancer.run)
        self.spawn(self._commit_regularly)
        if self.orderly and self._clustering:
            self.spawn(self.rebalancer.keep_locks)

    async def _close(self) -> None:
        if self.rebalancer.route_changed in self.client.routes.on_change:
            self.client.routes.on_change.remove(self.rebalancer.route_changed)
        if self.client.is_open:
            # Commit and unlock before leaving: the brokers notify the other members of the leave, and these take the
            # queues over from the committed offsets.
            await self.rebalancer.stop_all()
            await self.client.leave(self)
        await self._end_trace()

    # -- the interface to the client instance ----------------------------------------------------------------------

    def producer_data(self) -> ProducerData | None:
        """None: a consumer does not produce."""
        return None

    def consumer_data(self) -> ConsumerData | None:
        """Its part of the heartbeat."""
        return ConsumerData(
            group_name=self.group,
            consume_type="CONSUME_PASSIVELY",
            message_model=self.model.upper(),
            consume_from_where={"first": "CONSUME_FROM_FIRST_OFFSET", "last": "CONSUME_FROM_LAST_OFFSET"}.get(
                str(self._start), "CONSUME_FROM_TIMESTAMP"
            ),
            subscription_data_set=[subscription.data for subscription in self.subscriptions.values()],
        )

    def pushes(self) -> dict[int, Push]:
        """Handlers for changes of the group's members, and for requests of administrators that brokers pass on."""
        return self._requests.table

    # -- receiving messages ----------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[ConsumerMessage]:
        return self

    async def __anext__(self) -> ConsumerMessage:
        # Fast path without an await, for a ready message. Every _YIELD_AFTER messages take() runs a checkpoint, so that
        # a cancellation arrives and other tasks run also while messages are always ready.
        self._since_yield += 1
        if self._since_yield < _YIELD_AFTER and self._group is not None and not self._suspended:
            message = self._ready.take_one()
            if message is not None:
                return message  # type: ignore[return-value] # its process queues make ConsumerMessages
        return (await self.take(1))[1][0]  # type: ignore[return-value] # as above

    def batches(self, size: int = 32) -> AsyncIterator[Batch]:
        """Iterates over batches of up to ``size`` messages of one queue. A batch has the messages that are ready now.

        >>> async def example(consumer: Consumer) -> None:
        ...     async for batch in consumer.batches(100):
        ...         async with batch.process():
        ...             print([message.body for message in batch])
        """
        return _Batches(self, size)

    async def run(self, handler: Callable[[ConsumerMessage], Awaitable[object]], *, concurrency: int = 20) -> None:
        """Calls ``handler`` for each message, up to ``concurrency`` calls at the same time, until it is cancelled.

        Each call runs in a ``process()`` block: the message is acknowledged when the handler returns, and retried later
        if it raises an exception.

        >>> async def example(consumer: Consumer) -> None:
        ...     async def handle(message: ConsumerMessage) -> None:
        ...         print(message.body)
        ...     await consumer.run(handle, concurrency=4)
        """

        async def work() -> None:
            async for message in self:
                async with message.process():
                    await handler(message)

        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(work)

    async def take(self, count: int) -> tuple[ProcessQueue, MessageBlock[ReceivedMessage]]:
        """Waits for messages of one queue and returns up to ``count``, which the caller has to acknowledge."""
        self._since_yield += _BATCH_WEIGHT
        if self._since_yield >= _YIELD_AFTER:
            self._since_yield = 0
            await checkpoint()
        while True:
            self._check_open()
            found = None if self._suspended else self._ready.take(count)
            if found is not None:
                return found
            self._since_yield = 0  # waiting lets other tasks run
            await self._ready.wait()

    # -- acknowledging ---------------------------------------------------------------------------------------------

    async def hand_back(self, process_queue: ProcessQueue, messages: list[ReceivedMessage], delay_level: int) -> None:
        """Makes messages come again later; see ConsumerMessage.nack and Batch.nack."""
        if not self._clustering:
            _log.warning("a broadcasting consumer does not retry; a message is skipped", messages=describe(messages))
            process_queue.finished(messages)
        elif self.orderly:
            await self._retries.in_place(process_queue, messages, delay_level)
        else:
            await self._retries.to_retry_topic(process_queue, messages, delay_level)

    # -- queues ----------------------------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues that this member has now, without those of the group's retry topic.

        >>> def busy(consumer: Consumer) -> bool:
        ...     return len(consumer.assignment) > 4
        """
        again = retry_topic(self.group)
        return sorted(queue for queue in self.rebalancer.process_queues if queue.topic != again)

    def _new_process_queue(
        self,
        queue: MessageQueue,
        subscription: Subscription,
        offset: int,
        owner: object,
        make: Callable[..., ProcessQueue] = ProcessQueue,
    ) -> ProcessQueue:
        return make(
            self.client,
            self.group,
            queue,
            subscription,
            offset,
            prefetch=self._prefetch,
            kind=ConsumerMessage,
            with_subscription=False,
            orderly=self.orderly,
            on_ready=self._ready.add,
            owner=owner,
            interceptors=self._interceptors,
            counts=self._requests.counts(queue.topic),
        )

    async def _open_process_queue(self, queue: MessageQueue) -> ProcessQueue:
        offset = await self._offsets.load(queue)
        if offset is None:
            offset = await first_offset(self.client, queue, self._start)
        process_queue = self._new_process_queue(queue, self.subscriptions[queue.topic], offset, self)
        self.spawn(process_queue.run)
        return process_queue

    def offer(self, message: ConsumerMessage, owner: object, make: Callable[..., ProcessQueue]) -> ProcessQueue:
        """Offers the program a message that no pull has returned.

        The process queue that ``make`` creates receives its acknowledgement, ``owner`` receives it when it is handed
        back.
        """
        subscription = Subscription(message.stored_topic, ALL, 0)
        process_queue = self._new_process_queue(message.queue, subscription, message.queue_offset, owner, make)
        message._receiver = (owner, process_queue)  # noqa: SLF001 - set by the pull for other messages
        process_queue.add(MessageBlock.of([message]))
        return process_queue

    async def _close_process_queue(self, process_queue: ProcessQueue) -> None:
        self._ready.discard(process_queue)
        if process_queue.committable != process_queue.committed:
            try:
                await self._offsets.save({process_queue.queue: process_queue.committable}, confirmed=True)
            except RocketMQError as error:
                self.client.outages.note(
                    "an offset cannot be committed", error, group=self.group, queue=process_queue.queue
                )

    async def commit(self) -> None:
        """Commits the offsets of all acknowledged messages, and waits for the brokers' replies.

        Offsets are also committed automatically, every ``commit_interval`` seconds and when the consumer closes. A
        queue is committed up to its first message that is not acknowledged. A failure is logged, not raised.

        >>> async def safe_point(consumer: Consumer) -> None:
        ...     await consumer.commit()
        """
        self._check_open()
        await self._commit(confirmed=True)

    async def _commit(self, *, confirmed: bool) -> None:
        # The offsets are read before the await and marked as committed after it: messages that are acknowledged while
        # the commit is under way are in the next one. A queue may have been taken away by then.
        changed = {
            queue: process_queue.committable
            for queue, process_queue in self.rebalancer.process_queues.items()
            if process_queue.committable != process_queue.committed
        }
        if changed:
            await self._offsets.save(changed, confirmed=confirmed)
            for queue, offset in changed.items():
                process_queue = self.rebalancer.process_queues.get(queue)
                if process_queue is not None:
                    process_queue.committed = offset

    async def _commit_regularly(self) -> None:
        while True:
            await anyio.sleep(self._commit_interval)
            try:
                await self._commit(confirmed=False)
            except RocketMQError as error:
                self.client.outages.note("offsets cannot be committed now", error, level=INFO, group=self.group)

    def suspend(self) -> None:
        """Stops handing out messages until ``resume``. Messages that were read ahead are retained.

        >>> def during_maintenance(consumer: Consumer) -> None:
        ...     consumer.suspend()
        """
        self._suspended = True

    def resume(self) -> None:
        """Hands out messages again after ``suspend``.

        >>> def after_maintenance(consumer: Consumer) -> None:
        ...     consumer.resume()
        """
        self._suspended = False
        self._ready.wake()

    async def reset(self, queue: MessageQueue, offset: int) -> None:
        """Continues one of the assigned queues from ``offset``, and commits that offset.

        Messages that were read ahead are discarded. Raises UsageError if the queue is not assigned to this consumer.

        >>> async def replay(consumer: Consumer) -> None:
        ...     for queue in consumer.assignment:
        ...         await consumer.reset(queue, 0)
        """
        self._check_open()
        process_queue = self.rebalancer.process_queues.get(queue)
        if process_queue is None:
            raise UsageError(f"{queue} is not one of this consumer's queues now")
        process_queue.seek(offset)  # before the await: else an automatic commit could overwrite it with the old offset
        await self._offsets.save({queue: offset}, confirmed=True)
        process_queue.committed = offset


class _Batches:
    """Iterates over batches. Not an async generator: those need to be closed when a loop is left early."""

    def __init__(self, consumer: Consumer, size: int) -> None:
        self._consumer = consumer
        self._size = size

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        process_queue, block = await self._consumer.take(self._size)
        return Batch(block, process_queue)  # type: ignore[arg-type] # its process queues make ConsumerMessages
