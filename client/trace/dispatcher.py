"""TraceDispatcher: collects message traces and sends them in the background (RocketMQ's AsyncTraceDispatcher).

Traffic comes first: ``append`` never waits and never raises. What does not fit into the bounded buffer, or cannot be
stored, is discarded and counted. The traces are sent by a producer group of their own, one request at a time.
"""

import itertools
import time
from collections import deque
from typing import Final, NamedTuple

import anyio

from trimq.client.attempts import Attempts
from trimq.client.core import Client, Push
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import Message
from trimq.client.sending import Limits, prepare
from trimq.protocol.body import ConsumerData, ProducerData
from trimq.protocol.message_trace import TRACE_GROUP_PREFIX, MessageTrace, encode_trace, trace_keys
from trimq.protocol.topic_rules import MAX_GROUP_LENGTH, TRACE_TOPIC, topic_problem
from trimq.remoting.client.client_log import StandardLog

MAX_TRACES: Final = 2048
"""Most traces that wait to be sent, as in RocketMQ."""
MAX_WAITING_SIZE: Final = 4 * 1024 * 1024
"""Most bytes that their texts and keys have together."""
MAX_MESSAGE_SIZE: Final = 128_000
"""Largest body in bytes of a message with traces, as in RocketMQ."""
MAX_KEYS_SIZE: Final = 16 * 1024
"""Most bytes of keys of such a message: its properties have to fit into a record."""
BATCH: Final = 100
"""Most traces in a message. So many are sent immediately."""
FLUSH_INTERVAL: Final = 5.0
"""Seconds after which fewer are sent, as in RocketMQ."""
FLUSH_TIMEOUT: Final = 3.0
"""Seconds that closing waits until the last traces are stored."""
_SEND_TIMEOUT: Final = 5.0
_COMPRESS_OVER: Final = 4096
_REPORT_INTERVAL: Final = 60.0
"""Seconds between two log lines about discarded traces."""

_numbers = itertools.count(1)
_log = StandardLog("trimq.client.trace")


class _Waiting(NamedTuple):
    """An encoded trace that waits to be sent, its keys, and their size in bytes."""

    text: bytes
    keys: list[str]
    keys_size: int

    @property
    def size(self) -> int:
        return len(self.text) + self.keys_size


