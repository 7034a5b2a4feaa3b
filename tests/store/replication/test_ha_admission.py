"""Proofs on the port for slaves: who is let in, who is not, and what that costs the master."""

import ipaddress
import shutil
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.store.replication.pairs import (
    ASYNC_MASTER,
    SLAVE,
    FakeMaster,
    MemoryListener,
    led,
    log_bytes,
    one_slave,
    store_of,
    until,
)
from tests.store.simdisk import SimDisk
from tests.store.stores import fill
from tests.tls_certificates import Certificates, KeyPair, certificates
from trimq.broker.store.message_store import HAClient, MessageStore
from trimq.broker.store.replication.ha_admission import BegunStream, HAAdmission, HATls
from trimq.protocol.ha_proof import ANSWER_BYTES, CHALLENGE, CHALLENGE_BYTES, HELLO, HAProofError, MasterProof
from trimq.remoting.tls.client_contexts import ClientTls, Tls
from trimq.remoting.tls.key_files import KeyFileError, Part

__all__ = ["certificates"]

KEYS = {b"one!": b"1" * 32}
OTHER = {b"one!": b"2" * 32}
MASTER, PEER = "10.0.0.1", "10.0.0.2"
REPORT = struct.pack(">q", 0)


def admission(keys: dict[bytes, bytes] | None = None, name: str = "a", *networks: str) -> HAAdmission:
    return HAAdmission(keys or KEYS, name, [ipaddress.ip_network(text) for text in networks])


def follow(
    nursery: trio.Nursery, slave: MessageStore, listener: MemoryListener, master: FakeMaster, proofs: HAAdmission
) -> HAClient:
    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return await listener.connect()

    client = slave.make_client(master, proofs.proving(open_stream, lambda _: MASTER))
    nursery.start_soon(client.run)
    return client


def serve(nursery: trio.Nursery, master: MessageStore, proofs: HAAdmission) -> MemoryListener:
    assert master.replication.ha is not None
    listener = MemoryListener()
    nursery.start_soon(master.replication.ha.serve, listener, lambda _: PEER, one_slave, proofs.of_slave)
    return listener


