"""mqadmin switchRole: what would be lost if a slave became the master, and the steps it shows, which are followed."""

import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.test_replication import TOPIC, cut_off, in_sync, pair
from tests.broker.wire_client import WireClient
from tests.store.replication.pairs import until
from trimq.broker import controller
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker
from trimq.client.mqadmin import roles
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.protocol.codes import RequestCode

MQADMIN = str(Path(sys.executable).parent / "mqadmin")
QUICK: dict[str, Any] = {"haSendHeartbeatInterval": 100, "haHousekeepingInterval": 5000}


async def switch_role(slave: BrokerController, namesrv: str = "", *words: str) -> "subprocess.CompletedProcess[bytes]":
    at = ["-n", namesrv] if namesrv else []
    return await trio.run_process(
        [MQADMIN, "switchRole", "-b", slave.address, *at, *words], capture_stdout=True, capture_stderr=True, check=False
    )


def names_of(master: BrokerController) -> str:
    assert master.namesrv is not None
    assert master.namesrv.address is not None
    host, port = master.namesrv.address
    return f"{host}:{port}"


async def send(broker: BrokerController, count: int, topic: str = TOPIC) -> None:
    async with WireClient.connect(broker.endpoint) as client:
        for number in range(count):
            assert (await client.send(topic, b"%d" % number, queue_id=number % 2)).code == 0


async def test_what_would_be_lost(tmp_path: Path) -> None:
    async with pair(tmp_path, leader=QUICK, **QUICK) as (master, slave):
        await send(master, 6)
        await in_sync(master, slave)
        names = names_of(master)
        done = await switch_role(slave, names)
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode()
        assert "Nothing would be lost: the slave has all of its master's log." in text
        assert "   brokerRole=ASYNC_MASTER\n   brokerId=0\n   haListenPort=" in text
        assert "   brokerRole=SLAVE\n   brokerId=1\n   brokerPermission=6\n" in text
        assert f"updateBrokerConfig -b {master.address} -k brokerPermission -v 4" in text

        await cut_off(master, slave)
        end = master.context.store.appended_offset
        await send(master, 3)
        await send(master, 2, "Other")
        more = master.context.store.appended_offset - end
        done = await switch_role(slave, names)
        assert done.returncode == 1
        text = done.stdout.decode()
        assert (
            f"LOST: {more} bytes are only on the master, {more} of them acknowledged: 5 messages of 2 topics\n" in text
        )
        assert "LOST: this slave does not follow its master: " in text
        assert "brokerRole=" not in text
        assert b"--acceptLoss" in done.stderr
        done = await switch_role(slave, "", "-m", master.address, "--acceptLoss")
        assert done.returncode == 0, done.stderr
        assert b"Empty the store of the old master" in done.stdout
        done = await switch_role(slave, names, "--json")
        assert done.returncode == 1
        found = json.loads(done.stdout)
        assert (found["bytesLost"], found["messagesLost"], found["masterEnd"] - found["slaveEnd"]) == (more, 5, more)
        assert found["newSlave"] == {"brokerRole": "SLAVE", "brokerId": "1"}

        done = await switch_role(master, names)
        assert done.returncode == 2
        assert b"is a master, not a slave" in done.stderr
        done = await switch_role(slave, names, "-m", slave.address)
        assert done.returncode == 2
        assert b"is a slave too" in done.stderr


