"""GET_BROKER_HA_STATUS (907), health and the runtime information of masters and slaves."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import trio
import trio.testing

from tests.broker.test_replication import TOPIC, in_sync, pair
from tests.broker.wire_client import WireClient
from tests.ports import free_port
from tests.store.replication.pairs import until
from trimq.broker.controller import BrokerController
from trimq.broker.services.master_end import MasterEnd
from trimq.broker.store.replication import ha_service
from trimq.broker.store.replication.offset_times import OffsetTimes
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.sysflag import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION
from trimq.remoting.runtime.clock import ManualClock

NO_CLIENT = {
    "lastReadTimestamp": 0,
    "lastWriteTimestamp": 0,
    "masterFlushOffset": 0,
    "maxOffset": 0,
    "transferredByteInSecond": 0,
}


async def ha_status(broker: BrokerController) -> dict[str, Any]:
    async with WireClient.connect(broker.endpoint) as client:
        reply = await client.ask(RequestCode.GET_BROKER_HA_STATUS)
    assert reply.code == 0, reply.remark
    found: dict[str, Any] = json.loads(bytes(reply.body))
    return found


async def acknowledged(master: BrokerController) -> None:
    """Wait until a slave has acknowledged all that the master has."""
    service = master.context.store.replication.ha
    assert service is not None
    await until(lambda: [slave.behind for slave in service.state().slaves] == [0])


async def test_a_master_and_its_slave(tmp_path: Path) -> None:
    """Names and types are those of RocketMQ 5.5.0's body."""
    async with pair(tmp_path) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for _ in range(5):
                await client.send(TOPIC, bytes(1000))
        await in_sync(master, slave)
        end = master.context.store.appended_offset
        replica = slave.replication.client
        assert replica is not None
        # The slave has asked how far its master's log goes, and has acknowledged it all.
        await until(lambda: replica.state().master_offset == end)
        await acknowledged(master)
        found = await ha_status(master)
        [connection] = found.pop("haConnectionInfo")
        assert found == {
            "master": True,
            "masterCommitLogMaxOffset": end,
            "inSyncSlaveNums": 1,
            "haClientRuntimeInfo": NO_CLIENT,
        }
        assert isinstance(connection.pop("transferredByteInSecond"), int)
        assert connection == {
            "addr": "127.0.0.1",
            "slaveAckOffset": end,
            "diff": 0,
            "inSync": True,
            "transferFromWhere": end,
        }
        now = slave.clock.wall_ms()
        found = await ha_status(slave)
        mine = found.pop("haClientRuntimeInfo")
        assert found == {
            "master": False,
            "masterCommitLogMaxOffset": 0,
            "inSyncSlaveNums": 0,
            "haConnectionInfo": [],
        }
        assert now - 20_000 < mine.pop("lastReadTimestamp") <= now + 1000
        assert now - 20_000 < mine.pop("lastWriteTimestamp") <= now + 1000
        assert isinstance(mine.pop("transferredByteInSecond"), int)
        assert mine == {
            "masterAddr": f"127.0.0.1:{master.replication.port}",
            "maxOffset": end,
            "masterFlushOffset": end,
        }
        async with WireClient.connect(slave.endpoint) as client:
            reply = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        table = json.loads(bytes(reply.body))["table"]
        assert table["brokerRole"] == "SLAVE"
        assert (table["masterCommitLogMaxOffset"], table["slaveLagBytes"], table["slaveLagMs"]) == (str(end), "0", "0")
        assert 0 <= int(table["masterSilentMs"]) < 20_000