async def test_a_slave_follows_a_master_that_both_have_proved_themselves(autojump_clock: object) -> None:
    master_disk, slave_disk = SimDisk(), SimDisk()
    async with (
        store_of(master_disk, ASYNC_MASTER) as master,
        store_of(slave_disk, SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 20)
        listener = serve(nursery, master, admission())
        client = follow(nursery, slave, listener, FakeMaster(master), admission())
        await until(lambda: slave.max_phy_offset == master.max_phy_offset)
        assert log_bytes(slave_disk) == log_bytes(master_disk)
        assert client.state().error == ""
        nursery.cancel_scope.cancel()


async def test_a_replica_follows_with_a_proof_too(autojump_clock: object) -> None:
    async with (
        store_of(SimDisk(), ASYNC_MASTER, leadership=led(1, members=(1, 2))) as master,
        store_of(SimDisk(), SLAVE, leadership=led(2, members=(1, 2))) as slave,
        trio.open_nursery() as nursery,
    ):
        listener = serve(nursery, master, admission())
        follow(nursery, slave, listener, FakeMaster(master), admission())
        assert master.replication.ha is not None
        ha = master.replication.ha
        await until(lambda: any(found.state().broker_id == 2 for found in ha.connections))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("theirs", [admission(OTHER), admission(KEYS, "b")], ids=["another secret", "another name"])
async def test_a_slave_with_another_secret_gets_nothing(theirs: HAAdmission, autojump_clock: object) -> None:
    slave_disk = SimDisk()
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(slave_disk, SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 20)
        with capture_logs() as logs:
            client = follow(nursery, slave, serve(nursery, master, admission()), FakeMaster(master), theirs)
            await until(lambda: client.state().error != "")
        (line,) = [line for line in logs if line["event"] == "slave_refused"]
        assert line["advice"] == "the slave does not know the secret (haSecretFile), or has another brokerName"
        assert "does not get the proof it wants" in client.state().error
        assert log_bytes(slave_disk) == b""
        assert master.replication.ha is not None
        assert master.replication.ha.connections == []
        nursery.cancel_scope.cancel()


async def test_an_empty_slave_takes_no_first_record_from_a_master_that_proves_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """That record is an answer on another connection, which needs no proof."""
    slave_disk = SimDisk()
    async with (
        store_of(SimDisk(), ASYNC_MASTER) as master,
        store_of(slave_disk, SLAVE) as slave,
        trio.open_nursery() as nursery,
    ):
        await fill(master, 20)
        listener = MemoryListener()

        async def silent() -> None:
            while True:
                stream = await listener.accept()
                while await stream.receive_some():
                    pass

        nursery.start_soon(silent)
        client = follow(nursery, slave, listener, FakeMaster(master), admission())
        await trio.sleep(20)
        assert "does not prove itself" in client.state().error
        assert slave.max_phy_offset == 0
        assert log_bytes(slave_disk) == b""
        nursery.cancel_scope.cancel()


async def test_a_slave_sends_nothing_to_a_master_that_proves_nothing(autojump_clock: object) -> None:
    """Neither to one that is silent, as RocketMQ's, nor to one that sends its log at once, nor to one that reflects."""
    begins: list[Callable[[bytes], bytes]] = [
        lambda _: b"",
        lambda _: struct.pack(">qi", 0, 4) + b"evil" + bytes(CHALLENGE_BYTES),
        lambda _: CHALLENGE + bytes(32),
    ]
    for answer in begins:
        here, there = trio.testing.memory_stream_pair()

        async def open_stream(_host: str, _port: int, end: trio.abc.Stream = here) -> trio.abc.Stream:
            return end

        async def fake_master(end: trio.abc.Stream = there, reply: Callable[[bytes], bytes] = answer) -> None:
            assert await end.receive_some(100) == HELLO
            await end.send_all(reply(HELLO))
            seen = b""
            while data := await end.receive_some(1000):
                seen += data
                if len(seen) == ANSWER_BYTES:
                    await end.send_all(seen[-32:])
            assert len(seen) in (0, ANSWER_BYTES)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake_master)
            began = trio.current_time()
            with pytest.raises(OSError, match=r"does not prove itself|no challenge|does not know the secret"):
                await admission().proving(open_stream, lambda _: MASTER)(MASTER, 1)
            assert trio.current_time() - began <= 5


async def test_a_slave_that_is_cancelled_closes_its_stream(autojump_clock: object) -> None:
    here, there = trio.testing.memory_stream_pair()

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return here

    with trio.move_on_after(1):
        await admission().proving(open_stream, lambda _: MASTER)(MASTER, 1)
    assert await there.receive_some(100) == HELLO
    assert await there.receive_some(100) == b""


async def _report_only(stream: trio.abc.Stream) -> None:
    await stream.send_all(REPORT)


async def _part_of_a_greeting(stream: trio.abc.Stream) -> None:
    await stream.send_all(HELLO[:3])


async def _greeting_and_report(stream: trio.abc.Stream) -> None:
    await stream.send_all(HELLO[:4] + REPORT)


async def _silent(_stream: trio.abc.Stream) -> None:
    pass


async def _gone(stream: trio.abc.Stream) -> None:
    await stream.aclose()


async def _gone_after_the_greeting(stream: trio.abc.Stream) -> None:
    await stream.send_all(HELLO)
    await stream.aclose()


async def _no_answer(stream: trio.abc.Stream) -> None:
    await stream.send_all(HELLO)


async def _zeros(stream: trio.abc.Stream) -> None:
    await stream.send_all(HELLO + bytes(ANSWER_BYTES) + REPORT)


async def _byte_by_byte(stream: trio.abc.Stream) -> None:
    for byte in HELLO + bytes(ANSWER_BYTES):
        await stream.send_all(bytes([byte]))
        await trio.sleep(0.3)


HOSTILE = [
    _report_only,
    _part_of_a_greeting,
    _greeting_and_report,
    _silent,
    _gone,
    _gone_after_the_greeting,
    _no_answer,
    _zeros,
    _byte_by_byte,
]


