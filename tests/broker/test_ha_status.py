"""GET_BROKER_HA_STATUS (907), health and the runtime information of masters and slaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.test_replication import TOPIC, in_sync, pair
from tests.broker.wire_client import WireClient
from trimq.broker.controller import BrokerController
from trimq.broker.services.master_end import MasterEnd
from trimq.broker.testing import running_broker
from trimq.protocol.codes import RequestCode

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


async def test_a_master_and_its_slave(tmp_path: Path) -> None:
    """Names and types are those of RocketMQ 5.5.0's body."""
    async with pair(tmp_path) as (master, slave):
        async with WireClient.connect(master.endpoint) as client:
            for _ in range(5):
                await client.send(TOPIC, bytes(1000))
        await in_sync(master, slave)
        end = master.context.store.appended_offset
        client = slave.replication.client
        assert client is not None
        with trio.fail_after(20):  # the slave has asked how far its master's log goes, and has acknowledged it all
            while (await ha_status(master))["inSyncSlaveNums"] == 0 or client.state().master_offset != end:
                await trio.sleep(0.01)
            while (found := await ha_status(master))["haConnectionInfo"][0]["diff"]:
                await trio.sleep(0.01)
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
        async with WireClient.connect(slave.endpoint) as client_:
            reply = await client_.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
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
