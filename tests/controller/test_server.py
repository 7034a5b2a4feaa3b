"""A running controller: elections by itself, notifications, health, metrics, and what it refuses to start with."""

import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.controller.server import NAME, FailingKv, ScriptedBroker, Server, manager, name, running
from tests.namesrv.server import Wire
from tests.ports import free_port
from tests.web_client import get
from trimq.controller.kv import KvError
from trimq.controller.server import StartError
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.runtime.clock import ManualClock


@asynccontextmanager
async def brokers(count: int, *, silent: int = 0) -> AsyncIterator[list[ScriptedBroker]]:
    """``silent`` more brokers accept connections, and answer nothing."""
    found = [ScriptedBroker() for _ in range(count)] + [ScriptedBroker(answers=False) for _ in range(silent)]
    async with trio.open_nursery() as nursery:
        for broker in found:
            await nursery.start(broker.run)
        yield found
        nursery.cancel_scope.cancel()


async def heard(broker: ScriptedBroker, epoch: int) -> RemotingCommand:
    """Wait until a broker is notified of this epoch."""
    with trio.fail_after(5):
        while True:
            command = await broker.notified.receive()
            if command.ext_fields()["masterEpoch"] == str(epoch):
                return command


async def end_lease_of_1(server: Server, *living: int) -> None:
    """Time passes; only these brokers send heartbeats."""
    server.clock.advance(2.9)
    for broker_id in living:
        await server.heartbeat(broker_id)
    server.clock.advance(0.2)


class TestElections:
    async def test_the_lease_of_the_master_ends(self, tmp_path: Path) -> None:
        async with brokers(3) as (first, second, third), running(tmp_path) as server:
            await server.led_by_1(first.address, second.address, third.address)
            await end_lease_of_1(server, 2, 3)
            for broker in (first, second, third):  # the old master too: it may only be cut off
                command = await heard(broker, 2)
                assert command.code == RequestCode.NOTIFY_BROKER_ROLE_CHANGED
                assert command.ext_fields() == {
                    "masterAddress": second.address,
                    "masterBrokerId": "2",
                    "masterEpoch": "2",
                    "syncStateSetEpoch": "3",
                }
                assert json.loads(bytes(command.body)) == {"syncStateSet": [2], "syncStateSetEpoch": 3}

    async def test_a_broker_that_does_not_answer_delays_no_other(self, tmp_path: Path) -> None:
        gone = f"127.0.0.1:{free_port()}"
        async with brokers(1, silent=1) as (second, silent), running(tmp_path) as server:
            await server.led_by_1(gone, second.address, silent.address, "no address")
            await end_lease_of_1(server, 2, 3, 4)
            await heard(second, 2)
            await heard(silent, 2)
            # The controller goes on, with what is no address too.
            fields = name(brokerId="2", designateElect="true")
            code, _, _ = await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, fields)
            assert code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST

    async def test_brokers_of_elections_by_request_hear_too(self, tmp_path: Path) -> None:
        async with brokers(2) as (first, second), running(tmp_path) as server:
            await server.led_by_1(first.address, second.address)
            fields = name(brokerId="1", brokerAddress=first.address, trimqStarted="true")
            assert (await server.ask(RequestCode.CONTROLLER_REGISTER_BROKER, fields))[0] == 0
            await heard(second, 2)

    async def test_without_notifications(self, tmp_path: Path) -> None:
        async with brokers(2) as (first, second), running(tmp_path, notifyBrokerRoleChanged="false") as server:
            await server.led_by_1(first.address, second.address)
            fields = name(brokerId="2", designateElect="true")
            assert (await server.ask(RequestCode.CONTROLLER_ELECT_MASTER, fields))[0] == 0
            await trio.testing.wait_all_tasks_blocked(0.05)
            for broker in (first, second):
                with pytest.raises(trio.WouldBlock):
                    broker.notified.receive_nowait()

    async def test_the_scan_finds_what_the_watch_did_not(self, tmp_path: Path) -> None:
        """A member of the set that comes back after its master has gone: no lease ends then."""
        async with running(tmp_path, notifyBrokerRoleChanged="false") as server:
            await server.led_by_1("127.0.0.1:1001", "127.0.0.1:1002")
            server.clock.advance(9)
            await trio.testing.wait_all_tasks_blocked()
            assert (await server.heartbeat(2))["masterEpoch"] == "1"
            with trio.fail_after(10):
                while (found := await server.heartbeat(2))["masterEpoch"] != "2":
                    server.clock.advance(0.5)
            assert found["masterBrokerId"] == "2"

    async def test_a_group_for_which_no_broker_can_be_elected(self, tmp_path: Path) -> None:
        async with running(tmp_path, notifyBrokerRoleChanged="false") as server:
            await server.led_by_1("127.0.0.1:1001")
            await server.join(2)
            with capture_logs() as logs:
                await end_lease_of_1(server, 2)
                with trio.fail_after(5):
                    while not any(line["event"] == "no_master_elected" for line in logs):
                        await trio.lowlevel.checkpoint()
            (lost,) = [line for line in logs if line["event"] == "broker_not_alive"]
            assert (lost["broker_name"], lost["broker_id"]) == (NAME, "1")

    async def test_what_ended_while_no_controller_ran(self, tmp_path: Path) -> None:
        """All leases begin anew with the controller: a master that is gone is replaced after its whole time."""
        async with running(tmp_path, sqlite=True, notifyBrokerRoleChanged="false") as server:
            await server.led_by_1("127.0.0.1:1001", "127.0.0.1:1002")
        async with running(tmp_path, sqlite=True, notifyBrokerRoleChanged="false") as server:
            assert (await server.heartbeat(2))["masterBrokerId"] == "1"
            await end_lease_of_1(server, 2)
            with trio.fail_after(10):
                while (await server.heartbeat(2)).get("masterBrokerId") != "2":
                    await trio.lowlevel.checkpoint()


