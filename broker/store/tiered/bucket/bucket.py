"""The bucket as the tier uses it: names below the broker's prefix, calls in threads, requests counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import trio

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo, ObjectStore, Read

_T = TypeVar("_T")


class Bucket:
    """See above. All methods raise OSError as object_store.py says, and none retries."""

    def __init__(self, store: ObjectStore, disk: Disk, prefix: str) -> None:
        """``disk``: has threads of its own. ``prefix``: see broker_prefix."""
        self._store = store
        self._disk = disk
        self.prefix = prefix
        self.requests: Counter[str] = Counter()
        """Requests by kind: put, get, list, delete."""

    async def _call(self, kind: str, fn: Callable[..., _T], *arguments: Any) -> _T:
        self.requests[kind] += 1
        # Shielded: a request that goes on in its thread must not be followed by one that it could overtake.
        with trio.CancelScope(shield=True):
            return await self._disk.run(fn, *arguments)

    async def run(self, fn: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that takes long in one of the bucket's threads. It makes no request."""
        return await self._disk.run(fn, *arguments)

    async def create(self, name: str, data: Sequence[Any]) -> None:
        """See ObjectStore."""
        await self._call("put", self._store.create, self.prefix + name, data)

    async def replace(self, name: str, data: bytes, version: str | None) -> str:
        """See ObjectStore."""
        return await self._call("put", self._store.replace, self.prefix + name, data, version)

    async def read(self, name: str) -> Read:
        """See ObjectStore."""
        return await self._call("get", self._store.read, self.prefix + name)

    async def read_range(self, name: str, begin: int, length: int) -> Any:
        """See ObjectStore."""
        return await self._call("get", self._store.read_range, self.prefix + name, begin, length)

    async def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        """See ObjectStore. The names in the answer are below the prefix."""
        behind = self.prefix + after if after else ""
        found = await self._call("list", self._store.list, self.prefix + prefix, behind, count)
        return [info._replace(name=info.name.removeprefix(self.prefix)) for info in found]

    async def delete(self, names: Sequence[str]) -> None:
        """See ObjectStore."""
        if names:
            await self._call("delete", self._store.delete, [self.prefix + name for name in names])
