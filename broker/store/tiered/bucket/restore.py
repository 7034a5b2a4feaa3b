"""Makes an empty directory the store of a broker whose history is in a bucket.

Topics, groups and consumer offsets come from the last upload. The log begins at the first file boundary above all that
was uploaded, so no message of before gets a second log offset. A queue goes on behind its last uploaded message, and
behind the offset of each consumer group: what lies between was lost, and its offsets are not given to other messages.
The history itself stays in the bucket.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import structlog

from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, write_durably
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.queue_starts import RESTORED, Origin, encode_starts
from trimq.protocol import lenient_json
from trimq.protocol.bucket_object import BucketFormatError
from trimq.protocol.bucket_state import PRIVATE_FILES, decode_state
from trimq.protocol.file_names import offset_name

_log: Final = structlog.get_logger(__name__)

_OFFSETS: Final = "consumerOffset.json"


class RestoredQueue(NamedTuple):
    """A queue: where its messages in the bucket begin and end, and the offset of its next message."""

    topic: str
    queue_id: int
    begin: int
    end: int
    start: int

    @property
    def missing(self) -> int:
        """Messages that consumers had already got, and that are not in the bucket."""
        return self.start - self.end


class Restored(NamedTuple):
    """What was restored: where the log begins, the queues, the names of the state files."""

    log_start: int
    queues: list[RestoredQueue]
    files: list[str]


def is_empty(disk: Disk, config: MessageStoreConfig) -> bool:
    """Whether a directory holds neither a log nor queues. Blocks.

    A file of the log without a length is no log: a power cut has left it, and a start would delete it.
    """
    if disk.list(f"{config.root}/consumequeue"):
        return False
    log = str(config.commit_log_path)
    return len(_lengthless(disk, log)) == len(disk.list(log))


def _lengthless(disk: Disk, directory: str) -> list[str]:
    """The files of a directory that have no length."""
    found = []
    for name in disk.list(directory):
        info = disk.stat(f"{directory}/{name}")
        if info is not None and not info.is_directory and not info.size:
            found.append(f"{directory}/{name}")
    return found


async def restore(disk: Disk, config: MessageStoreConfig, bucket: Bucket, manifest: Manifest) -> Restored:
    """Make the directory of ``config``, which ``is_empty``, the store of the manifest's broker.

    A restore that was interrupted is repeated as a whole: the file of the log comes last. Raises OSError,
    BucketFormatError.
    """
    state = await read_state(bucket, manifest)
    queues = list(_queues(manifest, state))
    size = config.mapped_file_size_commit_log
    log_start = -(-manifest.end // size) * size
    starts = {(queue.topic, queue.queue_id): queue.start for queue in queues}

    def write() -> None:
        root, log = str(config.root), str(config.commit_log_path)
        make_durable_directory(disk, f"{root}/config")
        make_durable_directory(disk, log)
        for name, data in state.items():
            write_durably(disk, f"{root}/config/{name}", data, private=name in PRIVATE_FILES)
        write_durably(disk, f"{root}/{RESTORED}", encode_starts(starts, Origin(manifest.end, log_start)))
        for path in _lengthless(disk, log):
            disk.delete(path)
        fd = disk.create(f"{log}/{offset_name(log_start)}", size)
        try:
            disk.data_sync(fd)  # its length: without it the next start would delete the file, and begin the log at 0
        finally:
            disk.close(fd)
        disk.sync_directory(log)

    await disk.run(write)
    return Restored(log_start, queues, list(state))


async def read_state(bucket: Bucket, manifest: Manifest) -> dict[str, bytes]:
    """The state files as of the last upload that has them. Raises OSError, BucketFormatError."""
    for entry in reversed(manifest.chain):
        directory = await manifest.read_directory(entry.object)
        if directory.state_length:
            data = await bucket.read_range(entry.object.name, directory.state_position, directory.state_length)
            return decode_state(directory.checked_state(bytes(data)))
    if manifest.root is None or not manifest.root.state:
        return {}
    return decode_state((await bucket.read(manifest.root.state)).data)


def _queues(manifest: Manifest, state: Mapping[str, bytes]) -> Iterator[RestoredQueue]:
    ranges: dict[tuple[str, int], tuple[int, int]] = {}
    for entry in manifest.entries:
        for stretch in entry.stretches:
            key = stretch.topic, stretch.queue_id
            begin, end = ranges.get(key, (stretch.offset, stretch.end))
            ranges[key] = min(begin, stretch.offset), max(end, stretch.end)
    consumed = _consumed(state.get(_OFFSETS, b"{}"))
    for key in sorted({*ranges, *consumed}):
        begin, end = ranges.get(key, (0, 0))
        yield RestoredQueue(*key, begin, end, max(end, consumed.get(key, 0)))


def _consumed(data: bytes) -> dict[tuple[str, int], int]:
    """The greatest offset of a group by topic and queue. Raises BucketFormatError."""
    found: dict[tuple[str, int], int] = {}
    try:
        table: Any = lenient_json.loads(data).get("offsetTable", {})
        for name, offsets in table.items():
            topic = name.partition("@")[0]
            for queue_id, offset in offsets.items():
                key = topic, int(queue_id)
                found[key] = max(found.get(key, 0), int(offset))
    except (ValueError, AttributeError, TypeError) as error:
        raise BucketFormatError(f"{_OFFSETS} in the bucket is damaged") from error
    return found
