"""A master and its slave in one loop: stores on simulated disks, and connections in memory."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import trio
import trio.testing

from tests.store.simdisk import SimDisk
from tests.store.stores import settings
from trimq.broker.config import BrokerRole, ReplicationConfig
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import Begin, MessageStore
from trimq.broker.store.replication.ha_client import HAClient
from trimq.broker.store.replication.ha_service import Admission
from trimq.broker.store.replication.leadership import Leadership
from trimq.protocol.epoch_file import Epoch
from trimq.remoting.runtime.clock import ManualClock

PORT = 10912
SYNC_MASTER = ReplicationConfig(broker_role=BrokerRole.SYNC_MASTER, ha_listen_port=PORT)
ASYNC_MASTER = ReplicationConfig(ha_listen_port=PORT)
SLAVE = ReplicationConfig(broker_role=BrokerRole.SLAVE)


@dataclass
class Lease:
    """A clock that tests move by hand."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def led(
    broker_id: int, epoch: int = 1, members: tuple[int, ...] = (), clock: Lease | None = None, *, learner: bool = False
) -> Leadership:
    """One broker's part. Without ``members`` it is the only one."""
    return Leadership(broker_id, epoch, members or (broker_id,), 1, clock or Lease(), learner=learner)


@asynccontextmanager
async def store_of(
    disk: SimDisk,
    replication: ReplicationConfig,
    *,
    sync: bool = False,
    file_size: int = 8192,
    place: SyncPlace = SyncPlace.THREAD,
    leadership: Leadership | None = None,
    truncate_at: int | None = None,
) -> AsyncIterator[MessageStore]:
    """A running store with a role; with ``leadership`` controllers have assigned it."""
    store = MessageStore(
        settings(sync=sync, mapped_file_size_commit_log=file_size),
        disk=disk,
        clock=ManualClock(),
        sync_place=place,
        replication=replication,
        leadership=leadership,
        truncate_at=truncate_at,
    )
    async with store.opened():
        yield store


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Accepts the streams that ``connect`` has made."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](10)

    async def connect(self) -> trio.abc.Stream:
        """The client's end of a new connection."""
        here, there = trio.testing.memory_stream_pair()
        await self._send.send(there)
        return here

    async def accept(self) -> trio.abc.Stream:
        return await self._receive.receive()

    async def aclose(self) -> None:
        await self._send.aclose()


@dataclass
class FakeMaster:
    """A slave's view of a master whose store is at hand. ``has`` answers ``has_record`` if it is set."""

    store: MessageStore | None = None
    asked: list[int] = field(default_factory=list)
    is_rocketmq: bool = False

    address = "10.0.0.1:10911"

    @property
    def ha_address(self) -> tuple[str, int] | None:
        return ("10.0.0.1", PORT)

    async def changed(self) -> None:
        await trio.sleep_forever()

    async def begin(self) -> Begin | None:
        store = self.store
        if store is None or store.max_phy_offset <= store.min_phy_offset:
            return None
        return Begin(store.min_phy_offset, bytes(await store.look_message_cold(store.min_phy_offset)))

    async def has_record(self, offset: int, record: bytes) -> bool:
        self.asked.append(offset)
        return self.store is None or await self.store.same_record(offset, sha256(record).digest()) is not False


async def one_slave(_address: str) -> int:
    """Admits one slave from each address."""
    return 1


def serve(
    nursery: trio.Nursery,
    master: MessageStore,
    peers: Callable[[trio.abc.Stream], str] | None = None,
    admission: Admission = one_slave,
) -> MemoryListener:
    """Let a master accept slaves. ``peers`` returns a connection's address."""
    assert master.replication.ha is not None
    listener = MemoryListener()
    nursery.start_soon(master.replication.ha.serve, listener, peers or (lambda _: "10.0.0.2"), admission)
    return listener


def follow(nursery: trio.Nursery, slave: MessageStore, listener: MemoryListener, master: FakeMaster) -> HAClient:
    """Let a slave follow; the connections are those of ``listener``."""

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return await listener.connect()

    client = slave.make_client(master, open_stream)
    nursery.start_soon(client.run)
    return client


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without an event of its own, on the clock of the test."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(0.01)


def log_bytes(disk: SimDisk) -> bytes:
    """The bytes of the log, up to where nothing was written."""
    paths = [f"/store/commitlog/{name}" for name in disk.list("/store/commitlog")]
    return b"".join(map(disk.content, paths)).rstrip(b"\0")


def epochs_of(store: MessageStore) -> list[Epoch]:
    assert store.replication.epochs is not None
    return store.replication.epochs.entries
