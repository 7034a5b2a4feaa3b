import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.broker.store.log.log_scan import Blank, Damage, LogRecord, LogWalk, NoRecordError, RecordReader, erase_behind
from trimq.protocol import record
from trimq.protocol.record import encode_record, pack_host

SIZE = 4096
NOW = 1_700_000_000_000
V4 = pack_host("10.0.0.1", 10911)
V6 = pack_host("fe80::1", 10911)


def _encode(phy: int, body: bytes = b"body", *, topic: str = "T", host: bytes = V4, time: int = NOW) -> bytes:
    return encode_record(
        topic=topic.encode(),
        body=body,
        properties=b"KEYS\x01k\x02",
        queue_id=3,
        queue_offset=7,
        physical_offset=phy,
        born_timestamp=NOW,
        born_host=host,
        store_timestamp=time,
        store_host=host,
        sys_flag=record.host_flags(host, host),
    )


class Log:
    """A log written record by record, as the commit log writes it."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        make_durable_directory(self.disk, "/log")
        self.files: list[MappedFile] = []
        self.offsets: list[int] = []
        self.position = 0

    def add(self, body: bytes = b"body", time: int = NOW) -> None:
        data = _encode(self.position, body, time=time)
        left = SIZE - self.position % SIZE
        if left < len(data) + 8:
            record.BLANK.pack_into(self.files[-1].view, self.position % SIZE, left, record.MAGIC_BLANK)
            self.position += left
            data = _encode(self.position, body, time=time)
        if self.position // SIZE == len(self.files):
            start = len(self.files) * SIZE
            self.files.append(MappedFile.create(self.disk, f"/log/{start:020d}", start, SIZE, SIZE))
        at = self.position % SIZE
        self.files[-1].view[at : at + len(data)] = data
        self.offsets.append(self.position)
        self.position += len(data)

    def walk(self, start: int = 0) -> tuple[list[int], list[Damage], int]:
        walk = LogWalk(self.disk, self.files, start, RecordReader(SIZE))
        records, damaged = [], []
        while (found := walk.step()) is not None:
            if isinstance(found, LogRecord):
                records.append(found.phy)
            elif isinstance(found, Damage):
                damaged.append(found)
        return records, damaged, walk.position

    def size_at(self, phy: int) -> int:
        return int.from_bytes(self.files[phy // SIZE].view[phy % SIZE : phy % SIZE + 4], "big")


@given(st.binary(max_size=300), st.sampled_from(["T", "t" * 200]), st.sampled_from([V4, V6]))
def test_every_form_of_record_is_read(body: bytes, topic: str, host: bytes) -> None:
    data = bytes(9) + _encode(512, body, topic=topic, host=host)
    found = RecordReader(SIZE).read(memoryview(data), 9, 512)
    flags = record.host_flags(host, host)
    assert found == LogRecord(512, len(data) - 9, topic, 3, 7, flags, NOW, "KEYS\x01k\x02")


@given(st.data())
@examples(max_examples=200)
def test_no_changed_byte_goes_through_as_another_record(data: st.DataObject) -> None:
    body = data.draw(st.binary(min_size=1, max_size=60))
    image = bytearray(_encode(512, body))
    at = data.draw(st.integers(0, len(image) - 1))
    image[at] ^= data.draw(st.integers(1, 255))
    try:
        found = RecordReader(SIZE).read(memoryview(image), 0, 512)
    except NoRecordError:
        return
    if isinstance(found, LogRecord):
        assert found.size == len(image), "lengths agree with each other"
        assert not 88 <= at < 88 + len(body), "the body is covered by its checksum"


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_record(data: bytes) -> None:
    try:
        found = RecordReader(SIZE).read(memoryview(data), 0, 0)
    except NoRecordError:
        return
    assert isinstance(found, Blank)


def test_a_sector_of_zeros_in_the_text_is_no_text() -> None:
    image = bytearray(_encode(0, b"x" * 415))
    assert len(image) > 512
    RecordReader(SIZE).read(memoryview(image), 0, 0)
    torn = bytes(image[:512]).ljust(len(image), b"\0")
    with pytest.raises(NoRecordError, match="zeros"):
        RecordReader(SIZE).read(memoryview(torn), 0, 0)


def test_a_zero_in_a_property_is_a_character() -> None:
    data = _encode(0).replace(b"KEYS\x01k\x02", b"KEYS\x01\0\x02")
    found = RecordReader(SIZE).read(memoryview(data), 0, 0)
    assert isinstance(found, LogRecord)
    assert found.properties == "KEYS\x01\0\x02"


def test_a_walk_over_several_files() -> None:
    log = Log()
    for number in range(60):
        log.add(b"x" * (number * 7 % 200))
    assert len(log.files) > 2
    assert log.walk() == (log.offsets, [], log.position)
    assert log.walk(log.offsets[20]) == (log.offsets[20:], [], log.position)


@given(st.integers(0, 59), st.integers(1, 5), st.sampled_from(["flip", "zero", "magic", "size"]))
@examples(max_examples=80)
def test_damage_is_reported_and_never_the_end(first: int, count: int, kind: str) -> None:
    log = Log()
    for number in range(60):
        log.add(b"x" * (1 + number * 7 % 200))
    hit = range(first, min(first + count, 60))
    for number in hit:
        phy = log.offsets[number]
        view, at, size = log.files[phy // SIZE].view, phy % SIZE, log.size_at(phy)
        if kind == "flip":
            view[at + 88] ^= 1
        elif kind == "zero":
            view[at : at + size] = bytes(size)
        elif kind == "magic":
            view[at + 4] ^= 0x10
        else:
            view[at : at + 4] = (1 << 30).to_bytes(4, "big")
    records, damaged, end = log.walk()
    assert records == [phy for number, phy in enumerate(log.offsets) if number not in hit]
    if hit[-1] == 59:
        assert end <= log.offsets[first]
    else:
        assert end == log.position
        assert damaged[0].phy == log.offsets[first]
        following = log.offsets[hit[-1] + 1]
        assert damaged[-1].phy + damaged[-1].length in (following, following - following % SIZE)


def test_a_blank_of_the_wrong_length_is_damage() -> None:
    log = Log()
    for _ in range(60):
        log.add(b"x" * 100)
    at = max(phy for phy in log.offsets if phy < SIZE)
    at += log.size_at(at)
    log.files[0].view[at : at + 4] = (50).to_bytes(4, "big")
    records, damaged, end = log.walk()
    assert (records, end) == (log.offsets, log.position)
    assert (damaged[0].phy, damaged[0].length) == (at, SIZE - at)
    assert "BLANK" in damaged[0].why


def test_erasing_behind_a_position() -> None:
    log = Log()
    for _ in range(20):
        log.add(b"x" * 50)
    file = log.files[0]
    keep = bytes(file.view[:1000])
    assert erase_behind(log.disk, file, 1000) > 0
    assert bytes(file.view) == keep.ljust(SIZE, b"\0")
    assert log.disk.durable_content(file.path) == bytes(file.view)
    assert erase_behind(log.disk, file, 1000) == 0