async def test_a_master_that_does_not_answer(tmp_path: Path) -> None:
    async with pair(tmp_path, leader=QUICK, **QUICK) as (master, slave):
        await send(master, 6)
        await in_sync(master, slave)
        await cut_off(master, slave)
        end = slave.context.store.appended_offset
        await send(master, 3)
        more = master.context.store.appended_offset - end
        client = slave.replication.client
        assert client is not None
        await until(lambda: client.state().lag == more)
        done = await switch_role(slave, "", "-m", "127.0.0.1:1")
        assert done.returncode == 1
        text = done.stdout.decode()
        assert "LOST: unknown: the master 127.0.0.1:1 does not answer (" in text
        assert f", and {more} bytes that it had before\n" in text
        assert "; all that it has stored since 20" in text
    async with running_broker(tmp_path / "slave", brokerRole="SLAVE", brokerId=1) as slave:
        done = await switch_role(slave, "", "-n", "127.0.0.1:1")
        assert done.returncode == 1
        text = done.stdout.decode()
        assert "the master does not answer (no name server says where it is: " in text
        assert "); this slave has never heard of it\n" in text
        done = await switch_role(slave, "", "-n", "127.0.0.1:1", "--acceptLoss")
        assert done.returncode == 0
        text = done.stdout.decode()
        assert "   brokerId=0\n   haListenPort=10912\n   # It is not known which of them the old master was:\n" in text
        assert "   # brokerRole=SYNC_MASTER\n   # brokerRole=ASYNC_MASTER\n" in text
        assert "   # If the old master had haAllowedAddresses: " in text
        assert b"1. Make sure that the old master does not run, and does not start by itself." in done.stdout
        assert b"brokerPermission" not in done.stdout


async def test_a_slave_that_is_behind_another_one_or_ahead_of_its_master(tmp_path: Path) -> None:
    async with pair(tmp_path, leader=QUICK, **QUICK) as (master, slave):
        await send(master, 2)
        await in_sync(master, slave)
        await cut_off(master, slave)
        await send(master, 2)
        names = names_of(master)
        more: dict[str, Any] = QUICK | {"haMasterAddress": f"127.0.0.1:{master.replication.port}"}
        async with running_broker(
            tmp_path / "other", brokerRole="SLAVE", brokerId=2, namesrvAddr=names, **more
        ) as other:
            await in_sync(master, other)
            lacking = other.context.store.appended_offset - slave.context.store.appended_offset
            done = await switch_role(slave, names)
            text = done.stdout.decode()
            assert f"LOST: the slave {other.address} has {lacking} bytes that this one does not have\n" in text
            done = await switch_role(other, names, "--json")
            assert done.returncode == 0, done.stdout
            assert json.loads(done.stdout)["newMaster"]["haMasterAddress"] == ""
            async with running_broker(tmp_path / "shorter") as shorter:
                done = await switch_role(other, "", "-m", shorter.address)
                assert done.returncode == 1
                end = other.context.store.appended_offset
                assert f"LOST: this slave has {end} bytes more than its master" in done.stdout.decode()


async def test_lines_of_a_sync_master_that_is_lost(tmp_path: Path) -> None:
    """The slave remembers what its master was. It must not come back as an ASYNC_MASTER, which promises less."""
    leader = QUICK | {"brokerRole": "SYNC_MASTER", "haAllowedAddresses": "127.0.0.1", "slaveReadEnable": True}
    async with pair(tmp_path, leader=leader, **QUICK, haAllowedAddresses="192.0.2.1") as (master, slave):
        await in_sync(master, slave)
        await until(lambda: slave.context.store.replication.master_settings != {})
        done = await switch_role(slave, names_of(master), "--json")
        alive = json.loads(done.stdout)
        assert alive["newMaster"] == {
            "brokerRole": "SYNC_MASTER",
            "brokerId": "0",
            "haListenPort": str(master.replication.port),
            "slaveReadEnable": "true",
            "haAllowedAddresses": "127.0.0.1",  # the old master; the slave's own line was another pair's
        }
        assert alive["newSlave"] == {"brokerRole": "SLAVE", "brokerId": "1", "slaveReadEnable": "false"}
        assert alive["notes"] == [
            "haAllowedAddresses has to admit the slaves of this new master: the old master, and the other slaves."
        ]
        done = await switch_role(slave, "", "-m", "127.0.0.1:1", "--acceptLoss")
        text = done.stdout.decode()
        assert "   brokerRole=SYNC_MASTER\n" in text
        assert "   inSyncReplicas=2\n" in text
        assert "ASYNC_MASTER" not in text
        assert "takes no sends until a slave is connected" in text


def fake(address: str, config: dict[str, str], info: dict[str, str] | None = None) -> roles.Replica:
    return roles.Replica(address, {}, info or {}, config, 100, 100)