class TestHealth:
    async def reasons(self, server: Server) -> dict[str, str]:
        answer = await get(server.controller.web_endpoints[0], "/readyz")
        found = {one["code"]: one["text"] for one in json.loads(answer.body)["reasons"]}
        assert answer.status == (503 if found else 200)
        return found

    async def test_a_store_that_is_silent(self, tmp_path: Path) -> None:
        async with running(tmp_path, healthPort="0") as server:
            with trio.fail_after(5):
                while await self.reasons(server):
                    await trio.lowlevel.checkpoint()
                server.kv.failure = KvError("etcd does not answer", sent=False)
                with capture_logs() as logs:
                    while "controller_store_silent" not in await self.reasons(server):
                        server.clock.advance(1)
                    server.clock.advance(6)
                    await self.reasons(server)
                    assert (await self.reasons(server))["controller_store_silent"] == "etcd does not answer"
                    server.kv.failure = None
                    while await self.reasons(server):
                        server.clock.advance(1)
            assert [line["event"] for line in logs if "store" in line["event"]] == [
                "controller_store_failed",
                "controller_store_answers",
            ]

    async def test_a_store_that_has_never_answered(self, tmp_path: Path) -> None:
        clock = ManualClock()
        kv = FailingKv(clock)
        kv.failure = KvError("etcd does not answer", sent=False)
        controller = manager(tmp_path, clock, kv, healthPort="0")
        async with trio.open_nursery() as nursery:
            await nursery.start(controller.run)
            readiness = controller.health.readiness()
            assert [reason.code for reason in readiness.reasons] == ["controller_store_silent"]
            controller.shutdown()

    async def test_a_watch_that_ends_is_begun_again(self, tmp_path: Path) -> None:
        class Ending(FailingKv):
            watches = 0

            async def watch(self, *_arguments: object) -> None:
                self.watches += 1
                await trio.lowlevel.checkpoint()
                if self.watches == 2:
                    raise KvError("etcd ends a watch", sent=False)

        clock = ManualClock()
        kv = Ending(clock)
        controller = manager(tmp_path, clock, kv)
        async with trio.open_nursery() as nursery:
            await nursery.start(controller.run)
            with trio.fail_after(5):
                while kv.watches < 4:
                    clock.advance(0.5)
                    await trio.lowlevel.checkpoint()
            controller.shutdown()

    async def test_metrics(self, tmp_path: Path) -> None:
        async with running(tmp_path, metricsExporterType="PROM", metricsPromExporterPort="0") as server:
            await server.led_by_1("127.0.0.1:1001", "127.0.0.1:1002")
            page = (await get(server.controller.web_endpoints[0], "/metrics")).body
        assert "\ntrimq_controller_elections_total 1.0\n" in page
        assert "\ntrimq_controller_brokers 2.0\n" in page
        assert "\ntrimq_ready 1.0\n" in page
        families = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
        assert len(families) == len({name for name, _ in families}) > 20


class TestStart:
    async def test_a_port_that_is_taken(self, tmp_path: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            port = sock.getsockname()[1]
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
                manager(tmp_path, ManualClock(), None, listenPort=str(port)).bind()

    async def test_a_database_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "controller.db").write_bytes(b"no database" * 500)
        controller = manager(tmp_path, ManualClock(), None)
        with pytest.raises(StartError, match="set controllerStorePath"):
            await controller.run()
        assert controller.stopped.is_set()

    async def test_elections_wait_for_first_heartbeats(self, tmp_path: Path) -> None:
        began = trio.current_time()
        async with running(tmp_path) as server:
            assert began + 1.5 <= server.controller.replicas.hears_until <= trio.current_time() + 1.5

    async def test_stopping_answers_what_was_asked(self, tmp_path: Path) -> None:
        async with running(tmp_path, sqlite=True) as server:
            await server.join(1)
            server.controller.shutdown()
            await server.controller.stopped.wait()
            assert await server.wire.stream.receive_some() == b""

    async def test_two_controllers_on_one_store(self, tmp_path: Path) -> None:
        clock = ManualClock()
        kv = FailingKv(clock)
        controllers = [manager(tmp_path, clock, kv, notifyBrokerRoleChanged="false") for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for controller in controllers:
                await nursery.start(controller.run)
            assert controllers[0].address is not None
            async with await trio.open_tcp_stream(*controllers[0].address) as stream:
                server = Server(controllers[0], clock, kv, Wire(stream))
                await server.led_by_1("127.0.0.1:1001", "127.0.0.1:1002")
                await end_lease_of_1(server, 2)
                with trio.fail_after(5):
                    while (await server.heartbeat(2))["masterEpoch"] != "2":
                        await trio.lowlevel.checkpoint()
            elections = [controller.replicas.elections for controller in controllers]
            assert sum(elections) == 2, "the first, and one after the end of the lease"
            for controller in controllers:
                controller.shutdown()
