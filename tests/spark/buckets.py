"""Brokers' stores whose tier is in a bucket of the real object server; their logs keep everything, to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import trio

from tests.interop.harness.drivers import unique
from tests.interop.harness.object_server import ObjectServer
from tests.store.stores import settings, until_dispatched
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.obstore_store import connect
from trimq.broker.tiered_config import BUCKET_PROVIDER, PLUG_IN, TieredStoreConfig
from trimq.pipeline.store.options import StoreOptions, parse
from trimq.pipeline.store.plan import plan_of
from trimq.pipeline.store.table import batches, damages, files_of
from trimq.pipeline.store.walk import Damage
from trimq.remoting.runtime.clock import ManualClock

CLUSTER, BROKER, PREFIX = "C1", "broker-a", "prod/mq"


@dataclass
class Place:
    """A bucket, and the directory of the store of its broker."""

    server: ObjectServer
    root: Path
    bucket: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/{PREFIX}"

    @property
    def options(self) -> dict[str, str]:
        """The options with which a table reads it."""
        return {"cluster": CLUSTER, "endpoint": self.server.endpoint}

    @property
    def store(self) -> Path:
        return self.root / BROKER

    @property
    def objects(self) -> Path:
        """The directory that has the broker's objects as files."""
        return self.server.files(self.bucket) / PREFIX / CLUSTER / BROKER

    def requests(self) -> list[tuple[str, str]]:
        """Operations and objects of all requests to brokers' objects up to now, in whatever bucket."""
        last = unique("last")
        store = connect(
            f"s3://{self.bucket}", endpoint=self.server.endpoint, region="", path_style=True, timeout_ms=9000
        )
        try:
            store.read(last)
        except FileNotFoundError:
            pass
        return [(call, name) for call, name in self.server.requests(last) if name.startswith(f"{PREFIX}/")]

    def gets(self) -> list[str]:
        """The names of objects below the broker's prefix that were read, once for each request."""
        begin = f"{PREFIX}/{CLUSTER}/{BROKER}/"
        return [name.removeprefix(begin) for call, name in self.requests() if call == "GetObject"]


def new_place(server: ObjectServer, root: Path) -> Place:
    return Place(server, root, server.create_bucket())


class QuietStore(BucketMessageStore):
    """Uploads and joins only what a test says."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.upkeep.run = trio.sleep_forever  # type: ignore[method-assign]


@asynccontextmanager
async def opened(place: Place, broker: str = BROKER, **options: Any) -> AsyncIterator[BucketMessageStore]:
    local = {name: options.pop(name) for name in list(options) if not name.startswith("tiered_")}
    config = TieredStoreConfig(
        message_store_plug_in=PLUG_IN,
        tiered_backend_service_provider=BUCKET_PROVIDER,
        tiered_store_bucket=f"s3://{place.bucket}",
        tiered_store_bucket_prefix=PREFIX,
        tiered_store_bucket_endpoint=place.server.endpoint,
        **options,
    )
    objects = connect(
        config.tiered_store_bucket, endpoint=place.server.endpoint, region="", path_style=True, timeout_ms=30_000
    )
    store = QuietStore(
        settings(str(place.root / broker), message_index_enable=False, **local),
        config,
        objects,
        cluster=CLUSTER,
        broker_name=broker,
        random=Random(7),
        disk=RealDisk(),
        clock=ManualClock(),
        sync_place=SyncPlace.THREAD,
    )
    async with store.opened():
        with trio.fail_after(30):
            await store.is_loaded.wait()
        store.uploads.stop()
        yield store


async def upload(store: BucketMessageStore) -> None:
    """Upload all messages, and let the root name them."""
    await until_dispatched(store)
    await store.flush()
    await store.uploads.upload_all()


async def join(store: BucketMessageStore) -> int:
    """Join what there is to join, and delete the old objects without a grace. Returns the number of joins."""
    joins = 0
    while gone := await store.joiner.join_next(store.clock.wall_ms()):
        await store.uploads.save()
        await store.bucket.delete([*gone, *store.manifest.garbage_pages()])
        joins += 1
    return joins


def run(
    place: Place, script: Callable[[BucketMessageStore], Awaitable[Any]], broker: str = BROKER, **options: Any
) -> None:
    """Do something with the store."""

    async def main() -> None:
        async with opened(place, broker, **options) as store:
            await script(store)

    trio.run(main)


def parsed(place: Place, **options: Any) -> StoreOptions:
    given = {"path": place.url, **place.options, **options}
    return parse({name: str(value) for name, value in given.items()})


def rows(place: Place, **options: Any) -> list[dict[str, Any]]:
    """The rows of the bucket, sorted."""
    given = parsed(place, **options)
    found: list[dict[str, Any]] = []
    for part in plan_of(given).parts:
        for batch in batches(files_of(given), part, given):
            found += batch.to_pylist()
    return sorted(found, key=place_of)


def damaged(place: Place, **options: Any) -> list[Damage]:
    given = parsed(place, damage=True, **options)
    return [item for part in plan_of(given).parts for item in damages(files_of(given), part, given)]


def place_of(row: dict[str, Any]) -> tuple[str, int, int]:
    """Sorts rows by queue and offset."""
    return row["topic"], row["queueId"], row["queueOffset"]
