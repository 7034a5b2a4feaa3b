"""Delivers a task's rows to the brokers: at least once, or once with ``idempotent=true``.

Rows are sent in batches of some hundred KiB, each to one queue, which stores a batch as a whole. A batch that may not
have been stored is sent again, for ``pollTimeoutMs``: at least once.

With ``idempotent=true`` batches are sent one after the other, and the id of each row (UNIQ_KEY) is derived from the
query, the batch, the partition and the row's number in it. Spark gives a task that runs again the same rows in the same
order (as long as the query does), so that the rows that an earlier attempt stored are the first ones, up to some batch.
A task queries the brokers for its first row's id. If it is stored, the task queries for the ids of all rows, batch by
batch, until it finds a batch of which none is stored. The queries use the key index, which every RocketMQ broker has.

The limits: messages that were deleted, or their index; a broker that has the rows but is away when the task runs again;
two concurrent attempts of one task (speculation, a worker that Spark has given up but that still runs); a query whose
rows have another order when it runs again; sharding keys, if the topic's queues have changed since the first attempt.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel
import pyarrow as pa
import structlog
from anyio.abc import TaskGroup

from trimq.client.admin import Admin
from trimq.client.core import Client
from trimq.client.errors import RocketMQError, TopicNotFoundError
from trimq.client.message import Message, MessageQueue
from trimq.client.producer import Producer
from trimq.client.sending import BatchEntry, prepare_batch
from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.topics import session
from trimq.pipeline.topics.direct_sender import ConnectionEndedError, DirectSender
from trimq.pipeline.topics.places import Patience, is_passing
from trimq.pipeline.topics.rows_fast_path import Request, fits_fast_path, requests_of
from trimq.pipeline.topics.servers import SERVER_OPTIONS, Servers
from trimq.pipeline.topics.settings import group_of
from trimq.pipeline.topics.sink_rows import Row, rows_of
from trimq.protocol.hashing import string_hash
from trimq.protocol.property_text import decode_properties
from trimq.protocol.topic_rules import topic_problem

WRITE_OPTIONS: Final = (*SERVER_OPTIONS, "topic", "group", "idempotent", "writeId", "batchBytes", "pollTimeoutMs")
DEFAULT_GROUP: Final = "spark-rocketmq-sink"
_IN_FLIGHT: Final = 3
_SETTLE: Final = 0.5
"""Seconds after which a stored message is in the index: brokers index it a moment after they acknowledge it."""
_CONCURRENT_QUERIES: Final = 16

_log = structlog.get_logger("pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """The settings of a writer. ``topic`` applies to all rows; None if each row has its own."""

    servers: Servers
    topic: str | None
    group: str
    idempotent: bool
    batch_bytes: int
    timeout: float

    @staticmethod
    def of(options: Options) -> "WriteSettings":
        """The settings of a write. Raises OptionError."""
        options.check_names(WRITE_OPTIONS, "the rocketmq sink")
        topic = options.text("topic")
        problem = topic_problem(topic) if topic is not None else None
        if problem is not None:
            raise OptionError("topic", topic, f"the name of a topic ({problem})")
        return WriteSettings(
            servers=Servers.of(options),
            topic=topic,
            group=group_of(options) or DEFAULT_GROUP,
            idempotent=options.flag("idempotent", default=False),
            batch_bytes=options.integer("batchBytes", 512 * 1024, least=1, unit="bytes") or 0,
            timeout=(options.integer("pollTimeoutMs", 120_000, least=1, unit="milliseconds") or 0) / 1000,
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a task, the same for all of its attempts. ``again``: Spark reports an earlier attempt."""

    text: str
    again: bool = False

    def key(self, row: int) -> str:
        """The id of a row: 32 hexadecimal digits, like RocketMQ's own ids.

        >>> Identity("q/1/0").key(7) == Identity("q/1/0", again=True).key(7) != Identity("q/1/1").key(7)
        True
        """
        return hashlib.blake2b(f"{self.text}/{row}".encode(), digest_size=16).hexdigest().upper()


