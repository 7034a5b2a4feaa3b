"""Buckets in memory, with obstore behind them, that count and can hold up or fail their reads."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from obstore.store import MemoryStore

from tests.store.simdisk import SimDisk
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore


class MemoryBucket(Bucket):
    """See Bucket. ``disk``: where its calls run."""

    def __init__(self, disk: Disk | None = None) -> None:
        self.memory = MemoryStore()
        self.disk = disk or SimDisk()
        super().__init__(ObstoreStore(self.memory), self.disk, "p/C/b/")
        self.ranges: list[tuple[str, int, int]] = []
        self.bytes_read = 0
        self.gate: trio.Event | None = None
        self.before_read: Callable[[str], None] | None = None
        self.harm: Callable[[bytearray], Any] | None = None

    async def read_range(self, name: str, begin: int, length: int) -> Any:
        self.ranges.append((name, begin, length))
        if self.before_read is not None:
            self.before_read(name)
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        data = await super().read_range(name, begin, length)
        self.bytes_read += len(data)
        if self.harm is not None:
            changed = bytearray(data)
            self.harm(changed)
            return bytes(changed)
        return data

    @property
    def gets(self) -> int:
        return self.requests["get"]

    def reset(self) -> None:
        """Count from 0 again."""
        self.requests = Counter()
        self.ranges.clear()
        self.bytes_read = 0
