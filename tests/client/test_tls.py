"""The SDK, its blocking facade and mqadmin over TLS, against our name server and broker."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from click.testing import CliRunner

from tests.canary import permit
from tests.client.tls_servers import TlsServers, server_keys, tls_servers
from tests.tls_certificates import PASSWORD, Certificates, lock
from trimq.client import (
    Admin,
    ClientOptions,
    Consumer,
    Message,
    Producer,
    PullConsumer,
    Tls,
    TransactionProducer,
    TransactionState,
    UnreachableError,
    UsageError,
    sync,
)
from trimq.client.mqadmin import main
from trimq.pipeline.topics.connecting import connect
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90, func_only=True)]


@pytest.fixture(scope="module", params=["permissive", "enforcing", "mutual"])
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def servers(mode: str, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServers]:
    keys = server_keys(certificates, "enforcing" if mode == "mutual" else mode, mutual=mode == "mutual")
    if mode == "permissive":
        keys["tls.enable"] = "true"  # the broker registers over TLS
    with tls_servers(tmp_path_factory.mktemp(mode), keys) as running:
        yield running


@pytest.fixture(autouse=True)
def _servers_print_nothing() -> None:
    """They run in this process, and mqadmin's output is compared. tests/conftest.py restores the log."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@pytest.fixture
def tls(certificates: Certificates) -> Tls:
    return Tls(certificates.ca, certificates.client.cert, certificates.client.key)


@pytest.fixture
def options(tls: Tls) -> ClientOptions:
    return ClientOptions(tls=tls)


async def test_send_and_consume(servers: TlsServers, options: ClientOptions, name: str) -> None:
    namesrv = servers.namesrv
    bodies = {b"%d" % number for number in range(100)} | {bytes(300_000)}
    async with Admin(namesrv, options=options) as admin:
        await admin.create_topic(name, queues=2)
    async with (
        Producer(name, namesrv=namesrv, options=options, compression=None) as producer,
        anyio.create_task_group() as sends,
    ):
        for body in bodies:
            sends.start_soon(producer.send, Message(name, body))
    seen: list[bytes] = []
    async with Consumer(name, name, namesrv=namesrv, options=options, start="first") as consumer:
        async for message in consumer:
            async with message.process():
                seen.append(message.body)
            if len(seen) == len(bodies):
                break
    assert set(seen) == bodies
    async with PullConsumer(name, namesrv=namesrv, options=options, start="first") as puller:
        assert len(await puller.queues(name)) == 2


async def test_message_traces_are_sent_with_tls_too(servers: TlsServers, options: ClientOptions, name: str) -> None:
    """Issue 3326 of RocketMQ: the producer of traces did not use the TLS of the producer whose sends it reports."""
    async with Admin(servers.namesrv, options=options) as admin:
        for topic in (name, f"{name}Trace"):
            await admin.create_topic(topic, queues=1)
    async with Producer(
        name, namesrv=servers.namesrv, options=options, enable_msg_trace=True, customized_trace_topic=f"{name}Trace"
    ) as producer:
        receipt = await producer.send(Message(name, b"one"))
    async with Consumer(name, f"{name}Trace", namesrv=servers.namesrv, options=options, start="first") as consumer:
        message = await anext(consumer)
        assert receipt.message_id.encode() in message.body


async def test_plain_clients(servers: TlsServers, mode: str, name: str) -> None:
    async with Admin(servers.namesrv) as admin:
        if mode == "permissive":
            assert (await admin.cluster_info()).broker_addr_table
        else:
            with pytest.raises(UnreachableError):
                await admin.cluster_info()


