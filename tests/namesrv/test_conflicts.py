"""Two brokers with one name and id: the first keeps the route while it lives, and all three processes report it."""

import json
import socket
from pathlib import Path

import trio
from structlog.testing import capture_logs

from tests.namesrv.builders import CLUSTER, Cluster, registration_body, registration_header, topic
from tests.namesrv.server import running
from trimq.namesrv.conflicts import BrokerIdConflictError
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.headers.namesrv import RegisterBrokerRequestHeader
from trimq.remoting.server.connection import PROBE_SECONDS, Connection

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
ONE, TWO = object(), object()
TOPICS = (topic("A"), topic("B"))


def route(cluster: Cluster) -> dict[str, str]:
    body = cluster.routes.route("A")
    assert body is not None
    return json.loads(body)["brokerDatas"][0]["brokerAddrs"]  # type: ignore[no-any-return]


def refused(cluster: Cluster, addr: str = SECOND, connection: object = TWO) -> bool:
    try:
        cluster.register(topic("A", read=9), topic("C"), addr=addr, connection=connection)
    except BrokerIdConflictError as error:
        return "give it another brokerName" in error.remark and addr in error.remark
    return False


def reported_conflict(cluster: Cluster) -> str | None:
    return cluster.routes.register_broker(registration_header(addr=FIRST), registration_body(*TOPICS), ONE).conflict


def test_the_second_one_is_refused_and_changes_nothing() -> None:
    # Guards the route: it contains neither the address nor the topics of the second broker.
    cluster = Cluster()
    cluster.register(*TOPICS, addr=FIRST, connection=ONE)
    with capture_logs() as logs:
        for _ in range(3):
            assert refused(cluster)
    assert [(log["event"], log["kept"], log["refused"]) for log in logs] == [("broker_id_conflict", FIRST, SECOND)]
    assert route(cluster) == {"0": FIRST}
    assert cluster.routes.route("C") is None
    assert cluster.routes.topics.queues("A")["broker-a"].read_queue_nums == 4
    assert cluster.routes.cluster_info().broker_addr_table["broker-a"].broker_addrs == {"0": FIRST}


def test_the_first_one_hears_of_it_until_the_second_one_gives_up() -> None:
    # Guards that the holder is notified, by complete and by repeated registrations, and only while the conflict lasts.
    cluster = Cluster()
    header, raw = registration_header(addr=FIRST), b"the same bytes"
    assert reported_conflict(cluster) is None
    assert refused(cluster)
    assert reported_conflict(cluster) == SECOND
    assert reported_conflict(cluster) == SECOND
    cluster.routes.remember(header, raw)
    renewed = cluster.routes.renew(header, raw, ONE)
    assert renewed is not None
    assert renewed.conflict == SECOND
    for _ in range(4):
        cluster.clock.advance(31)
        renewed = cluster.routes.renew(header, raw, ONE)
    assert renewed is not None
    assert renewed.conflict is None
    assert reported_conflict(cluster) is None


def test_who_is_gone_is_followed() -> None:
    # Guards brokers that move: a closed connection or silence ends the claim of the first one.
    cluster = Cluster()
    cluster.register(*TOPICS, addr=FIRST, connection=ONE)
    assert refused(cluster)
    cluster.routes.connection_closed(ONE)
    assert not refused(cluster)
    assert route(cluster) == {"0": SECOND}
    cluster.clock.advance(119)
    assert refused(cluster, FIRST, ONE)
    cluster.clock.advance(2)  # before a scan for silent brokers
    assert not refused(cluster, FIRST, ONE)
    assert route(cluster) == {"0": FIRST}


def test_what_is_no_conflict() -> None:
    # Guards the restart at the same address, a new address of one process, other ids, and the controller's choice.
    cluster = Cluster()
    cluster.register(*TOPICS, addr=FIRST, connection=ONE)
    cluster.register(*TOPICS, addr=FIRST, connection=TWO)  # restarted; its old connection is not closed yet
    cluster.register(*TOPICS, addr=SECOND, connection=TWO)  # brokerIP1 has changed
    assert route(cluster) == {"0": SECOND}
    cluster.register(*TOPICS, addr="127.0.0.1:3", broker_id=1, connection=ONE)
    cluster.register(*TOPICS, addr=FIRST, connection=ONE, state_version=1)
    assert route(cluster) == {"0": FIRST, "1": "127.0.0.1:3"}


def test_a_slave_that_was_elected_gets_in() -> None:
    # Guards DLedger's failover: a live slave of the group becomes the master over its existing connection, without a
    # state version, while the old master's machine has failed without closing its connection.
    cluster = Cluster()
    cluster.register(*TOPICS, addr=FIRST, connection=ONE)
    cluster.register(*TOPICS, addr=SECOND, broker_id=2, connection=TWO)
    cluster.register(*TOPICS, addr=SECOND, broker_id=0, connection=TWO)
    assert route(cluster) == {"0": SECOND}
    assert refused(cluster, FIRST, ONE)  # the old master still registers as master
    cluster.register(*TOPICS, addr=FIRST, broker_id=1, connection=ONE)
    assert route(cluster) == {"0": SECOND, "1": FIRST}


def test_a_slave_that_was_started_anew_as_a_master_does_not() -> None:
    # Guards the route against a wrong configuration: another process at the slave's address was not elected.
    cluster = Cluster()
    cluster.register(*TOPICS, addr=FIRST, connection=ONE)
    cluster.register(*TOPICS, addr=SECOND, broker_id=1, connection=object())
    assert refused(cluster)
    assert route(cluster) == {"0": FIRST, "1": SECOND}


async def test_over_the_wire(tmp_path: Path) -> None:
    # Guards the refusal's form, the notification of the first broker, the probe of its connection, and the takeover.
    def header(addr: str) -> RegisterBrokerRequestHeader:
        return registration_header(addr=addr)

    body = encode_json(registration_body(*TOPICS))
    async with running(tmp_path) as server, server.connect() as second:
        async with server.connect() as first:
            assert (await first.ask(RequestCode.REGISTER_BROKER, header(FIRST), body)).code == 0
            holder = server.controller.routes.live_brokers()[0].connection
            assert isinstance(holder, Connection)
            assert not holder.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            reply = await second.ask(RequestCode.REGISTER_BROKER, header(SECOND), body)
            assert reply.code == 1
            assert str(reply.remark).startswith("broker_id_conflict: brokerName broker-a with brokerId 0 belongs to")
            assert reply.ext_fields() == {"conflict": FIRST}
            assert holder.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert holder.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == PROBE_SECONDS * 1000
            reply = await first.ask(RequestCode.REGISTER_BROKER, header(FIRST), body)
            assert (reply.code, reply.ext_fields()) == (0, {"conflict": SECOND})
            question = {"brokerName": "broker-a", "brokerAddr": FIRST, "clusterName": CLUSTER, "brokerId": "0"}
            reply = await first.ask(
                RequestCode.QUERY_DATA_VERSION, question
            )  # a broker with forceRegister=false sends this request instead
            assert reply.ext_fields()["conflict"] == SECOND
        with trio.fail_after(10):
            while (await second.ask(RequestCode.REGISTER_BROKER, header(SECOND), body)).code:
                await trio.lowlevel.checkpoint()
        reply = await second.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "A"})
        assert json.loads(bytes(reply.body))["brokerDatas"][0]["brokerAddrs"] == {"0": SECOND}
