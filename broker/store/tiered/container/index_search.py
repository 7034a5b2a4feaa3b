"""One query of the tier's key index: over the files that can hold messages of its time, the newest first."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.index.index_file import Cold
from trimq.broker.store.tiered.container.index_segment import IndexSegment
from trimq.broker.store.tiered.container.index_store_file import IndexStoreFile
from trimq.protocol.tiered_index_batch import KeyItems
from trimq.protocol.tiered_index_layout import IndexItem

_log = structlog.get_logger(__name__)

_AT_ONCE: Final = 4
"""Files that are read at the same time."""
_SPARE: Final = 64
"""Items of other topics, or more than one of a message, may stand before those that count."""


class IndexSearch:
    """What is searched, and what was found."""

    def __init__(self, key_hash: int, begin_ms: int, end_ms: int, max_count: int, topic_id: int | None) -> None:
        self._key_hash = key_hash
        self._begin_ms, self._end_ms = begin_ms, end_ms
        self._max_count = max_count
        self._topic_id = topic_id
        self._found: dict[tuple[int, int, int], IndexItem] = {}

    @property
    def is_done(self) -> bool:
        """Whether enough was found."""
        return len(self._found) >= self._max_count

    def _add(self, items: Iterable[IndexItem]) -> None:
        for item in items:
            if self._topic_id is None or item.topic_id == self._topic_id:
                self._found.setdefault((item.topic_id, item.queue_id, item.offset), item)

    def add_waiting(self, pending: Sequence[KeyItems]) -> None:
        """Search keys that are in no file yet."""
        for waiting in reversed(pending):
            items, times = waiting.items, waiting.times
            same = (items["hash"] == self._key_hash) & (times >= self._begin_ms) & (times <= self._end_ms)
            self._add(
                IndexItem(
                    self._key_hash, int(item["topic"]), int(item["queue"]), int(item["offset"]), int(item["size"]), ms
                )
                for item, ms in zip(items[same][::-1], times[same][::-1].tolist(), strict=True)
            )

    async def run(
        self, disk: Disk, local: Mapping[int, IndexStoreFile], remote: Mapping[int, IndexSegment]
    ) -> list[IndexItem]:
        """Search the files, by stamp. Raises OSError if some cannot be read and nothing was found in the others."""
        error: OSError | None = None
        stamps = self._stamps(local, remote)
        while stamps and not self.is_done:
            part, stamps = stamps[:_AT_ONCE], stamps[_AT_ONCE:]
            for result in await self._select(disk, local, remote, part):
                if isinstance(result, OSError):
                    error = result
                else:
                    self._add(result)
        if error is not None:
            if not self._found:
                raise error
            _log.warning("tiered_index_partly_searched", error=str(error))
        return list(self._found.values())[: self._max_count]

    def _stamps(self, local: Mapping[int, IndexStoreFile], remote: Mapping[int, IndexSegment]) -> list[int]:
        wanted: list[int] = []
        following: int | None = None
        for stamp in sorted({*local, *remote}, reverse=True):
            file, segment = local.get(stamp), remote.get(stamp)
            if file is not None:
                searched = file.may_hold(self._begin_ms, self._end_ms)
            else:
                # The end time in the metadata can be too low, if RocketMQ's broker was restarted meanwhile. But when
                # the next file was created, its messages were all stored.
                searched = segment is not None and (
                    (segment.first_ms is None or segment.first_ms <= self._end_ms)
                    and (following is None or max(following, segment.end_ms) >= self._begin_ms)
                )
            if searched:
                wanted.append(stamp)
            following = stamp
        return wanted

    async def _select(
        self,
        disk: Disk,
        local: Mapping[int, IndexStoreFile],
        remote: Mapping[int, IndexSegment],
        stamps: list[int],
    ) -> list[list[IndexItem] | OSError]:
        results: dict[int, list[IndexItem] | OSError] = {}

        async def search(stamp: int) -> None:
            try:
                results[stamp] = await self._select_one(disk, local.get(stamp), remote.get(stamp))
            except OSError as error:
                # Perhaps it was deleted meanwhile: then there is nothing to be found.
                results[stamp] = error if stamp in local or stamp in remote else []

        async with trio.open_nursery() as nursery:
            for stamp in stamps:
                nursery.start_soon(search, stamp)
        return [results[stamp] for stamp in stamps]

    async def _select_one(
        self, disk: Disk, file: IndexStoreFile | None, segment: IndexSegment | None
    ) -> list[IndexItem]:
        limit = self._max_count + _SPARE
        if file is None:
            if segment is None:
                return []
            return await segment.select(self._key_hash, self._begin_ms, self._end_ms, limit)
        try:
            return file.select(self._key_hash, self._begin_ms, self._end_ms, limit, wait=False)
        except Cold:
            file.hold()
            try:
                return await disk.run(file.select_cold, self._key_hash, self._begin_ms, self._end_ms, limit)
            finally:
                file.release()