@pytest.mark.parametrize("attack", HOSTILE, ids=lambda attack: attack.__name__)
async def test_who_proves_nothing_gets_no_byte_of_the_log(
    attack: Callable[[trio.abc.Stream], Awaitable[None]], autojump_clock: object
) -> None:
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        await fill(master, 5)
        listener = serve(nursery, master, admission())
        stream = await listener.connect()
        began = trio.current_time()

        async def attacks() -> None:
            try:
                await attack(stream)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the master has closed it meanwhile

        nursery.start_soon(attacks)
        got = b""
        try:
            while data := await stream.receive_some(1000):
                got += data
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        assert got[:8] in (b"", CHALLENGE)
        assert len(got) in (0, CHALLENGE_BYTES)
        ha = master.replication.ha
        assert ha is not None
        await until(lambda: ha.refused == 1)
        assert trio.current_time() - began <= 5.1
        assert ha.connections == []
        nursery.cancel_scope.cancel()


async def test_a_report_without_a_greeting_is_refused_at_once_with_advice(autojump_clock: object) -> None:
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(REPORT)
    began = trio.current_time()
    with pytest.raises(HAProofError, match="the slave proves nothing: set haSecretFile there"):
        await admission().of_slave(here, PEER)
    assert trio.current_time() == began


async def test_connections_that_prove_nothing_are_few(autojump_clock: object) -> None:
    """Of one address eight wait; further ones are closed at once, and the deadline makes room again."""
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        ha = master.replication.ha
        assert ha is not None
        listener = serve(nursery, master, admission())
        streams = [await listener.connect() for _ in range(12)]
        await trio.testing.wait_all_tasks_blocked()
        assert ha.refused == 4
        await trio.sleep(5.5)
        assert ha.refused == 12
        assert len(streams) == 12
        slave_end = await listener.connect()
        await admission().of_master(slave_end)
        await slave_end.send_all(REPORT)
        await until(lambda: len(ha.connections) == 1)
        nursery.cancel_scope.cancel()


async def test_the_advice_names_the_reason(autojump_clock: object) -> None:
    """Not haAllowedAddresses where it would not help."""

    async def nothing(_address: str) -> int:
        return 0

    async def silent(_address: str) -> int:
        await trio.sleep(60)
        return 1

    async def first_advice(admitted: Callable[[str], Awaitable[int]], connections: int) -> str:
        async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
            ha = master.replication.ha
            assert ha is not None
            listener = MemoryListener()
            with capture_logs() as logs:
                nursery.start_soon(ha.serve, listener, lambda _: PEER, admitted, admission().of_slave)
                streams = [await listener.connect() for _ in range(connections)]
                await until(lambda: ha.refused > 0)
            assert streams
            nursery.cancel_scope.cancel()
        return next(str(line["advice"]) for line in logs if line["event"] == "slave_refused")

    assert await first_advice(nothing, 1) == "set haAllowedAddresses if it is one of this master's"
    assert "name servers do not say in time" in await first_advice(silent, 1)
    many = await first_advice(one_slave, 12)
    assert "32 connections, or 8 from this address, have not proved themselves yet" in many
    assert "haAllowedAddresses" not in many


async def test_connections_that_wait_for_a_proof_are_closed_when_the_port_is(autojump_clock: object) -> None:
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        listener = MemoryListener()
        scope = trio.CancelScope()

        async def port() -> None:
            assert master.replication.ha is not None
            with scope:
                await master.replication.ha.serve(listener, lambda _: PEER, one_slave, admission().of_slave)

        nursery.start_soon(port)
        stream = await listener.connect()
        await stream.send_all(HELLO)
        assert (await stream.receive_some(CHALLENGE_BYTES)).startswith(CHALLENGE)
        scope.cancel()
        with trio.fail_after(1):
            assert await stream.receive_some(1) == b""
        nursery.cancel_scope.cancel()


async def test_addresses_of_rocketmqs_brokers_prove_nothing(autojump_clock: object) -> None:
    proofs = admission(KEYS, "a", "10.0.0.0/24")
    async with store_of(SimDisk(), ASYNC_MASTER) as master, trio.open_nursery() as nursery:
        ha = master.replication.ha
        assert ha is not None
        listener = serve(nursery, master, proofs)
        stream = await listener.connect()
        await trio.sleep(8)  # its first report may come late
        await stream.send_all(REPORT[:3])
        await stream.send_all(REPORT[3:])
        await until(lambda: len(ha.connections) == 1 and ha.connections[0].ack_offset == 0)
        # One that has the secret proves itself from there too, and one with another secret is refused.
        own = await listener.connect()
        await proofs.of_master(own)
        other = await listener.connect()
        with pytest.raises(HAProofError):
            await admission(OTHER).of_master(other)
        # Silence ends there too.
        silent = await listener.connect()
        assert await silent.receive_some(1) == b""
        assert ha.refused == 2
        nursery.cancel_scope.cancel()


