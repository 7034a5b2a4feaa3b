"""Where queues begin of which the local store has no message: the file tierRestored.json.

Those of a restored store, and those whose messages only the bucket has: while it is away, a new message would get the
offset 0 otherwise, and the history of the queue would be taken for that of a topic that was deleted.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog
import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole, write_durably
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.bucket.bucket_queues import BucketQueues

_log: Final = structlog.get_logger(__name__)

RESTORED: Final = "config/tierRestored.json"
"""Holds until each of the queues has a message, or its topic is deleted."""
_SLICE: Final = 500
Starts = Mapping[tuple[str, int], int]
"""Topic and queue id to the offset of the next message."""


class _File(msgspec.Struct, rename="camel"):
    """Topic to queue id to the offset of its next message; see Origin, -1 if that is not known."""

    queues: dict[str, dict[int, int]]
    end: int = -1
    log_start: int = -1


class Origin(NamedTuple):
    """What a store was restored from: log offsets behind all that the bucket had, and where its own log began."""

    end: int
    log_start: int


class QueueStarts:
    """See above. ``origin``: what the store was restored from. Belongs to the event loop."""

    def __init__(self, disk: Disk, root: str, starts: Starts, origin: Origin | None = None) -> None:
        self._disk = disk
        self._root = root
        self.starts = dict(starts)
        self.origin = origin
        self._forgotten: list[Callable[[str], bool]] | None = None
        """What was forgotten while ``note`` looks."""
        self._lock = trio.Lock()

    async def note(self, find: Callable[[], Awaitable[Starts]]) -> None:
        """Let the queues that ``find`` returns begin there, durably, or where they begin already if that is greater.

        If it cannot be written, the next call tries again.
        """
        async with self._lock:
            forgotten: list[Callable[[str], bool]] = []
            self._forgotten = forgotten
            try:
                looked = await find()
            finally:
                self._forgotten = None
            found = {
                key: max(start, self.starts.get(key, 0))
                for key, start in looked.items()
                if not any(is_gone(key[0]) for is_gone in forgotten)
            }
            starts = {**self.starts, **found}
            if starts == self.starts:
                return
            before, self.starts = self.starts, starts
            try:
                await self._write()
            except OSError as error:
                if self.starts is starts:
                    self.starts = before
                _log.warning("queue_starts_not_noted", queues=len(found), error=str(error))

    async def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Remove topics that were deleted, durably: otherwise the next start would create their queues again.

        If it cannot be written, they are deleted all the same, as with DeletedTopics.
        """
        if self._forgotten is not None:
            self._forgotten.append(is_gone)
        gone = {topic for topic, _ in self.starts if is_gone(topic)}
        if not gone:
            return
        self.starts = {key: start for key, start in self.starts.items() if key[0] not in gone}
        with trio.CancelScope(shield=True):
            async with self._lock:
                try:
                    await self._write()
                except OSError as error:
                    _log.warning("deleted_topic_not_noted", topics=sorted(gone), error=str(error))

    async def _write(self) -> None:
        data = encode_starts(self.starts, self.origin)

        def write() -> None:
            make_durable_directory(self._disk, f"{self._root}/config")
            write_durably(self._disk, f"{self._root}/{RESTORED}", data)

        await self._disk.run(write)


async def idle_queues(queues: BucketQueues, log_begin: int) -> dict[tuple[str, int], int]:
    """Where the queues end whose messages in the bucket all stood before the begin of the local log."""
    found = {}
    for number, queue in enumerate(queues.all()):
        if number % _SLICE == _SLICE - 1:
            await trio.lowlevel.checkpoint()
        # Of one whose messages have expired only the end is known.
        if queue.commit_offset and queue.last_physical < log_begin and queue.topic not in queues.gone:
            found[queue.topic, queue.queue_id] = queue.commit_offset
    return found


def read_restored(disk: Disk, root: str) -> QueueStarts:
    """What the file says. Blocks.

    Without starts and origin if there is none; without origin if the store was not restored, or by an older version.
    Raises OSError, StoreLoadError.
    """
    data = read_whole(disk, f"{root}/{RESTORED}")
    if data is None:
        return QueueStarts(disk, root, {})
    try:
        found = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise StoreLoadError(
            f"{root}/{RESTORED} is damaged: restore the store from the bucket again; delete the file "
            "if the store was not restored"
        ) from error
    starts = {(topic, queue_id): start for topic, queues in found.queues.items() for queue_id, start in queues.items()}
    return QueueStarts(disk, root, starts, None if found.end < 0 else Origin(found.end, found.log_start))


def encode_starts(starts: Starts, origin: Origin | None) -> bytes:
    """The contents of the file."""
    queues: dict[str, dict[int, int]] = {}
    for (topic, queue_id), start in starts.items():
        queues.setdefault(topic, {})[queue_id] = start
    return msgspec.json.encode(_File(queues, *(origin or ())))
