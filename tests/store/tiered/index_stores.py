"""The tier's key index on a simulated disk."""

from typing import Any

from tests.store.simdisk import SimDisk
from trimq.broker.store.tiered.container.flat_file_store import FlatFileStore
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.tiered_index_batch import KeysOfMessage

TOPIC = "TT"
NOW = 1_700_000_000_000
DIRECTORY = "/store/tiered_index_file"
SEGMENTS = "/tier/1a2ddc2d_C1/broker-t/rmq_sys_INDEX/0/INDEX"


class Wall:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.ms = NOW

    def __call__(self) -> int:
        return self.ms


async def index(
    disk: SimDisk, wall: Wall | None = None, *, slots: int = 16, items: int = 9, **options: Any
) -> IndexStoreService:
    """A recovered index with files of ``items`` - 1 items."""
    wall = wall or Wall()
    config = TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=POSIX_PROVIDER,
        tiered_store_file_path="/tier",
        tiered_store_index_file_max_hash_slot_num=slots,
        tiered_store_index_file_max_index_num=items,
        **options,
    )
    metadata = DefaultMetadataStore(disk, "/store", "broker-t", wall)
    files = FlatFileStore(FileSegmentFactory(config, disk, "C1"), metadata, "broker-t")
    await files.load()
    service = IndexStoreService(disk, "/store", config, files.index_file(), persist=metadata.persist, wall_ms=wall)
    await service.recover()
    return service


def put(service: IndexStoreService, number: int, *keys: str, wall_ms: int = NOW, queue_id: int = 0) -> None:
    """Put the keys of message ``number``: 100 bytes at 100 times this number."""
    service.put_messages([KeysOfMessage(TOPIC, 7, queue_id, keys, number * 100, 100, wall_ms)])


async def numbers(
    service: IndexStoreService, key: str, *, most: int = 99, begin: int = 0, end: int = 1 << 50
) -> list[int]:
    """The messages with a key, as ``put`` numbers them."""
    return [item.offset // 100 for item in await service.query(TOPIC, key, most, begin, end)]
