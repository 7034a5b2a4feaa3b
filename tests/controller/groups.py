"""Controllers without a network: several managers over one store in memory."""

from __future__ import annotations

from collections.abc import Awaitable

from trimq.controller.config import ControllerConfig, load_controller
from trimq.controller.kv import Kv
from trimq.controller.local_kv import LocalKv
from trimq.controller.replicas_info import LeaseAnswer, ReplicasInfoManager
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.namesrv import BrokerHeartbeatRequestHeader
from trimq.remoting.runtime.clock import ManualClock

NAME = "b"
TTL = 3000


def heartbeat_header(
    broker_id: int | None = 1,
    *,
    name: str = NAME,
    epoch: int = 0,
    max_offset: int = 0,
    priority: int | None = None,
    timeout: int | None = TTL,
) -> BrokerHeartbeatRequestHeader:
    return BrokerHeartbeatRequestHeader(
        cluster_name="c",
        broker_addr=f"127.0.0.1:{1000 + (broker_id or 0)}",
        broker_name=name,
        broker_id=broker_id,
        epoch=epoch,
        max_offset=max_offset,
        confirm_offset=0,
        heartbeat_timeout_mills=timeout,
        election_priority=priority,
    )


class Group:
    """One group of brokers, and the controllers that share its store."""

    def __init__(self, controllers: int = 1, *, unclean: bool = False) -> None:
        self.clock = ManualClock()
        self.kv: Kv = LocalKv(self.clock)
        flags = {"enableElectUncleanMaster": ("true" if unclean else "false", "test")}
        self.config = load_controller(flags=flags).section(ControllerConfig)
        self.managers = [ReplicasInfoManager(self.kv, lambda: self.config) for _ in range(controllers)]

    @property
    def manager(self) -> ReplicasInfoManager:
        return self.managers[0]

    def through(self, kv: Kv) -> ReplicasInfoManager:
        """Another controller, which reaches the store by this way."""
        return ReplicasInfoManager(kv, lambda: self.config)

    async def join(self, *broker_ids: int) -> None:
        """Brokers that have ids, and live."""
        for broker_id in broker_ids:
            await self.manager.apply_broker_id("c", NAME, broker_id, f"127.0.0.1:{1000 + broker_id};5")
            await self.beat(broker_id)

    async def beat(
        self, broker_id: int, *, epoch: int = 0, max_offset: int = 0, priority: int | None = None
    ) -> LeaseAnswer:
        header = heartbeat_header(broker_id, epoch=epoch, max_offset=max_offset, priority=priority)
        return await self.manager.heartbeat(header)

    async def led_by(self, master: int, *others: int) -> None:
        """A group with this master, and a set of all of these."""
        await self.join(*sorted([master, *others]))
        assert (await self.manager.elect(NAME, master)).changed
        if others:
            await self.manager.alter_sync_state_set(NAME, master, 1, [master, *others], 1)

    async def dies(self, *dead: int, living: tuple[int, ...] = ()) -> None:
        """The leases of some end, those of others do not."""
        self.clock.advance(TTL / 1000 - 0.5)
        for broker_id in living:
            live = self.manager.live.get((NAME, broker_id))
            await self.beat(
                broker_id,
                epoch=live.epoch if live else 0,
                max_offset=live.max_offset if live else 0,
                priority=live.priority if live else None,
            )
        self.clock.advance(0.6)
        state = await self.manager.state(NAME)
        assert not state.alive & set(dead)
        assert state.alive >= set(living)

    async def facts(self) -> tuple[int | None, int, list[int], int]:
        """Master (alive or not), epoch, set, the set's epoch."""
        state = await self.manager.state(NAME)
        return state.master, state.epoch, state.members, state.set_epoch


async def refused(call: Awaitable[object]) -> ResponseCode:
    """The code with which a call is refused."""
    try:
        await call
    except RemotingError as error:
        return ResponseCode(error.code)
    raise AssertionError("it was not refused")
