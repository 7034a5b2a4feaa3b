"""The bucket as the tier uses it: names below the broker's prefix, calls in threads, requests counted."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.object_store import ChangedError, ObjectInfo, ObjectStore, ObjectWriter, Read
from trimq.broker.store.tiered.driver.provider_stats import CallStats

_T = TypeVar("_T")

PUT: Final = "put"
GET: Final = "get"
LIST: Final = "list"
DELETE: Final = "delete"

_AT_ONCE: Final = 1000
"""Names in one request of a listing, and of a deletion in S3."""
_ANSWERS: Final = (FileExistsError, FileNotFoundError, ChangedError)
"""Errors with which the object store has done what was asked of it."""


class Bucket:
    """See above. All methods raise OSError as object_store.py says, and none retries."""

    def __init__(self, store: ObjectStore, disk: Disk, prefix: str) -> None:
        """``disk``: has threads of its own. ``prefix``: see broker_prefix."""
        self._store = store
        self._disk = disk
        self.prefix = prefix
        self.requests: Counter[str] = Counter()
        """Requests by kind: put (each part is one), get, list, delete."""
        self.calls = {kind: CallStats() for kind in (PUT, GET, LIST, DELETE)}
        """Durations and sizes of calls by kind, for metrics."""

    async def call(self, kind: str, requests: int, fn: Callable[..., _T], *arguments: Any) -> _T:
        """Call a method of the object store, which sends so many requests.

        A request that goes on in its thread must not be followed by one that it could overtake: so a call that is
        cancelled has not begun, or ends with its request (see Disk.run).
        """
        stats = self.calls[kind]
        began = time.perf_counter()
        try:
            result = await self._disk.run(fn, *arguments)
        except OSError as error:
            self.requests[kind] += requests
            took = stats.succeeded if isinstance(error, _ANSWERS) else stats.failed
            took.add(time.perf_counter() - began)
            # Without the frames of the thread: one of them refers to the error, so it would keep what these frames
            # have, 16 MiB of records, until a garbage collection.
            error.__context__ = None
            raise error.with_traceback(None)  # noqa: B904 - it is the same error
        self.requests[kind] += requests
        stats.succeeded.add(time.perf_counter() - began)
        return result

    async def run(self, fn: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that takes long in one of the bucket's threads. It makes no request."""
        return await self._disk.run(fn, *arguments)

    async def create(self, name: str, data: Sequence[Any]) -> None:
        """See ObjectStore."""
        await self.call(PUT, 1, self._store.create, self.prefix + name, data)
        self.calls[PUT].sizes.add(sum(memoryview(piece).nbytes for piece in data))

    async def replace(self, name: str, data: bytes, version: str | None) -> str:
        """See ObjectStore."""
        new = await self.call(PUT, 1, self._store.replace, self.prefix + name, data, version)
        self.calls[PUT].sizes.add(len(data))
        return new

    def writer(self, name: str, part_size: int) -> "BucketWriter":
        """See ObjectStore."""
        return BucketWriter(self, self._store.writer(self.prefix + name, part_size), part_size)

    async def read(self, name: str) -> Read:
        """See ObjectStore."""
        found = await self.call(GET, 1, self._store.read, self.prefix + name)
        self.calls[GET].sizes.add(len(found.data))
        return found

    async def read_range(self, name: str, begin: int, length: int) -> Any:
        """See ObjectStore."""
        found = await self.call(GET, 1, self._store.read_range, self.prefix + name, begin, length)
        self.calls[GET].sizes.add(memoryview(found).nbytes)
        return found

    async def list(self, prefix: str, after: str = "", count: int = _AT_ONCE) -> list[ObjectInfo]:
        """See ObjectStore. The names in the answer are below the prefix."""
        behind = self.prefix + after if after else ""
        found = await self.call(LIST, 1, self._store.list, self.prefix + prefix, behind, count)
        self.requests[LIST] += max(0, len(found) - 1) // _AT_ONCE
        return [info._replace(name=info.name.removeprefix(self.prefix)) for info in found]

    async def delete(self, names: Sequence[str]) -> None:
        """See ObjectStore."""
        if names:
            requests = -(-len(names) // _AT_ONCE)
            await self.call(DELETE, requests, self._store.delete, [self.prefix + name for name in names])


class BucketWriter:
    """See ObjectWriter."""

    def __init__(self, bucket: Bucket, writer: ObjectWriter, part_size: int) -> None:
        self._bucket = bucket
        self._writer = writer
        self._part_size = part_size
        self._size = 0

    async def write(self, data: Any) -> None:
        """See ObjectWriter."""
        before = self._parts
        self._size += memoryview(data).nbytes
        # The first part comes with the request that begins the upload.
        requests = self._parts - before + (not before and self._parts > 0)
        await self._bucket.call(PUT, requests, self._writer.write, data)

    async def finish(self) -> None:
        """See ObjectWriter."""
        # Few bytes are one request; otherwise the rest is a part, and another request completes the object.
        requests = 1 + (self._parts > 0 and self._size % self._part_size > 0)
        await self._bucket.call(PUT, requests, self._writer.finish)
        self._bucket.calls[PUT].sizes.add(self._size)

    @property
    def _parts(self) -> int:
        return self._size // self._part_size
