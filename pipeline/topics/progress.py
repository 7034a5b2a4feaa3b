"""How far a stream may go: what is there to read now, how a batch's end is chosen, what has become of its queues."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from client.core import Client
from client.errors import RocketMQError
from client.message import MessageQueue
from pipeline.topics import places, planning, session
from pipeline.topics.offsets import Positions, StreamOffset, limited
from pipeline.topics.places import Bounds, is_passing
from pipeline.topics.planning import Range, name_of
from pipeline.topics.settings import Position, ReadSettings

FRESH: Final = 0.2
"""Seconds for which the ends of queues are taken as they were: Spark asks up to 65 times a second."""

_log = structlog.get_logger("pipeline")

Bound = dict[MessageQueue, Bounds]
_NOTHING: Final = StreamOffset({})


class Progress:
    """What a stream reader knows between Spark's calls.

    ``end_after`` and ``ranges`` do the work; both take and give what stands in the checkpoint, so that a reader that
    knows nothing yet (a restarted query) gives the same answers. ``knows_start`` False: Spark does not say where a
    batch starts, so that what looks like a new query may be one that goes on.
    """

    def __init__(
        self, settings: ReadSettings, *, knows_start: bool = True, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._knows_start = knows_start
        self._now = now
        self._bounds: Bound = {}
        self._asked = float("-inf")
        self._target: Positions | None = None
        self._highest: Positions = {}
        self._committed: Positions = {}
        self._gone: set[MessageQueue] = set()
        self._short_since: dict[MessageQueue, float] = {}

    # -- what there is ---------------------------------------------------------------------------------------------

    def bounds(self, start: StreamOffset = _NOTHING) -> Bound:
        """The bounds of all queues, at most FRESH seconds old. A broker that is down keeps its queues as they were.

        Raises OptionError for a topic that is not there at the begin of a stream, DataLossError for one that ``start``
        knows and that was deleted.
        """
        if self._now() - self._asked < FRESH:
            return self._bounds
        settings = self._settings
        if start.is_initial and not self._bounds:
            self._bounds = session.ask(settings.namesrv, lambda client: planning.known_bounds(client, settings))
        else:
            known = set(self._bounds) | set(start.ends)
            self._bounds = {**self._bounds, **session.ask(settings.namesrv, lambda client: self._look(client, known))}
        self._asked = self._now()
        return self._bounds

    async def _look(self, client: Client, known: set[MessageQueue]) -> Bound:
        """What can be learned now; nothing where brokers are down."""
        try:
            before = set((await places.cluster(client)).broker_addr_table)
            routes, _ = await places.routes(client, self._settings)
            found = await places.bounds(client, self._settings, routes.values())
            # A broker that comes or goes while we ask has not lost its topics.
            registered = before & set((await places.cluster(client)).broker_addr_table) if known - set(found) else set()
        except RocketMQError as error:
            if not is_passing(error):
                raise
            _log.warning("what is new cannot be learned now", reason=str(error))
            return {}
        served = {queue for route in routes.values() for queue in route.read_queues}
        self._check_gone({queue for queue in known - served if queue.broker_name in registered})
        return found

    def _check_gone(self, deleted: set[MessageQueue]) -> None:
        """A queue whose broker is registered and does not have it any more was deleted."""
        for queue in sorted(deleted - self._gone):
            text = planning.lost(self._settings, f"the queue {name_of(queue)} was deleted while a stream reads it")
            _log.warning("a queue is gone", reason=text)
        self._gone |= deleted

    # -- where a batch ends ----------------------------------------------------------------------------------------

    def pin_target(self) -> None:
        """From now on nothing that comes later is read: the end of Trigger.AvailableNow."""
        self._asked = float("-inf")
        self._target = {queue: bounds.end for queue, bounds in self.bounds().items()}

    def end_after(self, start: StreamOffset, most: int | None) -> StreamOffset:
        """The end of a batch of at most ``most`` messages that starts at ``start``; ``start`` where nothing is new.

        Raises DataLossError where a queue does not have any more what comes next in it.
        """
        bounds = self.bounds(start)
        begins = self._begins({queue: bound for queue, bound in bounds.items() if queue not in start.ends}, start)
        known = {**start.ends, **begins}
        ends = dict(known)
        for queue, bound in bounds.items():
            self._check_bounds(queue, known[queue], bound)
            target = bound.end if self._target is None else min(bound.end, self._target.get(queue, 0))
            ends[queue] = max(known[queue], target, self._highest.get(queue, 0))
        if most is not None:
            ends = limited(known, ends, most)
        if not begins and ends == start.ends:
            return start
        return StreamOffset(ends, begins)

    def _check_bounds(self, queue: MessageQueue, known: int, bound: Bounds) -> None:
        """Raises DataLossError where what was to be read next was trimmed, or the queue stays shorter than it was."""
        if bound.end >= known:
            self._short_since.pop(queue, None)
            if known < bound.first:
                what = f"{name_of(queue)} begins at {bound.first}, the stream has read it up to {known}"
                _log.warning("messages are not there any more", reason=planning.lost(self._settings, what))
        elif self._now() - self._short_since.setdefault(queue, self._now()) > self._settings.poll_timeout:
            # Not at once: a broker that has just started may not have got to its end yet.
            what = f"{name_of(queue)} ends at {bound.end}, the stream has read it up to {known}"
            _log.warning("a queue is shorter than it was", reason=planning.lost(self._settings, what))

    def remember(self, end: StreamOffset) -> None:
        """An end that was given to Spark or came from it: no later one lies before it."""
        for queue, offset in end.ends.items():
            self._highest[queue] = max(offset, self._highest.get(queue, 0))

    def _begins(self, unknown: Bound, start: StreamOffset) -> Positions:
        """Where queues begin that the stream has not met: by the options at first, at their first message later."""
        if not unknown:
            return {}
        settings = self._settings
        position = settings.start if start.is_initial else Position("earliest")
        if position.kind in ("earliest", "latest"):
            return {
                queue: bound.first if position.kind == "earliest" else bound.end for queue, bound in unknown.items()
            }

        async def resolve(client: Client) -> Positions:
            return await planning.resolve(client, position, "startingOffsets", unknown)

        return session.ask(settings.namesrv, resolve)

    # -- what a batch reads ----------------------------------------------------------------------------------------

    def ranges(self, start: StreamOffset, end: StreamOffset) -> list[Range]:
        """The ranges between two offsets. Raises DataLossError where an end lies before its start."""
        found = []
        for queue, stop in sorted(end.ends.items()):
            begin = end.begin_of(queue, start)
            if begin > stop:
                what = f"{name_of(queue)} ends at {stop}, the stream has read it up to {begin}"
                text = planning.lost(self._settings, what)
                _log.warning("a queue has fewer messages than were read", reason=text)
            elif begin < stop:
                found.append(Range(queue, begin, stop))
        return planning.split(found, self._settings.min_partitions)

    # -- progress that others see ----------------------------------------------------------------------------------

    def show(self, reached: Mapping[MessageQueue, int]) -> None:
        """Commits for the group what Spark has committed; what cannot be committed now comes with the next batch."""
        group = self._settings.group
        fresh = [(queue, offset) for queue, offset in reached.items() if self._committed.get(queue) != offset]
        if group is None or not fresh:
            return
        try:
            session.ask(self._settings.namesrv, lambda client: places.commit(client, group, fresh))
        except RocketMQError as error:
            _log.warning("the group's progress cannot be shown now", group=group, reason=str(error))
            return
        self._committed.update(fresh)
