"""Transactions in the script that crashes at each of its disk calls, and what a start has to find of them.

The promise is the one that users rely on: a half that was acknowledged is never lost, and it is committed at most once,
even if its producer commits it again after every crash.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import trio

from tests.store.builders import message
from trimq.broker.services.offsets import ConsumerOffsetManager
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.services.transaction.ops import End
from trimq.broker.services.transaction.read_back import read_back
from trimq.broker.services.transaction.resumed import ResumedHalves
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult
from trimq.broker.testing import configuration
from trimq.protocol.property_text import join_properties
from trimq.protocol.record import RecordError
from trimq.protocol.topic_rules import TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import QUEUE, Half, NotAHalfError, decode_half, make_half
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

TOPIC: Final = "Paid"
TOPICS: Final = frozenset({TOPIC, TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})
"""The topics that ``check`` looks at. What is stored there is not sent by the script's other operations."""
EXPIRED: Final = TRANS_CHECK_MAX_TIME_TOPIC
_ROOT: Final = "/store"


# -- events


class Preparing(NamedTuple):
    """A half is being stored."""

    body: bytes


class HalfStored(NamedTuple):
    """A half was acknowledged."""

    body: bytes
    physical_offset: int
    size: int
    durable: bool


class Ending(NamedTuple):
    """From now on a half may be ended. ``commit``: by a commit, else by a rollback."""

    body: bytes
    commit: bool


class Committed(NamedTuple):
    """A commit was acknowledged."""

    body: bytes
    physical_offset: int
    size: int
    durable: bool


class Expiring(NamedTuple):
    """From now on a half may be in TRANS_CHECK_MAX_TIME_TOPIC."""

    body: bytes


class Resuming(NamedTuple):
    """From now on an expired half may be a pending one again."""

    body: bytes


class Placed(NamedTuple):
    """A half is in TRANS_CHECK_MAX_TIME_TOPIC, or a new half was made of it."""

    body: bytes
    physical_offset: int


class Done(NamedTuple):
    """The op record of a half is durable."""

    body: bytes


TransactionEvent = Preparing | HalfStored | Ending | Committed | Expiring | Resuming | Placed | Done


@dataclass
class HalfPromise:
    """What holds for a half."""

    durable: bool = False
    committing: bool = False
    rolling_back: bool = False
    committed: bool = False
    expiring: bool = False
    resuming: bool = False
    done: bool = False
    ends: list[int] = field(default_factory=list)
    """The log offsets of records that stand for the half instead of it."""


def add_event(halves: dict[bytes, HalfPromise], event: TransactionEvent, flushed: int, *, killed: bool) -> None:
    """Add what follows from an event by the moment at which the log was durable up to ``flushed``."""
    half = halves.setdefault(event.body, HalfPromise())
    match event:  # a half that is only Preparing promises nothing
        case HalfStored():
            half.durable = killed or event.durable or event.physical_offset + event.size <= flushed
        case Ending():
            half.committing |= event.commit
            half.rolling_back |= not event.commit
        case Committed():
            half.committed = killed or event.durable or event.physical_offset + event.size <= flushed
            half.ends.append(event.physical_offset)
        case Expiring():
            half.expiring = True
        case Resuming():
            half.resuming = True
        case Placed():
            half.ends.append(event.physical_offset)
        case Done():
            half.done = True


# -- the service on the script's store


@lru_cache
def _configuration() -> Configuration:
    return configuration(Path(_ROOT), {"transactionOpMsgMaxSize": 6})


