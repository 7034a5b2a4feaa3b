import errno
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.schedule import ScheduleMessageService
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import GetMessageResult, GetMessageStatus, PutCallback, PutMessageResult, PutMessageStatus
from trimq.protocol import record
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_text import encode_properties
from trimq.protocol.topic_rules import SCHEDULE_TOPIC
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/delayOffset.json"
HOST = record.pack_host("10.0.0.1", 10911)


class Store:
    """Queues of (record, tags code). A message put to the schedule topic waits there with its due time."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.parked: dict[int, list[tuple[bytes, int]]] = {}
        self.first: dict[int, int] = {}
        self.put: list[MessageInner] = []
        self.answers: list[PutMessageStatus | None] = []
        self.waiting: list[tuple[MessageInner, PutCallback]] = []
        self.arriving: list[Callable[[str, int, int, int, int], None]] = []
        self.cold = False
        self.released = 0
        self.given = 0
        self.looks = 0
        self.indexes_tags = True
        self.log_end = 0
        self.flushed_offset = 1 << 40
        self.flushes = 0

    def park(self, level: int, body: str, delay_ms: int, **extra: Any) -> None:
        """A message whose real topic is T, queue 2."""
        properties = {"REAL_TOPIC": "T", "REAL_QID": "2", "DELAY": str(level), "TAGS": "red"} | extra
        queue = self.parked.setdefault(level - 1, [])
        offset = self.first.get(level - 1, 0) + len(queue)
        data = record.encode_record(
            topic=SCHEDULE_TOPIC.encode(), body=body.encode(), properties=encode_properties(properties).encode(),
            queue_id=level - 1, queue_offset=offset, physical_offset=0, born_timestamp=7, born_host=HOST,
            store_timestamp=self.clock.wall_ms(), store_host=HOST, flag=3, reconsume_times=1,
        )  # fmt: skip
        due = self.clock.wall_ms() + delay_ms
        queue.append((data, due))
        for listener in self.arriving:
            listener(SCHEDULE_TOPIC, level - 1, offset + 1, due, self.clock.wall_ms())

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self.first.get(queue_id, 0)

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self.first.get(queue_id, 0) + len(self.parked.get(queue_id, []))

    next_offset = max_offset

    def look_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]] | None:
        self.looks += 1
        return None if self.cold else self._units(queue_id, offset, count)

    async def queue_units(self, topic: str, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        await trio.lowlevel.checkpoint()
        return self._units(queue_id, offset, count)

    def _units(self, queue_id: int, offset: int, count: int) -> list[tuple[int, int, int]]:
        at = offset - self.min_offset("", queue_id)
        units = self.parked.get(queue_id, [])[at : at + count] if at >= 0 else []
        return [(0, len(data), due) for data, due in units]

    def get_message(
        self, topic: str, queue_id: int, offset: int, max_count: int, max_bytes: int, filter: object
    ) -> GetMessageResult | None:
        assert filter is None
        return None if self.cold else self._get(queue_id, offset, max_count)

    async def get_message_cold(
        self, topic: str, queue_id: int, offset: int, max_count: int, max_bytes: int, filter: object
    ) -> GetMessageResult:
        await trio.lowlevel.checkpoint()
        return self._get(queue_id, offset, max_count)

    def _get(self, queue_id: int, offset: int, count: int) -> GetMessageResult:
        low, high = self.min_offset("", queue_id), self.max_offset("", queue_id)
        if queue_id not in self.parked:
            return GetMessageResult(GetMessageStatus.NO_MATCHED_LOGIC_QUEUE)
        if offset < low:
            return GetMessageResult(GetMessageStatus.OFFSET_TOO_SMALL, low)
        if offset >= high:
            over = GetMessageStatus.OFFSET_OVERFLOW_ONE if offset == high else GetMessageStatus.OFFSET_OVERFLOW_BADLY
            return GetMessageResult(over, high)
        found = [data for data, _ in self.parked[queue_id][offset - low :][:count]]
        self.given += 1
        return GetMessageResult(
            GetMessageStatus.FOUND,
            offset + len(found),
            buffers=[b"".join(found)],
            count=len(found),
            release=self._release,
        )

    def _release(self) -> None:
        self.released += 1

    def put_message(self, message: MessageInner, on_done: PutCallback) -> PutMessageResult | None:
        answer = self.answers.pop(0) if self.answers else PutMessageStatus.PUT_OK
        if answer is None:
            self.waiting.append((message, on_done))
            return None
        return self.finish(message, answer)

    def finish(self, message: MessageInner, answer: PutMessageStatus) -> PutMessageResult:
        result = PutMessageResult(answer, self.log_end, 0, 10, remark="because")
        if result.ok:
            self.log_end += 10
            message.body = bytes(message.body)
            self.put.append(message)
        return result

    async def flush(self) -> bool:
        await trio.lowlevel.checkpoint()
        self.flushes += 1
        self.flushed_offset = self.log_end
        return True

    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.put]


class World:
    def __init__(self, disk: SimDisk | None = None, **config: Any) -> None:
        self.clock = ManualClock()
        self.disk = disk or SimDisk()
        self.store = Store(self.clock)
        self.config = configuration(**config)
        self.service = self.make()

    def make(self) -> ScheduleMessageService:
        service = ScheduleMessageService(self.config, self.store, self.disk, self.clock)
        self.store.arriving = [service.message_arriving]
        return service

    @asynccontextmanager
    async def running(self) -> Any:
        await self.service.load()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.service.run)
            await trio.testing.wait_all_tasks_blocked()
            yield
            nursery.cancel_scope.cancel()
        assert self.store.released == self.store.given

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await trio.testing.wait_all_tasks_blocked()


async def test_a_message_is_delivered_when_it_is_due_and_not_before() -> None:
    world = World()
    async with world.running():
        world.store.park(1, "one", 1000)
        world.store.park(2, "five", 5000)
        await trio.testing.wait_all_tasks_blocked()
        await world.advance(0.999)
        assert world.store.bodies() == []
        await world.advance(0.001)
        assert world.store.bodies() == ["one"]
        for _ in range(4):
            await world.advance(1)
        assert world.store.bodies() == ["one", "five"]
        assert world.service.offsets()[1] == world.service.offsets()[2] == 1
        assert world.service.delivered == 2


async def test_what_is_delivered_is_the_message_in_its_real_place() -> None:
    world = World()
    async with world.running():
        world.store.park(1, "x", 0, KEYS="k1  k2\u3000x", UNIQ_KEY="u")
        await trio.testing.wait_all_tasks_blocked()
    (message,) = world.store.put
    assert (message.topic, message.queue_id, message.body) == ("T", 2, b"x")
    assert (message.tags_code, message.keys, message.wait) == (
        tags_code("red"),
        ("u", "k1", "k2\u3000x", "T#red"),
        False,
    )
    assert (message.born_timestamp, message.born_host, message.flag, message.reconsume_times) == (7, HOST, 3, 1)
    assert b"REAL_TOPIC\x01T\x02" in message.properties
    assert b"DELAY\x011\x02" in message.properties


async def test_order_in_a_level_is_kept_over_many() -> None:
    world = World()
    async with world.running():
        for number in range(100):
            world.store.park(3, str(number), 10_000)
        await world.advance(10)
    assert world.store.bodies() == [str(number) for number in range(100)]


async def test_an_idle_service_sleeps() -> None:
    world = World()
    async with world.running():
        assert world.clock.sleeping == 1  # the task that writes the file
        world.store.park(18, "x", 7_200_000)
        await trio.testing.wait_all_tasks_blocked()
        assert world.clock.sleeping == 2


async def test_an_earlier_message_of_another_level_wakes_it() -> None:
    world = World()
    async with world.running():
        world.store.park(5, "late", 60_000)
        await trio.testing.wait_all_tasks_blocked()
        world.store.park(1, "early", 400)
        await trio.testing.wait_all_tasks_blocked()
        await world.advance(0.4)
        assert world.store.bodies() == ["early"]


async def test_other_topics_are_nothing_to_it() -> None:
    world = World()
    async with world.running():
        world.service.message_arriving("T", 0, 1, 0, 0)
        world.service.message_arriving(SCHEDULE_TOPIC, 99, 1, 0, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.put == []


async def test_cold_messages_are_delivered_too() -> None:
    world = World()
    world.store.cold = True
    async with world.running():
        world.store.park(1, "x", 1000)
        await trio.testing.wait_all_tasks_blocked()
        await world.advance(1)
        assert world.store.bodies() == ["x"]


# the wall clock


@pytest.mark.parametrize("step_ms", [5, 3_600_000], ids=["5 ms", "an hour"])
async def test_a_clock_that_is_set_back_brings_nothing_before_its_time(step_ms: int) -> None:
    """If a due time is further in the future than the delay, the service waits for the delay from now, no longer."""
    world = World()
    async with world.running():
        world.store.park(5, "x", 60_000)
        await trio.testing.wait_all_tasks_blocked()
        world.clock.set_wall_ms(world.clock.wall_ms() - step_ms)
        await world.advance(1)  # the service notices it within a second
        await world.advance(58.9)
        assert world.store.bodies() == []
        await world.advance(1.1)
        assert world.store.bodies() == ["x"]


async def test_due_times_of_a_clock_that_was_ahead_after_a_restart() -> None:
    """Messages present when such a time is found are due one delay later, in order; later messages are not affected."""
    world = World()
    for number in range(40):
        world.store.park(5, str(number), 60_000 + 3_600_000 + number)
    async with world.running():
        await world.advance(10)
        world.store.park(5, "own time", 60_000)
        await world.advance(20)
        world.store.park(5, "later", 60_000)
        await world.advance(29.9)
        assert world.store.bodies() == []
        await world.advance(0.1)
        assert world.store.bodies() == [*map(str, range(40))]
        await world.advance(9.9)
        assert len(world.store.bodies()) == 40
        await world.advance(0.1)
        assert world.store.bodies()[40:] == ["own time"]
        await world.advance(19.9)
        assert len(world.store.bodies()) == 41
        await world.advance(0.1)
        assert world.store.bodies()[41:] == ["later"]


async def test_a_late_due_time_that_comes_while_it_runs_is_found_at_once() -> None:
    world = World()
    async with world.running():
        world.store.park(5, "x", 60_000 + 3_600_000)
        await trio.testing.wait_all_tasks_blocked()
        await world.advance(59.9)
        assert world.store.bodies() == []
        await world.advance(0.1)
        assert world.store.bodies() == ["x"]


async def test_the_wait_of_a_late_due_time_does_not_follow_the_wall_clock_back() -> None:
    world = World()
    async with world.running():
        world.store.park(5, "x", 60_000 + 3_600_000)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(6):
            await world.advance(9.9)
            world.clock.set_wall_ms(world.clock.wall_ms() - 7_200_000)
        assert world.store.bodies() == []
        await world.advance(1)
        assert world.store.bodies() == ["x"]


async def test_waiting_for_what_is_not_due_takes_no_turns() -> None:
    """An earlier due time behind a later one must not make the service poll repeatedly."""
    world = World()
    async with world.running():
        world.store.park(5, "x", 60_000)
        world.store.park(5, "due before", -1)
        await world.advance(30)
        world.store.looks = 0
        for _ in range(10):
            await world.advance(1)
        assert world.store.looks == 0
        await world.advance(20)
        assert world.store.bodies() == ["x", "due before"]


async def test_a_clock_set_forward_is_noticed_within_a_second() -> None:
    world = World()
    async with world.running():
        world.store.park(17, "x", 3_600_000)
        await trio.testing.wait_all_tasks_blocked()
        world.clock.set_wall_ms(world.clock.wall_ms() + 3_600_000)
        await world.advance(1)
        assert world.store.bodies() == ["x"]


# restart


async def test_a_restart_goes_on_where_it_was() -> None:
    world = World()
    async with world.running():
        world.store.park(1, "a", 1000)
        world.store.park(1, "b", 2000)
        await trio.testing.wait_all_tasks_blocked()
        await world.advance(1)
        assert world.store.bodies() == ["a"]
    await world.service.persist()
    assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 1
    world.service = world.make()
    async with world.running():
        await world.advance(1)
    assert world.store.bodies() == ["a", "b"]


async def test_the_file_is_what_java_writes_and_reads() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"dataVersion":{"counter":1},"offsetTable":{1:40,3:7,40:2},"later":1}')
    world = World(disk)
    world.store.first = {0: 30, 2: 9}
    world.store.parked = {0: [(b"", 0)] * 20, 2: []}
    await world.service.load()
    assert world.service.offsets() == dict.fromkeys(range(1, 19), 0) | {1: 40, 3: 7, 40: 2}
    assert world.service.max_level == 18
    written = json.loads(world.service.encode())
    assert written["offsetTable"]["40"] == 2
    assert written["later"] == 1


async def test_offsets_outside_of_the_queue_are_corrected() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"offsetTable":{1:0,2:99}}')
    world = World(disk)
    world.store.first = {0: 5, 1: 5}
    world.store.park(1, "kept", 0)
    world.store.park(2, "delivered before", 0)
    async with world.running():
        await trio.testing.wait_all_tasks_blocked()
        assert world.service.offsets()[1] == 6
        assert world.service.offsets()[2] == 6
    assert world.store.bodies() == ["kept"]


async def test_messages_that_the_store_has_deleted_are_passed_over() -> None:
    world = World()
    async with world.running():
        world.store.park(1, "gone", 1000)
        await trio.testing.wait_all_tasks_blocked()
        world.store.parked[0].clear()
        world.store.first[0] = 1
        world.store.park(1, "there", 1000)
        await world.advance(1)
        assert world.store.bodies() == ["there"]


async def test_a_broken_file_stops_the_start() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"offsetTable":{"one":1}}')
    with pytest.raises(StateFileError):
        await World(disk).service.load()


async def test_offsets_are_written_every_10_s() -> None:
    world = World()
    async with world.running():
        world.store.park(1, "x", 0)
        await trio.testing.wait_all_tasks_blocked()
        assert world.disk.stat(PATH) is None
        await world.advance(10)
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 1


async def test_a_disk_that_fails_does_not_stop_delivery() -> None:
    world = World()
    world.disk.fail("data_sync", errno.EIO)
    async with world.running():
        for body in ("a", "b"):
            world.store.park(1, body, 0)
            await trio.testing.wait_all_tasks_blocked()
            await world.advance(10)
        await world.advance(1)
        assert world.store.bodies() == ["a", "b"]
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 2


# copies that are not durable yet


async def test_a_message_counts_as_delivered_when_its_copy_is_durable() -> None:
    """A power cut may take the copy: until it is durable the log file of the message stays, and the file has it too."""
    world = World()
    world.store.flushed_offset = 0
    async with world.running():
        for body in ("a", "b", "c"):
            world.store.park(1, body, 0)
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.bodies() == ["a", "b", "c"]
        assert world.service.offsets()[1] == 3
        assert next(world.service.positions()) == (SCHEDULE_TOPIC, 0, 0)
        await world.advance(10)
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 0
        world.store.flushed_offset = 29  # the copy of the third ends at 30
        assert next(world.service.positions()) == (SCHEDULE_TOPIC, 0, 2)
        world.store.flushed_offset = 30
        await world.advance(10)
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 3, "written again without a new delivery"
        assert next(world.service.positions()) == (SCHEDULE_TOPIC, 0, 3)


async def test_a_stop_makes_the_copies_durable_and_delivers_no_more() -> None:
    """So that an orderly stop and a start deliver nothing twice."""
    world = World()
    world.store.flushed_offset = 0
    async with world.running():
        world.store.park(1, "a", 0)
        await trio.testing.wait_all_tasks_blocked()
        await world.service.persist()
        assert world.store.flushes == 1
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 1
        world.store.park(1, "b", 0)
        await world.advance(2)
        assert world.store.bodies() == ["a"]
    world.service = world.make()
    async with world.running():
        assert world.store.bodies() == ["a", "b"]


async def test_a_stop_waits_for_the_delivery_that_is_under_way_and_begins_no_other() -> None:
    """SYNC_FLUSH: results come later than the puts, and the stop comes while the first of five waits for its own."""
    world = World()
    world.store.flushed_offset = 0
    world.store.answers = [None] * 5
    async with world.running(), trio.open_nursery() as nursery:
        for body in "abcde":
            world.store.park(1, body, 0)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(world.service.persist)
        await trio.testing.wait_all_tasks_blocked()
        flushes = world.store.flushes
        while world.store.waiting:
            message, on_done = world.store.waiting.pop()
            on_done(world.store.finish(message, PutMessageStatus.PUT_OK))
            await trio.testing.wait_all_tasks_blocked()
    assert flushes == 0
    assert world.store.bodies() == ["a"]
    assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 1
    world.store.answers.clear()
    world.service = world.make()
    async with world.running():
        assert world.store.bodies() == list("abcde")


@pytest.mark.parametrize("read", ["queue_units", "get_message_cold"])
async def test_a_stop_during_a_cold_read_delivers_nothing_and_skips_nothing(
    monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    world = World()
    read_now, read_on = getattr(world.store, read), trio.Event()

    async def slow(*where: Any) -> Any:
        await read_on.wait()
        return await read_now(*where)

    monkeypatch.setattr(world.store, read, slow)
    async with world.running(), trio.open_nursery() as nursery:
        world.store.cold = True
        world.store.park(1, "a", 0)
        world.store.park(1, "b", 5000)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(world.service.persist)
        await trio.testing.wait_all_tasks_blocked()
        flushes = world.store.flushes
        read_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (flushes, world.store.flushes) == (0, 1)
    assert world.store.bodies() == []
    world.service = world.make()
    async with world.running():
        assert world.store.bodies() == ["a"]


async def test_a_stop_while_nothing_is_due_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    read_now, read_on = world.store.queue_units, trio.Event()

    async def slow(*where: Any) -> Any:
        await read_on.wait()
        return await read_now(*where)

    monkeypatch.setattr(world.store, "queue_units", slow)
    async with world.running(), trio.open_nursery() as nursery:
        world.store.park(1, "later", 1000)
        world.store.cold = True
        await world.advance(1)
        nursery.start_soon(world.service.persist)
        await trio.testing.wait_all_tasks_blocked()
        world.clock.set_wall_ms(world.clock.wall_ms() - 500)
        read_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.flushes == 1


async def test_a_stop_ends_the_sleep_until_a_message_is_due(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    async with world.running():
        began = trio.current_time()
        await world.service.persist()
        assert trio.current_time() == began


async def test_a_stop_does_not_wait_for_ever_for_a_delivery(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    world.store.answers = [PutMessageStatus.PUT_OK, None]
    async with world.running():
        world.store.park(1, "a", 0)
        world.store.park(1, "b", 0)
        await trio.testing.wait_all_tasks_blocked()
        await world.service.persist()
        assert json.loads(world.disk.content(PATH))["offsetTable"]["1"] == 1
        ((message, on_done),) = world.store.waiting  # the nursery of the task waits for it
        on_done(world.store.finish(message, PutMessageStatus.PUT_OK))


# a store that refuses messages


async def test_what_the_store_refuses_now_is_tried_again() -> None:
    world = World()
    busy = PutMessageStatus.OS_PAGE_CACHE_BUSY
    world.store.answers = [PutMessageStatus.PUT_OK, busy, busy, busy]
    async with world.running():
        for body in ("a", "b", "c"):
            world.store.park(1, body, 1000)
        world.store.park(2, "other level", 1000)
        await world.advance(1)
        assert world.store.bodies() == ["a"]
        assert world.service.offsets()[1] == 1
        for _ in range(20):
            await world.advance(0.1)
        assert sorted(world.store.bodies()) == ["a", "b", "c", "other level"]
        assert world.store.bodies().index("b") < world.store.bodies().index("c")


async def test_what_the_store_will_never_take_does_not_hold_up_the_rest() -> None:
    world = World()
    world.store.answers = [PutMessageStatus.MESSAGE_ILLEGAL]
    async with world.running():
        world.store.park(1, "bad", 0)
        world.store.park(1, "good", 0)
        world.store.park(1, "no topic", 0, REAL_TOPIC="RMQ_SYS_TRANS_HALF_TOPIC")
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.bodies() == ["good"]
        assert world.service.offsets()[1] == 3


async def test_an_outcome_that_comes_later_is_waited_for() -> None:
    world = World()
    world.store.answers = [None]
    async with world.running():
        world.store.park(1, "a", 0)
        world.store.park(1, "b", 0)
        await trio.testing.wait_all_tasks_blocked()
        assert world.service.offsets()[1] == 0
        message, on_done = world.store.waiting.pop()
        on_done(world.store.finish(message, PutMessageStatus.PUT_OK))
        await trio.testing.wait_all_tasks_blocked()
        assert world.store.bodies() == ["a", "b"]


async def test_an_unexpected_error_is_tried_again_after_10_s() -> None:
    world = World()
    world.store.parked[0] = [(b"not a record", 0)]
    async with world.running():
        await world.advance(1)
        assert world.service.offsets()[1] == 0
        world.store.parked[0] = []
        world.store.park(1, "x", 0)
        for _ in range(10):
            await world.advance(1)
        assert world.store.bodies() == ["x"]
