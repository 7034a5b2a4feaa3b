import trio
import trio.testing

from tests.store.builders import Rig, batch, config, message, records
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.types import PutMessageStatus

BUSY = PutMessageStatus.OS_PAGE_CACHE_BUSY
NO_FILE = PutMessageStatus.CREATE_MAPPED_FILE_FAILED
OK = PutMessageStatus.PUT_OK


class StuckSpace:
    """An allocator that gives space when the test says so."""

    lacks_buffer = False

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.next_file: MappedFile | None = None
        rig.log.start_appending(self, rig.path.durability.rolled)
        rig.path.allocator = self  # type: ignore[assignment]

    def poke(self, wanted: int = 0) -> None:
        pass

    def take_next(self) -> MappedFile | None:
        file, self.next_file = self.next_file, None
        return file

    def give_file(self) -> None:
        files = self.rig.files
        start = files.last.end if files.last else 0
        self.next_file = MappedFile.create(self.rig.disk, files.path_of(start), start, files.size, 4096)
        self.rig.path.lock.space_ready()

    def give_step(self) -> None:
        file = self.rig.files.last
        assert file is not None
        file.reserve_range(file.reserved, file.reserved + 4096)
        file.mark_reserved(file.reserved + 4096)
        self.rig.path.lock.space_ready()


async def test_puts_that_wait_are_served_in_their_order() -> None:
    rig = Rig()
    space = StuckSpace(rig)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.path.lock.run)
        shared = bytearray(b"first")
        first = message()
        first.body = memoryview(shared)
        assert rig.put(first) is None
        shared[:] = b"2nd3r"
        view = memoryview(shared)
        assert rig.put(batch([view[:3], view[3:]])) is None
        shared[:] = b"later"
        space.give_file()
        # space is available now, but no put overtakes those that wait
        assert rig.path.lock.is_held
        assert rig.put(message(b"fourth")) is None
        await rig.answered(3)
        assert [item.body for item in records(rig.files)] == [b"first", b"2nd", b"3r", b"fourth"]
        assert len(rig.path.lock) == 0
        assert rig.put(message(b"fifth")) is not None
        rig.path.lock.stop()


async def test_waiting_for_a_step_too_long_is_busy(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig(settings=config(os_page_cache_busy_time_out_mills=1000))
    space = StuckSpace(rig)
    space.give_file()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.path.lock.run)
        assert rig.put(message(b"x" * 3000)) is not None
        begin = trio.current_time()
        assert rig.put(message(b"y" * 3000)) is None
        await trio.sleep(0.5)
        assert rig.put(message(b"z")) is None
        results = await rig.answered(2)
        assert [result.status for result in results] == [OK, BUSY]
        assert 1.0 <= trio.current_time() - begin < 1.1
        results = await rig.answered(3)
        assert results[2].status is OK
        assert 1.4 <= trio.current_time() - begin < 1.6
        assert "1 s" in results[1].remark
        assert [item.body[:1] for item in records(rig.files)] == [b"x", b"z"]
        rig.path.lock.stop()


async def test_waiting_for_a_file_too_long_fails_and_those_behind_are_busy(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(settings=config(os_page_cache_busy_time_out_mills=1000))
    StuckSpace(rig)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.path.lock.run)
        begin = trio.current_time()
        rig.put(message(b"first"))
        rig.put(message(b"second"))
        await rig.answered(1)
        assert trio.current_time() - begin < 1.1
        await trio.sleep(0.5)
        refused = rig.put(message(b"third"))
        assert refused is not None
        assert refused.status is BUSY
        results = await rig.answered(3)
        assert [result.status for result in results] == [BUSY, BUSY, NO_FILE]
        assert rig.stats.put_message_failed_times == 3
        assert 5.0 <= trio.current_time() - begin < 5.1
        assert rig.log.max_offset == 0
        rig.path.lock.stop()


async def test_one_that_came_late_gets_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    space = StuckSpace(rig)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.path.lock.run)
        rig.put(message(b"first"))
        await trio.sleep(0.9)
        rig.put(message(b"second"))
        await trio.sleep(0.2)
        space.give_file()
        results = await rig.answered(2)
        assert [result.status for result in results] == [OK, OK]
        rig.path.lock.stop()