async def test_a_broker_alone_is_a_master_without_slaves(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        async with WireClient.connect(broker.endpoint) as client:
            await client.send(TOPIC)
        found = await ha_status(broker)
        assert found == {
            "master": True,
            "masterCommitLogMaxOffset": broker.context.store.appended_offset,
            "inSyncSlaveNums": 0,
            "haConnectionInfo": [],
            "haClientRuntimeInfo": NO_CLIENT,
        }
        assert found["masterCommitLogMaxOffset"] > 0


async def test_a_slave_without_a_master(tmp_path: Path) -> None:
    async with running_broker(tmp_path, brokerRole="SLAVE", brokerId=1) as slave:
        found = await ha_status(slave)
        assert not found["master"]
        assert found["haClientRuntimeInfo"] == NO_CLIENT  # and no masterAddr


def notes(broker: BrokerController, code: str = "replication") -> list[str]:
    return [note.text for note in broker.health.readiness().notes if note.code == code]


async def reason_until(broker: BrokerController, code: str) -> str:
    def found() -> list[str]:
        return [reason.text for reason in broker.health.readiness().reasons if reason.code == code]

    await until(lambda: found() != [])
    return found()[0]


async def test_health_has_roles_and_lags(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"haSendHeartbeatInterval": 100, "haHousekeepingInterval": 600}
    async with pair(tmp_path, leader=quick, **quick) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC, bytes(1000))
        await in_sync(master, slave)
        await acknowledged(master)
        assert "slave 127.0.0.1: in sync, 0 bytes, 0 s behind" in notes(master)
        assert "ASYNC_MASTER: 1 slave(s), 2 copies in sync, a message needs 1" in notes(master)
        address = f"127.0.0.1:{master.replication.port}"
        assert notes(slave) == [f"SLAVE: connected with {address}, 0 bytes, 0 s behind"]
        assert slave.health.readiness().ready
        # The master lives, and its port for slaves does not: the slave knows how far behind it is.
        view = slave.replication.master
        assert view is not None
        assert master.context.store.replication.ha is not None
        view._learned = "127.0.0.1:1"
        master.context.store.replication.ha.connections[0].close("a test")
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC, bytes(1000))
        text = await reason_until(slave, "master_silent")
        assert text.startswith("this slave has got nothing right from its master 127.0.0.1:1 for ")
        assert "all attempts to connect to 127.0.0.1:1 failed" in text
        await until(lambda: ", 0 bytes" not in notes(slave)[0] and ", 0 s" not in notes(slave)[0])
        [text] = notes(slave)
        assert text.startswith("SLAVE: not connected with 127.0.0.1:1, ")
        assert "; last error: " in text
        view._learned = address
        await until(lambda: notes(slave) == [f"SLAVE: connected with {address}, 0 bytes, 0 s behind"])
        assert slave.health.readiness().ready


async def test_a_slave_without_a_master_and_a_sync_master_without_slaves_are_not_ready(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"haSendHeartbeatInterval": 100, "haHousekeepingInterval": 200}
    async with running_broker(tmp_path / "slave", brokerRole="SLAVE", brokerId=1, **quick) as slave:
        text = await reason_until(slave, "master_silent")
        assert text.startswith("this slave has got nothing right from its master for ")
        assert text.endswith(" s: no name server says where it is")
        assert notes(slave) == ["SLAVE: not connected with any master, 0 bytes, 0 s behind"]
    async with running_broker(tmp_path / "master", brokerRole="SYNC_MASTER", haListenPort=free_port()) as master:
        assert "in-sync replicas not enough" in await reason_until(master, "replicas_missing")
        assert notes(master) == ["SYNC_MASTER: 0 slave(s), 1 copies in sync, a message needs 2"]


