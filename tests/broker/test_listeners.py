"""Named listeners: one broker, a different address for each network; and the warning about an unreachable address."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.wire_client import WireClient
from tests.docs.examples import examples
from tests.namesrv.builders import registration_body, registration_header, topic
from tests.namesrv.server import running
from trimq.broker import addresses
from trimq.broker.config import load_broker
from trimq.broker.testing import running_broker
from trimq.namesrv.config import load_namesrv
from trimq.protocol.codes import RequestCode
from trimq.protocol.register_broker_body import encode_register_broker_body
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.network import SystemNetwork


async def route(endpoint: tuple[str, int], code: int = RequestCode.GET_ROUTEINFO_BY_TOPIC) -> Any:
    async with WireClient.connect(endpoint) as client:
        reply = await client.ask(code, {"topic": "TBW102"})
        assert reply.code == 0, reply.remark
        return json.loads(bytes(reply.body))


async def test_each_client_gets_the_address_of_the_listener_it_came_to(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "embeddedNamesrvEnable": True,
        "embeddedNamesrvPort": 0,
        "embeddedNamesrvNamedListenPorts": "outside=0;other=0",
        "advertisedListeners": "outside=broker.example:20911; vpn=10.8.0.1:10911",
    }
    async with running_broker(tmp_path, **keys) as broker:
        assert await broker.context.registration.registered()
        namesrv = broker.namesrv
        assert namesrv is not None
        assert namesrv.address is not None
        expected = {
            namesrv.address: broker.address,
            namesrv.named_endpoints["outside"]: "broker.example:20911",
            namesrv.named_endpoints["other"]: broker.address,  # the broker has no listener of this name
        }
        for _ in range(2):  # first built, then from the cache
            for endpoint, address in expected.items():
                found = await route(endpoint)
                assert [data["brokerAddrs"] for data in found["brokerDatas"]] == [{"0": address}]
        cluster = await route(namesrv.named_endpoints["outside"], RequestCode.GET_BROKER_CLUSTER_INFO)
        assert cluster["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": "broker.example:20911"}


async def test_new_addresses_replace_those_in_the_routes(tmp_path: Path) -> None:
    async with running(tmp_path, namedListenPorts="outside=0") as server, server.connect() as wire:
        outside = server.controller.named_endpoints["outside"]
        header = registration_header("broker-a", 0, "127.0.0.1:10911")
        for address in ("a.example:1", "b.example:2"):
            header.listeners = json.dumps({"outside": address})
            reply = await wire.ask(RequestCode.REGISTER_BROKER, header, _body())
            assert reply.code == 0
            found = await route(outside)
            assert found["brokerDatas"][0]["brokerAddrs"] == {"0": address}
        header.listeners = "[1]"
        reply = await wire.ask(RequestCode.REGISTER_BROKER, header, _body())
        assert (reply.code, str(reply.remark).partition(":")[0]) == (1, "listeners is no JSON of name to address")


def _body() -> bytes:
    return encode_register_broker_body(registration_body(topic("A"), topic("TBW102", read=8, write=8, perm=7)))


@pytest.mark.parametrize("value", ["outside", "=h:1", "outside=h", "outside=h:x", "outside="])
def test_listeners_that_are_none(value: str) -> None:
    with pytest.raises(ConfigError, match="NAME=HOST:PORT"):
        load_broker(flags={"advertisedListeners": (value, "test")})


@pytest.mark.parametrize("value", ["outside", "=1", "outside=h:1", "outside=70000"])
def test_named_ports_that_are_none(value: str) -> None:
    with pytest.raises(ConfigError, match="NAME=PORT"):
        load_namesrv(flags={"namedListenPorts": (value, "test")})


def test_the_manuals_listeners() -> None:
    [example] = [text for text in examples("docs/operate.md") if text.startswith("# name server")]
    _, settings = example.splitlines()
    name_server, broker = (setting.split("=", 1) for setting in settings.split())
    named = load_namesrv(flags={name_server[0]: (name_server[1], "manual")})
    embedded = load_broker(flags={"embeddedNamesrvNamedListenPorts": (name_server[1], "manual")})
    configured = load_broker(flags={broker[0]: (broker[1], "manual")})
    assert named.value("namedListenPorts") == embedded.value("embeddedNamesrvNamedListenPorts") == "outside=9877"
    assert configured.value("advertisedListeners") == "outside=mq.example.com:20911"


async def test_an_address_without_an_answer_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with capture_logs() as logs:
            await addresses.warn_if_unreachable(address, ("127.0.0.1", 1), SystemNetwork())
        assert [(log["event"], log["address"]) for log in logs] == [("advertised_address_unreachable", address)]
        taken.listen()
        with capture_logs() as logs, trio.fail_after(5):
            await addresses.warn_if_unreachable(address, ("127.0.0.1", 1), SystemNetwork())
        assert logs == []
