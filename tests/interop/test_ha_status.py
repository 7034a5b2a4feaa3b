"""haStatus of mqadmin 5.5.0 on masters and slaves, and the body that it reads: TriMQ's and Apache's are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import mqadmin
from tests.interop.harness.servers import Broker, Cluster, Peer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import connected
from tests.interop.test_mqadmin import settings
from tests.interop.test_replication import running_pair, send
from trimq.protocol.codes import RequestCode

BODY = {
    "master": bool,
    "masterCommitLogMaxOffset": int,
    "inSyncSlaveNums": int,
    "haConnectionInfo": list,
    "haClientRuntimeInfo": dict,
}
CONNECTION = {
    "addr": str,
    "slaveAckOffset": int,
    "diff": int,
    "inSync": bool,
    "transferredByteInSecond": int,
    "transferFromWhere": int,
}
CLIENT = {
    "masterAddr": str,
    "transferredByteInSecond": int,
    "maxOffset": int,
    "lastReadTimestamp": int,
    "lastWriteTimestamp": int,
    "masterFlushOffset": int,
}


def kinds(value: dict[str, Any]) -> dict[str, type]:
    return {name: type(item) for name, item in value.items() if name != "activated"}


def status(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(probe.ask(broker.address, RequestCode.GET_BROKER_HA_STATUS).body)
    assert kinds(found) == BODY
    return found


@pytest.mark.parametrize(
    ("master", "slave"), [("trimq", "apache"), ("apache", "trimq")], ids=["trimq to apache", "apache to trimq"]
)
def test_mqadmin_shows_masters_and_slaves(master: Peer, slave: Peer, tmp_path: Path) -> None:
    with running_pair(tmp_path, master, slave) as pair:
        with connected(*pair.wire) as wire:
            send(wire, 0, 10)

        def level() -> bool:
            connections = status(pair.master)["haConnectionInfo"]
            return len(connections) == 1 and connections[0]["diff"] == 0

        wait_until(level, "the slave has it all", 100)
        found = status(pair.master)
        [connection] = found["haConnectionInfo"]
        end = found["masterCommitLogMaxOffset"]
        assert kinds(connection) == CONNECTION
        assert (found["master"], found["inSyncSlaveNums"], connection["inSync"]) == (True, 1, True)
        assert connection["slaveAckOffset"] == connection["transferFromWhere"] == end > 0
        assert connection["addr"].startswith("127.0.0.1")
        assert kinds(found["haClientRuntimeInfo"]).items() <= CLIENT.items()
        found = status(pair.slave)
        assert (found["master"], found["haConnectionInfo"]) == (False, [])
        client = found["haClientRuntimeInfo"]
        assert kinds(client) == CLIENT
        assert client["masterAddr"] == connection_address(pair.master)
        assert client["maxOffset"] == end
        assert client["lastReadTimestamp"] > 1_500_000_000_000

        with mqadmin(Cluster([pair.names], [pair.master]), tmp_path / "mqadmin") as admin:
            shown = admin.run("haStatus", "-b", pair.master.address)
            assert f"#MasterAddr\t{pair.master.address}" in shown
            assert f"#MasterCommitLogMaxOffset\t{end}\n#SlaveNum\t1\n#InSyncSlaveNum\t1" in shown
            [row] = [line.split() for line in shown.splitlines() if line.startswith("127.0.0.1")]
            assert row[1:3] == [str(end), "0"]
            assert row[4:] == ["OK", str(end)]
            shown = admin.run("haStatus", "-b", pair.slave.address)
            assert f"#MasterAddr\t{client['masterAddr']}" in shown
            assert f"#CommitLogMaxOffset\t{end}" in shown
            assert "#LastReadTime" in shown


def connection_address(master: Broker) -> str:
    return f"127.0.0.1:{settings_of(master)['haListenPort']}"


def settings_of(broker: Broker) -> dict[str, str]:
    return settings(bytes(probe.ask(broker.address, RequestCode.GET_BROKER_CONFIG).body).decode())