class Transactions:
    """The halves of an opened store, without the broker around it."""

    def __init__(self, store: MessageStore, disk: Disk, clock: Clock) -> None:
        config = _configuration()
        self.store = store
        self.resumed: ResumedHalves
        self.offsets = ConsumerOffsetManager(config, disk, clock)
        self.service = TransactionalMessageService(
            configuration=config,
            store=store,
            offsets=self.offsets,
            disk=disk,
            clock=clock,
            store_host=b"\x7f\0\0\1\0\0\0\1",
        )

    async def open(self) -> None:
        """What a broker does at its start."""
        await self.offsets.load()
        await self.service.load()
        await read_back(self.service, self.store, self.offsets)
        self.store.add_topic_listener(TRANS_HALF_TOPIC, self.service.half_arriving)
        held = HeldHalves(self.store, self.service.halves)
        self.resumed = ResumedHalves(self.store, held)
        self.store.hold_log(held)

    async def stop(self) -> None:
        """What a broker does at its orderly stop."""
        await self.service.stop()
        await self.offsets.persist()

    async def half(self, offset: int) -> Half | None:
        """The half at an offset of the half queue; None if it is damaged."""
        units = await self.store.queue_units(TRANS_HALF_TOPIC, QUEUE, offset, 1)
        data = await self.store.look_message_cold(units[0][0]) if units else b""
        try:
            half = decode_half(data) if len(data) else None
        except (NotAHalfError, RecordError):
            return None
        # The unit of a damaged record is a filler, which leads to another one.
        return half if half is not None and half.offset == offset else None

    async def put(self, put: Any) -> PutMessageResult:
        """Store a message and wait for the result."""
        return await self.service._put(put, lambda _: None)

    async def commit(self, half: Half) -> PutMessageResult:
        """Commit a half and wait for the result. Every other first record is committed as those of a round are."""
        if half.is_first and half.offset % 2:
            service = self.service
            service.committing([half.offset])
            return await service._put(
                service.messages.committed(half),
                lambda result: (service.committed if result.ok else service.not_committed)([half.offset]),
            )
        done = trio.Event()
        results: list[PutMessageResult] = []

        def on_done(result: PutMessageResult) -> None:
            results.append(result)
            done.set()

        result = self.service.commit(half, on_done)
        if result is not None:
            return result
        await done.wait()
        return results[0]

    async def expired(self) -> list[Half]:
        """The halves in TRANS_CHECK_MAX_TIME_TOPIC."""
        store, found = self.store, []
        for offset in range(store.min_offset(EXPIRED, 0), store.max_offset(EXPIRED, 0)):
            units = await store.queue_units(EXPIRED, 0, offset, 1)
            data = await store.look_message_cold(units[0][0]) if units else b""
            if len(data):
                found.append(decode_half(bytes(data), EXPIRED.encode()))
        return found

    async def resume(self, half: Half) -> PutMessageResult | None:
        """Make a new half of an expired one, as 323 does; None if there is one already."""
        if await self.resumed.find(half.physical_offset) >= 0:
            return None
        result = await self.service.resume(half)
        if result.ok:
            self.resumed.note(half.physical_offset, result.queue_offset)
        return result

    def pending(self) -> list[int]:
        """The offsets of the pending halves."""
        return list(self.service.halves.all_pending())


class Producer:
    """The operations of the script. ``note`` takes the events."""

    def __init__(self, transactions: Transactions, random: Random, note: Callable[[TransactionEvent], None]) -> None:
        self._transactions = transactions
        self._service = transactions.service
        self._random = random
        self._note = note
        self._bodies: dict[int, bytes] = {}
        self._service.ops.on_done = partial(self._done, self._service.ops.on_done)

    def _done(self, before: Callable[[End], None], end: End) -> None:
        before(end)
        if end.origin in self._bodies:
            self._note(Done(self._bodies[end.origin]))

    async def prepare(self, body: bytes, unique: str, *, durable: bool) -> None:
        """Store a half."""
        properties = {"UNIQ_KEY": unique}
        make_half(properties, TOPIC, 0, "P")
        text = join_properties(properties).encode()
        self._note(Preparing(body))
        result = await self._transactions.put(message(body, TRANS_HALF_TOPIC, QUEUE, properties=text, keys=(unique,)))
        if result.ok:
            self._bodies[result.queue_offset] = body
            self._note(HalfStored(body, result.physical_offset, result.size, durable))

    async def _choose(self) -> Half | None:
        pending = self._transactions.pending()
        half = await self._transactions.half(self._random.choice(pending)) if pending else None
        if half is not None:
            self._bodies[half.origin] = bytes(half.body)
        return half

    async def commit(self, *, durable: bool) -> None:
        """Commit one of the pending halves."""
        half = await self._choose()
        if half is not None and self._is_pending(half):
            body = bytes(half.body)
            self._note(Ending(body, commit=True))
            result = await self._transactions.commit(half)
            if result.ok:
                self._note(Committed(body, result.physical_offset, result.size, durable))

    async def roll_back(self) -> None:
        """Roll back one of the pending halves."""
        half = await self._choose()
        if half is not None and self._is_pending(half):
            self._note(Ending(bytes(half.body), commit=False))
            self._service.roll_back(half)

    async def store_again(self) -> None:
        """Store one of the pending halves again, as a check does."""
        half = await self._choose()
        if half is not None and self._is_pending(half):
            await self._service.store_again(half, half.times + 1)

    async def store_all_again(self) -> None:
        """Store all pending halves again, as a round of checks does."""
        for offset in self._transactions.pending():
            half = await self._transactions.half(offset)
            if half is not None and self._is_pending(half):
                self._bodies[half.origin] = bytes(half.body)
                await self._service.store_again(half, half.times + 1)

    async def expire(self) -> None:
        """Move one of the pending halves to TRANS_CHECK_MAX_TIME_TOPIC."""
        half = await self._choose()
        if half is not None and self._is_pending(half):
            body = bytes(half.body)
            self._note(Expiring(body))
            self._place(body, await self._service.expire(half))

    async def resume(self) -> None:
        """Resume one of the expired halves, unless it was resumed before."""
        expired = await self._transactions.expired()
        if expired:
            half = self._random.choice(expired)
            body = bytes(half.body)
            self._note(Resuming(body))
            result = await self._transactions.resume(half)
            if result is not None:
                self._place(body, result)

    def _place(self, body: bytes, result: PutMessageResult) -> None:
        if result.ok:
            self._note(Placed(body, result.physical_offset))

    def _is_pending(self, half: Half) -> bool:
        return self._service.halves.state(half.offset) is State.PENDING

    async def write_ops(self) -> None:
        """The interval of op records is over."""
        self._service.ops.write()

    async def settle(self) -> None:
        """The service's look at what is durable, and the writers of its state files."""
        self._service.settle()
        await self._transactions.offsets.persist()
        await self._service.settled.file.persist()