class TraceDispatcher:
    """The traces of one producer or consumer ``group``, which go to ``topic`` (default RMQ_SYS_TRACE_TOPIC).

    ``kind`` is PRODUCE or CONSUME, a part of the name of the group that sends the traces. ``sent`` counts the traces
    that brokers have stored, ``discarded`` those that are lost: because too many were waiting, because they could not
    be stored, or because the producer or consumer closed before that. Raises UsageError for an illegal topic.

    >>> async def lost(producer: "Producer") -> int:
    ...     dispatcher = producer.trace_dispatcher
    ...     return dispatcher.discarded if dispatcher is not None else 0
    """

    def __init__(self, client: Client, group: str, kind: str, topic: str | None = None) -> None:
        self.topic: str = TRACE_TOPIC if topic is None else topic
        problem = topic_problem(self.topic)
        if problem is not None:
            raise UsageError(f"customized_trace_topic: {problem}")
        self.group: str = f"{TRACE_GROUP_PREFIX}-{group}-{kind}-{next(_numbers)}"[:MAX_GROUP_LENGTH]
        self.sent: int = 0
        self.discarded: int = 0
        self._client = client
        self._attempts = Attempts(
            client, self.group, retries=2, retry_unknown=True, timeout=_SEND_TIMEOUT, create_topics=True
        )
        self._limits = Limits(MAX_MESSAGE_SIZE, "zlib", _COMPRESS_OVER, 5)
        self._waiting: deque[_Waiting] = deque()
        self._size = 0
        # Of the traces that append() has accepted, how many are sent or given up, and how many are wanted so.
        self._accepted = self._done = self._wanted = 0
        self._is_open = False
        self._reported = -_REPORT_INTERVAL
        self._wake: anyio.Event
        self._progress: anyio.Event

    # -- the interface to the client instance: it is a producer of its own -----------------------------------------

    def producer_data(self) -> ProducerData | None:
        """Its part of the heartbeat."""
        return ProducerData(group_name=self.group)

    def consumer_data(self) -> ConsumerData | None:
        """None: it does not consume."""
        return None

    def pushes(self) -> dict[int, Push]:
        """None: brokers send it no requests."""
        return {}

    # -- traces ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Binds to the running loop. Called before the first trace, and before ``run`` starts as a task."""
        self._wake, self._progress = anyio.Event(), anyio.Event()
        self._is_open = True
        self._client.join(self)

    def append(self, trace: MessageTrace) -> bool:
        """Adds a trace. Returns False if it is discarded, because too many are waiting or because it is invalid."""
        if not self._is_open:
            return self._discard(1, "this producer or consumer is closed")
        if len(self._waiting) >= MAX_TRACES:
            return self._discard(1, f"{MAX_TRACES} are waiting")
        try:
            entry = _encoded(trace)
        except ValueError as error:
            return self._discard(1, str(error))
        if len(entry.text) > MAX_MESSAGE_SIZE or self._size + entry.size > MAX_WAITING_SIZE:
            return self._discard(1, f"{self._size} bytes are waiting, and the next trace has {entry.size} bytes")
        self._waiting.append(entry)
        self._size += entry.size
        self._accepted += 1
        if len(self._waiting) in (1, BATCH):
            self._wake.set()
        return True

    async def run(self) -> None:
        """Sends traces until it is cancelled."""
        while True:
            while not self._waiting:
                await self._woken()
            with anyio.move_on_after(FLUSH_INTERVAL):
                while len(self._waiting) < BATCH and self._done >= self._wanted:
                    await self._woken()
            await self._send()

    async def _woken(self) -> None:
        self._wake = anyio.Event()
        await self._wake.wait()

    async def flush(self) -> None:
        """Sends the traces that are waiting, and returns when they are stored or discarded.

        >>> async def checkpoint(producer: "Producer") -> None:
        ...     if producer.trace_dispatcher is not None:
        ...         await producer.trace_dispatcher.flush()
        """
        until = self._wanted = self._accepted
        while self._is_open and self._done < until:
            self._wake.set()
            await self._progress.wait()

    async def shutdown(self) -> None:
        """Sends what is waiting, within FLUSH_TIMEOUT. Discards the rest, and accepts no more."""
        with anyio.move_on_after(FLUSH_TIMEOUT):
            await self.flush()
        self._is_open = False
        left = len(self._waiting)
        self._waiting.clear()
        if left:
            self._discard(left, f"they could not be stored within {FLUSH_TIMEOUT:g} s of closing")
        if self._client.is_open:
            await self._client.leave(self)

    async def _send(self) -> None:
        entries = self._next()
        stored = False
        try:
            keys = tuple({key: None for entry in entries for key in entry.keys})
            message = Message(self.topic, b"".join([entry.text for entry in entries]), keys=keys)
            prepared = prepare(message, None, self._client.unique_ids, self._limits)
            await self._attempts.deliver(prepared, None, (message,))
            stored = True
        except RocketMQError as error:
            self._client.outages.note("message traces cannot be stored", error, group=self.group, topic=self.topic)
        finally:
            if stored:
                self.sent += len(entries)
            else:
                self.discarded += len(entries)
            self._done += len(entries)
            self._progress.set()
            self._progress = anyio.Event()

    def _next(self) -> list[_Waiting]:
        """The traces of the next message: at least one, as append() refuses a trace that exceeds a limit alone."""
        entries: list[_Waiting] = []
        size = keys_size = 0
        while self._waiting and len(entries) < BATCH:
            entry = self._waiting[0]
            size += len(entry.text)
            keys_size += entry.keys_size
            if entries and (size > MAX_MESSAGE_SIZE or keys_size > MAX_KEYS_SIZE):
                break
            entries.append(self._waiting.popleft())
            self._size -= entry.size
        return entries

    def _discard(self, count: int, why: str) -> bool:
        """Counts lost traces, and logs that at most once a minute. Returns False."""
        self.discarded += count
        now = time.monotonic()
        if now - self._reported >= _REPORT_INTERVAL:
            self._reported = now
            _log.warning("message traces are discarded", reason=why, discarded=self.discarded, group=self.group)
        return False


def _encoded(trace: MessageTrace) -> _Waiting:
    """A trace as it is sent. Of too many keys, only the first ones find it. Raises ValueError for a separator in it."""
    keys: list[str] = []
    size = 0
    for key in trace_keys(trace):
        size += len(key.encode()) + 1
        if size > MAX_KEYS_SIZE:
            size -= len(key.encode()) + 1
            break
        keys.append(key)
    return _Waiting(encode_trace(trace).encode(), keys, size)
