"""A queue in the tier: append, read, restart, expiry, on a simulated disk."""

import errno

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import Batch, FlatMessageFile
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.memory import MemoryFileSegment
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.store.tiered.driver.posix import PosixFileSegment
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.queue_unit import UNIT, UNIT_SIZE
from trimq.protocol.record import AT_PHYSICAL_OFFSET, decode_head, encode_record
from trimq.protocol.tiered_layout import (
    APACHE_UPLOADED,
    PHYSICAL,
    UNKNOWN_PHYSICAL,
    SegmentType,
    cluster_directory,
    segment_name,
)

CLUSTER, BROKER, TOPIC = "C1", "broker-t", "TT"


def flat_files(disk: SimDisk, **options: object) -> FlatFileStore:
    config = TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=POSIX_PROVIDER,
        tiered_store_file_path="/tier",
        **options,  # type: ignore[arg-type]
    )
    metadata = DefaultMetadataStore(disk, "/store", BROKER, lambda: 1_000)
    return FlatFileStore(FileSegmentFactory(config, disk, CLUSTER), metadata, BROKER)


def record(offset: int, position: int, body: bytes, *, time: int, topic: str = TOPIC, queue_id: int = 0) -> bytes:
    return encode_record(
        topic=topic.encode(),
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=position,
        body=body,
        properties=b"",
        sys_flag=0,
        flag=0,
        born_timestamp=time,
        born_host=bytes(8),
        store_timestamp=time,
        store_host=bytes(8),
        reconsume_times=0,
        prepared_transaction_offset=0,
    )


def batch(file: FlatMessageFile, bodies: list[bytes], *, physical: int = 5_000, time: int = 100) -> Batch:
    offset, position = file.commit_offset, file.commit_log.commit_offset
    records, units, entries = [], b"", b""
    for number, body in enumerate(bodies):
        data = record(offset + number, position, body, time=time)
        records.append(data)
        units += UNIT.pack(position, len(data), 7)
        entries += PHYSICAL.pack(physical, len(data), decode_head(data).body_crc)
        position, physical = position + len(data), physical + 1000
    return Batch(offset, records, sum(map(len, records)), units, entries, time, time)


async def test_messages_come_back_with_their_offsets_in_the_log_also_after_a_restart() -> None:
    disk = SimDisk()
    files = flat_files(disk)
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    await file.init_offset(3)
    await file.append(batch(file, [b"a", b"bb"]))
    await file.append(batch(file, [b"c"], physical=9_000))
    await files.metadata.persist()
    for other in (disk.copy(), disk.power_cut()):
        again = flat_files(other)
        await again.load()
        found = again.find(TOPIC, 0)
        assert found is not None
        assert (found.min_offset, found.commit_offset) == (3, 6)
        fetched = await found.read_messages(3, 10, 1 << 20)
        heads = [decode_head(message.record) for message in fetched.messages]
        assert [message.offset for message in fetched.messages] == [3, 4, 5]
        assert [head.physical_offset for head in heads] == [5_000, 6_000, 9_000]
        assert fetched.next_offset == 6
        record = await found.read_physical(6_000)
        assert record is not None
        assert int.from_bytes(record[AT_PHYSICAL_OFFSET : AT_PHYSICAL_OFFSET + 8], "big") == 6_000
        assert await found.read_physical(6_001) is None
        assert await found.store_time(4) == 100


async def filled(disk: SimDisk, *bodies: bytes, **options: object) -> FlatMessageFile:
    files = flat_files(disk, **options)
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    await file.init_offset(0)
    if bodies:
        await file.append(batch(file, list(bodies)))
    await files.metadata.persist()
    return file


async def test_what_is_outside_of_the_queue() -> None:
    file = await filled(SimDisk(), b"a", b"b")
    for offset in (-1, 2):
        with pytest.raises(LookupError, match=f"no message {offset} in the tier"):
            await file.read_messages(offset, 1, 100)
        assert await file.store_time(offset) == -1
    assert await file.physical.read(0, 3) == await file.physical.read(0, 2) + UNKNOWN_PHYSICAL
    first = file.commit_log.segments[0]
    first.commit_position -= 1
    assert await file.store_time(1) == 100
    first.commit_position = 0
    assert await file.store_time(1) == -1


async def test_a_batch_that_does_not_follow_is_refused() -> None:
    file = await filled(SimDisk(), b"a")
    with pytest.raises(ValueError, match="goes on at 1, not at 5"):
        await file.append(batch(file, [b"b"])._replace(offset=5))
    assert file.commit_offset == 1


