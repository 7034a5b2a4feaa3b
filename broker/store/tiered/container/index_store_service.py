"""The key index of the tier. Source: RocketMQ's IndexStoreService.

Keys go into a local file (UNSEALED). A full one (SEALED) is compacted and uploaded, and then deleted here; an orderly
stop uploads the last one too. A query looks into all files that can have messages of the time: unlike RocketMQ's, also
into those that were created before it, because messages may be uploaded long after they were stored.
"""

from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably, make_durable_directory
from trimq.broker.store.tiered.container.flat_append_file import FlatAppendFile
from trimq.broker.store.tiered.container.index_store_file import Keyed, LocalIndexFile, SlotCache, UploadedIndexFile
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.tiered_config import TieredStoreConfig
from trimq.protocol.tiered_index_layout import HEADER_SIZE, IndexItem, tiered_key_hash

_log: Final = structlog.get_logger(__name__)

DIRECTORY: Final = "tiered_index_file"
COMPACTING: Final = "compacting"
_INTERVAL: Final = 10.0
_SECOND_MS: Final = 1000
_AT_ONCE: Final = 128
"""So many keys are put between two turns of the loop."""
_HOUR_MS: Final = 3_600_000


class IndexStoreService:
    """``load`` comes first. One task puts keys at a time."""

    def __init__(
        self,
        disk: Disk,
        root: str,
        config: TieredStoreConfig,
        uploads: FlatAppendFile,
        metadata: DefaultMetadataStore,
        wall_ms: Callable[[], int],
    ) -> None:
        """``root`` is the store's directory; ``uploads`` the stream of uploaded files."""
        self._disk = disk
        self.directory = f"{root}/{DIRECTORY}"
        self._config = config
        self._uploads = uploads
        self._metadata = metadata
        self._wall_ms = wall_ms
        self._local: dict[int, LocalIndexFile] = {}
        """By time of creation, in order; the last one takes keys."""
        self._uploaded: list[UploadedIndexFile] = []
        self._cache = SlotCache()
        self._last_stamp = 0
        """The newest time of creation that a file has, or has had."""
        self._put_lock = trio.Lock()
        self._upload_lock = trio.Lock()
        self._wake = trio.Event()
        self._failures = 0

    @property
    def _shape(self) -> tuple[int, int]:
        config = self._config
        return config.tiered_store_index_file_max_hash_slot_num, config.tiered_store_index_file_max_index_num

    # -- start

    async def load(self) -> None:
        """Open what is there. Raises OSError."""
        await self._uploads.recover()
        self._uploaded = [UploadedIndexFile(s, self._cache) for s in self._uploads.segments if s.commit_position]
        self._last_stamp = max((file.begin_ms for file in self._uploaded), default=0)
        await self._disk.run(make_durable_directory, self._disk, self.directory)
        compacting = f"{self.directory}/{COMPACTING}"
        for name in await self._disk.run(self._disk.list, compacting):
            await self._disk.run(self._disk.delete, f"{compacting}/{name}")
        known = {file.begin_ms for file in self._uploaded}
        names = [name for name in await self._disk.run(self._disk.list, self.directory) if name.isdigit()]
        for name in sorted(names, key=int):
            path = f"{self.directory}/{name}"
            if int(name) in known:
                await self._disk.run(delete_durably, self._disk, path)
                continue
            await self._open(path)

    async def _open(self, path: str) -> None:
        stamp = int(path.rpartition("/")[2])
        self._last_stamp = max(self._last_stamp, stamp)
        try:
            self._local[stamp] = await self._disk.run(LocalIndexFile.open, self._disk, path, *self._shape)
        except ValueError as error:
            info = await self._disk.run(self._disk.stat, path)
            if info is not None and info.size < HEADER_SIZE:
                # A power cut while it was created.
                await self._disk.run(delete_durably, self._disk, path)
            else:
                _log.error("tiered_index_file_not_opened", path=path, error=str(error))

    # -- keys

    async def put(
        self, topic: str, topic_id: int, queue_id: int, messages: Sequence[tuple[tuple[str, ...], int, int, int]]
    ) -> None:
        """Put the keys of messages: (keys, stream position, size, store time in ms) each. Raises OSError."""
        pending: list[Keyed] = []
        async with self._put_lock:
            for keys, offset, size, store_ms in messages:
                hashes = dict.fromkeys(tiered_key_hash(topic, key) for key in keys)
                pending += [(key, topic_id, queue_id, offset, size, store_ms) for key in hashes if key is not None]
                if len(pending) >= _AT_ONCE:
                    await self._put(pending)
                    pending = []
            if pending:
                await self._put(pending)

    async def _put(self, keys: Sequence[Keyed]) -> None:
        most = max(1, self._shape[1] - 2)
        for at in range(0, len(keys), most):
            part = keys[at : at + most]
            file = await self._file_for(len(part))
            if file.makes_room(len(part)):
                await self._disk.run(file.prepare, len(part))
            file.put(part)
        await trio.lowlevel.checkpoint()

    async def _file_for(self, count: int) -> LocalIndexFile:
        last = next(reversed(self._local.values()), None)
        if last is not None and not last.is_full(count):
            return last
        if last is not None:
            last.is_sealed = True
            self._wake.set()
        stamp = self._last_stamp = max(self._wall_ms(), self._last_stamp + 1)
        path = f"{self.directory}/{stamp}"
        file = await self._disk.run(LocalIndexFile.create, self._disk, path, *self._shape)
        self._local[stamp] = file
        return file

    async def sync(self) -> None:
        """Make the keys put so far durable. Raises OSError."""
        for file in list(self._local.values()):
            await self._disk.run(file.sync)

    # -- queries

    async def query(self, topic: str, topic_id: int, key: str, begin: int, end: int) -> list[IndexItem]:
        """The entries for a key with store times in [begin, end] ms, to a second; newest file first, each message once.

        A file that cannot be read is left out. The key is to be compared with the record's: hashes collide.
        """
        its = tiered_key_hash(topic, key)
        if its is None:
            return []
        items: list[IndexItem] = []
        for file in reversed(list(self._local.values())):
            items += file.query(its)
        for uploaded in reversed(self._uploaded):
            if uploaded.end_ms + _SECOND_MS < begin:
                continue
            try:
                items += await uploaded.query(its)
            except (OSError, ValueError) as error:
                _log.error("tiered_index_file_not_read", file=str(uploaded.segment), error=str(error))
        chosen = {
            (item.queue_id, item.offset): item
            for item in items
            if item.topic_id == topic_id and begin - _SECOND_MS <= item.store_ms <= end + _SECOND_MS
        }
        return list(chosen.values())

    # -- upload

    async def run(self) -> None:
        """Upload full files, and delete expired ones."""
        while True:
            self._wake = trio.Event()
            await self.upload_full()
            with trio.move_on_after(_INTERVAL * min(1 + self._failures, 30)):
                await self._wake.wait()

    async def upload_full(self) -> None:
        """Compact and upload the files that take no more keys."""
        while len(self._local) > 1 and await self._upload(next(iter(self._local.values()))):
            pass

    async def upload_all(self) -> None:
        """Compact and upload all files, also the one that takes keys."""
        async with self._put_lock:
            while self._local and await self._upload(next(iter(self._local.values()))):
                pass

    async def _upload(self, file: LocalIndexFile) -> bool:
        async with self._upload_lock:
            try:
                await self._compact_and_upload(file)
            except OSError as error:
                self._failures += 1
                if self._failures == 1:
                    _log.error("tiered_index_upload_failed", path=file.path, error=str(error))
                return False
            self._failures = 0
            return True

    async def _compact_and_upload(self, file: LocalIndexFile) -> None:
        file.is_sealed = True
        disk, compacting = self._disk, f"{self.directory}/{COMPACTING}"
        path = f"{compacting}/{file.begin_ms}"
        if file.count:
            await disk.run(make_durable_directory, disk, compacting)
            await disk.run(file.compact, path)
            fd = disk.open(path, writable=False)
            try:
                size = disk.size(fd)
                mapping = disk.map(fd, size)
                try:
                    await self._uploads.roll()
                    await self._uploads.append((mapping.view,), size, file.begin_ms, file.end_ms)
                finally:
                    mapping.close()
            finally:
                disk.close(fd)
            await self._metadata.persist()
            self._uploaded.append(UploadedIndexFile(self._uploads.segments[-1], self._cache))
            await disk.run(disk.delete, path)
        del self._local[file.begin_ms]
        file.close()
        await disk.run(delete_durably, disk, file.path)

    async def expire(self) -> int:
        """Delete uploaded files whose messages are all expired. Returns their number. Raises OSError."""
        before = self._wall_ms() - self._config.tiered_store_file_reserved_time * _HOUR_MS
        deleted = await self._uploads.destroy_expired(before)
        self._uploaded = [file for file in self._uploaded if file.segment.base_offset not in deleted]
        return len(deleted)

    def close(self) -> None:
        """Close the local files."""
        for file in self._local.values():
            file.close()
        self._local.clear()