def test_lines_with_addresses() -> None:
    """What is not an IP address would be refused in haAllowedAddresses; each entry is one slave."""
    slave = fake("10.0.0.2:1", {"brokerId": "1", "haAllowedAddresses": "10.0.0.2"})
    master = fake("10.0.0.1:1", {"brokerRole": "ASYNC_MASTER", "haMasterAddress": "10.0.0.2:9"})
    change = roles.Change(
        slave, master, "10.0.0.1:1", others={"[fd00::3]:1": 1}, silent={"host:1": "x", "10.0.0.1:2": ""}
    )
    lines = roles._lines(change)
    assert lines.leader["haAllowedAddresses"] == "10.0.0.1;fd00::3;10.0.0.1"
    assert lines.follower == {"brokerRole": "SLAVE", "brokerId": "1", "haMasterAddress": ""}
    assert len(lines.notes) == 1
    del slave.config["haAllowedAddresses"]
    assert roles._lines(change).notes == []


async def test_other_slaves_are_asked_and_shown(tmp_path: Path) -> None:
    async with pair(tmp_path, leader=QUICK, **QUICK) as (master, slave):
        names, port = names_of(master), master.replication.port
        more: dict[str, Any] = QUICK | {"haMasterAddress": f"127.0.0.1:{port}", "namesrvAddr": names}
        async with running_broker(tmp_path / "2", brokerRole="SLAVE", brokerId=2, **more) as other:
            await in_sync(master, other)
            done = await switch_role(slave, names)
            text = done.stdout.decode()
            assert (
                f"Write into the configuration of the slave {other.address} (127.0.0.1:{port} is the old master), and "
                f"start it again:\n   haMasterAddress=127.0.0.1:{port}\n" in text
            )
            other.reactor._acceptor.close()  # it is still listed
            done = await switch_role(slave, names)
            assert done.returncode == 0
            assert f"NOT ASKED: the slave {other.address} does not answer: " in done.stdout.decode()
            done = await switch_role(slave, names, "-m", "127.0.0.1:1")
            assert f"LOST: unknown: the slave {other.address} does not answer (" in done.stdout.decode()


@asynccontextmanager
async def name_server() -> AsyncIterator[str]:
    settings = {"listenPort": "0", "bindAddress": "127.0.0.1"}
    server = NamesrvController(load_namesrv(flags={key: (value, "test") for key, value in settings.items()}))
    server.bind()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        assert server.address is not None
        yield f"127.0.0.1:{server.address[1]}"
        server.shutdown()


class Brokers:
    """Brokers that start and end in any order."""

    def __init__(self, nursery: trio.Nursery, common: dict[str, Any]) -> None:
        self._nursery = nursery
        self._common = common
        self._ends: dict[Path, trio.Event] = {}

    async def start(self, root: Path, **settings: Any) -> BrokerController:
        self._ends[root] = trio.Event()
        broker: BrokerController = await self._nursery.start(self._run, root, self._common | settings)
        return broker

    async def stop(self, root: Path, broker: BrokerController) -> None:
        self._ends.pop(root).set()
        await broker.stopped.wait()

    def stop_all(self) -> None:
        for event in self._ends.values():
            event.set()

    async def _run(self, root: Path, settings: dict[str, Any], task_status: trio.TaskStatus[BrokerController]) -> None:
        end = self._ends[root]
        async with running_broker(root, **settings) as broker:
            task_status.started(broker)
            await end.wait()