async def test_a_read_ends_before_its_size_and_has_one_message_at_least() -> None:
    file = await filled(SimDisk(), b"a" * 50, b"b" * 50, b"c" * 50)
    size = len(record(0, 0, b"a" * 50, time=0))
    for limit, count in ((1, 1), (size, 1), (2 * size - 1, 1), (2 * size, 2), (9 * size, 3)):
        fetched = await file.read_messages(0, 10, limit)
        assert (len(fetched.messages), fetched.next_offset) == (count, count)


async def test_records_by_position() -> None:
    file = await filled(SimDisk(), b"a", b"b")
    size = len(record(0, 0, b"a", time=0))
    found = await file.read_record(size, size)
    assert found is not None
    assert decode_head(found).queue_offset == 1
    for position, length in ((size, size - 1), (size + 1, size), (2 * size, size), (0, 5), (1 << 40, size)):
        assert await file.read_record(position, length) is None
    file._first_offset = 1  # the record has expired meanwhile
    assert await file.read_record(0, size) is None


async def test_a_damaged_body_is_skipped_if_bodies_are_checked() -> None:
    disk = SimDisk()
    await filled(disk, b"aaaa", b"bbbb")
    path = f"/tier/{cluster_directory(CLUSTER)}/{BROKER}/{TOPIC}/0/COMMIT_LOG/{segment_name(0)}"
    fd = disk.open(path)
    disk.pwrite(fd, b"X", disk.content(path).index(b"aaaa"))
    disk.close(fd)

    async def offsets(*, check_crc: bool) -> list[int]:
        metadata = DefaultMetadataStore(disk, "/store", BROKER, lambda: 1_000)
        config = TieredStoreConfig(
            message_store_plug_in=PLUG_IN,
            tiered_backend_service_provider=POSIX_PROVIDER,
            tiered_store_file_path="/tier",
        )
        metadata.load()
        file = FlatMessageFile(
            FileSegmentFactory(config, disk, CLUSTER), metadata, BROKER, TOPIC, 0, check_crc=check_crc
        )
        await file.recover()
        fetched = await file.read_messages(0, 10, 1 << 20)
        assert fetched.next_offset == 2
        return [message.offset for message in fetched.messages]

    assert await offsets(check_crc=False) == [0, 1]
    assert await offsets(check_crc=True) == [1]


@given(
    st.dictionaries(
        st.integers(0, 7),
        st.tuples(
            # None: its own.
            st.none() | st.sampled_from([-(1 << 63), -1, 0, 92, 400, 1 << 40, (1 << 63) - 1]) | st.integers(0, 1000),
            st.sampled_from([-(1 << 31), -250, -1, 0, 91, 94, 1 << 22, (1 << 31) - 1]) | st.integers(0, 400),
        ),
        max_size=3,
    ),
    st.integers(0, 7),
    st.sampled_from([1, 200, 300, 1 << 20]),
)
@example({0: (0, 0)}, 0, 1)
@example({0: (-1, 94)}, 0, 200)
@example({4: (None, -(1 << 31) + 98)}, 0, 300)
@example({5: (None, -(1 << 31) + 98)}, 0, 300)
@example({7: (None, -(1 << 31))}, 0, 1 << 20)
@example({5: (None, -250)}, 0, 1 << 20)
@example({3: (0, -(1 << 31)), 5: ((1 << 63) - 1, (1 << 31) - 1)}, 0, 1 << 20)
async def test_damaged_units_give_no_wrong_message_and_lead_on(
    harms: dict[int, tuple[int | None, int]], offset: int, max_bytes: int
) -> None:
    disk = SimDisk()
    file = await filled(disk, *(b"%d" % number * number for number in range(8)))
    expected = [message.record for message in (await file.read_messages(0, 8, 1 << 20)).messages]
    assert len(expected) == 8
    segment = file.consume_queue.segments[0]
    assert isinstance(segment, PosixFileSegment)
    fd = disk.open(segment.file)
    places = [UNIT.unpack(disk.pread(fd, UNIT_SIZE, at * UNIT_SIZE)) for at in range(8)]
    for number, (position, size) in harms.items():
        place = places[number][0] if position is None else position
        disk.pwrite(fd, UNIT.pack(place, size, 7), number * UNIT_SIZE)
    units = [UNIT.unpack(disk.pread(fd, UNIT_SIZE, at * UNIT_SIZE)) for at in range(8)]
    disk.close(fd)
    found: list[int] = []
    at = offset
    while at < 8:
        fetched = await file.read_messages(at, 8, max_bytes)
        found += [message.offset for message in fetched.messages]
        assert [message.record for message in fetched.messages] == [expected[m.offset] for m in fetched.messages]
        assert fetched.next_offset > at
        at = fetched.next_offset
    assert found == [number for number in range(offset, 8) if units[number] == places[number]]