async def test_a_transaction_and_its_check_over_one_connection(
    servers: TlsServers, options: ClientOptions, name: str
) -> None:
    async def check(message: Any) -> TransactionState:
        return TransactionState.COMMIT

    async with Admin(servers.namesrv, options=options) as admin:
        await admin.create_topic(name, queues=1)
    async with (
        TransactionProducer(name, check, namesrv=servers.namesrv, options=options) as producer,
        producer.transaction(Message(name, b"half")),
    ):
        pass
    async with Consumer(name, name, namesrv=servers.namesrv, options=options, start="first") as consumer:
        message = await anext(consumer)
        assert message.body == b"half"


def test_the_blocking_facade(servers: TlsServers, options: ClientOptions, name: str) -> None:
    with sync.Admin(servers.namesrv, options=options) as admin:
        admin.create_topic(name, queues=1)
    with sync.Producer(name, namesrv=servers.namesrv, options=options) as producer:
        assert producer.send(Message(name, b"one")).queue_offset == 0
    with sync.Consumer(name, name, namesrv=servers.namesrv, options=options, start="first") as consumer:
        message = consumer.take(timeout=20)
        assert message is not None
        assert message.body == b"one"


async def test_no_client_certificate(servers: TlsServers, mode: str, certificates: Certificates) -> None:
    options = ClientOptions(tls=Tls(certificates.ca))
    async with Admin(servers.namesrv, options=options) as admin:
        if mode == "mutual":
            with pytest.raises(UnreachableError, match="the other side requires a certificate and got none"):
                await admin.cluster_info()
        else:
            assert (await admin.cluster_info()).broker_addr_table


async def test_a_client_certificate_of_another_ca(servers: TlsServers, mode: str, certificates: Certificates) -> None:
    pair = certificates.foreign_client
    async with Admin(servers.namesrv, options=ClientOptions(tls=Tls(certificates.ca, pair.cert, pair.key))) as admin:
        if mode == "mutual":
            with pytest.raises(UnreachableError, match="does not trust the authority"):
                await admin.cluster_info()
        else:
            assert (await admin.cluster_info()).broker_addr_table


async def test_another_ca(servers: TlsServers, tls: Tls, certificates: Certificates) -> None:
    options = ClientOptions(tls=replace(tls, ca_file=certificates.other.cert))
    async with Admin(servers.namesrv, options=options) as admin:
        with pytest.raises(UnreachableError, match=r"not trusted .* trusted are those in .*other-ca"):
            await admin.cluster_info()