@pytest.mark.parametrize("role", ["ASYNC_MASTER", "SYNC_MASTER"])
async def test_the_steps_lead_to_a_pair_with_changed_roles(role: str, tmp_path: Path) -> None:
    """A planned change, in the order that the command prints: no store is emptied, and nothing is lost."""
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    async with name_server() as names, trio.open_nursery() as nursery:
        brokers = Brokers(nursery, QUICK | {"namesrvAddr": names, "registerNameServerPeriod": 10_000})
        master = await brokers.start(one, brokerRole=role, haListenPort=0)
        slave = await brokers.start(two, brokerRole="SLAVE", brokerId=1)
        other = await brokers.start(three, brokerRole="SLAVE", brokerId=2) if role == "SYNC_MASTER" else None
        service = master.context.store.replication.ha
        assert service is not None
        await until(lambda: service.in_sync == (2 if other is None else 3))
        await send(master, 6)
        await in_sync(master, slave)
        async with WireClient.connect(master.endpoint) as client:
            reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, {}, b"brokerPermission=4\n")
            assert reply.code == 0, reply.remark
        await send(master, 2)  # of clients that have not read the route since
        await in_sync(master, slave)
        done = await switch_role(slave, names, "--json")
        assert done.returncode == 0, done.stdout
        lines = json.loads(done.stdout)
        with capture_logs() as logs:
            await brokers.stop(one, master)
        assert "slaves_lack_messages" not in [log["event"] for log in logs]
        await brokers.stop(two, slave)
        new = await brokers.start(two, **lines["newMaster"] | {"haListenPort": 0})
        old = await brokers.start(one, **lines["newSlave"] | {"brokerPermission": 6, "slaveReadEnable": True})
        promoted = new.context.store.replication.ha
        assert promoted is not None
        await until(lambda: promoted.in_sync == (2 if other is None else 3))
        await send(new, 4)
        await in_sync(new, old)
        assert old.context.store.max_offset(TOPIC, 0) == 6
        assert old.context.store.appended_offset == new.context.store.appended_offset
        if other is not None:
            await in_sync(new, other)
            assert other.context.store.appended_offset == new.context.store.appended_offset
        async with WireClient.connect(old.endpoint) as client:
            found = await client.pull_messages(TOPIC, queueId=0, queueOffset=4)
            assert [one.body for one in found] == [b"0", b"2"]  # those of the new master
        done = await switch_role(old, names)
        assert (done.returncode, done.stderr) == (0, b"")
        brokers.stop_all()


@pytest.mark.parametrize("seconds", [0.2, math.inf])
async def test_an_orderly_stop_waits_for_slaves(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ASYNC_MASTER has acknowledged what its slave does not have yet."""
    monkeypatch.setattr(controller, "_SLAVES_SECONDS", 20.0 if seconds < 1 else 0.2)
    async with name_server() as names, trio.open_nursery() as nursery:
        brokers = Brokers(nursery, QUICK | {"namesrvAddr": names})
        master = await brokers.start(tmp_path / "1", haListenPort=0)
        slave = await brokers.start(tmp_path / "2", brokerRole="SLAVE", brokerId=1)
        await send(master, 2)
        await in_sync(master, slave)
        client = slave.replication.client
        assert client is not None
        take = client._log.take

        async def slow(data: Any) -> bool:
            await trio.sleep(seconds)
            return await take(data)

        monkeypatch.setattr(client._log, "take", slow)
        if seconds < 1:
            await send(master, 4)
            with trio.fail_after(20):
                assert await master.context.store.finish_replication(math.inf) == []
            assert slave.context.store.appended_offset == master.context.store.appended_offset
        await send(master, 4)
        end = master.context.store.appended_offset
        assert slave.context.store.appended_offset < end
        with capture_logs() as logs:
            await brokers.stop(tmp_path / "1", master)
        lacking = [(log["slaves"], log["log_end"]) for log in logs if log["event"] == "slaves_lack_messages"]
        if seconds < 1:
            assert slave.context.store.appended_offset == end
            assert lacking == []
        else:
            assert lacking == [(["127.0.0.1"], end)]
        brokers.stop_all()


async def test_a_slave_of_a_lost_sync_master_goes_on_alone(tmp_path: Path) -> None:
    leader = QUICK | {"brokerRole": "SYNC_MASTER"}
    async with pair(tmp_path, leader=leader, **QUICK) as (master, slave):
        service = master.context.store.replication.ha
        assert service is not None
        await until(lambda: service.in_sync == 2)
        await send(master, 4)
        await in_sync(master, slave)
    alone: dict[str, Any] = {"brokerRole": "SYNC_MASTER", "haListenPort": 0}
    async with running_broker(tmp_path / "slave", **alone) as new, WireClient.connect(new.endpoint) as client:
        assert "in-sync replicas not enough" in ((await client.send(TOPIC)).remark or "")
    async with running_broker(tmp_path / "slave", **alone, inSyncReplicas=1) as new:
        await send(new, 2)
        async with WireClient.connect(new.endpoint) as client:
            found = [(await client.pull_messages(TOPIC, queueId=0, queueOffset=at))[0].body for at in range(3)]
            assert found == [b"0", b"2", b"0"]
