"""mqadmin switchRole: what would be lost if a slave became the master, and the steps it shows, which are followed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import trio

from tests.broker.test_replication import TOPIC, cut_off, in_sync, pair
from tests.broker.wire_client import WireClient
from tests.store.replication.pairs import until
from trimq.broker.controller import BrokerController
from trimq.broker.testing import running_broker

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


async def test_the_steps_lead_to_a_pair_with_changed_roles(tmp_path: Path) -> None:
    """A planned change: no store is emptied, and nothing is lost. The lines are those that the command prints."""
    async with pair(tmp_path, leader=QUICK, **QUICK) as (master, slave):
        await send(master, 6)
        await in_sync(master, slave)
        done = await switch_role(slave, names_of(master), "--json")
        assert done.returncode == 0, done.stdout
        found = json.loads(done.stdout)
    # Both have ended. The new master is first, and has the name server of this test.
    leader: dict[str, Any] = found["newMaster"] | {"haListenPort": 0}
    async with running_broker(
        tmp_path / "slave", embeddedNamesrvEnable=True, embeddedNamesrvPort=0, **QUICK, **leader
    ) as new:
        await send(new, 4)
        follower: dict[str, Any] = found["newSlave"] | QUICK | {"namesrvAddr": names_of(new), "slaveReadEnable": True}
        async with running_broker(tmp_path / "master", **follower) as old:
            await in_sync(new, old)
            assert old.context.store.max_offset(TOPIC, 0) == 5
            assert old.context.store.appended_offset == new.context.store.appended_offset
            async with WireClient.connect(old.endpoint) as client:
                found = await client.pull_messages(TOPIC, queueId=0, queueOffset=3)
                assert [one.body for one in found] == [b"0", b"2"]  # those of the new master
            done = await switch_role(old, names_of(new))
            assert (done.returncode, done.stderr) == (0, b"")
