"""The history of a broker in a bucket, for commands that no broker takes part in: which one it is, and its manifest.

A broker may have it open meanwhile: nothing here takes its ownership.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from trimq.broker.config import BrokerConfig, MessageStoreConfig, load_broker
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.object_store import ObjectStore
from trimq.broker.store.tiered.bucket.open_object_store import open_object_store
from trimq.broker.tiered_config import BUCKET_PROVIDER, TieredStoreConfig
from trimq.broker.tools.offline_store import NotUsableError
from trimq.protocol.bucket_manifest import Root
from trimq.protocol.bucket_names import broker_prefix
from trimq.remoting.config.properties import ConfigError


class BucketOptions(NamedTuple):
    """What the command line says of a bucket; None: the configuration says it."""

    bucket: str | None = None
    prefix: str | None = None
    endpoint: str | None = None
    region: str | None = None
    cluster: str | None = None
    broker: str | None = None


KEYS: Final = BucketOptions(
    "tieredStoreBucket",
    "tieredStoreBucketPrefix",
    "tieredStoreBucketEndpoint",
    "tieredStoreBucketRegion",
    "brokerClusterName",
    "brokerName",
)
"""The keys of the configuration that stand for the options."""


@dataclass(frozen=True)
class OfflineBucket:
    """See above. ``local``: the configuration of a store on the local disk, for a restore."""

    tier: TieredStoreConfig
    local: MessageStoreConfig
    cluster: str
    broker: str
    bucket: Bucket
    disk: Disk

    @classmethod
    def of(
        cls,
        tier: TieredStoreConfig,
        local: MessageStoreConfig,
        cluster: str,
        broker: str,
        objects: ObjectStore,
        disk: Disk,
    ) -> "OfflineBucket":
        """The part of a bucket that belongs to a broker."""
        prefix = broker_prefix(tier.tiered_store_bucket_prefix, cluster, broker)
        return cls(tier, local, cluster, broker, Bucket(objects, disk, prefix), disk)

    @property
    def url(self) -> str:
        """Where the objects of the broker are."""
        return f"{self.tier.tiered_store_bucket}/{self.bucket.prefix}"

    async def load(self) -> tuple[Manifest, Root]:
        """The manifest as it is now. Raises NotUsableError if there is none, OSError, BucketFormatError."""
        manifest = Manifest(self.bucket, self.cluster, self.broker)
        await manifest.load()
        if manifest.root is None:
            raise self.no_history()
        return manifest, manifest.root

    def no_history(self) -> NotUsableError:
        """The error for a bucket in which no broker of this name has written."""
        return NotUsableError(
            f"there is no history of broker {self.broker} in cluster {self.cluster}: {self.url} is empty. Pass the "
            "broker's configuration with -c, or --prefix, --cluster and --broker"
        )


def find_bucket(config_file: str | None, options: BucketOptions, root: Path | None = None) -> OfflineBucket | None:
    """The bucket that options or a configuration name, variables of the environment too; None if none does.

    ``root``: the directory of the store. Raises NotUsableError.
    """
    flags = {
        key: (value, f"--{option}")
        for option, key, value in zip(BucketOptions._fields, KEYS, options, strict=True)
        if key is not None and value is not None
    }
    if options.bucket is not None:
        flags["tieredBackendServiceProvider"] = BUCKET_PROVIDER, "--bucket"
    if root is not None:
        flags["storePathRootDir"] = str(root.absolute()), "DIRECTORY"
    try:
        found = load_broker(config_file, flags, os.environ)
    except ConfigError as error:
        raise NotUsableError(f"the configuration cannot be used: {error}") from error
    tier, broker = found.section(TieredStoreConfig), found.section(BrokerConfig)
    if not tier.uses_bucket or not tier.tiered_store_bucket:
        return None
    try:
        objects = open_object_store(tier)
    except StoreLoadError as error:
        raise NotUsableError(str(error)) from error
    disk = RealDisk().with_own_threads()
    return OfflineBucket.of(
        tier, found.section(MessageStoreConfig), broker.broker_cluster_name, broker.broker_name, objects, disk
    )