async def test_what_is_taken_back_meanwhile_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = await filled(SimDisk(), b"a")

    async def nothing(*_: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return b""

    monkeypatch.setattr(file.consume_queue, "read", nothing)
    fetched = await file.read_messages(0, 10, 1 << 20)
    assert (len(fetched.messages), fetched.next_offset) == (0, 0)


async def test_what_comes_late_to_a_deleted_queue_is_dropped() -> None:
    disk = SimDisk()
    file = await filled(disk, b"a")
    late = batch(file, [b"b"])
    await file.destroy()
    assert not await file.append(late)
    await file.init_offset(0)
    await file.skip_to(9)
    await file.roll(records=True, units=True)
    assert (file.commit_log.segments, file.consume_queue.segments) == ([], [])


async def test_a_queue_begins_again_without_records() -> None:
    disk = SimDisk()
    files = flat_files(disk)
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    await file.consume_queue.init_offset(5 * UNIT.size)
    await files.metadata.persist()
    again = flat_files(disk.power_cut())
    await again.load()
    found = again.find(TOPIC, 0)
    assert found is not None
    await found.append(batch(found, [b"a"]))
    assert (found.min_offset, found.commit_offset) == (5, 6)


async def test_a_queue_that_cannot_be_read_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    await filled(disk, b"a")
    error = OSError(errno.EIO, "the provider has failed")

    async def recover(_file: FlatMessageFile) -> None:
        async with trio.open_nursery():
            raise error

    monkeypatch.setattr(FlatMessageFile, "recover", recover)
    with pytest.raises(OSError, match="the provider has failed") as caught:
        await flat_files(disk).load()
    assert caught.value is error


async def test_a_topic_is_forgotten_with_its_queues() -> None:
    disk = SimDisk()
    files = flat_files(disk)
    await files.load()
    await files.find_or_create(TOPIC, 0).init_offset(0)
    await files.destroy_topic(TOPIC)
    assert files.metadata.topics == {}
    await files.destroy_topic(TOPIC)
    assert list(files.all()) == []


async def test_messages_of_both_brokers_in_one_segment() -> None:
    """RocketMQ's broker leaves the side file as it is: entries are missing in the middle, and at the begin."""
    disk = SimDisk()
    file = await filled(disk)
    await file.append(batch(file, [b"a", b"b"], physical=1_000))
    entries = b""
    for body in (b"c", b"d"):  # as RocketMQ's broker uploads
        made = batch(file, [body])
        at = await file.commit_log.append(made.records, made.size, 100, 100)
        assert at + made.size == file.commit_log.commit_offset
        await file.consume_queue.append((made.units,), len(made.units), 100, 100)
        entries += made.physical
    await file.append(batch(file, [b"e"], physical=9_000))
    fetched = await file.read_messages(0, 10, 1 << 20)
    physical = [decode_head(message.record).physical_offset for message in fetched.messages]
    size = len(record(0, 0, b"a", time=0))
    assert physical == [1_000, 2_000, APACHE_UPLOADED + 2 * size, APACHE_UPLOADED + 3 * size, 9_000]
    for number, offset in enumerate((1_000, 2_000, None, None, 9_000)):
        found = await file.read_physical(physical[number])
        assert (found is not None) == (offset is not None)
    # Nothing that is known stands behind the last entry that is.
    assert await file.physical.find(9_001, 0) is None
    assert await file.physical.find(3_000, 0) is None


async def test_segments_in_memory() -> None:
    files = flat_files(SimDisk(), tiered_store_consume_queue_max_size=40)
    files.factory = FileSegmentFactory(TieredStoreConfig(message_store_plug_in=PLUG_IN), SimDisk(), CLUSTER)
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    assert isinstance(file.commit_log._factory.create(SegmentType.COMMIT_LOG, "p", 0), MemoryFileSegment)
    await file.init_offset(0)
    await file.append(batch(file, [b"a", b"b"]))
    fetched = await file.read_messages(0, 10, 1 << 20)
    assert [message.offset for message in fetched.messages] == [0, 1]
    segment = file.commit_log.segments[0]
    size = segment.commit_position
    await file.commit_log.cut(size - 1)
    assert await segment.size() == size - 1
    await file.destroy()
    assert await segment.size() is None
