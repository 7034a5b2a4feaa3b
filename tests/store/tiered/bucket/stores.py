"""Whole stores with a bucket: a simulated disk, and obstore's memory store as twin of the object store."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import trio
import trio.testing
from obstore.store import MemoryStore

from tests.store.stores import settings, until_dispatched
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo, ObjectStore, ObjectWriter
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore
from trimq.broker.tiered_config import BUCKET_PROVIDER, PLUG_IN, TieredStoreConfig
from trimq.remoting.runtime.clock import ManualClock


def tier(**options: Any) -> TieredStoreConfig:
    return TieredStoreConfig(
        **(
            {
                "message_store_plug_in": PLUG_IN,
                "tiered_backend_service_provider": BUCKET_PROVIDER,
                "tiered_store_bucket": "memory://test",
            }
            | options
        )
    )


class Objects(ObstoreStore):
    """The twin. ``calls`` are the names of the methods with the objects; ``fail`` decides about errors.

    ``fail(call, name, done)`` is called before each call has its effect (``done`` false) and after it.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[tuple[str, str]] = []
        self.fail: Callable[[str, str, bool], None] = _no_fault

    def _do(self, call: str, name: str, *arguments: Any) -> Any:
        self.calls.append((call, name))
        self.fail(call, name, False)
        result = getattr(ObstoreStore, call)(self, name, *arguments)
        self.fail(call, name, True)
        return result

    def create(self, name: str, data: Sequence[Any]) -> None:
        self._do("create", name, data)

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        replaced: str = self._do("replace", name, data, version)
        return replaced

    def read(self, name: str) -> Any:
        return self._do("read", name)

    def read_range(self, name: str, begin: int, length: int) -> Any:
        return self._do("read_range", name, begin, length)

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        found: list[ObjectInfo] = self._do("list", prefix, after, count)
        return found

    def writer(self, name: str, part_size: int) -> Any:
        return _Writer(self, name, ObstoreStore.writer(self, name, part_size))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.calls.append(("delete", name))
            self.fail("delete", name, False)
            ObstoreStore.delete(self, [name])
            self.fail("delete", name, True)

    def copy(self) -> "Objects":
        """Another bucket with the same objects."""
        other = Objects()
        for name in self.named(""):
            ObstoreStore.create(other, name, [ObstoreStore.read(self, name).data])
        return other

    def named(self, part: str) -> Sequence[str]:
        """The names that objects with ``part`` in their names have."""
        return [info.name for info in ObstoreStore.list(self, "", count=100_000) if part in info.name]


class _Writer:
    """See ObjectWriter; its parts are calls named ``writer``."""

    def __init__(self, objects: Objects, name: str, writer: ObjectWriter) -> None:
        self._objects, self._name, self._writer = objects, name, writer

    def write(self, data: Any) -> None:
        self._objects.calls.append(("writer", self._name))
        self._objects.fail("writer", self._name, False)
        self._writer.write(data)
        self._objects.fail("writer", self._name, True)

    def finish(self) -> None:
        self._objects.calls.append(("finish", self._name))
        self._objects.fail("finish", self._name, False)
        self._writer.finish()
        self._objects.fail("finish", self._name, True)


def _no_fault(_call: str, _name: str, _done: bool) -> None: ...


@asynccontextmanager
async def opened(
    disk: Disk,
    objects: ObjectStore,
    config: TieredStoreConfig | None = None,
    local: MessageStoreConfig | None = None,
    clock: ManualClock | None = None,
    **more: Any,
) -> AsyncIterator[BucketMessageStore]:
    store = BucketMessageStore(
        local or settings(),
        config or tier(),
        objects,
        cluster="C1",
        broker_name="broker-a",
        random=Random(7),
        disk=disk,
        clock=clock or ManualClock(),
        sync_place=SyncPlace.THREAD,
        **more,
    )
    async with store.opened():
        await trio.testing.wait_all_tasks_blocked()
        yield store


async def uploaded(store: BucketMessageStore) -> None:
    """Upload everything, and let the root name it."""
    await until_dispatched(store)
    await store.flush()
    await store.uploads.upload_all()
