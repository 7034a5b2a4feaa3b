"""Log files with pending messages are kept, until the disk is so full that files are deleted forcibly."""

import errno
from collections.abc import Iterator
from typing import Any

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.store.stores import TOPIC, drain, fill, opened
from tests.store.test_clean import Rig
from trimq.broker.health import log_hold_notes
from trimq.broker.metrics.store import store_families
from trimq.broker.services.queued_messages import QueuedMessages, QueuePosition
from trimq.broker.store.disk.disk import DiskSpace
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.queue_unit import FILLER_SIZE
from trimq.remoting.http.metrics import text_of


class Reader:
    """A service that reads queue 0 of the topic from ``offset`` on."""

    def __init__(self, store: MessageStore) -> None:
        self.offset = 0
        store.hold_log(QueuedMessages("delayed messages", store, self.positions))

    def positions(self) -> Iterator[QueuePosition]:
        yield TOPIC, 0, self.offset


def _first_log_file_kept(store: MessageStore) -> int:
    return store.files.files[0].start


async def test_an_expired_file_stays_as_long_as_it_has_a_pending_message() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 150)
        rig.age(store, 100)
        reader = Reader(store)
        reader.offset = next(
            number for number, one in enumerate(await drain(store)) if one.commit_log_offset >= 2 * 8192
        )
        store._clean._manual_rounds = 20
        assert await store._clean.look() == 2
        assert _first_log_file_kept(store) == 2 * 8192
        assert (await drain(store))[0].queue_offset == reader.offset
        (note,) = log_hold_notes(store)
        assert note.code == "log_files_held"
        assert note.text.startswith(f"{len(store.files.files) - 1} expired files")
        assert note.text.endswith("pending or whose end is not durable yet")

        reader.offset = 150
        while await store._clean.look():
            pass
        assert len(store.files.files) == 1
        assert not list(log_hold_notes(store))
        assert store.log_holds.deleted == {"delayed messages": 0}


async def test_a_held_file_that_is_not_expired_is_not_counted() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        await fill(store, 150)
        rig.age(store, 100, count=2)
        Reader(store)
        store._clean._manual_rounds = 20
        assert await store._clean.look() == 0
        assert store.log_holds.files_held == 2


async def test_a_full_disk_deletes_pending_messages_and_says_how_many() -> None:
    rig = Rig()
    config = rig.settings(delete_file_batch_max=1)
    async with opened(rig.disk, config, rig.clock) as store:
        await fill(store, 150)
        reader = Reader(store)
        reader.offset = 5
        await store._checkpoints.save()
        await trio.testing.wait_all_tasks_blocked()
        rig.disk.capacity = rig.disk.used() * 100 // 86
        with capture_logs() as logs:
            assert await store._clean.look() == 1
        lost = store.min_offset(TOPIC, 0) - 5
        assert lost > 10
        assert store.log_holds.deleted == {"delayed messages": lost}
        (event,) = [entry for entry in logs if entry["event"] == "pending_messages_deleted"]
        assert (event["what"], event["count"]) == ("delayed messages", lost)
        (note,) = log_hold_notes(store)
        assert note.code == "pending_messages_deleted"
        assert f"{lost} pending delayed messages" in note.text
        page = "".join(text_of(family) for family in store_families(store, DiskSpace(1, 1), {}))
        assert f'trimq_pending_messages_deleted_total{{what="delayed_messages"}} {float(lost)}' in page

        # What is gone does not hold the files behind it: the lowest pending message is one that still exists.
        rig.disk.capacity = 1 << 40
        assert await QueuedMessages("", store, reader.positions).lowest() == (await drain(store))[0].commit_log_offset


class BadPage:
    """A service whose messages cannot be found while ``bad``."""

    name = "half messages"
    bad = True

    async def lowest(self) -> int | None:
        return self._read()

    async def count(self, _start: int, _end: int) -> int:
        return self._read() or 0

    def _read(self) -> int | None:
        if self.bad:
            raise OSError(errno.EIO, "bad sector")
        return None


async def test_a_page_that_cannot_be_read_holds_the_log_until_the_disk_is_full() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(delete_file_batch_max=1), rig.clock) as store:
        await fill(store, 150)
        rig.age(store, 100, count=3)
        page = BadPage()
        store.hold_log(page)
        Reader(store)
        store._clean._manual_rounds = 20
        with capture_logs() as logs:
            assert await store._clean.look() == 0
            assert await store._clean.look() == 0
        assert [(one["event"], one["what"]) for one in logs] == [("pending_messages_not_found", "half messages")]
        assert store.log_holds.files_held == 3

        capacity, rig.disk.capacity = rig.disk.capacity, rig.disk.used() * 100 // 86
        with capture_logs() as logs:
            assert await store._clean.look() == 1
        events = {one["event"]: one for one in logs}
        assert events["pending_messages_not_counted"]["what"] == "half messages"
        assert events["pending_messages_deleted"]["what"] == "delayed messages", "those that can be counted are"
        assert store.log_holds.deleted["half messages"] == 0

        page.bad, rig.disk.capacity = False, capacity
        reader_lowest = (await drain(store))[0].commit_log_offset
        assert await store.log_holds.lowest() == reader_lowest
        page.bad = True
        with capture_logs() as logs:
            assert await store.log_holds.lowest() == 0
        assert [one["event"] for one in logs] == ["pending_messages_not_found"], "a new error is reported again"


async def test_without_pending_messages_nothing_is_held() -> None:
    rig = Rig()
    async with opened(rig.disk, rig.settings(), rig.clock) as store:
        assert await store.log_holds.lowest() is None
        reader = Reader(store)
        assert await store.log_holds.lowest() is None
        await fill(store, 3)
        assert await store.log_holds.lowest() == 0
        reader.offset = 3
        assert await store.log_holds.lowest() is None


class Units:
    """A queue of log offsets. None is a filler."""

    def __init__(self, first: int, offsets: list[int | None], min_phy_offset: int) -> None:
        self.first = first
        self.offsets = offsets
        self.min_phy_offset = min_phy_offset

    def min_offset(self, _topic: str, _queue_id: int) -> int:
        return self.first

    def max_offset(self, _topic: str, _queue_id: int) -> int:
        return self.first + len(self.offsets)

    async def queue_units(self, _topic: str, _queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        await trio.lowlevel.checkpoint()
        at = offset - self.first
        found = self.offsets[at : at + min(count, 2)] if at >= 0 else []
        return [(0, FILLER_SIZE, 0) if one is None else (one, 10, 0) for one in found]


@given(
    offsets=st.lists(st.integers(0, 50), unique=True).map(sorted),
    fillers=st.lists(st.integers(0, 50), max_size=8),
    first=st.integers(0, 5),
    position=st.integers(0, 60),
    low=st.integers(0, 50),
    span=st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted),
)
def test_bisection_finds_what_a_scan_finds(
    offsets: list[int], fillers: list[int], first: int, position: int, low: int, span: list[Any]
) -> None:
    units: list[int | None] = list(offsets)
    for at in fillers:
        units.insert(at, None)
    store = Units(first, units, low)
    pending = QueuedMessages("x", store, lambda: [(TOPIC, 0, position)])
    behind = [(n, at) for n, at in enumerate(units, first) if at is not None and n >= position]
    queue_end = max(position, first + len(units))

    def place(log_offset: int) -> int:
        return min((n for n, at in behind if at >= log_offset), default=queue_end)

    async def check() -> None:
        assert await pending.lowest() == min((at for _, at in behind if at >= low), default=None)
        start, end = span
        assert await pending.count(start, end) == place(end) - place(start)

    trio.run(check)
