"""What is uploaded together: the extension makes what Python makes, and leaves to it what is unusual."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, put, until_dispatched
from tests.store.tiered.test_tiered_message_store import all_offsets, opened
from trimq.broker.store.tiered.access import batch as batches
from trimq.broker.store.tiered.access.batch import BatchBuilder, Buffer, Built, Limits
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.tiered.bucket.object_contents import ObjectMemory
from trimq.protocol.native import NATIVE, NativeExtension
from trimq.protocol.queue_unit import FILLER_SIZE, UNIT
from trimq.protocol.record import encode_record
from trimq.protocol.tiered_index_batch import KeyItems, items_of_bytes

native = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
START, POSITION, TOPIC_ID, QUEUE_ID = 10_000, 777, 5, 3

PIECES = st.sampled_from(
    [
        "UNIQ_KEY\x01U1\x02",
        "UNIQ_KEY\x01\x02",
        "UNIQ_KEY\x01last",
        "KEYS\x01a b\x02",
        "KEYS\x01  ключ 😀 \x02",
        "KEYS\x01\x02",
        "TAGS\x01KEYS\x02",
        "XKEYS\x01no\x02",
        "KEYS",
        "\x02KEYS\x01c\x02",
        "plain\x01value\x02",
    ]
)
RECORDS = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["T", "x" * 127, "%RETRY%" + "g" * 200]),
        "body": st.binary(max_size=30),
        "properties": st.lists(PIECES, max_size=4).map("".join) | st.text(max_size=5),
        "v6": st.integers(0, 3),
        "time": st.integers(-1, 2**62),
        "gap": st.integers(0, 5),
        "harm": st.none() | st.tuples(st.integers(0, 400), st.integers(1, 255)),
    }
)


def encoded(drawn: dict[str, Any], number: int) -> bytearray:
    born, store = drawn["v6"] & 1, drawn["v6"] & 2
    record = bytearray(
        encode_record(
            topic=drawn["topic"].encode(),
            queue_id=QUEUE_ID,
            queue_offset=number,
            physical_offset=0,
            body=drawn["body"],
            properties=drawn["properties"].encode("utf-8", "surrogatepass"),
            sys_flag=(0x10 if born else 0) | (0x20 if store else 0),
            flag=0,
            born_timestamp=1,
            born_host=bytes(20 if born else 8),
            store_timestamp=drawn["time"],
            store_host=bytes(20 if store else 8),
            reconsume_times=0,
            prepared_transaction_offset=0,
        )
    )
    if drawn["harm"] is not None:
        at, mask = drawn["harm"]
        record[at % len(record)] ^= mask
    return record


def same_keys(one: KeyItems, other: KeyItems) -> None:
    assert one.items.tolist() == other.items.tolist()
    assert one.times.tolist() == other.times.tolist()


@native
@given(st.lists(RECORDS, min_size=1, max_size=5), st.booleans())
@example([{"topic": "T", "body": b"", "properties": "", "v6": 0, "time": 9, "gap": 0, "harm": None}], True)
async def test_the_extension_makes_what_python_makes(drawn: list[dict[str, Any]], keys: bool) -> None:
    log, units, records = bytearray(), bytearray(), []
    for number, one in enumerate(drawn):
        log += bytes(one["gap"])
        record = encoded(one, number)
        units += UNIT.pack(START + len(log), len(record), number * 7 - 1)
        log += record
        records.append(bytes(record))
    target = memoryview(bytearray(sum(map(len, records))))
    extension = NATIVE.extension
    assert extension is not None
    named = ("Tä", TOPIC_ID, QUEUE_ID) if keys else None
    made = extension.tier_batch(memoryview(log), START, bytes(units), POSITION, target, named)
    if made is None:
        assert any(one["harm"] is not None or _is_odd(one["properties"]) for one in drawn)
        return
    queue: Any = type("Queue", (), {"topic": "Tä", "queue_id": QUEUE_ID})
    built = await batches._built(batches._Part(queue, 3, POSITION, bytes(units), TOPIC_ID, keys=keys), records)
    assert built.batch is not None
    assert (b"".join(built.batch.records), *built.batch[3:]) == (bytes(target), *made[:4])
    same_keys(items_of_bytes(*made[4:]), built.keys)


def _is_odd(text: str) -> bool:
    """The extension leaves a last value that is empty to Python: then an earlier one counts."""
    return "\x01\x02" in text or text.endswith("\x01") or any(0xD800 <= ord(letter) < 0xE000 for letter in text)


@native
@pytest.mark.parametrize(
    "change", [{"start": START + 1}, {"units": b""}, {"units": bytes(19)}, {"target": -1}, {"target": 1}]
)
def test_what_does_not_fit_is_left_to_python(change: dict[str, Any]) -> None:
    drawn = {"topic": "T", "body": b"b", "properties": "", "v6": 0, "time": 9, "harm": None}
    record = encoded(drawn, 0)
    units = change.get("units", UNIT.pack(START, len(record), 1))
    extension = NATIVE.extension
    assert extension is not None

    def made(start: int, units: bytes, more: int) -> object:
        target = memoryview(bytearray(len(record) + more))
        return extension.tier_batch(memoryview(record), start, units, 0, target, ("T", 1, 2))

    assert made(START, UNIT.pack(START, len(record), 1), 0) is not None
    assert made(change.get("start", START), units, change.get("target", 0)) is None


class Spy:
    """The extension, and how often it has made a batch."""

    def __init__(self, error: Exception | None = None) -> None:
        self.NativeFault = NATIVE.fault or RuntimeError
        self.error = error
        self.made: list[bool] = []

    def tier_batch(self, *arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        assert NATIVE.extension is not None
        found = NATIVE.extension.tier_batch(*arguments)
        self.made.append(found is not None)
        return found


async def built(store: TieredMessageStore, offset: int = 0, most: int = 100, size: int = 1 << 20) -> Built:
    queue = store.find_queue(TOPIC, 0)
    assert queue is not None
    builder = BatchBuilder(store.commit_log, store.queues)
    found = await builder.build(queue, offset, POSITION, Limits(most, size, store.flushed_offset), TOPIC_ID, Buffer())
    assert found is not None
    return found


def same(one: Built, other: Built) -> None:
    assert one.batch is not None
    assert other.batch is not None
    assert b"".join(map(bytes, one.batch.records)) == b"".join(map(bytes, other.batch.records))
    assert (one.batch[0], *one.batch[2:]) == (other.batch[0], *other.batch[2:])
    same_keys(one.keys, other.keys)


async def filled(store: TieredMessageStore, count: int = 30) -> None:
    await fill(store, count)
    await until_dispatched(store)
    await store.flush()


@native
async def test_a_batch_within_a_file_is_made_by_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        await filled(store)
        spy = Spy()
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(spy))  # type: ignore[arg-type]
        fast = await built(store, 1, most=12)
        assert spy.made == [True]
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(None))
        same(fast, await built(store, 1, most=12))


@native
async def test_a_batch_ends_at_the_edge_of_a_file_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension makes a batch of one file only: else Python would make one for each queue, at each edge."""
    async with opened(SimDisk()) as store:
        await filled(store, 60)
        log = store.commit_log.files
        assert len(log.files) > 1
        spy = Spy()
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(spy))  # type: ignore[arg-type]
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        taken, files = 0, []
        while taken < 60:
            found = await built(store, taken, most=60)
            assert found.batch is not None
            count = len(found.batch.units) // 20
            units = await BatchBuilder(store.commit_log, store.queues).units(queue, taken, count)
            (file,) = {log.find(phy) for phy, _, _ in units}
            files.append(file)
            taken += count
        assert files == log.files
        assert spy.made == [True] * len(files)


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=native), False])
async def test_of_records_far_from_each_other_the_log_between_is_not_read(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue among a thousand others: each of its batches would read all that they have in the log."""
    disk = SimDisk()
    async with opened(disk) as store:
        await put(store, b"first")
        await fill(store, 25, topic="Other")
        await put(store, b"second")
        await until_dispatched(store)
        await store.flush()
        for file in store.commit_log.files.files:
            file.in_memory_from = file.size
        disk.cold = True
        before = len(disk.history)
        spy = Spy()
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(spy if is_native else None))  # type: ignore[arg-type]
        found = await built(store)
        assert spy.made == [True] * is_native
        assert found.batch is not None
        assert len(found.batch.units) == 2 * 20
        read = [entry for entry in disk.history[before:] if entry.startswith("read_ahead")]
        assert len(read) == 2
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(None))
        same(found, await built(store))


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=native), False])
async def test_what_is_in_memory_is_not_read_ahead_again(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages of several queues lie between each other: a batch of each would read the same part of the log."""
    disk = SimDisk()
    async with opened(disk) as store:
        await filled(store)
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(NATIVE.extension if is_native else None))
        for file in store.commit_log.files.files:
            file.in_memory_from = file.size
        disk.cold = True
        before = len(disk.history)

        def reads() -> list[str]:
            return [entry for entry in disk.history[before:] if entry.startswith("read_ahead")]

        cold = await built(store, 1, most=12)
        first = reads()
        assert first
        same(await built(store, 1, most=12), cold)
        assert reads() == first


