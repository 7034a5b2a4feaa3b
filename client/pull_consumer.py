"""PullConsumer: reads the queues and offsets that the program chooses; for pipelines, replays and tests."""

from collections.abc import Iterable, Mapping
from datetime import datetime

import anyio
import anyio.lowlevel

from trimq.client import offsets
from trimq.client.core import Client, ClientOptions, Push, wall_ms
from trimq.client.errors import UsageError, copied
from trimq.client.expression_check import check_in_broker
from trimq.client.member import GroupMember
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.offsets import StartFrom
from trimq.client.process_queue import Prefetch, ProcessQueue
from trimq.client.ready_queue import ReadyQueue
from trimq.client.subscription import ALL, Sql, Subscription, check_filter
from trimq.protocol.body import ConsumerData, ProducerData


class PullConsumer(GroupMember):
    """Reads assigned queues. ``poll`` advances the position of each queue; only ``commit`` commits offsets.

    ``start`` is where to start in a queue for which ``group`` has no committed offset: ``"first"``, ``"last"`` (only
    new messages), or a time. ``tags`` is a tag expression (``"paid || refunded"``) or an Sql expression that filters
    the messages. ``prefetch`` bounds how much is read ahead. There is no rebalance: members of a group that assign the
    same queue all read it. ``enable_msg_trace`` reports each message that ``poll`` returns to the trace topic, or to
    ``customized_trace_topic``; ``trace_dispatcher`` counts the reports.

    Raises UsageError for an invalid group name or filter, and if no name server is given.

    >>> async def example(namesrv: str) -> None:
    ...     async with PullConsumer("audit", namesrv=namesrv, start="first") as consumer:
    ...         await consumer.assign(await consumer.queues("Orders"))
    ...         for message in await consumer.poll(100, timeout=5):
    ...             print(message.queue_offset, message.body)
    ...         await consumer.commit()
    """

    def __init__(  # noqa: PLR0913 - settings, each by keyword
        self,
        group: str,
        *,
        namesrv: str | Iterable[str] | None = None,
        client: Client | None = None,
        options: ClientOptions | None = None,
        start: StartFrom = "last",
        tags: str | Sql = ALL,
        prefetch: Prefetch | None = None,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
    ) -> None:
        super().__init__(group, namesrv, client, options)
        self._hooks = self._traced("CONSUME", customized_trace_topic) if enable_msg_trace else None
        self._start = start
        self._tags = tags
        check_filter(tags)
        self._prefetch = prefetch or Prefetch()
        self._process_queues: dict[MessageQueue, ProcessQueue] = {}
        self._positions: dict[MessageQueue, int] = {}
        self._ready = ReadyQueue(self.client.read_arrived)

    async def _open(self) -> None:
        self.client.join(self)
        self._start_trace()

    async def _close(self) -> None:
        for process_queue in self._process_queues.values():
            process_queue.drop()
        if self.client.is_open:
            await self.client.leave(self)
        await self._end_trace()

    def producer_data(self) -> ProducerData | None:
        """None: a consumer does not produce."""
        return None

    def consumer_data(self) -> ConsumerData | None:
        """Its part of the heartbeat."""
        topics = {queue.topic for queue in self._process_queues}
        return ConsumerData(
            group_name=self.group,
            consume_type="CONSUME_ACTIVELY",
            subscription_data_set=[Subscription(topic, self._tags, 0).data for topic in sorted(topics)],
        )

    def pushes(self) -> dict[int, Push]:
        """None: a consumer with assigned queues has no share that could change."""
        return {}

    # -- queues and positions --------------------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All readable queues of a topic.

        Raises TopicNotFoundError; NoBrokerError or UnreachableError in an outage, after ``request_timeout`` seconds.

        >>> async def count(consumer: PullConsumer) -> int:
        ...     return len(await consumer.queues("Orders"))
        """
        self._check_open()
        patience = self.client.options.request_timeout
        return sorted((await self.client.routes.refresh(topic, patience=patience)).read_queues)

    async def assign(self, queues: Iterable[MessageQueue] | Mapping[MessageQueue, int]) -> None:
        """Reads these queues from now on, and no others. Queues that were assigned before keep their positions.

        A new queue starts at the offset given for it in a mapping, else at the group's committed offset, else at
        ``start``. For a queue that was assigned before, an offset in a mapping is a ``seek``. Raises UsageError if the
        broker does not filter by SQL92 expressions, and RocketMQError if an offset cannot be queried; the queues before
        it are assigned then.

        >>> async def tail(consumer: PullConsumer, queue: MessageQueue) -> None:
        ...     await consumer.assign({queue: await consumer.end_offset(queue) - 10})
        """
        self._check_open()
        wanted = dict(queues) if isinstance(queues, Mapping) else dict.fromkeys(queues)
        for topic in sorted({queue.topic for queue in wanted} - {queue.topic for queue in self._process_queues}):
            await check_in_broker(self.client, self.group, Subscription(topic, self._tags, wall_ms()))
        for queue in [queue for queue in self._process_queues if queue not in wanted]:
            process_queue = self._process_queues.pop(queue)
            process_queue.drop()
            self._ready.discard(process_queue)
            del self._positions[queue]
        for queue, offset in wanted.items():
            if queue in self._process_queues:
                if offset is not None:
                    self.seek(queue, offset)
                continue
            start = offset if offset is not None else await self._first(queue)
            process_queue = self._new_process_queue(queue, start)
            self._process_queues[queue] = process_queue
            self._positions[queue] = start
            self.spawn(process_queue.run)

    async def _first(self, queue: MessageQueue) -> int:
        committed = await offsets.committed_offset(self.client, self.group, queue)
        return committed if committed is not None else await offsets.first_offset(self.client, queue, self._start)

    def _new_process_queue(self, queue: MessageQueue, offset: int) -> ProcessQueue:
        return ProcessQueue(
            self.client,
            self.group,
            queue,
            Subscription(queue.topic, self._tags, wall_ms()),
            offset,
            prefetch=self._prefetch,
            kind=ReceivedMessage,
            with_subscription=True,
            on_ready=self._ready.add,
        )

    @property
    def assignment(self) -> list[MessageQueue]:
        """The assigned queues, sorted.

        >>> def busy(consumer: PullConsumer) -> bool:
        ...     return bool(consumer.assignment)
        """
        return sorted(self._process_queues)

    def _assigned(self, queue: MessageQueue) -> ProcessQueue:
        process_queue = self._process_queues.get(queue)
        if process_queue is None:
            raise UsageError(f"{queue} is not assigned to this consumer")
        return process_queue

    def position(self, queue: MessageQueue) -> int:
        """The offset after the last message that ``poll`` has returned. Raises UsageError if the queue is not assigned.

        >>> def where(consumer: PullConsumer, queue: MessageQueue) -> int:
        ...     return consumer.position(queue)
        """
        self._assigned(queue)
        return self._positions[queue]

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continues a queue from ``offset``; messages read ahead are discarded.

        Raises UsageError if the queue is not assigned. An offset outside the queue is corrected by the broker's reply.

        >>> def rewind(consumer: PullConsumer, queue: MessageQueue) -> None:
        ...     consumer.seek(queue, 0)
        """
        self._assigned(queue).seek(offset)
        self._positions[queue] = offset

    async def seek_to_first(self, *queues: MessageQueue) -> None:
        """Continues the given queues, or all assigned ones, from their first stored message.

        >>> async def replay(consumer: PullConsumer) -> None:
        ...     await consumer.seek_to_first()
        """
        for queue in queues or self.assignment:
            self.seek(queue, await self.first_offset(queue))

    async def seek_to_end(self, *queues: MessageQueue) -> None:
        """Continues the given queues, or all assigned ones, with messages that are stored from now on.

        >>> async def only_new(consumer: PullConsumer) -> None:
        ...     await consumer.seek_to_end()
        """
        for queue in queues or self.assignment:
            self.seek(queue, await self.end_offset(queue))

    async def seek_to_time(self, when: datetime | float, *queues: MessageQueue) -> None:
        """Continues the given queues, or all assigned ones, with the first message stored at ``when`` or later.

        ``when`` is an aware datetime, or seconds since the epoch. Raises UsageError for a datetime without a time zone.

        >>> async def since(consumer: PullConsumer, yesterday: datetime) -> None:
        ...     await consumer.seek_to_time(yesterday)
        """
        for queue in queues or self.assignment:
            self.seek(queue, await self.offset_by_time(queue, when))

    def pause(self, *queues: MessageQueue) -> None:
        """Makes ``poll`` skip these queues until ``resume``. Raises UsageError if one is not assigned.

        >>> def slow_down(consumer: PullConsumer, queue: MessageQueue) -> None:
        ...     consumer.pause(queue)
        """
        for queue in queues:
            self._assigned(queue).pause()

    def resume(self, *queues: MessageQueue) -> None:
        """Ends the pause of these queues. Raises UsageError if one is not assigned.

        >>> def go_on(consumer: PullConsumer, queue: MessageQueue) -> None:
        ...     consumer.resume(queue)
        """
        for queue in queues:
            self._assigned(queue).resume()

    # -- messages --------------------------------------------------------------------------------------------------

    async def poll(self, max_messages: int = 32, *, timeout: float | None = None) -> list[ReceivedMessage]:
        """Waits for messages of the assigned queues and returns those that are ready, up to ``max_messages``.

        Returns an empty list after ``timeout`` seconds; None waits without limit. Messages of one queue are in order. A
        cancelled call loses no messages. Raises UsageError if no queue is assigned, and CredentialsError if there is no
        message and a broker refuses this client's user; the pulls go on, so a later call may succeed.

        >>> async def drain(consumer: PullConsumer) -> list[ReceivedMessage]:
        ...     return await consumer.poll(1000, timeout=1)
        """
        self._check_open()
        if not self._process_queues:
            raise UsageError("no queue is assigned: poll would wait for ever")
        await anyio.lowlevel.checkpoint()
        # No await after a successful _take: a cancellation there would lose the messages that were taken.
        found = self._take(max_messages)
        with anyio.move_on_after(timeout):
            while not found:
                for process_queue in self._process_queues.values():
                    if process_queue.refused is not None:
                        raise copied(process_queue.refused)
                await self._ready.wait()
                found = self._take(max_messages)
        return found

    def _take(self, most: int) -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = []
        while len(found) < most and (more := self._ready.take(most - len(found))) is not None:
            process_queue, block = more
            self._positions[process_queue.queue] = block.offsets[-1] + 1
            process_queue.finished(block)  # makes space for the next pull; commits are by position, not by the window
            found += block
            if self._hooks is not None:
                self._hooks.polled(self.group, list(block))
        return found

    # -- offsets ---------------------------------------------------------------------------------------------------

    async def commit(self, positions: Mapping[MessageQueue, int] | None = None) -> None:
        """Commits offsets for the group: the given ones, or the positions of all assigned queues.

        The offset to commit is the one after the last processed message. Raises RocketMQError if a commit fails; the
        queues before it are committed then.

        >>> async def one(consumer: PullConsumer, message: ReceivedMessage) -> None:
        ...     await consumer.commit({message.queue: message.queue_offset + 1})
        """
        self._check_open()
        for queue, offset in dict(self._positions if positions is None else positions).items():
            await offsets.commit_offset(self.client, self.group, queue, offset)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's committed offset in a queue; None if it has none.

        >>> async def lag(consumer: PullConsumer, queue: MessageQueue) -> int:
        ...     return await consumer.end_offset(queue) - (await consumer.committed(queue) or 0)
        """
        self._check_open()
        return await offsets.committed_offset(self.client, self.group, queue)

    async def first_offset(self, queue: MessageQueue) -> int:
        """The offset of the queue's first stored message.

        >>> async def is_whole(consumer: PullConsumer, queue: MessageQueue) -> bool:
        ...     return await consumer.first_offset(queue) == 0
        """
        self._check_open()
        return await offsets.min_offset(self.client, queue)

    async def end_offset(self, queue: MessageQueue) -> int:
        """The offset that the queue's next message will get.

        >>> async def at_end(consumer: PullConsumer, queue: MessageQueue) -> bool:
        ...     return consumer.position(queue) == await consumer.end_offset(queue)
        """
        self._check_open()
        return await offsets.max_offset(self.client, queue)

    async def offset_by_time(self, queue: MessageQueue, when: datetime | float) -> int:
        """The offset of the first message stored at ``when`` or later; the queue's end if there is none.

        ``when`` is an aware datetime, or seconds since the epoch. Raises UsageError for a datetime without a time zone.

        >>> async def since_1970(consumer: PullConsumer, queue: MessageQueue) -> int:
        ...     return await consumer.offset_by_time(queue, 0.0)
        """
        self._check_open()
        return await offsets.offset_by_time(self.client, queue, when)
