"""A queue in the tier: append, read, restart, expiry, on a simulated disk."""

from tests.store.simdisk import SimDisk
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.flat_message_file import Batch, FlatMessageFile
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import AT_PHYSICAL_OFFSET, decode_head, encode_record
from trimq.protocol.tiered_layout import PHYSICAL

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
