"""adminListenAddress: administration is served there only, everything else on all ports."""

import socket
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from tests.broker.auth.signed import closed_broker
from tests.broker.wire_client import WireClient
from tests.docs.commands import ALL
from tests.ports import free_port
from trimq.broker.cli import banner
from trimq.broker.config import BrokerConfig, NettyServerConfig
from trimq.broker.controller import BrokerController
from trimq.broker.ports import ClientPorts
from trimq.broker.start_error import StartError
from trimq.broker.testing import configuration, running_broker
from trimq.client.mqadmin import main as main_of_mqadmin
from trimq.protocol.auth.admin_port import ON_ADMIN_PORT
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.network import SystemNetwork


def endpoints(broker: BrokerController) -> list[tuple[str, int]]:
    """Main port, VIP port, admin port."""
    found = [text.partition(" ")[0].rpartition(":") for text in broker.listening]
    return [(host.replace("0.0.0.0", "127.0.0.1"), int(port)) for host, _, port in found]


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.ROCKETMQ])
async def test_every_code_on_every_port(tmp_path: Path, encoding: Encoding) -> None:
    port = free_port()
    async with running_broker(tmp_path, fastListenPort=free_port(), adminListenAddress=f"127.0.0.1:{port}") as broker:
        main, vip, admin = endpoints(broker)
        assert admin == ("127.0.0.1", port)
        for endpoint in (main, vip, admin):
            async with WireClient.connect(endpoint, encoding) as client:
                for code in RequestCode:
                    # Empty requests: it is only about whether the port refuses them.
                    reply = await client.ask(code)
                    refused = reply.code == ResponseCode.NO_PERMISSION and f"127.0.0.1:{port} " in (reply.remark or "")
                    assert refused == (endpoint != admin and code in ON_ADMIN_PORT), (endpoint, code)
                assert (await client.ask(7777)).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert broker.reactor.stats.admin_refused == 2 * len(ON_ADMIN_PORT)
        assert await _ask(main, RequestCode.GET_BROKER_CONFIG) == (
            16,
            (
                f"requests with this code are served only at 127.0.0.1:{port} (adminListenAddress): "
                "connect to that address"
            ),
        )
        assert any(f"127.0.0.1:{port} (for administrators)" in line for line in banner(broker, 1.0))


async def _ask(endpoint: tuple[str, int], code: int) -> tuple[int, str | None]:
    async with WireClient.connect(endpoint) as client:
        reply = await client.ask(code)
        return reply.code, reply.remark


async def test_clients_work_on_all_ports_and_their_fast_paths_stay_open(tmp_path: Path) -> None:
    async with running_broker(tmp_path, adminListenAddress="127.0.0.1:0") as broker:
        main, admin = endpoints(broker)
        for endpoint in (main, admin):
            async with WireClient.connect(endpoint) as client:
                assert (await client.send("T")).code == 0
                assert (await client.pull("T")).code == 0
                tables = {connection.table for connection in broker.reactor.connections.values()}
                assert tables
                assert all(table.fast for table in tables)


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main_of_mqadmin, words, env={"NAMESRV_ADDR": ""})
    return result.exit_code, result.output


async def test_mqadmin_uses_the_admin_address_with_b(tmp_path: Path) -> None:
    async with running_broker(tmp_path, adminListenAddress="127.0.0.1:0") as broker:
        main, admin = (f"{host}:{port}" for host, port in endpoints(broker))
        program, *words = ALL["security admin_port"].split()
        assert program == "mqadmin"
        at = words.index("-b") + 1
        words[at] = main
        code, output = await trio.to_thread.run_sync(run, *words)
        assert code != 0
        assert f"{admin} (adminListenAddress)" in output.replace("\n", " ")
        assert broker.context.topics.queues_of("orders") is None
        words[at] = admin
        code, output = await trio.to_thread.run_sync(run, *words)
        assert code == 0, output
        assert broker.context.topics.queues_of("orders")
        code, output = await trio.to_thread.run_sync(run, "getBrokerConfig", "-b", admin)
        assert code == 0, output
        assert "adminListenAddress" in output


async def test_the_port_comes_before_the_signature_and_is_no_way_around_it(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, adminListenAddress="127.0.0.1:0") as (broker, root):
        admin = endpoints(broker)[-1]
        assert "adminListenAddress" in ((await root.ask(26)).remark or "")
        assert "adminListenAddress" in ((await root.client.ask(26)).remark or "")
        async with WireClient.connect(admin) as client:
            root.client = client
            assert (await client.ask(26)).remark == "username cannot be null."
            assert (await root.ask(26)).code == 0


async def test_without_the_key_there_is_no_port_and_no_refusal(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        assert await _ask(endpoints(broker)[0], RequestCode.GET_BROKER_CONFIG) == (0, None)
        assert [feature.name for feature in broker.gate.features] == []


async def test_an_address_that_no_machine_can_have_ends_the_start(tmp_path: Path) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartError, match=r"a\.\.b:1: this is no name of a machine: .*adminListenAddress"),
        flatten_subgroups=True,
    ):
        async with running_broker(tmp_path, adminListenAddress="a..b:1"):
            pass


async def test_a_taken_address_ends_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = configuration(tmp_path, {"adminListenAddress": f"127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.RaisesGroup(pytest.RaisesExc(StartError, match="adminListenAddress"), flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                await nursery.start(BrokerController(settings).run)


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0", "::"])
@pytest.mark.parametrize("key", ["listenPort", "fastListenPort", "haListenPort"])
def test_a_port_that_this_broker_has_already_is_refused(tmp_path: Path, key: str, bind: str) -> None:
    ports = {"listenPort": 10911, "fastListenPort": 10909, "haListenPort": 10912}
    keys = ports | {"bindAddress": bind, "adminListenAddress": f"127.0.0.1:{ports[key]}"}
    with pytest.raises(ConfigError) as caught:
        configuration(tmp_path, keys)
    assert (caught.value.key, caught.value.expected) == ("adminListenAddress", f"another port than {key}={ports[key]}")
    if bind == "127.0.0.1":
        configuration(tmp_path, keys | {"adminListenAddress": f"127.0.0.2:{ports[key]}"})
    with pytest.raises(ConfigError, match="another port than"):
        configuration(tmp_path, keys | {"adminListenAddress": f"[::]:{ports[key]}"})


def test_a_slave_has_no_port_for_slaves(tmp_path: Path) -> None:
    keys = {"brokerRole": "SLAVE", "brokerId": 1, "haListenPort": 10912, "adminListenAddress": "127.0.0.1:10912"}
    configuration(tmp_path, keys)


@pytest.mark.parametrize("key", ["listenPort", "fastListenPort"])
def test_the_same_port_by_another_name_of_the_machine_blames_the_admin_address(tmp_path: Path, key: str) -> None:
    """Both can be bound; only listening fails."""
    ports = {"listenPort": free_port(), "fastListenPort": free_port()}
    settings = configuration(tmp_path, ports | {"adminListenAddress": f"127.1:{ports[key]}"})
    with ClientPorts(settings.section(BrokerConfig), settings.section(NettyServerConfig), SystemNetwork()) as found:
        expected = (
            rf"cannot listen on 127\.0\.0\.1:{ports[key]}: Address already in use: set another adminListenAddress"
        )
        with pytest.raises(StartError, match=expected):
            found.open()


@pytest.mark.parametrize("address", ["10911", ":1", "host:", "host:70000", "host:x"])
def test_what_is_no_address(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        configuration(tmp_path, {"adminListenAddress": address})