@dataclass(slots=True)
class Chunk:
    """Rows that are sent as one batch. ``queue`` is set for rows with a sharding key, else any queue may take them."""

    topic: str
    queue: MessageQueue | None
    entries: list[BatchEntry]
    size: int = 0


def deliver(batches: Iterable[pa.RecordBatch], settings: WriteSettings, identity: Identity) -> tuple[int, int]:
    """Send all rows; returns how many were sent, and how many an earlier attempt had stored.

    Raises RocketMQError if a broker refuses or does not answer for ``timeout``, RowError for a row that no broker
    accepts.
    """

    async def run(client: Client) -> tuple[int, int]:
        async with (
            Producer(settings.group, client=client, retries=0, retry_unknown=False) as producer,
            Admin(client=client) as admin,
        ):
            return await _Delivery(producer, admin, settings, identity).run(batches)

    return session.ask(settings.servers, run)


class _Delivery:
    """The delivery of one task's rows.

    ``_slots`` bounds the batches in flight. With idempotent=true there is one: an earlier attempt has then stored the
    first rows and no later ones. A chunk of a sharding key's queue also holds the queue's lock, to keep the order.
    """

    def __init__(self, producer: Producer, admin: Admin, settings: WriteSettings, identity: Identity) -> None:
        self._producer = producer
        self._admin = admin
        self._settings = settings
        self._identity = identity
        self._patience = Patience(settings.timeout)
        self._open: dict[tuple[str, MessageQueue | None], Chunk] = {}
        self._queues: dict[str, list[MessageQueue]] = {}
        self._topics: set[str] = set()
        self._slots = anyio.Semaphore(1 if settings.idempotent else _IN_FLIGHT)
        self._locks: dict[MessageQueue, anyio.Lock] = {}
        self._direct_sender: DirectSender | None = None
        self._wants_direct_sender = True
        self._asking = settings.idempotent
        self._first = True
        self._error: Exception | None = None
        self._sent = 0
        self._found = 0

    async def run(self, batches: Iterable[pa.RecordBatch]) -> tuple[int, int]:
        """Send the rows of ``batches``; returns the numbers of rows sent and of rows found stored already."""
        # The task group ends only when all batches in flight are acknowledged: Spark commits the task after this.
        async with anyio.create_task_group() as group:
            try:
                await self._take(batches, group)
                # Before the open chunks: this may put requests of the direct sender back on the full path.
                await self._finish_direct_sender(group)
                for chunk in self._open.values():
                    await self._start(chunk, group)
            except Exception as error:  # noqa: BLE001 - raised below, unwrapped: a task group would wrap it
                self._error = self._error or error
                group.cancel_scope.cancel()
            finally:
                if self._direct_sender is not None:
                    self._direct_sender.close()
        if self._error is not None:
            raise self._error
        return self._sent, self._found

    async def _take(self, batches: Iterable[pa.RecordBatch], group: TaskGroup) -> None:
        settings = self._settings
        next_id = self._producer.client.unique_ids.next
        number = 0
        for batch in batches:
            if settings.topic is not None and not settings.idempotent and fits_fast_path(batch):
                for request in requests_of(
                    batch, settings.topic, settings.batch_bytes, self._producer.client.unique_ids
                ):
                    await self._send_on_fast_path(request, group)
                continue
            for row in rows_of(batch, settings.topic):
                # The number counts all rows in Spark's order, delayed ones too: it is part of the row's identity.
                message_id = self._identity.key(number) if settings.idempotent else next_id()
                number += 1
                if row.delay:
                    await self._send_delayed(row)
                    continue
                queue = None if row.sharding_key is None else await self._queue_of(row.topic, row.sharding_key)
                chunk = self._open.get((row.topic, queue))
                if chunk is None:
                    chunk = self._open[row.topic, queue] = Chunk(row.topic, queue, [])
                entry = BatchEntry(message_id, 0, row.body, f"UNIQ_KEY\x01{message_id}\x02{row.properties}".encode())
                chunk.entries.append(entry)
                chunk.size += entry.size
                if chunk.size >= settings.batch_bytes:
                    del self._open[row.topic, queue]
                    await self._start(chunk, group)

    async def _send_on_fast_path(self, request: Request, group: TaskGroup) -> None:
        """Send by the direct sender. Once it has failed, its requests and all later ones take the full path."""
        if self._wants_direct_sender:
            self._wants_direct_sender = False
            # The direct sender blocks the event loop: nothing may be in flight in the background.
            await self._wait_for_all()
            self._direct_sender = await self._open_direct_sender(request.topic)
        if self._direct_sender is None:
            await self._start(request, group)
            return
        try:
            self._direct_sender.send(request)
        except ConnectionEndedError:
            await self._give_up_direct_sender(self._direct_sender, group)

    async def _open_direct_sender(self, topic: str) -> DirectSender | None:
        if self._settings.servers.tls:  # it sends over plain sockets
            return None
        try:
            queues = await self._producer.queues(topic)
            route = await self._producer.client.routes.get(topic)
        except RocketMQError:
            return None
        places = [(queue, route.master(queue.broker_name)) for queue in queues]
        known = [(queue, address) for queue, address in places if address is not None]
        signer = self._producer.client.signer
        return DirectSender(self._settings.group, known, session.REQUEST_TIMEOUT, signer) if known else None

    async def _finish_direct_sender(self, group: TaskGroup) -> None:
        """Wait until the direct sender's requests are acknowledged."""
        if self._direct_sender is None:
            return
        try:
            self._direct_sender.finish()
        except ConnectionEndedError:
            await self._give_up_direct_sender(self._direct_sender, group)
        else:
            self._sent += self._direct_sender.stored
            self._direct_sender.close()
            self._direct_sender = None

    async def _give_up_direct_sender(self, sender: DirectSender, group: TaskGroup) -> None:
        """Send the requests that are not known to be stored on the full path."""
        # First, so that _start does not take it for active and wait for each request.
        self._direct_sender = None
        unknown = sender.take_back()
        # After take_back, which receives the replies that have arrived.
        self._sent += sender.stored
        if sender.stored:
            self._topics.add(sender.topic)
        _log.info("the sink continues on the full path", topic=sender.topic, requests=len(unknown))
        for request in unknown:
            await self._start(request, group)

    async def _queue_of(self, topic: str, sharding_key: str) -> MessageQueue:
        queues = self._queues.get(topic)
        if queues is None:
            queues = self._queues[topic] = await self._producer.queues(topic)
        return queues[abs(string_hash(sharding_key)) % len(queues)]

    async def _start(self, chunk: Chunk | Request, group: TaskGroup) -> None:
        """Send a batch in the background as soon as a slot is free. Raises the error of an earlier one.

        With a direct sender the batch is waited for: the direct sender blocks the event loop, and a reply in the
        background could be read only after its timeout, so that a stored batch would be sent again.
        """
        await self._slots.acquire()
        self._check()
        group.start_soon(self._send_in_order, chunk)
        await anyio.lowlevel.checkpoint()
        if self._direct_sender is not None:
            await self._wait_for_all()

    async def _wait_for_all(self) -> None:
        """Wait until no batch is in flight in the background. Raises the error of an earlier one."""
        slots = 1 if self._settings.idempotent else _IN_FLIGHT
        for _ in range(slots):
            await self._slots.acquire()
        for _ in range(slots):
            self._slots.release()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _send_in_order(self, chunk: Chunk | Request) -> None:
        try:
            if isinstance(chunk, Request):
                await self._send_request(chunk)
            elif chunk.queue is None:
                await self._send(chunk)
            else:
                async with self._locks.setdefault(chunk.queue, anyio.Lock()):
                    await self._send(chunk)
        except Exception as error:  # noqa: BLE001 - _check raises it, unwrapped: a task group would wrap it
            self._error = self._error or error
        finally:
            self._slots.release()

    async def _send_request(self, request: Request) -> None:
        prepared = request.prepared(bytes(request.body))
        while True:
            try:
                await self._producer.deliver(prepared, None, ())
            except RocketMQError as error:
                await self._pause(request.topic, error)
            else:
                self._patience.worked()
                self._topics.add(request.topic)
                self._sent += request.rows
                return

    async def _send(self, chunk: Chunk) -> None:
        entries = await self._wanted(chunk) if self._asking else chunk.entries
        while entries:
            prepared = prepare_batch(chunk.topic, entries)
            try:
                # One id is sufficient: the receipts of single rows are not used.
                await self._producer.deliver(prepared._replace(message_ids=prepared.message_ids[:1]), chunk.queue, ())
            except RocketMQError as error:
                await self._pause(chunk.topic, error)
                # The failed attempt may have been stored although its reply was lost.
                if self._settings.idempotent:
                    entries = await self._missing(chunk.topic, entries)
            else:
                self._patience.worked()
                self._topics.add(chunk.topic)
                self._sent += len(entries)
                return

    async def _pause(self, topic: str, error: RocketMQError) -> None:
        """Wait before the next attempt. Raises ``error`` if it is permanent or the time is over."""
        may_pass = is_passing(error)
        if isinstance(error, TopicNotFoundError):
            # A topic that took rows before, or of which no broker is registered now, is away and not missing.
            may_pass = topic in self._topics or not (await self._admin.cluster_info()).broker_addr_table
        if not may_pass or self._patience.is_over:
            raise error
        _log.info("a batch is sent again", topic=topic, reason=str(error))
        await self._patience.wait()
        try:
            await self._producer.client.routes.refresh(topic)
        except RocketMQError:
            return

    async def _send_delayed(self, row: Row) -> None:
        message = Message(row.topic, row.body, delay_level=row.delay)
        message.system_properties = decode_properties(row.properties)
        while True:
            try:
                await self._producer.send(message)
            except RocketMQError as error:
                await self._pause(row.topic, error)
            else:
                self._patience.worked()
                self._sent += 1
                return

    # -- what an earlier run has stored ----------------------------------------------------------------------------

    async def _wanted(self, chunk: Chunk) -> list[BatchEntry]:
        """The rows that no earlier attempt stored. Queries end with the first batch of which no row is stored."""
        first, self._first = self._first, False
        # A first attempt normally finds nothing: one query without the pause for the index. But Spark's attempt number
        # starts at 0 again when the whole query is restarted, so that it has to be made.
        if first and not self._identity.again and await self._missing(chunk.topic, chunk.entries[:1], settle=False):
            self._asking = False
            return chunk.entries
        missing = await self._missing(chunk.topic, chunk.entries)
        found = len(chunk.entries) - len(missing)
        self._found += found
        self._asking = found > 0
        return missing

    async def _missing(self, topic: str, entries: list[BatchEntry], *, settle: bool = True) -> list[BatchEntry]:
        """The entries whose ids no broker of the topic finds. ``settle``: query a second time a moment later."""
        missing = await self._not_found(topic, entries)
        if missing and settle:
            await anyio.sleep(_SETTLE)
            missing = await self._not_found(topic, missing)
        return missing

    async def _not_found(self, topic: str, entries: list[BatchEntry]) -> list[BatchEntry]:
        stored: set[str] = set()
        errors: list[RocketMQError] = []
        limiter = anyio.CapacityLimiter(_CONCURRENT_QUERIES)

        async def one(message_id: str) -> None:
            async with limiter:
                try:
                    if await self._is_stored(topic, message_id):
                        stored.add(message_id)
                except RocketMQError as error:
                    errors.append(error)

        async with anyio.create_task_group() as group:
            for entry in entries:
                group.start_soon(one, entry.message_id)
        if errors:
            raise errors[0]
        return [entry for entry in entries if entry.message_id not in stored]

    async def _is_stored(self, topic: str, message_id: str) -> bool:
        """Whether a broker has the row. Waits for brokers: one that does not answer may have it."""
        while True:
            try:
                return bool(await self._admin.messages_by_unique_key(topic, message_id))
            except TopicNotFoundError:
                # With brokers registered, the topic does not exist. Without any, they are away.
                if (await self._admin.cluster_info()).broker_addr_table:
                    return False
                if self._patience.is_over:
                    raise
            except RocketMQError as error:
                if not is_passing(error) or self._patience.is_over:
                    raise
            await self._patience.wait()
