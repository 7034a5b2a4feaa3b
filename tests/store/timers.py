"""A store's timer data on a simulated disk, in small: 256 slots, log files of five units."""

from collections.abc import Iterable
from typing import Final

from tests.store.simdisk import SimDisk
from trimq.broker.store.message_store import NewTimer
from trimq.broker.store.timer.recovery import LogState, TimerRecovery
from trimq.broker.store.timer.timer_store import TimerStore
from trimq.protocol.record import encode_record, pack_host
from trimq.protocol.timer_layout import MAGIC_DEFAULT, MAGIC_DELETE, UNIT_SIZE

ROOT: Final = "/store"
NOW: Final = 1_700_000_000_000
FILE: Final = 5 * UNIT_SIZE + 20
SLOTS: Final = 256
SIZE: Final = 200
TOPIC_HASH: Final = 77


class Records:
    """The commit log as the timer sees it: record ``n`` of the timer's queue is at ``n * SIZE``."""

    def __init__(self, count: int = 0, first: int = 0) -> None:
        self.count = count
        self.first = first
        self.reads = 0
        self.foreign: set[int] = set()
        """Queue offsets whose place another topic's record has."""

    @property
    def state(self) -> LogState:
        return LogState(self.first * SIZE, self.count * SIZE, self.first, self.count)

    async def read(self, phy: int) -> bytes:
        self.reads += 1
        number, rest = divmod(phy, SIZE)
        if rest or not self.first <= number < self.count:
            return b""
        topic = b"Other______________" if number in self.foreign else b"rmq_sys_wheel_timer"
        record = encode_record(
            topic=topic,
            body=b"x" * (SIZE - 91 - len(topic)),
            properties=b"",
            queue_id=0,
            queue_offset=number,
            physical_offset=phy,
            born_timestamp=0,
            born_host=pack_host("10.0.0.1", 1),
            store_timestamp=0,
            store_host=pack_host("10.0.0.1", 1),
        )
        assert len(record) == SIZE
        return record


def timer_store(disk: SimDisk, precision: int = 1000, *, slots: int = SLOTS, file: int = FILE) -> TimerStore:
    """A store that is not recovered yet."""
    if disk.stat(ROOT) is None:
        disk.make_directory(ROOT)
        disk.sync_directory("/")
    return TimerStore(disk, ROOT, precision=precision, log_file_size=file, window=0, slots=slots)


async def recovered(
    disk: SimDisk, records: Records, precision: int = 1000, *, now: int = NOW, slots: int = SLOTS, file: int = FILE
) -> TimerStore:
    """A store after its recovery."""
    store = timer_store(disk, precision, slots=slots, file=file)
    await TimerRecovery(store, records.state, records.read, now).run()
    return store


async def add(store: TimerStore, records: Records, after: Iterable[int], *, deletes: bool = False) -> None:
    """Add messages that are due so many slots after NOW, one after the other in the timer's queue."""
    timers = []
    for slots in after:
        magic = MAGIC_DEFAULT | (MAGIC_DELETE if deletes else 0)
        due = NOW - NOW % store.precision + slots * store.precision
        timers.append(NewTimer(due, magic, NOW, records.count * SIZE, SIZE, TOPIC_HASH))
        records.count += 1
    await store.add(timers, records.count)


async def synced() -> bool:
    return True


async def save(store: TimerStore) -> None:
    assert await store.save(synced, NOW)


async def waiting(store: TimerStore, until: int = 1000) -> dict[int, list[int]]:
    """The queue offsets of the pending messages by their slot (slots after NOW), in the order of delivery."""
    found: dict[int, list[int]] = {}
    time, end = store.read_time, NOW - NOW % store.precision + until * store.precision
    while (time := store.wheel.next_time(time, end)) < end:
        slot = store.wheel.find(time)
        assert slot is not None
        due = await store.due(slot)
        found[(time - NOW) // store.precision] = [offset // SIZE for offset in due.offsets]
        time += store.precision
    return found


async def all_waiting(store: TimerStore) -> list[int]:
    """The queue offsets of all pending messages."""
    return sorted(number for numbers in (await waiting(store)).values() for number in numbers)
