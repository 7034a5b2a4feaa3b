"""After a start the index gets the keys that a crash took from it, from the records."""

import pytest

from tests.store.simdisk import SimDisk
from tests.store.tiered.index_stores import TOPIC, index, numbers
from tests.store.tiered.test_flat_message_file import flat_files
from trimq.broker.store.tiered.access import index_completion
from trimq.broker.store.tiered.access.index_completion import complete_index
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import Batch, FlatMessageFile
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import encode_record
from trimq.protocol.tiered_index_layout import tiered_key_hash
from trimq.protocol.tiered_layout import PHYSICAL


def message(offset: int, position: int, key: str, body: bytes = b"b") -> bytes:
    return encode_record(
        topic=TOPIC.encode(),
        queue_id=0,
        queue_offset=offset,
        physical_offset=position,
        body=body,
        properties=f"UNIQ_KEY\x01{key}\x02".encode(),
        sys_flag=0,
        flag=0,
        born_timestamp=1,
        born_host=bytes(8),
        store_timestamp=1,
        store_host=bytes(8),
        reconsume_times=0,
        prepared_transaction_offset=0,
    )


async def append(file: FlatMessageFile, *bodies: bytes, harm: int = -1) -> list[int]:
    """Upload messages with the keys k0, k1, ... by offset; the lengths of one are damaged. Returns their positions."""
    places, records, units, entries = [], [], b"", b""
    position = file.commit_log.commit_offset
    for number, body in enumerate(bodies):
        offset = file.commit_offset + number
        record = message(offset, position, f"k{offset}", body)
        if number == harm:
            record = record[:84] + b"\x7f" + record[85:]
        places.append(position)
        records.append(record)
        units += UNIT.pack(position, len(record), 0)
        entries += PHYSICAL.pack(offset, len(record), 0)
        position += len(record)
    await file.append(Batch(file.commit_offset, records, sum(map(len, records)), units, entries, 1, 1))
    return places


async def queue() -> tuple[FlatFileStore, FlatMessageFile]:
    files = flat_files(SimDisk())
    await files.load()
    file = files.find_or_create(TOPIC, 0)
    await file.init_offset(0)
    return files, file


async def found(service: IndexStoreService, key: str) -> list[int]:
    return [item.offset for item in await service.query(TOPIC, key, 9, 0, 1 << 50)]


async def test_missing_keys_are_put_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_completion, "_AT_ONCE", 2)
    monkeypatch.setattr(index_completion, "_READ", 150)
    files, file = await queue()
    places = await append(file, b"1", b"2" * 400, b"3", b"4", b"5")
    service = await index(SimDisk(), items=100)
    assert await complete_index(service, files) == 5
    for number, place in enumerate(places):
        assert await found(service, f"k{number}") == [place]
    assert service.indexed_until(file.topic_id, 0) == file.commit_log.commit_offset
    assert await complete_index(service, files) == 0


async def test_a_damaged_record_is_passed_and_what_is_none_ends_the_queue() -> None:
    files, file = await queue()
    places = await append(file, b"1", b"2", b"3", harm=1)
    end = file.commit_log.commit_offset
    await file.commit_log.append((bytes(200),), 200, 1, 1)
    service = await index(SimDisk(), items=100)
    assert await complete_index(service, files) == 3
    assert await found(service, "k0") == [places[0]]
    assert await found(service, "k1") == []
    assert await found(service, "k2") == [places[2]]
    assert service.indexed_until(file.topic_id, 0) == end


async def test_an_index_of_apaches_broker_counts_as_complete() -> None:
    files, file = await queue()
    await append(file, b"1", b"2")

    class ApachesIndex:
        def __init__(self) -> None:
            self.ends: list[tuple[int, int, int, int]] = []
            self.flushed = 0

        def indexed_until(self, topic_id: int, queue_id: int) -> int | None:
            return None

        def put_items(self, topic_id: int, queue_id: int, items: object, end: int) -> None:
            self.ends.append((topic_id, queue_id, len(items), end))  # type: ignore[arg-type]

        def put_messages(self, messages: object) -> None:
            raise AssertionError

        async def fill(self) -> None:
            raise AssertionError

        async def flush(self) -> None:
            self.flushed += 1

    its = ApachesIndex()
    assert await complete_index(its, files) == 0
    assert (its.ends, its.flushed) == ([(file.topic_id, 0, 0, file.commit_log.commit_offset)], 1)


async def test_records_that_are_gone_end_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    files, file = await queue()
    await append(file, b"1")

    async def nothing(position: int, length: int) -> bytes:
        raise LookupError

    monkeypatch.setattr(file.commit_log, "read", nothing)
    service = await index(SimDisk())
    assert await complete_index(service, files) == 0
    assert await numbers(service, "k0") == []
    assert tiered_key_hash(TOPIC, "k0") > 0
