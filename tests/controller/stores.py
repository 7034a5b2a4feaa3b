"""Stores for the tests of controllers: in memory, in SQLite, and in a real etcd of one member."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.interop.harness.etcd import Etcd
from trimq.controller.etcd_kv import EtcdKv
from trimq.controller.kv import Kv, Lease
from trimq.controller.local_kv import LocalKv
from trimq.controller.sqlite_kv import open_sqlite
from trimq.remoting.runtime.clock import ManualClock


class Store:
    """A store under test, in a key space of its own."""

    def __init__(self, kv: Kv, root: str, clock: ManualClock | None = None) -> None:
        self.kv = kv
        self.root = root
        self._clock = clock

    async def keys(self) -> set[str]:
        """What is there now, without the root."""
        return {key.removeprefix(self.root) for key in (await self.kv.range(self.root)).entries}

    async def revision(self, key: str) -> int:
        """That of a key's last change; 0 without the key."""
        found = (await self.kv.range(self.root)).entries.get(self.root + key)
        return found.revision if found is not None else 0

    def pass_time(self, lease: Lease) -> None:
        """Let a lease end: etcd's clock goes by itself."""
        if self._clock is not None:
            self._clock.advance(lease.ttl_ms / 1000 + 0.1)

    async def gone(self, key: str) -> None:
        """Wait until a key is not there any more."""
        await until(lambda: self._is_gone(key), f"{key} gone")

    async def _is_gone(self, key: str) -> bool:
        return key not in await self.keys()


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30) -> None:
    """Ask until it is so."""
    with trio.move_on_after(seconds):
        while not await condition():  # noqa: ASYNC110 - a store in another process
            await trio.sleep(0.02)
        return
    raise AssertionError(f"{what}: not within {seconds} s")


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[Store]:
    """Run a store's tasks, and close it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.kv.run)
        try:
            yield store
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await store.kv.close()


def local_store() -> Store:
    clock = ManualClock()
    return Store(LocalKv(clock), "/t/", clock)


async def sqlite_store(folder: Path) -> Store:
    clock = ManualClock()
    return Store(await open_sqlite(folder / "controller.db", clock), "/t/", clock)


def etcd_store(etcd: Etcd, root: str) -> Store:
    return Store(EtcdKv([member.client for member in etcd.members]), root)
