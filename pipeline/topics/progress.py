"""The progress of a stream: which messages exist, how the end of a batch is chosen, and what happened to its queues.

The rules of commit order: Spark writes the end of a batch (``end_after``) into its checkpoint before a row of the batch
is read (``ranges``), and runs the same batch again after a crash. So an end must contain everything that is needed to
plan the batch again, and the offset of a queue must never move back, except for a queue that was replaced.
"""

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
"""Seconds for which the bounds of queues are reused: Spark requests them up to 65 times a second."""
SHOWN_AGAIN: Final = 60.0
"""Seconds before a failed commit for the group is retried: each attempt may delay the stream."""
CLOCKS: Final = 60.0
"""Seconds by which a broker's clock may be behind the driver's without loss in queues that appear later."""

_log = structlog.get_logger("pipeline")

Bound = dict[MessageQueue, Bounds]
_NOTHING: Final = StreamOffset({})


class Progress:
    """The state of a stream reader between Spark's calls.

    ``end_after`` and ``ranges`` take and return only offsets that are in the checkpoint, so that the new reader of a
    restarted query gives the same results. The state of this object saves requests and repeated warnings.
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
        self._queried_at = float("-inf")
        self._pins = False
        """Trigger.AvailableNow: the run ends with the messages that exist at its first batch."""
        self._target: Positions | None = None
        """The ends of such a run; None until its first batch."""
        self._highest: Positions = {}
        """The highest offsets that Spark has got or passed: no later end may lie before them."""
        self._committed: Positions = {}
        self._shown_again: dict[MessageQueue, float] = {}
        self._deleted: set[MessageQueue] = set()
        self._trimmed: set[MessageQueue] = set()
        """Queues whose loss of messages was reported already."""
        self._planned: StreamOffset | None = None
        """The last end that this reader has planned: its queues were compared with the checkpoint then."""

    # -- bounds of queues ------------------------------------------------------------------------------------------

    def bounds(self, start: StreamOffset = _NOTHING) -> Bound:
        """The bounds of all queues, at most FRESH seconds old. Queues of a broker that is down keep their old bounds.

        A queue that ends before ``start`` is queried again until it has grown or pollTimeoutMs is over. The wait is
        within this one call: the next run has another reader, which would have to start the wait again.

        Raises OptionError for a topic that does not exist when a stream starts, DataLossError for a deleted one that
        ``start`` contains.
        """
        if self._now() - self._queried_at < FRESH and not self._may_grow(start, self._bounds):
            return self._bounds
        settings = self._settings
        if start.is_initial and not self._bounds:
            self._bounds = session.ask(settings.servers, lambda client: planning.known_bounds(client, settings))
        else:
            known = set(self._bounds) | set(start.ends)
            # A run of Trigger.AvailableNow queries its target only once, so it waits for brokers that are away for a
            # moment. Any other run finds their queues at its next batch.
            patience = Patience(settings.poll_timeout if self._pins and self._target is None else 0.0)
            found = session.ask(settings.servers, lambda client: self._query_patiently(client, start, known, patience))
            self._bounds = {**self._bounds, **found}
        self._queried_at = self._now()
        return self._bounds

    async def _query_patiently(
        self, client: Client, start: StreamOffset, known: set[MessageQueue], patience: Patience
    ) -> Bound:
        """The bounds, queried until all known queues are found and none is shorter than it was, or the time is over."""
        chosen = self._settings.queues
        wanted = known if chosen is None else known & chosen
        growth = Patience(self._settings.poll_timeout)
        while True:
            found = await self._query(client, known)
            if wanted - set(found) - self._deleted and not patience.is_over:
                await patience.wait()
            elif self._may_grow(start, found) and not growth.is_over:
                await growth.wait()
            else:
                return found

    @staticmethod
    def _may_grow(start: StreamOffset, bounds: Bound) -> bool:
        """Whether some queue is shorter than it was, and its broker may only be lagging behind."""
        return any(
            continuity.is_shorter(known, bounds[queue]) and continuity.may_grow(bounds[queue], start.seen.get(queue))
            for queue, known in start.ends.items()
            if queue in bounds
        )

    async def _query(self, client: Client, known: set[MessageQueue]) -> Bound:
        """The bounds as far as brokers answer now; empty if they are down. Raises DataLossError for deleted queues."""
        try:
            before = set((await places.cluster(client)).broker_addr_table)
            routes, _ = await places.routes(client, self._settings)
            found = await places.bounds(client, self._settings, routes.values())
            # Only brokers that were registered before and after the routes were read: one that comes or goes in
            # between has no routes, but has not deleted its topics.
            registered = before & set((await places.cluster(client)).broker_addr_table) if known - set(found) else set()
        except RocketMQError as error:
            if not is_passing(error):
                raise
            _log.warning("the bounds of queues cannot be queried now", reason=str(error))
            return {}
        served = {queue for route in routes.values() for queue in route.read_queues}
        self._check_deleted({queue for queue in known - served if queue.broker_name in registered})
        return found

    def _check_deleted(self, deleted: set[MessageQueue]) -> None:
        """Report queues whose broker is registered but does not have them any more. Raises DataLossError."""
        for queue in sorted(deleted - self._deleted):
            text = planning.missing_offsets(
                self._settings, f"the queue {name_of(queue)} was deleted while a stream reads it"
            )
            _log.warning("a queue was deleted", reason=text)
        self._deleted |= deleted

    # -- the end of a batch ----------------------------------------------------------------------------------------

    def pin_target(self) -> None:
        """Limit the run to the messages that exist at the next ``end_after``, for Trigger.AvailableNow.

        The ends are not queried here, because only the start of a batch shows why a topic may be missing: a wrong
        option of a new query, a deleted topic, or a broker that is away while an old query continues.
        """
        self._queried_at = float("-inf")
        self._pins, self._target = True, None

    def end_after(self, start: StreamOffset, most: int | None) -> StreamOffset:
        """The end of a batch that starts at ``start`` and has at most ``most`` messages; ``start`` if nothing is new.

        Raises DataLossError if the next messages of a queue do not exist any more.
        """
        bounds = self.bounds(start)
        if self._pins and self._target is None:
            self._target = {queue: bound.end for queue, bound in bounds.items()}
        begins = self._begins({queue: bound for queue, bound in bounds.items() if queue not in start.ends}, start)
        # Replaced queues are found before ends are chosen: the batch reads them from their new begin.
        again, undecided = self._begins_again(start, bounds)
        known = {**start.ends, **begins, **again}
        ends, first = dict(known), dict(known)
        for queue, bound in bounds.items():
            # A queue that cannot be compared with the checkpoint now stays where it is until the next batch.
            if queue not in known or queue in undecided:
                continue
            if queue not in again:
                self._check_begin(queue, known[queue], bound)
            target = bound.end if self._target is None else min(bound.end, self._target.get(queue, 0))
            # Never before an end that Spark has already: a slave that answers now may lag behind the master.
            ends[queue] = max(known[queue], target, self._highest.get(queue, 0))
            # Deleted messages do not count for the limit: else the stream would skip them in many batches without rows.
            first[queue] = min(ends[queue], max(known[queue], bound.first))
        if most is not None:
            ends = limited(first, ends, most)
        # The same offset means to Spark that there is no batch. A begin that is not in the checkpoint yet is news too.
        if not begins and not again and ends == start.ends:
            return start
        since_ms = self._since_ms() if start.is_initial else start.since_ms
        seen = self._sightings({queue: seen for queue, seen in start.seen.items() if queue not in again}, known, ends)
        self._planned = StreamOffset(ends, {**begins, **again}, since_ms, seen)
        return self._planned

    def _begins_again(self, start: StreamOffset, bounds: Bound) -> tuple[Positions, set[MessageQueue]]:
        """The begins of queues that were replaced, and the queues that cannot be compared with the checkpoint now.

        Messages are compared only in queues that have grown: an idle queue costs no request. Raises DataLossError.
        """
        known = {queue: bound for queue, bound in bounds.items() if queue in start.ends}
        short = {queue for queue, bound in known.items() if continuity.is_shorter(start.ends[queue], bound)}
        for queue in sorted(short):
            continuity.report_shorter(self._settings, queue, start.ends[queue], known[queue])
        longer = {
            queue: seen for queue, seen in start.seen.items() if queue in known and known[queue].end > start.ends[queue]
        }
        other, undecided = continuity.others(self._settings, longer, known, self._patience())
        for queue, time_ms in sorted(other.items()):
            continuity.report_other(self._settings, queue, start.seen[queue], time_ms, known[queue])
        again = {queue: known[queue] for queue in short | set(other)}
        if not again:
            return {}, undecided
        # The only case in which an offset moves back: the state of the old queue does not apply to the new one.
        for queue in again:
            self._highest.pop(queue, None)
            self._trimmed.discard(queue)
        return continuity.new_begins(self._settings, again, start.seen), undecided

    def _sightings(self, seen: Sightings, known: Positions, ends: Positions) -> Sightings:
        """The messages by which later batches recognise the queues: the last one of each queue if its time is known.

        If the batch ends where the queue ends, the bounds contain that time. Else the old message is used as long as it
        exists. After that the time of another one is queried, without waiting: a batch does not depend on it.
        """
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
            times = continuity.times(self._settings, wanted, Patience(0.0)) or {}
            found |= {queue: Seen(wanted[queue], time_ms) for queue, time_ms in times.items()}
        return found

    def _patience(self) -> Patience:
        """The time to wait for a broker: none in a run without an end, whose next batch queries the broker again."""
        return Patience(self._settings.poll_timeout if self._pins else 0.0)

    def _check_begin(self, queue: MessageQueue, known: int, bound: Bounds) -> None:
        """Report once that the next messages of a queue were deleted. Raises DataLossError with failOnDataLoss."""
        if bound.first <= known:
            self._trimmed.discard(queue)
        elif queue not in self._trimmed:
            what = f"{name_of(queue)} begins at {bound.first}, the stream has read it up to {known}"
            _log.warning("messages were deleted", reason=planning.missing_offsets(self._settings, what))
            self._trimmed.add(queue)

    def remember(self, end: StreamOffset) -> None:
        """Record an end that Spark got or passed: no later end may lie before it."""
        for queue, offset in end.ends.items():
            self._highest[queue] = max(offset, self._highest.get(queue, 0))

    def _begins(self, unknown: Bound, start: StreamOffset) -> Positions:
        """The begins of queues that are new to the stream: by the options in its first batch, later by ``since_ms``.

        A queue that appears later is new, or its broker was away when the stream started, so that it may have messages
        that the options exclude. The two cases cannot be distinguished, but store times exclude these messages in both.
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
            found = session.ask(settings.servers, resolve)
        except RocketMQError as error:
            # The first batch must have the begins of all queues. Later, new queues can wait for the next batch.
            if start.is_initial or not is_passing(error):
                raise
            _log.warning("new queues cannot be read yet", reason=str(error))
            return {}
        for queue, begin in found.items():
            # startingOffsets behind the queue's end: it was replaced after the user read them. The offset of a time may
            # lie behind the end too, if messages were appended after the bounds were queried; that is no loss.
            if position.kind == "table" and begin > unknown[queue].end:
                continuity.report_shorter(settings, queue, begin, unknown[queue])
                found[queue] = unknown[queue].end
        return found

    def _since_ms(self) -> int | None:
        """The store time from which queues are read that appear after the first batch; None for all messages."""
        position, now_ms = self._settings.start, int(self._wall() * 1000)
        if position.kind == "time" and position.time_ms < now_ms:
            return position.time_ms
        return now_ms - int(CLOCKS * 1000) if position.kind in ("latest", "time") else None

    # -- the ranges of a batch -------------------------------------------------------------------------------------

    def ranges(self, start: StreamOffset, end: StreamOffset) -> list[Range]:
        """The ranges between two offsets.

        Raises DataLossError if an end lies before its start, or if an earlier run has planned the batch and its queues
        were replaced since.
        """
        if start == end:
            return []
        if end != self._planned:  # planned by an earlier run and read from the checkpoint
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
        """Check that the messages of a batch still exist when it is run again after a restart. Raises DataLossError."""
        bounds = self.bounds(end)
        for queue, stop in sorted(end.ends.items()):
            if queue in bounds and continuity.is_shorter(stop, bounds[queue]):
                continuity.report_shorter(self._settings, queue, stop, bounds[queue])
        other, _ = continuity.others(self._settings, end.seen, bounds, self._patience())
        for queue, time_ms in sorted(other.items()):
            continuity.report_other(self._settings, queue, end.seen[queue], time_ms, bounds[queue])

    # -- progress of the group -------------------------------------------------------------------------------------

    def show(self, reached: Mapping[MessageQueue, int]) -> None:
        """Commit for the group the offsets that Spark has committed. Failed commits are retried after SHOWN_AGAIN."""
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
        shown = session.ask(self._settings.servers, lambda client: _commit_each(client, group, fresh))
        for queue, offset in fresh:
            if queue in shown:
                self._committed[queue] = offset
                self._shown_again.pop(queue, None)
            else:
                self._shown_again[queue] = now + SHOWN_AGAIN


async def _commit_each(client: Client, group: str, positions: list[tuple[MessageQueue, int]]) -> set[MessageQueue]:
    """Commit each queue's offset; returns the queues that succeeded. A failure does not affect the others."""
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
                away.add(queue.broker_name)  # do not wait for the same broker once for each of its queues
            _log.warning("progress cannot be committed now", group=group, queue=name_of(queue), reason=str(error))
    return done