async def test_a_master_of_rocketmq_is_followed_from_its_address() -> None:
    here, _ = trio.testing.memory_stream_pair()

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return here

    proofs = admission(KEYS, "a", "10.0.0.1")
    assert await proofs.proving(open_stream, lambda _: MASTER)(MASTER, 1) is here
    assert proofs.may_prove_nothing("::ffff:10.0.0.1"), "as a socket for both kinds of addresses has it"
    assert not proofs.may_prove_nothing("10.0.0.2")
    assert not proofs.may_prove_nothing("::ffff:10.0.0.2")
    assert not proofs.may_prove_nothing("a name")


async def test_a_master_that_has_disconnected_before_its_address_was_asked_for(autojump_clock: object) -> None:
    here, there = trio.testing.memory_stream_pair()

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return here

    def gone(_stream: trio.abc.Stream) -> str:
        raise OSError("not connected")

    with pytest.raises(OSError, match="not connected"):
        await admission(KEYS, "a", "10.0.0.1").proving(open_stream, gone)(MASTER, 1)
    with trio.fail_after(1):
        assert await there.receive_some() == b""  # closed


async def test_what_was_received_comes_first() -> None:
    here, there = trio.testing.memory_stream_pair()
    stream = BegunStream(here, b"abc")
    await there.send_all(b"def")
    assert [await stream.receive_some(2) for _ in range(3)] == [b"ab", b"c", b"de"]
    await stream.wait_send_all_might_not_block()
    await stream.send_all(b"x")
    assert await there.receive_some(5) == b"x"
    assert await BegunStream(here, b"abc").receive_some() == b"abc"
    await stream.aclose()
    assert await there.receive_some(5) == b""
    assert MasterProof(KEYS, "a").challenge() != MasterProof(KEYS, "a").challenge()