@native
async def test_a_fault_of_the_extension_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(SimDisk()) as store:
        await filled(store)
        monkeypatch.setattr(batches, "NATIVE", NativeExtension(None))
        expected = await built(store, 1, most=12)
        spy = Spy(NATIVE.fault("broken"))  # type: ignore[operator]
        state = NativeExtension(spy)  # type: ignore[arg-type]
        monkeypatch.setattr(batches, "NATIVE", state)
        same(await built(store, 1, most=12), expected)
        assert state.has_failed


async def test_a_group_ends_before_its_limits_and_before_what_is_damaged() -> None:
    async with opened(SimDisk()) as store:
        await filled(store)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        sizes = [size for _, size, _ in UNIT.iter_unpack(store.queues.read(queue, 0, 30) or b"")]

        def messages(found: Built) -> int:
            assert found.batch is not None
            assert found.batch.size == sum(sizes[: len(found.batch.units) // 20])
            return len(found.batch.units) // 20

        assert messages(await built(store, size=sum(sizes[:5]))) == 5
        assert messages(await built(store, size=sum(sizes[:5]) - 1)) == 4
        assert messages(await built(store, size=1)) == 1
        assert messages(await built(store, most=3)) == 3


@pytest.mark.parametrize("size", [FILLER_SIZE, 5])
async def test_units_that_lead_nowhere_are_passed_and_no_message_with_them(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(SimDisk()) as store:
        await filled(store)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        read = store.queues.read

        def damaged(queue: Any, offset: int, count: int) -> bytes | None:
            data = bytearray(read(queue, offset, count) or b"")
            for number in (4, 5):
                if 0 <= (at := (number - offset) * 20 + 8) < len(data):
                    data[at : at + 4] = size.to_bytes(4, "big")
            return bytes(data)

        monkeypatch.setattr(store.queues, "read", damaged)
        before = await built(store)
        assert before.batch is not None
        assert len(before.batch.units) == 4 * 20
        assert (await built(store, 4))[::2] == (None, 6)
        monkeypatch.undo()
        await store.uploads.upload_all()
        assert await all_offsets(store, 0, 30) != []


async def test_memory_is_used_again_and_released() -> None:
    buffers = batches.Buffers()
    with buffers.one() as first:
        memory = first.view(1000)
        assert len(memory) == 1000
        held = first.memory
    with buffers.one() as second, buffers.one() as third:
        assert second.view(500).obj is held
        assert third.view(10).obj is not held
    buffers.release()
    with buffers.one() as fourth:
        assert fourth.view(500).obj is not held
    with buffers.one() as large:
        large.view(batches._LARGEST_IDLE + 1)
    buffers.release()
    with buffers.one() as after:
        assert after.memory is None


@pytest.mark.parametrize("kind", [Buffer, ObjectMemory])
def test_memory_goes_back_to_the_system_with_its_last_view(kind: type[Buffer]) -> None:
    bytearray(24 * 1024 * 1024)  # once such a piece was freed, malloc takes none of less from the system alone
    buffer = kind()
    view = buffer.view(16 * 1024 * 1024)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    del buffer
    assert is_mapped(address)
    view.release()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    ranges = [[int(number, 16) for number in line.split()[0].split("-")] for line in maps]
    return any(begin <= address < end for begin, end in ranges)


def test_released_memory_of_an_object_is_not_used_again() -> None:
    memory = ObjectMemory()
    view = memory.view(1000)
    memory.clear()
    assert memory.view(10).obj is view.obj
    memory.release()
    assert memory.view(10).obj is not view.obj


async def test_a_batch_ends_before_a_record_that_is_not_there() -> None:
    drawn = {"topic": "T", "body": b"b", "properties": "", "v6": 0, "time": 9, "harm": None}
    record = bytes(encoded(drawn, 0))
    units = UNIT.pack(0, len(record), 1) * 2
    queue: Any = type("Queue", (), {"topic": "T", "queue_id": 0})
    part = batches._Part(queue, 3, 0, units, 1, keys=True)
    found = await batches._built(part, [record, b""])
    assert found.batch is not None
    assert len(found.batch.units) == 20
    assert (await batches._built(part, [b"", record]))[::2] == (None, 4)


async def test_a_damaged_record_is_uploaded_as_it_is_and_has_no_keys() -> None:
    async with opened(SimDisk()) as store:
        await filled(store, 20)
        queue = store.find_queue(TOPIC, 0)
        assert queue is not None
        units = list(UNIT.iter_unpack(store.queues.read(queue, 0, 20) or b""))
        physical = units[3][0]
        file = store.files.find(physical)
        assert file is not None
        good = await built(store)
        file.view[physical - file.start + 84] ^= 0x7F  # its body's length
        bad = await built(store)
        assert good.batch is not None
        assert bad.batch is not None
        assert bad.batch.units == good.batch.units
        keys_of_one = len(good.keys) // 20
        assert len(bad.keys) == len(good.keys) - keys_of_one
        assert units[3][1] not in (0, FILLER_SIZE)


async def test_many_records_give_way_to_other_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "NATIVE", NativeExtension(None))
    async with opened(SimDisk()) as store:
        await filled(store, 25)
        at_once = await built(store)
        monkeypatch.setattr(batches, "_SLICE", 4)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await trio.lowlevel.checkpoint()
                ticks += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            same(await built(store), at_once)
            nursery.cancel_scope.cancel()
        assert ticks >= 10


async def test_units_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue whose file was deleted meanwhile has no units; one that reads fewer than were asked is read again."""
    async with opened(SimDisk()) as store:
        await filled(store, 20)
        read = store.queues.read
        monkeypatch.setattr(store.queues, "read", lambda queue, offset, count: read(queue, offset, min(count, 7)))
        found = await built(store)
        assert found.batch is not None
        assert len(found.batch.units) == 20 * 20
        monkeypatch.setattr(
            store.queues, "read", lambda queue, offset, _: read(queue, offset, 7) if offset < 7 else b""
        )
        found = await built(store)
        assert found.batch is not None
        assert len(found.batch.units) == 7 * 20
