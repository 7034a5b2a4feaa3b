"""The section of the tiered store (the MessageStoreConfig of RocketMQ's module tieredstore)."""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimq.protocol.bucket_access import ENDPOINT, PREFIX
from trimq.remoting.config.options import option

MIB = 1024 * 1024

PLUG_IN: Final = "org.apache.rocketmq.tieredstore.TieredMessageStore"
MEMORY_PROVIDER: Final = "org.apache.rocketmq.tieredstore.provider.MemoryFileSegment"
POSIX_PROVIDER: Final = "org.apache.rocketmq.tieredstore.provider.PosixFileSegment"
BUCKET_PROVIDER: Final = "trimq.Bucket"
METADATA_PROVIDER: Final = "org.apache.rocketmq.tieredstore.metadata.DefaultMetadataStore"


_BUCKET: Final = re.compile(r"(s3|gs|az|memory)://[A-Za-z0-9][A-Za-z0-9._-]*")


class TieredStorageLevel(enum.StrEnum):
    """Which reads the tier serves."""

    DISABLE = "DISABLE"
    NOT_IN_DISK = "NOT_IN_DISK"
    NOT_IN_MEM = "NOT_IN_MEM"
    FORCE = "FORCE"


def _one_of(*names: str) -> Callable[[str], str]:
    return lambda text: "" if text in names else "one of " + ", ".join(name or "nothing" for name in names)


def _rate_problem(text: str) -> str:
    try:
        good = 0 < float(text) <= 1
    except ValueError:
        good = False
    return "" if good else "a number above 0 and at most 1"


def _bucket_problem(text: str) -> str:
    good = not text or _BUCKET.fullmatch(text)
    return "" if good else "s3://BUCKET, gs://BUCKET or az://CONTAINER, without a user, a password or a path"


def _endpoint_problem(text: str) -> str:
    good = not text or ENDPOINT.fullmatch(text)
    return "" if good else "https://HOST:PORT, or http:// without encryption, without a user or a password"


def _prefix_problem(text: str) -> str:
    return "" if PREFIX.fullmatch(text) else "names of letters, digits and . = _ - with slashes between them"