class Client:
    """A ClientTls. Without a context its files cannot be used."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self.problem = ""

    def new_problem(self) -> str:
        return self.problem

    async def context(self) -> ssl.SSLContext:
        if self._context is None:
            raise KeyFileError(Part.CERT, "no.pem", "a file")
        return self._context


def client_context(found: Certificates, pair: KeyPair | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(found.ca))
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def server_context(found: Certificates, pair: KeyPair | None = None) -> ssl.SSLContext:
    context = found.server_context(pair, clients=found.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context


async def over_tls(
    server: ssl.SSLContext | None,
    client: ssl.SSLContext | None,
    *networks: str,
    keys: tuple[dict[bytes, bytes], dict[bytes, bytes]] = ({}, {}),
    host: str = "127.0.0.1",
) -> tuple[str, str]:
    """Why a master has refused a slave, and why the slave a master; empty if they talk."""
    here, there = trio.testing.memory_stream_pair()
    found = [ipaddress.ip_network(text) for text in networks]
    master = HAAdmission(keys[0], "a", found, tls=HATls(lambda: server, Client(None)))
    slave = HAAdmission(keys[1], "a", tls=HATls(lambda: None, Client(client)))
    problems = ["", ""]

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return here

    async def side_of_master() -> None:
        try:
            stream = await master.of_slave(there, PEER)
            assert await stream.receive_some(100) == REPORT
            await stream.send_all(b"log")
        except (HAProofError, trio.BrokenResourceError) as error:
            problems[0] = str(error) or "lost"
            await trio.aclose_forcefully(there)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(side_of_master)
            try:
                stream = await slave.proving(open_stream, lambda _: MASTER)(host, 1)
                await stream.send_all(REPORT)
                assert await stream.receive_some(100) == b"log"
            except (OSError, trio.BrokenResourceError, AssertionError) as error:
                problems[1] = str(error) or "lost"
                await trio.aclose_forcefully(here)
    return problems[0], problems[1]


async def test_certificates_of_both_sides(certificates: Certificates, autojump_clock: object) -> None:
    found = certificates
    good = client_context(found, found.client)
    assert await over_tls(server_context(found), good) == ("", "")
    assert await over_tls(server_context(found), good, keys=(KEYS, KEYS)) == ("", "")
    assert "the slave does not know the secret" in (await over_tls(server_context(found), good, keys=(KEYS, OTHER)))[0]
    # A secret on one side only.
    refused = await over_tls(server_context(found), good, keys=(KEYS, {}))
    assert "the slave proves nothing" in refused[0]
    assert "the slave has no certificate" in (await over_tls(server_context(found), client_context(found, None)))[0]
    foreign = client_context(found, found.foreign_client)
    assert "no TLS connection" in (await over_tls(server_context(found), foreign))[0]
    for server in (found.foreign, found.elsewhere, found.expired):
        refused = await over_tls(server_context(found, server), good)
        assert "certificate verify failed" in refused[1].lower()
        assert refused[0]
    assert "no certificate for TLS" in (await over_tls(None, good))[0]
    assert "no.pem: expected a file" in (await over_tls(server_context(found), None))[1]


async def test_broken_files_of_the_slave_are_logged_once_and_named_if_the_handshake_fails(
    certificates: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    shutil.copy(certificates.other.cert, ca)
    tls = ClientTls(Tls(ca, certificates.client.cert, certificates.client.key))
    tls.current()
    ca.write_text("broken")
    problem = f"{ca}: expected certificates in PEM"
    slave = HAAdmission({}, "a", tls=HATls(lambda: None, tls))
    master = HAAdmission({}, "a", tls=HATls(lambda: server_context(certificates), Client(None)))

    async def refused(stream: trio.abc.Stream) -> None:
        with pytest.raises(HAProofError, match="no TLS connection"):
            await master.of_slave(stream, PEER)

    with capture_logs() as logs:
        for _ in range(2):
            here, there = trio.testing.memory_stream_pair()

            async def open_stream(_host: str, _port: int, opened: trio.abc.Stream = here) -> trio.abc.Stream:
                return opened

            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused, there)
                with pytest.raises(OSError, match="certificate verify failed") as caught:
                    await slave.proving(open_stream, lambda _: MASTER)("127.0.0.1", 1)
            assert str(caught.value).endswith(f"; the former files of TLS are in use: {problem}")
    assert [(line["event"], line["reason"]) for line in logs] == [("tls_reload_failed", problem)]


async def test_without_tls_only_the_addresses_of_rocketmqs_brokers(
    certificates: Certificates, autojump_clock: object
) -> None:
    tls = HATls(lambda: server_context(certificates), Client(None))
    for begin in (REPORT, HELLO):
        here, there = trio.testing.memory_stream_pair()
        await there.send_all(begin)
        with pytest.raises(HAProofError, match="connects without TLS"):
            await HAAdmission({}, "a", tls=tls).of_slave(here, PEER)
    proofs = HAAdmission({}, "a", [ipaddress.ip_network("10.0.0.0/24")], tls=tls)
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(REPORT)
    assert await (await proofs.of_slave(here, PEER)).receive_some(100) == REPORT
    # TLS from there is TLS: what follows must be a handshake.
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(b"\x16" + bytes(50))
    with pytest.raises(HAProofError, match="no TLS connection"):
        await proofs.of_slave(here, PEER)


async def test_a_handshake_that_does_not_end(certificates: Certificates, autojump_clock: object) -> None:
    proofs = HAAdmission({}, "a", tls=HATls(lambda: None, Client(client_context(certificates, certificates.client))))
    here, _ = trio.testing.memory_stream_pair()

    async def open_stream(_host: str, _port: int) -> trio.abc.Stream:
        return here

    with pytest.raises(OSError, match="does not answer the TLS handshake: set haTls there"):
        await proofs.proving(open_stream, lambda _: MASTER)("127.0.0.1", 1)
    proofs = HAAdmission({}, "a", tls=HATls(lambda: server_context(certificates), Client(None)))
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(b"\x16\x03\x01\x02\x00\x01")
    began = trio.current_time()
    with pytest.raises(HAProofError, match="has proved nothing in time"):
        await proofs.of_slave(here, PEER)
    assert trio.current_time() - began == pytest.approx(5)
