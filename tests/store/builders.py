"""Small stores and messages for the tests of the write path."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import trio
import trio.testing

from tests.store.simdisk import SimDisk
from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory
from trimq.broker.store.disk.mapped_file_queue import MappedFileQueue
from trimq.broker.store.disk.memory import LogMemory
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.log.puts import Dispatchable, MessageBatch, MessageInner
from trimq.broker.store.running_flags import RunningFlags
from trimq.broker.store.stats import StoreStats
from trimq.broker.store.types import PutMessageResult
from trimq.protocol.batch import BatchColumns
from trimq.protocol.message import StoredMessage, decode_message
from trimq.protocol.record import MAGIC_BLANK, SIZE_MAGIC, pack_host
from trimq.protocol.record_batch import ListedMessages

LOG = "/store/commitlog"
HOST = pack_host("10.0.0.1", 10911)
HOST_V6 = pack_host("fe80::1", 10911)


class Dispatched(NamedTuple):
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    store_timestamp: int
    keys: tuple[str, ...]
    sys_flag: int


class RecordingDispatcher:
    """Records the calls it received, in order."""

    def __init__(self) -> None:
        self.seen: list[Dispatched | tuple[int, int]] = []

    def dispatch(self, put: Dispatchable, result: PutMessageResult) -> None:
        assert isinstance(put, MessageInner | MessageBatch), "no test of the write path puts other types"
        is_one = isinstance(put, MessageInner)
        offsets = [result.physical_offset] if is_one else list(result.offsets or [])
        tags_codes = [put.tags_code] if isinstance(put, MessageInner) else put.tags_codes
        keys = [put.keys] if isinstance(put, MessageInner) else list(put.keys)
        ends = [*offsets[1:], result.physical_offset + result.size]
        for at, (tags_code, own, phy, end) in enumerate(zip(tags_codes, keys, offsets, ends, strict=True)):
            place = (put.topic, put.queue_id, result.queue_offset + at, phy, end - phy)
            self.seen.append(Dispatched(*place, tags_code, result.store_timestamp, own, put.sys_flag))

    def rolled(self, blank_offset: int, next_offset: int) -> None:
        self.seen.append((blank_offset, next_offset))

    @property
    def records(self) -> list[Dispatched]:
        return [item for item in self.seen if isinstance(item, Dispatched)]


class Answers:
    """Collects results that are returned immediately and those that come later."""

    def __init__(self) -> None:
        self.results: list[PutMessageResult] = []
        self.changed = trio.Event()

    def later(self, result: PutMessageResult) -> None:
        self.results.append(result)
        self.changed.set()

    def take(self, result: PutMessageResult | None) -> PutMessageResult | None:
        if result is not None:
            self.results.append(result)
        return result


def message(body: bytes = b"body", topic: str = "TopicTest", queue_id: int = 0, **more: Any) -> MessageInner:
    fields: dict[str, Any] = {
        "topic": topic,
        "queue_id": queue_id,
        "body": body,
        "properties": b"",
        "born_timestamp": 1_700_000_000_000,
        "born_host": HOST,
        "store_host": HOST,
    }
    return MessageInner(**(fields | more))


def batch(
    bodies: Sequence[Any],
    topic: str = "TopicTest",
    queue_id: int = 0,
    properties: Sequence[bytes] = (),
    **more: Any,
) -> MessageBatch:
    fields: dict[str, Any] = {
        "topic": topic,
        "queue_id": queue_id,
        "messages": ListedMessages(BatchColumns([0] * len(bodies), bodies, properties or [b""] * len(bodies))),
        "tags_codes": [0] * len(bodies),
        "keys": [()] * len(bodies),
        "born_timestamp": 1_700_000_000_000,
        "born_host": HOST,
        "store_host": HOST,
    }
    return MessageBatch(**(fields | more))


def config(file_size: int = 16384, *, sync: bool = False, step: int = 4096, **more: Any) -> MessageStoreConfig:
    return MessageStoreConfig(
        store_path_root_dir="/store",
        mapped_file_size_commit_log=file_size,
        flush_disk_type=FlushDiskType.SYNC_FLUSH if sync else FlushDiskType.ASYNC_FLUSH,
        commit_log_reserve_step=step,
        **more,
    )


class Rig:
    """A write path on a disk, without queues and index."""

    def __init__(
        self,
        disk: Disk | None = None,
        settings: MessageStoreConfig | None = None,
        *,
        wall_ms: Callable[[], int] = lambda: 1_700_000_000_000,
        directory: str = LOG,
        in_memory_bytes: int = 1 << 30,
    ) -> None:
        self.disk = disk or SimDisk()
        self.config = settings or config()
        make_durable_directory(self.disk, directory)
        self.flags = RunningFlags()
        self.stats = StoreStats()
        self.dispatcher = RecordingDispatcher()
        self.answers = Answers()
        self.files = MappedFileQueue(self.disk, directory, self.config.mapped_file_size_commit_log)
        self.log = CommitLog(
            self.files, wall_ms=wall_ms, max_message_size=self.config.max_message_size, stats=self.stats
        )
        self.path = WritePath(
            self.log,
            self.dispatcher,
            self.flags,
            self.stats,
            self.config,
            memory=LogMemory(in_memory_bytes, 1 << 30, 0),
            delay_ms=(0, 1000, 5000),
            sync_place=SyncPlace.THREAD,
        )

    @property
    def sim(self) -> SimDisk:
        assert isinstance(self.disk, SimDisk)
        return self.disk

    def put(self, put: MessageInner | MessageBatch) -> PutMessageResult | None:
        return self.answers.take(self.path.put_message(put, self.answers.later))

    async def answered(self, count: int) -> list[PutMessageResult]:
        """Wait until ``count`` results have come, and return them."""
        while len(self.answers.results) < count:
            self.answers.changed = trio.Event()
            await self.answers.changed.wait()
        return self.answers.results

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.path.run)
            await trio.testing.wait_all_tasks_blocked()
            yield self
            await self.path.stop()


def records(files: MappedFileQueue) -> list[StoredMessage]:
    """All records of a log, found by scanning it as recovery does."""
    found = []
    for file in files.files:
        at = 0
        while at + 8 <= file.wrote:
            size, magic = SIZE_MAGIC.unpack_from(file.view, at)
            if magic == MAGIC_BLANK:
                assert at + size == file.size
                break
            stored = decode_message(file.view, at)
            assert stored.commit_log_offset == file.start + at
            found.append(stored)
            at += size
    return found