# -- the check after a crash


async def check(
    transactions: Transactions,
    promised: dict[bytes, HalfPromise],
    pull: Callable[[str], Any],
    *,
    unsound: bool,
    deleted_below: int,
    fail: Callable[[str], None],
    committed_before: set[bytes],
) -> None:
    """Check the halves of an opened store, then commit all that are pending, as their producers would.

    ``pull`` reads queue 0 of a topic. ``unsound``: bytes in the log were damaged: a record may be missing, but no half
    may be committed twice. ``committed_before``: halves that earlier checks have committed; this one adds its own. An
    administrator then resumes all expired halves that were not resumed before, and each of these is committed too.
    """
    committed: Counter[bytes] = Counter(found.body for found in await pull(TOPIC))
    pending: Counter[bytes] = Counter()
    for offset in transactions.pending():
        half = await transactions.half(offset)
        if half is not None:
            pending[bytes(half.body)] += 1
    expired = Counter(bytes(half.body) for half in await transactions.expired()) if not unsound else Counter[bytes]()
    for body, count in (committed + pending).items():
        if count > 1:
            fail(f"half {body[:4]!r} is committed {committed[body]} times and pending {pending[body]} times")
    for body, half_promise in promised.items():
        half_promise.committing |= body in committed_before
        half_promise.resuming |= body in committed_before
        # The record of the half itself excuses nothing: its log file stays until what replaces it is durable. (The
        # script's disk never becomes so full that the cleaner may delete pending messages.)
        gone = any(place < deleted_below for place in half_promise.ends)
        if not unsound and not gone:
            _check_half(body, half_promise, (committed[body], pending[body], expired[body]), fail)
    await _commit_all(transactions, committed_before)
    resumed: list[bytes] = []
    if not unsound:
        for half in await transactions.expired():
            result = await transactions.resume(half)
            if result is not None:
                resumed.append(bytes(half.body))
                # With the transient store pool it can be read a moment later only.
                await transactions.service.until_readable(result.queue_offset)
        await _commit_all(transactions, committed_before)
    committed = Counter(found.body for found in await pull(TOPIC))
    for body in resumed:
        if not committed[body]:
            fail(f"half {body[:4]!r} was resumed and is not committed after that")
    for body, count in committed.items():
        if count > 1:
            fail(f"half {body[:4]!r} is committed {count} times after a further commit")
        if body not in promised:
            fail(f"{body[:4]!r} was never prepared")


async def _commit_all(transactions: Transactions, committed: set[bytes]) -> None:
    for offset in transactions.pending():
        half = await transactions.half(offset)
        if half is not None:
            committed.add(bytes(half.body))
            await transactions.commit(half)


def _check_half(body: bytes, half: HalfPromise, found: tuple[int, int, int], fail: Callable[[str], None]) -> None:
    committed, pending, expired = found
    name = f"half {body[:4]!r}"
    if expired and not half.expiring:
        fail(f"{name} has expired without a reason")
    if expired > 1 and not half.resuming:
        fail(f"{name} has expired {expired} times and was not resumed")
    if expired and (committed or pending) and not half.resuming:
        fail(f"{name} has expired, is committed {committed} times and pending {pending} times, and was not resumed")
    if committed and not half.committing:
        fail(f"{name} was committed without a commit")
    if half.committed and not committed:
        fail(f"the commit record of {name} is missing")
    if half.done and pending and not half.resuming:
        fail(f"{name} is pending although its op record was durable")
    if half.durable and not committed and not pending and not expired and not half.rolling_back:
        fail(f"{name} is lost")
