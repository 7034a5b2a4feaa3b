"""QueueReader: keeps messages of one queue ready, by long polling, within bounds (RocketMQ's ProcessQueue)."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio
import structlog

from client.core import Client
from client.errors import RocketMQError, TopicNotFoundError
from client.interceptors import Interceptor, ReceiveContext, call_all
from client.message import MessageQueue, ReceivedMessage
from client.offsets import OffsetWindow
from client.pulling import HOLD, NOT_KNOWN_YET, PullCall, PullResult, PullStatus, pull
from client.subscription import Subscription

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0

_log = structlog.get_logger("client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """How a queue is read ahead: bounds of what is held per queue, and of one pull.

    >>> Prefetch(messages=100).pull_messages
    32
    """

    messages: int = 1000
    bytes: int = 16 * 1024 * 1024
    pull_messages: int = 32
    hold: float = HOLD


class QueueReader:
    """The messages of one queue, as far as they are pulled, handed out and finished.

    ``run`` pulls until it is cancelled; ``on_ready`` is called when there is something to take again. In ``orderly``
    mode nothing can be taken while something that was taken is not finished; ``on_idle`` is called when it is.
    """

    def __init__(  # noqa: PLR0913 - a reader's surroundings
        self,
        client: Client,
        group: str,
        queue: MessageQueue,
        subscription: Subscription,
        offset: int,
        *,
        prefetch: Prefetch,
        kind: type[ReceivedMessage],
        with_subscription: bool,
        orderly: bool = False,
        on_ready: Callable[["QueueReader"], None],
        owner: object = None,
        interceptors: tuple[Interceptor, ...] = (),
    ) -> None:
        self.client = client
        self.group = group
        self.queue = queue
        self.window: OffsetWindow = OffsetWindow(offset)
        self.committed = offset
        self.buffer: deque[ReceivedMessage] = deque()
        self.orderly = orderly
        self.busy: bool = False
        self.on_idle: Callable[[], None] | None = None
        self.dropped: bool = False
        self.max_seen: int | None = None
        self._bytes = 0
        self._prefetch = prefetch
        self._kind = kind
        self._on_ready = on_ready
        self._received = [hook.received for hook in interceptors]
        self._call = PullCall(
            group,
            queue,
            subscription,
            prefetch.pull_messages,
            with_subscription=with_subscription,
            hold=prefetch.hold,
            receiver=(owner, self),
        )
        self._room = anyio.Event()
        self._full = False
        self._paused = False
        self._broker_id = 0
        self._generation = 0
        self.scope: anyio.CancelScope | None = None

    # -- taking and finishing --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether something can be taken now."""
        return bool(self.buffer) and not self._paused and not self.dropped and not (self.orderly and self.busy)

    def take_one(self) -> ReceivedMessage | None:
        """The next message; None where it is not ready."""
        if not self.is_ready:
            return None
        self.busy = self.orderly
        return self.buffer.popleft()

    def take(self, count: int) -> list[ReceivedMessage]:
        """Up to ``count`` messages; none where it is not ready."""
        if not self.is_ready:
            return []
        buffer = self.buffer
        if count >= len(buffer):
            taken = list(buffer)
            buffer.clear()
        else:
            taken = [buffer.popleft() for _ in range(count)]
        self.busy = self.orderly
        return taken

    def finished(self, messages: list[ReceivedMessage]) -> None:
        """Messages that were taken are done with; the offsets before the first unfinished one can be committed."""
        window, count = self.window, len(messages)
        if not count or not window.finished_first(count, messages[0].queue_offset, messages[-1].queue_offset):
            for message in messages:
                window.finished(message.queue_offset)
        self._bytes -= sum([message.size for message in messages])
        if self.busy:
            self._idle()
            if self.buffer:
                self._on_ready(self)
        if self._full:
            self._room.set()

    def put_back(self, messages: list[ReceivedMessage]) -> None:
        """Messages that were taken are to be taken again, first of all."""
        if not self.dropped:
            self.buffer.extendleft(reversed(messages))
            if len(self.buffer) > len(messages) and self.buffer[len(messages)].queue_offset < messages[-1].queue_offset:
                self.buffer = deque(sorted(self.buffer, key=lambda message: message.queue_offset))
        self._idle()
        if self.buffer:
            self._on_ready(self)

    def _idle(self) -> None:
        self.busy = False
        if self.on_idle is not None:
            self.on_idle()

    # -- control ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Nothing is handed out or pulled until ``resume``."""
        self._paused = True

    def resume(self) -> None:
        """Goes on."""
        self._paused = False
        self._room.set()
        if self.buffer:
            self._on_ready(self)

    def seek(self, offset: int) -> None:
        """Forgets what is held and goes on from ``offset``."""
        self._generation += 1
        self.window = OffsetWindow(offset)
        self.buffer.clear()
        self._bytes = 0
        self.busy = False
        self._room.set()
        if self.scope is not None:  # the pull that is under way asks for what is not wanted any more
            self.scope.cancel()

    def drop(self) -> None:
        """It belongs to another consumer now: nothing is handed out any more."""
        self.dropped = True
        self.buffer.clear()
        if self.scope is not None:
            self.scope.cancel()

    @property
    def committable(self) -> int:
        """The offset from which a successor has to go on."""
        return self.window.committable

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are held and not finished."""
        return self._bytes

    def _has_room(self) -> bool:
        bounds = self._prefetch
        return (
            not self._paused
            and self._bytes < bounds.bytes
            and self.window.unfinished < bounds.messages
            and self.window.span < 2 * bounds.messages
        )

    # -- pulling ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pulls until it is dropped; what goes wrong is tried again after a growing pause."""
        pause = 0.0
        while not self.dropped:
            with anyio.CancelScope() as self.scope:
                try:
                    while not self.dropped:
                        if pause:
                            await anyio.sleep(random.uniform(0.5, 1.0) * pause)  # noqa: S311 - spreads load
                        await self._pull_once()
                        pause = 0.0
                except RocketMQError as error:
                    pause = min(_LONGEST_PAUSE, pause * 2 or _FIRST_PAUSE)
                    await self._mend(error)
                except ValueError:
                    pause = _LONGEST_PAUSE
                    _log.exception("a pull's reply cannot be read", group=self.group, queue=self.queue)
        self.scope = None

    async def _pull_once(self) -> None:
        while not self._has_room():
            self._full = True
            self._room = anyio.Event()
            await self._room.wait()
        self._full = False
        generation, window = self._generation, self.window
        routes = self.client.routes
        route = routes.known(self.queue.topic) or await routes.get(self.queue.topic)
        address = route.member(self.queue.broker_name, self._broker_id)
        if address is None:
            raise TopicNotFoundError(f"the route of {self.queue.topic} has no broker {self.queue.broker_name}")
        result = await pull(self.client, address, self._call, window.next_offset, self._kind)
        if generation == self._generation and not self.dropped:
            self._absorb(window, result)

    def _absorb(self, window: OffsetWindow, result: PullResult) -> None:
        self.max_seen = result.max_offset
        self._broker_id = result.suggested_broker
        if result.status is PullStatus.OFFSET_MOVED:
            _log.warning(
                "offset is outside the queue",
                group=self.group,
                queue=self.queue,
                offset=window.next_offset,
                going_on_from=result.next_offset,
            )
        if result.messages:
            self.add(result.messages)
        window.moved_to(result.next_offset)

    def add(self, messages: list[ReceivedMessage]) -> None:
        """Messages of the queue have come, in order."""
        self.window.took_all([message.queue_offset for message in messages])
        self._bytes += sum([message.size for message in messages])
        was_empty = not self.buffer
        self.buffer.extend(messages)
        if self._received:
            call_all(self._received, ReceiveContext(self.group, self.queue, messages))
        if was_empty:
            self._on_ready(self)

    async def _mend(self, error: RocketMQError) -> None:
        _log.info("pull failed", group=self.group, queue=self.queue, reason=str(error))
        try:
            if error.code in NOT_KNOWN_YET:
                await self.client.heartbeat(error.address)
            else:
                await self.client.routes.refresh(self.queue.topic)
        except RocketMQError:
            return