async def test_trust_in_the_systems_cas(
    servers: TlsServers, mode: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Admin(servers.namesrv, options=ClientOptions(tls=True)) as admin:
        with pytest.raises(UnreachableError, match="trusted are those of this system"):
            await admin.cluster_info()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    async with Admin(servers.namesrv, options=ClientOptions(tls=True)) as admin:
        if mode == "mutual":
            with pytest.raises(UnreachableError, match="requires a certificate and got none"):
                await admin.cluster_info()
        else:
            assert (await admin.cluster_info()).broker_addr_table


@pytest.mark.parametrize("kind", ["expired", "elsewhere"])
async def test_certificates_that_are_refused(
    certificates: Certificates, tmp_path: Path, kind: str, tls: Tls, anyio_backend: str
) -> None:
    keys = server_keys(certificates, "permissive", getattr(certificates, kind), mutual=False)
    with tls_servers(tmp_path, keys) as servers:  # the broker registers in plain
        async with Admin(servers.namesrv, options=ClientOptions(tls=tls)) as admin:
            text = {"expired": "certificate has expired", "elsewhere": "is not for 127.0.0.1"}[kind]
            with pytest.raises(UnreachableError, match=text):
                await admin.cluster_info()
        lax = replace(tls, verify_host_name=False, verify_server=kind == "elsewhere")
        async with Admin(servers.namesrv, options=ClientOptions(tls=lax)) as admin:
            assert (await admin.cluster_info()).broker_addr_table


async def test_a_server_without_tls(tmp_path: Path, tls: Tls) -> None:
    with tls_servers(tmp_path, {"tls.server.mode": "disabled"}) as servers:
        async with Admin(servers.namesrv, options=ClientOptions(tls=tls)) as admin:
            with pytest.raises(UnreachableError, match="closed the connection within the TLS handshake: it may not"):
                await admin.cluster_info()


async def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a file for TLS cannot be used: .*/no: expected a file that can be read"):
        async with Producer("p", namesrv="127.0.0.1:1", options=ClientOptions(tls=Tls(tmp_path / "no"))):
            pass


# mqadmin


def run(servers: TlsServers, *options: object, env: dict[str, str] | None = None) -> Any:
    words = [*map(str, options), "clusterList", "-n", servers.namesrv, "--json"]
    return CliRunner(env=env).invoke(main, words)


def test_mqadmin(servers: TlsServers, mode: str, certificates: Certificates) -> None:
    client = certificates.client
    files = ("--tls-ca", certificates.ca, "--tls-cert", client.cert, "--tls-key", client.key)
    result = run(servers, *files)
    assert result.exit_code == 0, result.output
    assert "broker-a" in json.loads(result.output)[0].values()
    environment = {
        "TRIMQ_TLS_ENABLE": "true",
        "TRIMQ_TLS_CLIENT_TRUST_CERT_PATH": str(certificates.ca),
        "TRIMQ_TLS_CLIENT_CERT_PATH": str(client.cert),
        "TRIMQ_TLS_CLIENT_KEY_PATH": str(client.key),
    }
    assert run(servers, env=environment).exit_code == 0
    refused = run(servers, "--tls-ca", certificates.other.cert)
    assert refused.exit_code == 3
    assert "not trusted" in refused.output
    unverified = run(servers, "--tls", "--tls-no-verify", *files[2:])
    assert unverified.exit_code == 0
    assert run(servers, "--tls-no-verify", *files[2:]).exit_code == 0
    assert "not trusted" in run(servers, "--tls-no-verify-host-name").output  # not a plain connection
    plain = run(servers, "--no-tls", env=environment)
    assert plain.exit_code == (0 if mode == "permissive" else 3)
    assert ("it has answered nothing: it may serve TLS only" in plain.output) == (mode != "permissive")


def test_mqadmin_with_a_password(servers: TlsServers, certificates: Certificates, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    pair = certificates.authority.sign("both", usage="clientAuth")
    both.write_bytes(pair.cert.read_bytes() + lock(pair.key, tmp_path / "locked").read_bytes())
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    permit(password)
    password.chmod(0o600)
    files = ("--tls-ca", certificates.ca, "--tls-cert", both)
    wrong = run(servers, *files)
    assert wrong.exit_code == 2
    assert f"expected the password of the key in {both}" in wrong.output
    assert run(servers, *files, "--tls-key-password-file", password).exit_code == 0
    assert run(servers, *files, env={"TRIMQ_TLS_CLIENT_KEY_PASSWORD": PASSWORD}).exit_code == 0


def test_mqadmin_refuses_what_does_not_fit_together() -> None:
    result = CliRunner().invoke(main, ["--tls-key", "a", "clusterList", "-n", "127.0.0.1:1"])
    assert result.exit_code == 2
    assert "TLS: a key without cert_file" in result.output


# blocking connections of Spark workers


def test_a_blocking_connection(servers: TlsServers, mode: str, tls: Tls, certificates: Certificates) -> None:
    command = RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO, {})
    command.opaque = 7
    with connect(servers.namesrv, 10.0, tls) as connection:
        connection.sendall(encode(command))
        decoder = FrameDecoder()
        replies: list[RemotingCommand] = []
        while not replies:
            data = connection.recv(65536)
            assert data
            replies = list(decoder.feed(data))
    assert (replies[0].opaque, replies[0].code) == (7, 0)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        connect(servers.namesrv, 10.0, Tls(certificates.other.cert))
    with pytest.raises(OSError, match="a file for TLS cannot be used"):
        connect(servers.namesrv, 10.0, Tls("/no"))