class FakeLag:
    """Notes what MasterEnd says."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.seconds: list[float] = []

    def master_ends_at(self, offset: int) -> None:
        self.ends.append(offset)

    def sample(self, seconds: float) -> None:
        """As HAClient."""
        self.seconds.append(seconds)


@pytest.mark.parametrize(
    ("code", "body", "expected"),
    [
        (0, b'{"master":true,"masterCommitLogMaxOffset":77}', [77]),
        (0, b'{"master":false,"masterCommitLogMaxOffset":0}', []),  # it has become a slave
        (0, b"not JSON", []),
        (3, b'{"master":true,"masterCommitLogMaxOffset":77}', []),  # RocketMQ 4 does not know the request
    ],
)
async def test_odd_answers_about_the_masters_end(code: int, body: bytes, expected: list[int]) -> None:
    lag, master = FakeLag(), AsyncMock()
    master.ask.return_value = RemotingCommand(code, ext={"brokerRole": "SYNC_MASTER", "other": "x"}, body=body)
    master.settings = {}
    await MasterEnd(master, lag, ManualClock())._ask()
    master.ask.side_effect = OSError("it does not answer")
    await MasterEnd(master, lag, ManualClock())._ask()
    assert lag.ends == expected
    assert master.settings == ({"brokerRole": "SYNC_MASTER"} if expected else {})


async def test_the_rate_of_a_slave_counts_the_time_that_the_master_takes(nursery: trio.Nursery) -> None:
    clock, lag, master = ManualClock(), FakeLag(), AsyncMock()

    async def slow(_code: int) -> RemotingCommand:
        await clock.sleep(3)
        raise OSError("no answer")

    master.ask = slow
    nursery.start_soon(MasterEnd(master, lag, clock).run)
    for _ in range(8):
        await trio.testing.wait_all_tasks_blocked()
        clock.advance(1)
    await trio.testing.wait_all_tasks_blocked()
    assert lag.seconds == [4, 4]


async def test_a_slave_remembers_the_settings_of_its_master(tmp_path: Path) -> None:
    leader = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "enableAutoInSyncReplicas": True}
    async with pair(tmp_path, leader=leader) as (master, slave):
        await in_sync(master, slave)
        await until(lambda: slave.context.store.replication.master_settings != {})
    info = slave.context.store.runtime_info()
    assert info["masterBrokerRole"] == "SYNC_MASTER"
    assert (info["masterInSyncReplicas"], info["masterMinInSyncReplicas"]) == ("2", "1")
    assert info["masterEnableAutoInSyncReplicas"] == "true"


def test_the_age_of_what_is_missing() -> None:
    times = OffsetTimes()
    assert times.age(0, 5.0) == 0
    for second in range(10_000):
        times.note(100 * second, float(second))
        times.note(100 * second, second + 0.5)
    assert len(times._ends) <= 512
    assert times.age(999_900, 10_000.0) == 0  # nothing is missing
    assert times.age(999_899, 10_000.0) == 1
    assert times.age(999_700, 10_000.0) == 2
    # What is old is known less precisely, and never said to be older than it is.
    for behind in (100, 1000, 9000):
        assert 0.95 * behind - 1 < times.age(999_900 - 100 * behind, 10_000.0) <= behind
    times.note(500_050, 20_000.0)  # another master, with a shorter log
    assert times.age(500_050, 20_000.0) == 0
    assert times.age(500_049, 20_010.0) == 10


@pytest.mark.parametrize("encoding", list(Encoding))
async def test_a_slave_is_named_for_what_has_left_memory(
    encoding: Encoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = iter(range(100))

    async def suggested(broker: BrokerController) -> str:
        async with WireClient.connect(broker.endpoint, encoding) as client:
            # The first commit of a group is no matter of the fast path.
            group = f"G{next(groups)}"
            reply = await client.pull(
                TOPIC, group=group, sysFlag=PULL_COMMIT_OFFSET | PULL_SUBSCRIPTION, commitOffset=0
            )
        assert (reply.code, reply.remark) == (0, "FOUND")
        return reply.ext_fields()["suggestWhichBrokerId"]

    def far_back(broker: BrokerController, *, cold: bool) -> None:
        """Let the store take all for cold. The rule itself: tests/store/test_get_message.py."""

        def of_disk(*arguments: Any) -> Any:
            result = broker.context.store._getter.get(*arguments)
            assert result is not None
            result.suggest_slave = cold
            return result

        broker.context.store.get_message = of_disk

    async with pair(tmp_path, leader={"slaveReadEnable": True}, slaveReadEnable=True) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC)
        await in_sync(master, slave)
        far_back(master, cold=True)
        far_back(slave, cold=True)
        await acknowledged(master)
        assert (await suggested(master), await suggested(slave)) == ("1", "1")
        with monkeypatch.context() as patch:
            patch.setattr(ha_service, "_CLOSE", -1)  # the slave is too far behind
            assert await suggested(master) == "0"
        far_back(master, cold=False)
        far_back(slave, cold=False)
        assert (await suggested(master), await suggested(slave)) == ("0", "0")
        far_back(master, cold=True)
        view = slave.replication.master
        assert view is not None
        view._learned = "127.0.0.1:1"
        service = master.context.store.replication.ha
        assert service is not None
        service.connections[0].close("a test")
        while service.connections:
            await trio.lowlevel.checkpoint()
        assert await suggested(master) == "0"  # there is no slave now
    async with pair(tmp_path / "off", slaveReadEnable=True) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            await client.send(TOPIC)
        await in_sync(master, slave)
        far_back(master, cold=True)
        assert await suggested(master) == "0"