@dataclass(frozen=True)
class TieredStoreConfig:
    """Whether and how messages are copied to a tier (RocketMQ's tieredstore.MessageStoreConfig)."""

    message_store_plug_in: str = option(
        "",
        f"With {PLUG_IN} messages are copied to another storage, the tier, from which "
        "consumers read those that are no longer on the disk of the broker.",
        check=_one_of("", PLUG_IN),
    )
    tiered_storage_level: TieredStorageLevel = option(
        TieredStorageLevel.NOT_IN_DISK,
        "Which reads the tier serves: none, messages that are no longer on the local disk, or not in memory, or all "
        "that were uploaded.",
    )
    tiered_store_file_path: str = option("", "Directory of the segments, for PosixFileSegment.")
    tiered_metadata_service_provider: str = option(
        METADATA_PROVIDER, "Where the metadata of the segments is kept.", check=_one_of(METADATA_PROVIDER)
    )
    tiered_backend_service_provider: str = option(
        MEMORY_PROVIDER,
        f"Where the segments are kept: {POSIX_PROVIDER} keeps them in files; {BUCKET_PROVIDER}, which only TriMQ has, "
        f"in a bucket of an object store; {MEMORY_PROVIDER} in memory, for tests only.",
        check=_one_of(MEMORY_PROVIDER, POSIX_PROVIDER, BUCKET_PROVIDER),
    )
    tiered_store_bucket: str = option(
        "",
        f"The bucket, for {BUCKET_PROVIDER}: s3://BUCKET, gs://BUCKET or az://CONTAINER. Keys and roles come from the "
        "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME ...) or from the "
        "machine, never from this file. memory://NAME is for tests only.",
        ours=True,
        check=_bucket_problem,
    )
    tiered_store_bucket_prefix: str = option(
        "", "What the names of all objects begin with, such as prod/rocketmq.", ours=True, check=_prefix_problem
    )
    tiered_store_bucket_endpoint: str = option(
        "",
        "URL of the object store; http:// is not encrypted.",
        unset="that of the environment (AWS_ENDPOINT_URL), or of the cloud that tieredStoreBucket names",
        ours=True,
        check=_endpoint_problem,
    )
    tiered_store_bucket_region: str = option(
        "", "Region of a bucket of S3.", unset="that of the environment (AWS_REGION), or us-east-1", ours=True
    )
    tiered_store_bucket_path_style: bool = option(
        True,
        "The bucket's name is in the path of a URL, which each S3 server understands; otherwise it is the first part "
        "of the host's name.",
        ours=True,
    )
    tiered_store_bucket_request_timeout: int = option(
        30_000,
        "A request to the object store that takes longer has failed. It has to suffice for 16 MiB.",
        unit="ms",
        minimum=100,
        ours=True,
    )
    tiered_store_bucket_grace_time: int = option(
        3_600_000,
        "Objects that were joined into others, or whose messages have expired, are deleted after this time: a query "
        "that began before still reads them.",
        unit="ms",
        minimum=1000,
        ours=True,
    )
    tiered_store_commit_log_max_size: int = option(
        1024 * MIB,
        "Largest segment of records. A record that is larger gets one of its own.",
        unit="bytes",
        minimum=4096,
    )
    tiered_store_consume_queue_max_size: int = option(
        100 * MIB, "Largest segment of queue units.", unit="bytes", minimum=20, maximum=2**31 - 1
    )
    tiered_store_index_file_max_hash_slot_num: int = option(
        5_000_000, "Hash slots of an index file of the tier.", minimum=1, maximum=2**27
    )
    tiered_store_index_file_max_index_num: int = option(
        20_000_000, "Entries of an index file of the tier.", minimum=2, maximum=2**25
    )
    tiered_store_delete_file_enable: bool = option(True, "Delete expired segments.", dynamic=True)
    tiered_store_delete_file_interval: int = option(
        3_600_000, "Time between two searches for expired segments.", unit="ms", minimum=100
    )
    tiered_store_file_reserved_time: int = option(
        72,
        "How long messages stay in the tier; a topic can have its own time in the metadata (reserveTime).",
        unit="hours",
        minimum=1,
        maximum=1_000_000,
        dynamic=True,
    )
    commit_log_rolling_interval: int = option(
        24,
        "A segment of records whose first message is older than this is followed by a new one.",
        unit="hours",
        minimum=1,
    )
    commit_log_rolling_minimum_size: int = option(
        16 * MIB, "Smaller segments are not ended by their age.", unit="bytes", minimum=0
    )
    tiered_store_group_commit: bool = option(
        True, "Upload messages in groups; otherwise each queue is uploaded as soon as it has a message."
    )
    tiered_store_group_commit_timeout: int = option(
        30_000,
        "A message waits at most this long for others before it is uploaded.",
        unit="ms",
        minimum=0,
        dynamic=True,
    )
    tiered_store_group_commit_count: int = option(
        4096, "Most messages in a group; a queue with as many is uploaded at once.", minimum=1, dynamic=True
    )
    tiered_store_group_commit_size: int = option(
        4 * MIB, "Most bytes in a group; a larger message is uploaded alone.", unit="bytes", minimum=1, dynamic=True
    )
    tiered_store_max_group_commit_count: int = option(
        10_000, "The same limit as tieredStoreGroupCommitCount, from RocketMQ; the lower one counts.", minimum=1
    )
    tiered_store_max_pending_limit: int = option(
        10_000, "A quarter of this is the most queues that are uploaded at the same time.", minimum=4
    )
    tiered_store_max_upload_bytes_per_second: int = option(
        2**40,
        "Most bytes of records that are uploaded in a second; the default is no limit in practice. With a limit the "
        "processor, disks and network stay free for sends at their peak: what waits stays on the local disk.",
        unit="bytes",
        minimum=MIB,
        dynamic=True,
        ours=True,
    )
    read_ahead_cache_enable: bool = option(
        True, "Keep messages that were read from the tier in memory for the next reads."
    )
    read_ahead_message_count_threshold: int = option(4096, "Most messages of one read from the tier.", minimum=1)
    read_ahead_message_size_threshold: int = option(
        16 * MIB, "Most bytes of one read from the tier.", unit="bytes", minimum=1
    )
    read_ahead_cache_expire_duration: int = option(
        15_000, "Messages leave this memory when they were not read for this time.", unit="ms", minimum=1
    )
    read_ahead_cache_size_threshold_rate: str = option(
        "0.3", "Most memory for them, as a share of the memory of the machine or the cgroup.", check=_rate_problem
    )
    read_ahead_cache_max_bytes: int = option(
        256 * MIB, "Most memory for them, whatever their share.", unit="bytes", minimum=MIB, ours=True
    )
    tiered_store_read_timeout: int = option(
        10_000,
        "A read from the tier that takes longer has failed: consumers get the local messages, or are asked to come "
        "again. What does not return holds a thread until it does.",
        unit="ms",
        minimum=100,
        ours=True,
    )
    tiered_store_crc_check_enable: bool = option(
        False, "Verify the checksum of each message that is read from the tier."
    )
    record_get_message_result: bool = option(False, "Log the result of each read from the tier.")
    tiered_store_protect_local: bool = option(
        True,
        "Files of the commit log with messages that are not uploaded yet are kept, unless the disk is so full that "
        "files are deleted forcibly (diskSpaceCleanForciblyRatio).",
        ours=True,
    )

    def problem(self) -> tuple[str, str] | None:
        """A key whose value conflicts with other keys, and the expected value; None if there is no conflict."""
        if (
            self.is_enabled
            and self.tiered_backend_service_provider == POSIX_PROVIDER
            and not self.tiered_store_file_path
        ):
            return "tieredStoreFilePath", "a directory, with PosixFileSegment"
        if self.is_enabled and self.uses_bucket and not self.tiered_store_bucket:
            return "tieredStoreBucket", f"the URL of a bucket, such as s3://BUCKET, with {BUCKET_PROVIDER}"
        return None

    @property
    def is_enabled(self) -> bool:
        """Whether the tiered store is switched on."""
        return bool(self.message_store_plug_in)

    @property
    def uses_bucket(self) -> bool:
        """Whether the tier is in a bucket of an object store."""
        return self.tiered_backend_service_provider == BUCKET_PROVIDER

    @property
    def group_commit_count(self) -> int:
        """Most messages in a group."""
        return min(self.tiered_store_group_commit_count, self.tiered_store_max_group_commit_count)

    @property
    def uploads_at_once(self) -> int:
        """Most queues that are uploaded at the same time."""
        return self.tiered_store_max_pending_limit // 4

    @property
    def cache_rate(self) -> float:
        """The share of the memory for messages that were read ahead."""
        return float(self.read_ahead_cache_size_threshold_rate)
