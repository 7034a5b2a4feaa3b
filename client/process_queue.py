"""ProcessQueue: reads one queue ahead by long polling, within bounds, and tracks its offsets, as RocketMQ's does."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any, Final

import anyio

from trimq.client.core import Client
from trimq.client.errors import CredentialsError, RocketMQError, TopicNotFoundError
from trimq.client.interceptors import Interceptor, ReceiveContext, call_all
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.message_block import MessageBlock
from trimq.client.offset_window import OffsetWindow
from trimq.client.pulling import HOLD, NOT_KNOWN_YET, PullCall, Pulled, Pulls, PullStatus
from trimq.client.read_ahead import ReadAhead
from trimq.client.routes import TopicRoute
from trimq.client.subscription import Subscription
from trimq.remoting.client.client_log import StandardLog

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
"""Seconds before a failed pull is retried, first and at most."""

_log = StandardLog("trimq.client.process_queue")


class Counts:
    """Counters of a topic's processed messages: ``good`` ones succeeded, ``bad`` ones failed.

    Only a sample is timed, since reading the clock costs as much as acknowledging: ``timed`` messages took ``seconds``.
    """

    __slots__ = ("bad", "good", "seconds", "timed")

    def __init__(self) -> None:
        self.good: int = 0
        self.bad: int = 0
        self.seconds: float = 0.0
        self.timed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """How far a consumer reads ahead.

    ``messages`` and ``bytes`` bound the unfinished messages of each queue that the client holds. ``pull_messages`` is
    the most that one pull returns. ``hold`` is the time in seconds for which the broker may hold a pull that finds
    nothing.

    >>> Prefetch(messages=100).pull_messages
    32
    """

    messages: int = 1000
    bytes: int = 16 * 1024 * 1024
    pull_messages: int = 32
    hold: float = HOLD


class ProcessQueue:
    """The pulled messages of one queue, until they are taken by the program and finished.

    ``run`` pulls until it is cancelled. ``on_ready`` is called when messages can be taken again. In ``orderly`` mode no
    message can be taken while the one before is unfinished (``busy``); ``on_idle`` is called when it is finished.
    ``offset`` is the first to pull, ``owner`` the consumer that acknowledgements go through.
    """

    def __init__(  # noqa: PLR0913 - a process queue's surroundings
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
        on_ready: Callable[["ProcessQueue"], None],
        owner: object = None,
        interceptors: tuple[Interceptor, ...] = (),
        counts: Counts | None = None,
    ) -> None:
        self.client = client
        self.group = group
        self.queue = queue
        self.window: OffsetWindow = OffsetWindow(offset)
        self.committed = offset
        self.buffer: ReadAhead[ReceivedMessage] = ReadAhead()
        self.receiver: tuple[Any, ProcessQueue] = (owner, self)
        self.orderly = orderly
        self.busy: bool = False
        self.is_free: bool = not orderly
        """Whether messages may be taken from ``buffer.front`` directly: it is not paused, and never busy."""
        self.on_idle: Callable[[], None] | None = None
        self.dropped: bool = False
        self.max_seen: int | None = None
        self.counts: Counts = counts or Counts()
        self._bytes = 0
        self._prefetch = prefetch
        self._on_ready = on_ready
        self._received = [hook.received for hook in interceptors]
        call = PullCall(
            group,
            queue,
            subscription,
            prefetch.pull_messages,
            with_subscription=with_subscription,
            hold=prefetch.hold,
            receiver=self.receiver,
        )
        self._pulls = Pulls(client, call, self)
        self._kind = kind
        self._eager_pull_limit = prefetch.messages - 2 * prefetch.pull_messages
        self._until_check = 0
        self._address: str | None = None
        self._pause = 0.0
        self._tried: TopicRoute | None = None
        """The route with which the last pull was tried."""
        self._paused = False
        self.refused: CredentialsError | None = None
        """Why the broker does not accept this client's user; None since the last pull that it served."""
        self._broker_id = 0
        self.scope: anyio.CancelScope | None = None

    # -- taking and finishing --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a message can be taken now."""
        return bool(self.buffer) and not self._paused and not self.busy

    def take_one(self) -> ReceivedMessage | None:
        """The next message; None if none can be taken now."""
        if self._paused or self.busy:
            return None
        front = self.buffer.front
        message = front.popleft() if front else self.buffer.take_one()
        if message is not None:
            self.busy = self.orderly
        return message

    def take(self, count: int) -> MessageBlock[ReceivedMessage] | None:
        """Up to ``count`` messages; None if none can be taken now."""
        if not self.is_ready:
            return None
        self.busy = self.orderly
        return self.buffer.take(count)

    def finished(self, messages: Sequence[ReceivedMessage]) -> None:
        """Marks taken messages as finished. The offsets before the first unfinished message can be committed."""
        window = self.window
        # type(): isinstance() with an abstract base class costs as much as all the rest for a single message.
        if type(messages) is MessageBlock and window.finished_all(messages.offsets):
            self._bytes -= messages.size
        else:
            for message in messages:
                if window.finished(message.queue_offset):
                    self._bytes -= message.size
        self._after_finish(len(messages))

    def finished_one(self, message: ReceivedMessage) -> None:
        """As ``finished``, for one message."""
        # The window refuses an offset that it does not have: the message was finished before, or seek() has moved on.
        # Its bytes must not be subtracted twice.
        if self.window.finished(message.queue_offset):
            self._bytes -= message.size
        if self._until_check or self.busy:
            self._after_finish(1)

    def _after_finish(self, count: int) -> None:
        if self.busy:
            self._idle()
            if self.buffer:
                self._on_ready(self)
        if self._until_check:
            self._until_check -= min(count, self._until_check)
            if not self._until_check:
                self.pull_more()

    def put_back(self, messages: Iterable[ReceivedMessage]) -> None:
        """Puts back taken messages, which will be the next ones to be taken. A dropped queue only becomes idle."""
        if not self.dropped:
            self.buffer.put_back(messages)
        self._idle()
        if self.buffer:
            self._on_ready(self)

    def _idle(self) -> None:
        self.busy = False
        if self.on_idle is not None:
            self.on_idle()

    # -- control ---------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stops handing out and pulling messages until ``resume``."""
        self._paused = True
        self.is_free = False

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False
        self.is_free = not self.orderly
        self.pull_more()
        if self.buffer:
            self._on_ready(self)

    def seek(self, offset: int) -> None:
        """Discards the messages that it holds and continues from ``offset``."""
        self._pulls.forget()  # a reply from the old position must not be added to the new window
        self.window = OffsetWindow(offset)
        self.buffer.clear()
        self._bytes = 0
        self.busy = False
        self.pull_more()

    def drop(self) -> None:
        """Stops for good, since the queue goes to another consumer: no message is handed out or pulled any more."""
        self.dropped = True
        self.buffer.clear()
        self._pulls.forget()
        if self.scope is not None:
            self.scope.cancel()

    @property
    def position(self) -> int:
        """The offset of the next pull."""
        return self.window.next_offset

    @property
    def committable(self) -> int:
        """The offset to commit, from which the next owner of the queue has to continue."""
        return self.window.committable

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that were pulled and are not finished."""
        return self._bytes

    def _excess(self) -> int:
        """0 if another pull is within the bounds; else the least number of messages that must be finished before."""
        bounds, window = self._prefetch, self.window
        # The span counts finished messages behind an unfinished one. It is bounded too: they all come again if the
        # consumer ends before that message is finished.
        if self._bytes >= bounds.bytes or window.span >= 2 * bounds.messages:
            return 1
        return max(0, window.unfinished - bounds.messages + 1)

    # -- pulling ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pulls until it is dropped. A failed pull is logged and retried after a growing pause."""
        with anyio.CancelScope() as self.scope:
            while not self.dropped:
                if self._pause:
                    await self._wait()
                try:
                    await self._pull()
                except RocketMQError as error:
                    self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
                    await self._recover(error)
                except ValueError as error:
                    self._pause = _LONGEST_PAUSE
                    _log.failed("a pull's reply cannot be decoded", error, group=self.group, queue=self.queue)
        self.scope = None

    async def _wait(self) -> None:
        """Pause, until there is another route at most: a new master may be known."""
        with anyio.move_on_after(random.uniform(0.5, 1.0) * self._pause):  # noqa: S311 - spreads load
            await self.client.routes.differs(self.queue.topic, self._tried)
            self._pause = 0.0

    async def _pull(self) -> None:
        self._tried = await self.client.routes.get(self.queue.topic)
        address = self._address = self._member()
        if address is None:
            raise TopicNotFoundError(f"the route of {self.queue.topic} has no broker {self.queue.broker_name}")
        await self._pulls.run(address)

    def _member(self) -> str | None:
        """The address to pull from: that of the broker id which the last reply suggested, by the current route."""
        route = self.client.routes.known(self.queue.topic)
        return route.member(self.queue.broker_name, self._broker_id) if route is not None else None

    def pull_more(self) -> None:
        """Sends the next pull now, or as soon as enough messages are finished for it to be within the bounds."""
        if self.dropped or self._paused:
            return
        self._until_check = self._excess()
        if not self._until_check:
            self._pulls.next()

    def absorb(self, result: Pulled) -> None:
        """Takes the result of a pull. The next pull is sent before its messages are split, so that the broker works."""
        self._pause = 0.0
        self.refused = None
        if self.client.outages.open and self._address is not None:
            self.client.outages.over(self._address)
        self.max_seen = result.max_offset
        self._broker_id = result.suggested_broker
        window = self.window
        if result.status is PullStatus.OFFSET_MOVED:
            _log.warning(
                "offset is outside the queue",
                group=self.group,
                queue=self.queue,
                offset=window.next_offset,
                going_on_from=result.next_offset,
            )
        if self._member() != self._address:
            self._pulls.stop()
        began = window.next_offset
        window.moved_to(result.next_offset)
        # The messages of this reply are not in the window yet. The eager pull leaves space for them and for its own.
        if result.size + self._bytes < self._prefetch.bytes and window.unfinished < self._eager_pull_limit:
            self.pull_more()
        try:
            block = result.block(self._kind)
        except Exception:
            # Back to the position before: a reply that cannot be decoded must not skip its messages. The pull that was
            # sent in the meantime is discarded when the error ends ``Pulls.run``.
            window.moved_to(began)
            raise
        if block is not None:
            self.add(block)
        if not self._pulls.is_in_flight:
            self.pull_more()

    def add(self, block: MessageBlock[ReceivedMessage]) -> None:
        """Adds pulled messages, which follow those before in order."""
        self.window.took(block.offsets)  # before the buffer: only a message in the window can be finished
        self._bytes += block.size
        was_empty = not self.buffer
        self.buffer.add(block)
        if self._received:
            call_all(self._received, ReceiveContext(self.group, self.queue, block))
        if was_empty:
            self._on_ready(self)

    async def _recover(self, error: RocketMQError) -> None:
        self.client.outages.note("a pull", error, level=INFO, group=self.group, queue=self.queue)
        if isinstance(error, CredentialsError):
            self.refused = error
            self._on_ready(self)  # wakes a poll, which raises the error
        try:
            if error.code in NOT_KNOWN_YET:  # the broker has lost the subscription, as after a restart
                await self.client.heartbeat(error.address)
            else:
                if error.code is None:  # it did not answer, or the route has no broker
                    self.client.routes.doubt(error.address or "")
                await self.client.routes.refresh(self.queue.topic)
        except RocketMQError:
            return
