"""Cuts the power at every disk call while a store uploads to its tier, rolls, compacts, expires and restarts.

The script runs once, with an image of the disk for each call, as in enumeration.py. After each kind of loss a store is
opened on what is left. Every durable message must be found there by offset, by key and by its log offset, and uploads
go on without a hole and without a message twice.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from structlog.testing import capture_logs

from tests.crash.enumeration import simulate
from tests.crash.images import DiskImage, RecordingDisk
from tests.crash.losses import Loss, survivor
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.test_tiered_message_store import all_offsets, drop_local, opened, tier
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.types import QueryMessageResult
from trimq.protocol.message import decode_messages
from trimq.remoting.runtime.clock import ManualClock

QUEUES: Final = (0, 1)
_CONFIG: Final = dataclasses.replace(
    tier(
        tiered_store_file_reserved_time=1,
        tiered_store_index_file_max_hash_slot_num=16,
        tiered_store_index_file_max_index_num=40,
    ),
    tiered_store_commit_log_max_size=1500,
)

_BY_CHANCE: Final = (Loss.JOURNAL, Loss.PAGES, Loss.SECTORS, Loss.FILES, Loss.ONE_LOST, Loss.ONE_CAME, Loss.FLIP)
"""Kinds of loss that choose by chance what is lost: each is tried at every other call."""


class Ledger(NamedTuple):
    """What is promised at a disk call: the log offsets of the durable messages, by queue."""

    durable: tuple[tuple[int, ...], ...] = ((), ())
    is_expiring: bool = False
    """Whether segments may be gone."""


@dataclass
class TierTally:
    """Counts of what has been checked. ``equal`` states equal a checked one."""

    states: int = 0
    equal: int = 0
    calls: int = 0
    by_loss: Counter[str] = field(default_factory=Counter)

    def add(self, other: "TierTally") -> None:
        """Add the counts of another part."""
        self.states += other.states
        self.equal += other.equal
        self.calls = max(self.calls, other.calls)
        self.by_loss += other.by_loss

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.by_loss.items()))
        return f"{self.states} states and {self.equal} equal to one of them, {self.calls} disk calls; by loss: {kinds}"


class _Script:
    def __init__(self, disk: RecordingDisk) -> None:
        self.disk = disk
        self.ledger = Ledger()
        disk.moment = lambda: self.ledger

    async def run(self) -> None:
        async with opened(self.disk, _CONFIG):
            pass
        self.disk.wanted = lambda _: True
        async with opened(self.disk, _CONFIG) as store:
            for step in range(2):
                await self.send(store, 12)
                await store.uploads.upload_all()
                if step:
                    # Log files that are old enough to be deleted have durable queues, by many hours.
                    assert await store.flush_queues.write()
                    assert await store.flush_queues.sync()
                    await drop_local(store)
            assert store.tier_index is not None
            await store.tier_index.flush()
            await store.tier_index.upload_next()
        async with opened(self.disk, _CONFIG) as store:
            await self.send(store, 8)
            await store.uploads.upload_all()
            assert isinstance(store.clock, ManualClock)
            store.clock.advance(4_000.0)
            await self.send(store, 3)
            await store.uploads.upload_all()
            self.ledger = self.ledger._replace(is_expiring=True)
            assert await store.expire_tier()
            await self.send(store, 3)
            await store.uploads.upload_all()

    async def send(self, store: TieredMessageStore, count: int) -> None:
        found = []
        for queue_id, known in zip(QUEUES, self.ledger.durable, strict=True):
            number = count // (1 + queue_id)
            await fill(store, number, queue_id=queue_id, first=len(known))
            await until_dispatched(store)
            await store.flush()
            offsets = await all_offsets(store, len(known), len(known) + number, queue_id=queue_id)
            found.append((*known, *(physical for _, physical in offsets)))
        self.ledger = self.ledger._replace(durable=tuple(found))


def record() -> dict[int, DiskImage]:
    """Run the script; return the images of the disk by the number of the call."""
    disk = RecordingDisk()
    simulate(_Script(disk).run)
    return disk.images


def states(
    images: dict[int, DiskImage], part: int, parts: int, step: int = 1
) -> Iterator[tuple[str, SimDisk | None, Ledger]]:
    """The states of a part of the calls: name, disk (None if it equals an earlier one), what is promised."""
    seen: set[tuple[int, Ledger]] = set()
    calls = sorted(images)
    size = -(-len(calls) // parts)
    for call in calls[part * size : (part + 1) * size : step]:
        image = images[call]
        for loss in Loss:
            if loss in _BY_CHANCE and (call + _BY_CHANCE.index(loss)) % 2:
                continue
            left = survivor(image, loss, Random(f"{call}{loss}"))
            if left is None or left.damage is not None:
                continue
            key = left.found.key(), image.moment
            if key in seen:
                yield f"{call}:{loss.name}", None, image.moment
                continue
            seen.add(key)
            yield f"{call}:{loss.name}", left.found.disk(), image.moment


def check_part(part: int, parts: int, step: int = 1) -> TierTally:
    """Check the states of a part of the calls. Raises AssertionError with the name of the state."""
    images = record()
    tally = TierTally(calls=len(images))
    for name, disk, ledger in states(images, part, parts, step):
        if disk is None:
            tally.equal += 1
            continue
        tally.states += 1
        tally.by_loss[name.partition(":")[2]] += 1
        try:
            with capture_logs():
                simulate(check, disk, ledger)
        except* Exception as group:
            call = images[int(name.partition(":")[0])].call
            raise AssertionError(f"after a power cut at {name} ({call})") from group
    return tally


async def check(disk: SimDisk, ledger: Ledger) -> None:
    """Open a store on the disk, and look for all that is promised."""
    async with opened(disk, _CONFIG) as store:
        counts = [await _check_queue(store, queue_id, ledger) for queue_id in QUEUES]
        for queue_id, count in zip(QUEUES, counts, strict=True):
            await fill(store, 2, queue_id=queue_id, first=count)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        complete = all(len(durable) == count for durable, count in zip(ledger.durable, counts, strict=True))
        assert store.uploads.skipped == 0 or not complete
        for queue_id, count in zip(QUEUES, counts, strict=True):
            await _check_uploaded(store, queue_id, len(ledger.durable[queue_id]), count)


async def _check_queue(store: TieredMessageStore, queue_id: int, ledger: Ledger) -> int:
    """Check what can be read. Returns where the queue goes on."""
    durable = ledger.durable[queue_id]
    low, count = store.min_offset(TOPIC, queue_id), store.max_offset(TOPIC, queue_id)
    assert count >= len(durable)
    assert low == 0 or ledger.is_expiring or not durable
    file = store.flat_files.find(TOPIC, queue_id)
    assert file is None or file.commit_offset <= count
    found = dict(await all_offsets(store, low, count, queue_id=queue_id))
    assert {offset: found.get(offset) for offset in range(low, len(durable))} == dict(
        enumerate(durable[low:], start=low)
    )
    for offset, physical in enumerate(durable):
        record = await store.look_message_cold(physical)
        messages = decode_messages(bytes(record)) if len(record) else []
        identities = [(message.topic, message.queue_id, message.queue_offset) for message in messages]
        assert identities == [(TOPIC, queue_id, offset)] or (offset < low and not identities)
        if offset >= low:
            assert await _by_key(store, queue_id, offset) == [offset]
    return count


async def _by_key(store: TieredMessageStore, queue_id: int, offset: int) -> list[int]:
    key = f"u{TOPIC}{queue_id}-{offset}"
    result: QueryMessageResult = await store.query_message_cold(TOPIC, key, 4, 0, 1 << 60)
    found = [decode_messages(bytes(buffer))[0].queue_offset for buffer in result.buffers]
    result.release()
    return found


async def _check_uploaded(store: TieredMessageStore, queue_id: int, durable: int, count: int) -> None:
    file = store.flat_files.find(TOPIC, queue_id)
    assert file is not None
    assert file.commit_offset == count + 2
    found: list[int] = []
    offset = file.min_offset
    while offset < file.commit_offset:
        messages, offset = await file.read_messages(offset, 100, 1 << 20)
        found += [message.offset for message in messages]
    # A message that was not durable may be damaged: its offset has none.
    assert [one for one in found if not durable <= one < count] == [
        one for one in range(file.min_offset, count + 2) if not durable <= one < count
    ]
    assert found == sorted(set(found))
    assert await _by_key(store, queue_id, count + 1) == [count + 1]
    items = await store.fetcher.query(TOPIC, f"u{TOPIC}{queue_id}-{count + 1}", 4, 0, 1 << 60)
    assert len(items) == 1
