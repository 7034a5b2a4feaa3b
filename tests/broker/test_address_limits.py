"""Limits of addresses and preambles on a running broker: its ports, its metrics, its policies, its name server."""

import json
from pathlib import Path

import pytest
import trio

from tests.broker.auth.signed import User, acl, closed_broker
from tests.broker.wire_client import WireClient, send_ext
from tests.controller.server import manager
from tests.namesrv.server import running
from tests.web_client import get
from trimq.broker.testing import configuration, running_broker
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.runtime.clock import ManualClock

BUSY = ResponseCode.SYSTEM_BUSY


async def codes(address: tuple[str, int], code: int, count: int, preamble: bytes = b"") -> list[int]:
    """The codes of the replies to some requests on one connection; short if it was closed."""
    async with await trio.open_tcp_stream(*address) as stream:
        await stream.send_all(preamble + b"".join(encode(RemotingCommand(code, n)) for n in range(count)))
        decoder, found = FrameDecoder(), dict[int, int]()
        while len(found) < count:
            data = await stream.receive_some(65536)
            if not data:
                break
            found |= {command.opaque: command.code for command in decoder.feed(bytes(data))}
        return [found[number] for number in sorted(found)]


async def test_sends_and_pulls_beyond_the_limit_are_busy_and_the_fast_paths_open(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        running_broker(
            tmp_path,
            clock=clock,
            maxRequestsPerSecondPerAddress=20,
            metricsExporterType="PROM",
            metricsPromExporterPort=0,
        ) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        # All at once: so they are served together, where the native extension is.
        opaques = [await client.post(310, send_ext("T"), b"x") for _ in range(25)]
        replies = [await client.reply(opaque) for opaque in opaques]
        assert sorted(reply.code for reply in replies) == [0] * 20 + [BUSY] * 5
        assert broker.context.store.max_offset("T", 0) == 20
        assert (await client.pull("T")).code == BUSY
        (connection,) = broker.reactor.connections.values()
        assert connection.table.fast
        clock.advance(1)
        assert len(await client.pull_messages("T")) == 20
        page = (await get(broker.web_endpoints[-1], "/metrics")).body
        assert 'trimq_limited_total{limit="maxRequestsPerSecondPerAddress"} 6.0' in page


async def test_policies_see_the_address_of_the_preamble_from_a_proxy_only(tmp_path: Path) -> None:
    preamble = b"PROXY TCP4 10.1.2.3 10.0.0.9 4711 10911\r\n"
    for proxies, allowed in (("127.0.0.0/8", True), ("10.0.0.0/8", False)):
        async with closed_broker(tmp_path / proxies.partition("/")[0], proxyProtocolNetworks=proxies) as (broker, root):
            await root.make("app")
            await root.ask(3006, {"subject": "User:app"}, acl("app", "Topic:T Pub", ips=["10.1.2.3"]))
            stream = await trio.open_tcp_stream(*broker.endpoint)
            async with stream:
                await stream.send_all(preamble)
                user = User(root.client, "app")
                assert (await user.ask(310, send_ext("T"), b"x")).code == ResponseCode.NO_PERMISSION
                client = WireClient(stream)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(client._read)
                    if allowed:
                        assert (await User(client, "app").ask(310, send_ext("T"), b"x")).code == 0
                    else:
                        await client.until_closed()
                        assert broker.reactor.stats.preambles_refused == 1
                    nursery.cancel_scope.cancel()


async def test_the_name_server_in_the_process_and_a_controller_have_the_limits(tmp_path: Path) -> None:
    clock = ManualClock()
    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    keys = {"maxRequestsPerSecondPerAddress": "5", "proxyProtocolNetworks": "127.0.0.1"}
    async with running(tmp_path, **keys) as server:
        assert await codes(server.address, code, 7) == [0] * 5 + [BUSY] * 2
        assert await codes(server.address, code, 2, b"PROXY TCP4 10.1.2.3 10.0.0.9 4711 10911\r\n") == [0, 0]
    controller = manager(tmp_path, clock, None, **keys)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(controller.run)
        found = await codes(address, RequestCode.CONTROLLER_GET_METADATA_INFO, 7)
        assert found == [0] * 5 + [BUSY] * 2
        controller.shutdown()
    async with running_broker(
        tmp_path / "broker",
        embeddedNamesrvEnable=True,
        embeddedNamesrvPort=0,
        maxRequestsPerSecondPerAddress=5,
        proxyProtocolNetworks="127.0.0.1",
    ) as broker:
        assert broker.namesrv is not None
        assert broker.namesrv.address is not None
        preamble = b"PROXY TCP4 10.1.2.4 10.0.0.9 4711 10911\r\n"
        assert BUSY in await codes(broker.namesrv.address, code, 1000, preamble)


@pytest.mark.parametrize("text", ["10.0.0.1/8", "here", "10.0.0.1;10.0.0.2"])
def test_what_is_no_network(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"IP addresses or networks as 10\.0\.0\.0/8"):
        configuration(tmp_path, {"proxyProtocolNetworks": text})


@pytest.mark.parametrize("text", ["0.0.0.0/0", "10.0.0.1,::/0", "0.0.0.0/1,128.0.0.0/1", "::ffff:0:0/96"])
def test_proxies_at_all_addresses_refuse_the_start(tmp_path: Path, text: str) -> None:
    """Each client could choose the address that policies and limits see."""
    with pytest.raises(ConfigError, match="the addresses of your proxies") as caught:
        configuration(tmp_path, {"proxyProtocolNetworks": text})
    assert caught.value.key == "proxyProtocolNetworks"


async def test_no_request_changes_a_limit(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, WireClient.connect(broker.endpoint) as client:
        for key in ("maxConnectionsPerAddress", "maxRequestsPerSecondPerUser", "adminListenAddress"):
            reply = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, None, f"{key}=1\n".encode())
            assert reply.code == ResponseCode.NO_PERMISSION, json.dumps(reply.remark)
