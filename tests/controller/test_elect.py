"""Among the members of the set the one with the longest log is elected, however far apart the logs end."""

import pytest

from trimq.controller.config import ControllerConfig, load_controller
from trimq.controller.elect import BrokerLiveInfo, best
from trimq.controller.local_kv import LocalKv
from trimq.controller.replicas_info import ReplicasInfoManager
from trimq.protocol.headers.namesrv import BrokerHeartbeatRequestHeader
from trimq.remoting.runtime.clock import SystemClock

FAR_APART = [2**31 - 1, 2**31, 3 * 2**30, 2**32, 2**32 + 1, 2**40]
"""Bytes between two log ends: a difference of 32 bits is negative, zero or small for most of them."""


@pytest.mark.parametrize("gap", FAR_APART)
def test_the_longer_log_wins_at_any_distance(gap: int) -> None:
    short, long = BrokerLiveInfo(1, 1000), BrokerLiveInfo(1, 1000 + gap)
    assert best([(1, short), (2, long)]) == 2
    assert best([(1, long), (2, short)]) == 1


@pytest.mark.parametrize("gap", FAR_APART)
async def test_a_controller_elects_the_longer_log_of_two_members(gap: int) -> None:
    configuration = load_controller()
    manager = ReplicasInfoManager(LocalKv(SystemClock()), lambda: configuration.section(ControllerConfig))
    for broker_id in (1, 2, 3):
        await manager.apply_broker_id("c", "b", broker_id, f"10.0.0.{broker_id}:1;0")
        await heartbeat(manager, broker_id, 1000 + (gap if broker_id == 3 else 0))
    first = (await manager.elect("b", 1)).state
    await manager.alter_sync_state_set("b", 1, first.epoch, [1, 2, 3], first.set_epoch)
    assert (await manager.elect("b", without=1)).state.master == 3


async def heartbeat(manager: ReplicasInfoManager, broker_id: int, log_end: int) -> None:
    await manager.heartbeat(
        BrokerHeartbeatRequestHeader(
            cluster_name="c",
            broker_addr=f"10.0.0.{broker_id}:1",
            broker_name="b",
            broker_id=broker_id,
            epoch=1,
            max_offset=log_end,
        )
    )
