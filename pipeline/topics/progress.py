"""How far a stream may go: what is there to read now, how a batch's end is chosen, what has become of its queues."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from trimq.client.core import Client
from trimq.client.errors import RocketMQError
from trimq.client.message import MessageQueue
from trimq.pipeline.topics import continuity, places, planning, session
from trimq.pipeline.topics.offsets import Positions, Seen, Sightings, StreamOffset, limited
from trimq.pipeline.topics.places import Bounds, Patience, is_passing
from trimq.pipeline.topics.planning import Range, name_of
from trimq.pipeline.topics.settings import Position, ReadSettings

FRESH: Final = 0.2
"""Seconds for which the ends of queues are taken as they were: Spark asks up to 65 times a second."""
SHOWN_AGAIN: Final = 60.0
"""Seconds until progress that could not be committed for the group is tried again: each try may hold the stream up."""
CLOCKS: Final = 60.0
"""Seconds by which a broker's clock may be behind the driver's without loss in queues that are met later."""

_log = structlog.get_logger("pipeline")

Bound = dict[MessageQueue, Bounds]
_NOTHING: Final = StreamOffset({})


class Progress:
    """What a stream reader knows between Spark's calls.

    ``end_after`` and ``ranges`` do the work; both take and give what stands in the checkpoint, so that a reader that
    knows nothing yet (a restarted query) gives the same answers.
    """

    def __init__(
        self,
        settings: ReadSettings,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._now = now
        self._wall = wall
        self._bounds: Bound = {}
        self._asked = float("-inf")
        self._pins = False
        self._target: Positions | None = None
        self._highest: Positions = {}
        self._committed: Positions = {}
        self._shown_again: dict[MessageQueue, float] = {}
        self._gone: set[MessageQueue] = set()
        self._trimmed: set[MessageQueue] = set()
        self._planned: StreamOffset | None = None

    # -- what there is ---------------------------------------------------------------------------------------------

    def bounds(self, start: StreamOffset = _NOTHING) -> Bound:
        """The bounds of all queues, at most FRESH seconds old. A broker that is down keeps its queues as they were.

        A queue that ends before ``start`` is asked for again until it has grown or pollTimeoutMs is over. That is
        waited for here, within one call: the next run is another reader, which would begin to wait anew.

        Raises OptionError for a topic that is not there at the begin of a stream, DataLossError for one that ``start``
        knows and that was deleted.
        """
        if self._now() - self._asked < FRESH and not self._may_grow(start, self._bounds):
            return self._bounds
        settings = self._settings
        if start.is_initial and not self._bounds:
            self._bounds = session.ask(settings.namesrv, lambda client: planning.known_bounds(client, settings))
        else:
            known = set(self._bounds) | set(start.ends)
            # A run that ends with what is there now has no later look at a broker that is away for a moment.
            patience = Patience(settings.poll_timeout if self._pins and self._target is None else 0.0)
            found = session.ask(settings.namesrv, lambda client: self._patient_look(client, start, known, patience))
            self._bounds = {**self._bounds, **found}
        self._asked = self._now()
        return self._bounds

    async def _patient_look(
        self, client: Client, start: StreamOffset, known: set[MessageQueue], patience: Patience
    ) -> Bound:
        """What can be learned until everything known is there, and not shorter than it was, or patience ends."""
        chosen = self._settings.queues
        wanted = known if chosen is None else known & chosen
        growth = Patience(self._settings.poll_timeout)
        while True:
            found = await self._look(client, known)
            if wanted - set(found) - self._gone and not patience.is_over:
                await patience.wait()
            elif self._may_grow(start, found) and not growth.is_over:
                await growth.wait()
            else:
                return found

    @staticmethod
    def _may_grow(start: StreamOffset, bounds: Bound) -> bool:
        """Whether a queue is shorter than it was, and its broker may only be behind."""
        return any(
            continuity.is_shorter(known, bounds[queue]) and continuity.may_grow(bounds[queue], start.seen.get(queue))
            for queue, known in start.ends.items()
            if queue in bounds
        )

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
            text = planning.missing_offsets(
                self._settings, f"the queue {name_of(queue)} was deleted while a stream reads it"
            )
            _log.warning("a queue is gone", reason=text)
        self._gone |= deleted

    # -- where a batch ends ----------------------------------------------------------------------------------------

    def pin_target(self) -> None:
        """What is there at the next ``end_after`` is all that is read: the end of Trigger.AvailableNow.

        Not what is there now: only the start of a batch tells whether a topic that is missing is a wrong option of a
        new query, or lost, or away while a query goes on.
        """
        self._asked = float("-inf")
        self._pins, self._target = True, None

    def end_after(self, start: StreamOffset, most: int | None) -> StreamOffset:
        """The end of a batch of at most ``most`` messages that starts at ``start``; ``start`` where nothing is new.

        Raises DataLossError where a queue does not have any more what comes next in it.
        """
        bounds = self.bounds(start)
        if self._pins and self._target is None:
            self._target = {queue: bound.end for queue, bound in bounds.items()}
        begins = self._begins({queue: bound for queue, bound in bounds.items() if queue not in start.ends}, start)
        again, untold = self._begins_again(start, bounds)
        known = {**start.ends, **begins, **again}
        ends, there = dict(known), dict(known)
        for queue, bound in bounds.items():
            if queue not in known or queue in untold:
                continue
            if queue not in again:
                self._check_begin(queue, known[queue], bound)
            target = bound.end if self._target is None else min(bound.end, self._target.get(queue, 0))
            ends[queue] = max(known[queue], target, self._highest.get(queue, 0))
            # What was trimmed is no part of a batch: else it would be passed over limit by limit.
            there[queue] = min(ends[queue], max(known[queue], bound.first))
        if most is not None:
            ends = limited(there, ends, most)
        if not begins and not again and ends == start.ends:
            return start
        since_ms = self._since_ms() if start.is_initial else start.since_ms
        seen = self._sightings({queue: seen for queue, seen in start.seen.items() if queue not in again}, known, ends)
        self._planned = StreamOffset(ends, {**begins, **again}, since_ms, seen)
        return self._planned

    def _begins_again(self, start: StreamOffset, bounds: Bound) -> tuple[Positions, set[MessageQueue]]:
        """Where queues begin that are not any more what was read; and those of which nobody can tell now.

        Only queues that have become longer are compared: an idle one costs no request. Raises DataLossError.
        """
        known = {queue: bound for queue, bound in bounds.items() if queue in start.ends}
        short = {queue for queue, bound in known.items() if continuity.is_shorter(start.ends[queue], bound)}
        for queue in sorted(short):
            continuity.tell_shorter(self._settings, queue, start.ends[queue], known[queue])
        longer = {
            queue: seen for queue, seen in start.seen.items() if queue in known and known[queue].end > start.ends[queue]
        }
        other, untold = continuity.others(self._settings, longer, known, self._patience())
        for queue, time_ms in sorted(other.items()):
            continuity.tell_other(self._settings, queue, start.seen[queue], time_ms, known[queue])
        again = {queue: known[queue] for queue in short | set(other)}
        if not again:
            return {}, untold
        for queue in again:
            self._highest.pop(queue, None)
            self._trimmed.discard(queue)
        return continuity.new_begins(self._settings, again, start.seen), untold

    def _sightings(self, seen: Sightings, known: Positions, ends: Positions) -> Sightings:
        """By which messages the queues are known again: the last of each, where the brokers have told its time."""
        found: Sightings = {}
        wanted: Positions = {}
        for queue, end in ends.items():
            bound, old = self._bounds.get(queue), seen.get(queue)
            if bound is not None and end == bound.end and bound.last_ms:
                found[queue] = Seen(end - 1, bound.last_ms)
            elif bound is not None and end > known[queue] and (old is None or old.offset < bound.first):
                wanted[queue] = end - 1
            elif old is not None:
                found[queue] = old
        if wanted:
            told = continuity.times(self._settings, wanted, Patience(0.0)) or {}
            found |= {queue: Seen(wanted[queue], time_ms) for queue, time_ms in told.items()}
        return found

    def _patience(self) -> Patience:
        """A run that ends with what is there now has no later look at a broker that is away for a moment."""
        return Patience(self._settings.poll_timeout if self._pins else 0.0)

    def _check_begin(self, queue: MessageQueue, known: int, bound: Bounds) -> None:
        """Raises DataLossError where what was to be read next was trimmed; else tells it once."""
        if bound.first <= known:
            self._trimmed.discard(queue)
        elif queue not in self._trimmed:
            what = f"{name_of(queue)} begins at {bound.first}, the stream has read it up to {known}"
            _log.warning("messages are not there any more", reason=planning.missing_offsets(self._settings, what))
            self._trimmed.add(queue)

    def remember(self, end: StreamOffset) -> None:
        """An end that was given to Spark or came from it: no later one lies before it."""
        for queue, offset in end.ends.items():
            self._highest[queue] = max(offset, self._highest.get(queue, 0))

    def _begins(self, unknown: Bound, start: StreamOffset) -> Positions:
        """Where queues begin that the stream has not met: by the options at first, later as the start says.

        A queue that is met later is a new one, or its broker was away when the stream began, and has messages that the
        options exclude: nobody can tell before it is back. Its messages' store times can.
        """
        if not unknown:
            return {}
        settings = self._settings
        position = settings.start
        if not start.is_initial:
            position = Position("earliest") if start.since_ms is None else Position("time", time_ms=start.since_ms)
        if position.kind in ("earliest", "latest"):
            return {
                queue: bound.first if position.kind == "earliest" else bound.end for queue, bound in unknown.items()
            }

        async def resolve(client: Client) -> Positions:
            return await planning.resolve(client, position, "startingOffsets", unknown)

        try:
            found = session.ask(settings.namesrv, resolve)
        except RocketMQError as error:
            if start.is_initial or not is_passing(error):
                raise
            _log.warning("new queues cannot be read yet", reason=str(error))
            return {}
        for queue, begin in found.items():
            # startingOffsets of a queue that was made anew since somebody noted them. A time is looked up now: its
            # offset may lie behind the bounds that were asked for before it, where messages have come since.
            if position.kind == "table" and begin > unknown[queue].end:
                continuity.tell_shorter(settings, queue, begin, unknown[queue])
                found[queue] = unknown[queue].end
        return found

    def _since_ms(self) -> int | None:
        """The store time from which queues are read that are met after the first batch; None for all they have."""
        position, now_ms = self._settings.start, int(self._wall() * 1000)
        if position.kind == "time" and position.time_ms < now_ms:
            return position.time_ms
        return now_ms - int(CLOCKS * 1000) if position.kind in ("latest", "time") else None

    # -- what a batch reads ----------------------------------------------------------------------------------------

    def ranges(self, start: StreamOffset, end: StreamOffset) -> list[Range]:
        """The ranges between two offsets. Raises DataLossError where an end lies before its start.

        And where a batch that an earlier run has planned would read queues that are other ones by now.
        """
        if start == end:
            return []
        if end != self._planned:
            self._check_planned(end)
        found = []
        for queue, stop in sorted(end.ends.items()):
            begin = end.begin_of(queue, start)
            if begin > stop:
                what = f"{name_of(queue)} ends at {stop}, the stream has read it up to {begin}"
                text = planning.missing_offsets(self._settings, what)
                _log.warning("a queue has fewer messages than were read", reason=text)
            elif begin < stop:
                found.append(Range(queue, begin, stop))
        return planning.split(found, self._settings.min_partitions)

    def _check_planned(self, end: StreamOffset) -> None:
        """A batch is read again after a restart: what it was to read has to be there. Raises DataLossError."""
        bounds = self.bounds(end)
        for queue, stop in sorted(end.ends.items()):
            if queue in bounds and continuity.is_shorter(stop, bounds[queue]):
                continuity.tell_shorter(self._settings, queue, stop, bounds[queue])
        other, _ = continuity.others(self._settings, end.seen, bounds, self._patience())
        for queue, time_ms in sorted(other.items()):
            continuity.tell_other(self._settings, queue, end.seen[queue], time_ms, bounds[queue])

    # -- progress that others see ----------------------------------------------------------------------------------

    def show(self, reached: Mapping[MessageQueue, int]) -> None:
        """Commits for the group what Spark has committed; what cannot be committed now is tried again later."""
        group = self._settings.group
        if group is None:
            return
        now = self._now()
        fresh = [
            (queue, offset)
            for queue, offset in reached.items()
            if self._committed.get(queue) != offset and self._shown_again.get(queue, now) <= now
        ]
        if not fresh:
            return
        shown = session.ask(self._settings.namesrv, lambda client: _commit_each(client, group, fresh))
        for queue, offset in fresh:
            if queue in shown:
                self._committed[queue] = offset
                self._shown_again.pop(queue, None)
            else:
                self._shown_again[queue] = now + SHOWN_AGAIN


async def _commit_each(client: Client, group: str, positions: list[tuple[MessageQueue, int]]) -> set[MessageQueue]:
    """The queues whose progress is committed; one that cannot be leaves the others alone."""
    done: set[MessageQueue] = set()
    away: set[str] = set()
    for queue, offset in positions:
        if queue.broker_name in away:
            continue
        try:
            await places.commit(client, group, [(queue, offset)])
            done.add(queue)
        except RocketMQError as error:
            if is_passing(error):
                away.add(queue.broker_name)
            _log.warning("progress cannot be shown now", group=group, queue=name_of(queue), reason=str(error))
    return done
