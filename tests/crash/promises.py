"""Checks what a store has to hold after a crash, through the store's public interface."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import trio

from tests.crash import transactions
from tests.crash.losses import Damage
from tests.crash.script import DELAYS_MS, Promise
from tests.crash.timed import TIMED, deliver_all, problem
from tests.store.builders import message
from tests.store.simdisk import SimDisk
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import GetMessageStatus, PutMessageResult
from trimq.protocol.message import StoredMessage, decode_message, decode_messages
from trimq.protocol.queue_unit import FILLER_SIZE
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC
from trimq.remoting.runtime.clock import ManualClock

_FAR = 1 << 60
OUTAGES = (0, 17)
"""Days between a crash and the start of the timer: nothing is due at the start, or everything."""


class BrokenPromiseError(AssertionError):
    """A store breaks a promise; the text names the message and the reason."""


def check_state(promise: Promise, value: int) -> None:
    """Check that the state file holds the confirmed value or a newer one. Raises BrokenPromiseError if not."""
    first, last = promise.state
    if not first <= value <= last:
        raise BrokenPromiseError(f"the state file has {value}, it was {first} to {last}")


@dataclass
class Checker:
    """Checks one opened store.

    ``damage`` lists the places in the log where a bit was flipped. ``damaged``: an earlier recovery has reported a
    place in the middle of the log that holds no valid record, so that offsets may be missing in a queue.
    """

    store: MessageStore
    promise: Promise
    damage: Sequence[Damage] = ()
    damaged: bool = False
    committed: set[bytes] = field(default_factory=set)
    """Halves that checks have committed, on this store or before."""

    async def check(self) -> None:
        """Check all promises. Raises BrokenPromiseError if one is broken."""
        present: dict[bytes, StoredMessage] = {}
        for topic, queue_ids in self.store.topics().items():
            if topic == TIMED:
                continue  # see check_timed
            for queue_id in queue_ids if topic not in transactions.TOPICS else ():
                await self._check_queue(topic, queue_id, present)
        self._check_durable(present)
        await self._check_keys(present)
        for found in present.values():
            self._check_id(found)
        await self._check_transactions()

    async def _check_transactions(self) -> None:
        found = transactions.Transactions(self.store, self.store.disk, self.store.clock)
        await found.open()
        await transactions.check(
            found,
            self.promise.halves,
            lambda topic: pull_all(self.store, topic, 0, holes=self._has_holes()),
            unsound=self._has_holes() or bool(self.damage),
            deleted_below=self.promise.deleted_below,
            fail=self._fail,
            committed_before=self.committed,
        )

    def _fail(self, text: str) -> None:
        recovered = self.store.recovered
        raise BrokenPromiseError(f"{text} [{recovered}]")

    def _has_holes(self) -> bool:
        recovered = self.store.recovered
        return self.damaged or (recovered is not None and bool(recovered.damaged))

    # (b), (c): only messages that were sent, each at its own offset, without holes

    async def _check_queue(self, topic: str, queue_id: int, present: dict[bytes, StoredMessage]) -> None:
        store = self.store
        place = f"{topic}/{queue_id}"
        first, end = store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)
        pulled = await pull_all(store, topic, queue_id, holes=self._has_holes())
        offsets = [found.queue_offset for found in pulled]
        if offsets != sorted(set(offsets)):
            self._fail(f"{place}: offsets {offsets} are not in order")
        if not self._has_holes() and offsets != list(range(first, end)):
            self._fail(f"{place}: offsets {offsets} are not those from {first} to {end}")
        places = [found.commit_log_offset for found in pulled]
        if places != sorted(places):
            self._fail(f"{place}: log offsets {places} are not in order")
        units = await store.queue_units(topic, queue_id, first, end - first)
        tags = {phy: tag for phy, size, tag in units if size != FILLER_SIZE}
        for found in pulled:
            if topic == TIMER_TOPIC and "TIMER_ROLL_TIMES" in found.properties:
                continue  # the timer stored it again
            self._check_sent(topic, queue_id, found, tags.get(found.commit_log_offset))
            if found.body in present:
                self._fail(f"{place}: message {_name(found.body)} is stored twice")
            present[found.body] = found

    def _check_sent(self, topic: str, queue_id: int, found: StoredMessage, tag: int | None) -> None:
        sent = self.promise.sent.get(found.body)
        name = f"message {_name(found.body)} at {found.commit_log_offset}"
        if sent is None:
            self._fail(f"{name} was never sent")
            return
        if (sent.topic, sent.queue_id) != (topic, queue_id) or (found.topic, found.queue_id) != (topic, queue_id):
            self._fail(f"{name} of {sent.topic}/{sent.queue_id} came through {topic}/{queue_id}")
        text = "".join(f"{key}\x01{value}\x02" for key, value in found.properties.items())
        if text != sent.properties:
            self._fail(f"{name} has the properties {text!r} instead of {sent.properties!r}")
        wanted = sent.tags_code
        if topic == SCHEDULE_TOPIC:
            wanted = found.store_timestamp + DELAYS_MS[queue_id + 1]
        if tag != wanted:
            self._fail(f"{name} has the tag {tag} instead of {wanted} in its queue")
        placed = self.promise.placed.get(found.body)
        if placed is not None and (placed.queue_offset, placed.physical_offset) != (
            found.queue_offset,
            found.commit_log_offset,
        ):
            self._fail(f"{name} of queue offset {found.queue_offset} was acknowledged as {placed[1:3]}")

    # (a): no durable message is missing

    def _check_durable(self, present: dict[bytes, StoredMessage]) -> None:
        for body, placed in self.promise.durable.items():
            if body in present or body in self.promise.dropped or placed.physical_offset < self.promise.deleted_below:
                continue
            if any(one.begin <= placed.physical_offset < one.end for one in self.damage):
                continue
            self._fail(f"message {_name(body)}, durable at {placed.physical_offset}, is missing")

    # (d): by key and by id

    async def _check_keys(self, present: dict[bytes, StoredMessage]) -> None:
        """Query each message by all of its keys.

        The index may still find a message that is in no queue: the record remains in the log when a topic is dropped.
        """
        answers: dict[tuple[str, str], set[int]] = {}
        for body, sent in self.promise.sent.items():
            for key in sent.keys:
                found = answers.get((sent.topic, key))
                if found is None:
                    found = answers[sent.topic, key] = set(await self._query(sent.topic, key))
                if body in present and present[body].commit_log_offset not in found:
                    self._fail(f"message {_name(body)} at {present[body].commit_log_offset} is not found by {key}")

    async def _query(self, topic: str, key: str) -> list[int]:
        result = self.store.query_message(topic, key, 64, 0, _FAR)
        if result is None:
            result = await self.store.query_message_cold(topic, key, 64, 0, _FAR)
        try:
            answer = [one for data in result.buffers for one in _decoded(bytes(data))]
        finally:
            result.release()
        for one in answer:
            sent = self.promise.sent.get(one.body)
            if sent is None or sent.topic != topic or key not in sent.keys:
                self._fail(f"{topic} {key} finds the message {_name(one.body)} at {one.commit_log_offset}")
        return [one.commit_log_offset for one in answer]

    def _check_id(self, found: StoredMessage) -> None:
        data = self.store.look_message(found.commit_log_offset)
        if data is not None and (not data or decode_message(data, 0).body != found.body):
            self._fail(f"message {_name(found.body)} at {found.commit_log_offset} is not found by its id")

    # timed messages

    async def check_timed(self, disk: SimDisk, clock: ManualClock, crashes: int) -> None:
        """Let the timer deliver everything: each message comes, none before its time, none without end.

        None comes whose recall is durable. In a part of the states everything is overdue when the timer starts.

        ``crashes``: how often the store did not end in order so far.
        """
        outage = OUTAGES[self.store.max_phy_offset // 8 % len(OUTAGES)]
        await deliver_all(self.store, disk, clock, outage_days=outage)
        copies = await pull_all(self.store, TIMED, 0, holes=True) if self.store.has_queue(TIMED, 0) else []
        promise = self.promise
        recalls = promise.recalls
        sent = {body for body, one in promise.sent.items() if one.topic == TIMER_TOPIC and body not in recalls}
        wanted = sent & promise.durable.keys() - promise.delivered - set(recalls.values())
        never = {body for mark, body in recalls.items() if mark in promise.durable}
        damages = len(self.damage)
        if text := problem(copies, wanted, never, sent, 1 + crashes, damages):
            self._fail(text)

    # the store takes further messages

    async def put_one(self) -> None:
        """Append one more message and check that it gets the next offset and can be read."""
        store = self.store
        before = store.max_offset("Alpha", 0)
        done = trio.Event()
        results: list[PutMessageResult] = []

        def answer(result: PutMessageResult) -> None:
            results.append(result)
            done.set()

        result = store.put_message(
            message(b"after", "Alpha", 0, properties=b"KEYS\x01after\x02", keys=("after",)), answer
        )
        if result is not None:
            answer(result)
        await done.wait()
        if not results[0].ok or results[0].queue_offset != before:
            self._fail(f"a message after the crash got the result {results[0]}, the queue ended at {before}")
        pulled = await pull_all(store, "Alpha", 0, holes=self._has_holes())
        if pulled[-1].body != b"after" or pulled[-1].queue_offset != before:
            self._fail("a message after the crash is not in its queue")


async def pull_all(store: MessageStore, topic: str, queue_id: int, *, holes: bool) -> list[StoredMessage]:
    """Read a queue as a consumer does; with ``holes`` some offsets may have no message."""
    offset = store.min_offset(topic, queue_id)
    found: list[StoredMessage] = []
    while offset < store.max_offset(topic, queue_id):
        result = store.get_message(topic, queue_id, offset, 32, 1 << 20, None)
        if result is None:
            result = await store.get_message_cold(topic, queue_id, offset, 32, 1 << 20, None)
        if result.status is not GetMessageStatus.FOUND:
            result.release()
            text = f"{topic}/{queue_id}: offset {offset} of {store.max_offset(topic, queue_id)}: {result.status.name}"
            if not holes or result.next_begin_offset <= offset:
                raise BrokenPromiseError(f"{text} [{store.recovered}]")
        else:
            found += [one for data in result.buffers for one in _decoded(bytes(data))]
            result.release()
        offset = result.next_begin_offset
    return found


@lru_cache(maxsize=10_000)
def _decoded(data: bytes) -> tuple[StoredMessage, ...]:
    """Decode messages; cached because every state contains the same few records."""
    return tuple(decode_messages(data))


def _name(body: bytes) -> str:
    return str(int.from_bytes(body[:4], "big")) if len(body) >= 4 else repr(bytes(body))
