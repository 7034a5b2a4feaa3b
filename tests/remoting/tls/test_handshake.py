"""RemotingClient with TLS, on trio and on asyncio, against servers that use Python's own TLS."""

import shutil
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
import pytest
import structlog.testing
from anyio.abc import AnyByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSListener

from tests.tls_certificates import Certificates, KeyPair
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.remoting.client import handshake
from trimq.remoting.client.client_socket import SocketNetwork
from trimq.remoting.client.remoting_client import RemotingClient
from trimq.remoting.errors import RemotingConnectError
from trimq.remoting.runtime.log_setup import StructuredLog
from trimq.remoting.tls.client_contexts import ClientTls, Tls

Main = Callable[[], Awaitable[None]]
Run = Callable[[Main], None]
GONE = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError, OSError)


class Server:
    """Replies to each request with its body, ``times`` in all, in one piece."""

    def __init__(self) -> None:
        self.port = 0
        self.times = 1
        self.first_bytes: list[bytes] = []

    def address(self, host: str = "127.0.0.1") -> str:
        return f"{host}:{self.port}"

    async def handle(self, stream: AnyByteStream) -> None:
        decoder = FrameDecoder()
        try:
            while True:
                data = await stream.receive()
                self.first_bytes.append(data[:1])
                for command in decoder.feed(data):
                    await stream.send(encode(command.reply(body=bytes(command.body) * self.times)))
        except GONE:
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)


@asynccontextmanager
async def serving(context: ssl.SSLContext | None, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    """A server with TLS, or without."""
    server = Server()
    async with await anyio.create_tcp_listener(local_host=host) as plain, anyio.create_task_group() as tasks:
        server.port = plain.extra(SocketAttribute.local_port)
        if context is None:
            tasks.start_soon(plain.serve, server.handle)
        else:
            # Failed handshakes are the client's to report.
            listener = TLSListener(plain, context, standard_compatible=False, handshake_timeout=5)
            vars(listener)["handle_handshake_error"] = _ignored
            tasks.start_soon(listener.serve, server.handle)
        yield server
        tasks.cancel_scope.cancel()


async def _ignored(_error: BaseException, stream: AnyByteStream) -> None:
    await anyio.aclose_forcefully(stream)


@contextmanager
def accepting_once(context: ssl.SSLContext) -> Iterator[str]:
    """A server in a thread that does one handshake, and sends an alert if that fails; anyio's does not."""

    def run() -> None:
        sock, _ = listener.accept()
        with suppress(OSError), context.wrap_socket(sock, server_side=True) as stream:
            stream.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


async def ask(address: str, tls: Tls, body: bytes = b"hello") -> bytes:
    async with RemotingClient(tls=ClientTls(tls)) as client:
        return bytes((await client.invoke(address, RemotingCommand.request(1, {}, body), 5.0)).body)


def refusal(run: Run, context: ssl.SSLContext | None, tls: Tls, host: str = "127.0.0.1") -> str:
    """Why there is no connection."""
    texts: list[str] = []

    async def main() -> None:
        async with serving(context) as server:
            with pytest.raises(RemotingConnectError) as caught:
                await ask(server.address(host), tls)
            assert not caught.value.written
            texts.append(str(caught.value).removeprefix(f"cannot connect to {server.address(host)}: "))
            assert set(server.first_bytes) <= {b"\x16"}  # no frame in plain

    run(main)
    return texts[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("protocols", ["TLSv1.2", "TLSv1.3", ""])
def test_a_request_and_its_reply(run: Run, certificates: Certificates, host: str, protocols: str) -> None:
    async def main() -> None:
        async with serving(certificates.server_context()) as server:
            assert await ask(server.address(host), Tls(certificates.ca, protocols=protocols)) == b"hello"

    run(main)


def test_an_ipv6_address_is_verified(run: Run, certificates: Certificates) -> None:
    async def main() -> None:
        async with serving(certificates.server_context(), "::1") as server:
            assert await ask(server.address("[::1]"), Tls(certificates.ca)) == b"hello"

    run(main)


def test_bodies_that_are_longer_than_every_buffer(run: Run, certificates: Certificates) -> None:
    body = bytes(range(256)) * 4096 * 3

    async def main() -> None:
        async with (
            serving(certificates.server_context()) as server,
            RemotingClient(tls=ClientTls(Tls(certificates.ca))) as client,
        ):
            server.times = 2

            async def one(number: int) -> None:
                mine = bytes([number]) + body[: 1 + len(body) // (number + 1)]
                reply = await client.invoke(server.address(), RemotingCommand.request(1, {}, mine), 8.0)
                assert reply.body == mine * 2

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(one, number)

    run(main)


def test_a_client_certificate(run: Run, certificates: Certificates) -> None:
    context = certificates.server_context(clients=certificates.ca)

    async def main() -> None:
        async with serving(context) as server:
            pair = certificates.client
            assert await ask(server.address(), Tls(certificates.ca, pair.cert, pair.key)) == b"hello"

    run(main)


def test_a_missing_client_certificate(run: Run, certificates: Certificates) -> None:
    context = certificates.server_context(clients=certificates.ca)

    async def main() -> None:
        with accepting_once(context) as address, pytest.raises(RemotingConnectError) as caught:
            await ask(address, Tls(certificates.ca, protocols="TLSv1.2"))
        assert "TlsError: the TLS handshake failed: the other side accepts none of the" in str(caught.value)
        # With TLS 1.3 the server looks at the client's certificate when the client is done with the handshake.
        with accepting_once(context) as address, pytest.raises(RemotingConnectError) as late:
            await ask(address, Tls(certificates.ca, protocols="TLSv1.3"))
        assert "the other side requires a certificate and got none" in str(late.value)
        assert not late.value.written  # so a message was certainly not stored

    run(main)


def test_the_certificate_of_another_ca(run: Run, certificates: Certificates) -> None:
    text = refusal(run, certificates.server_context(certificates.foreign), Tls(certificates.ca))
    assert text == (
        "TlsError: the server's certificate is not trusted (unable to get local issuer certificate): none of the CA "
        f"certificates signs it; trusted are those in {certificates.ca}"
    )


def test_without_a_file_the_systems_cas_are_trusted(run: Run, certificates: Certificates) -> None:
    text = refusal(run, certificates.server_context(), Tls())
    assert text.endswith("none of the CA certificates signs it; trusted are those of this system")


def test_the_certificate_of_another_host(run: Run, certificates: Certificates) -> None:
    context = certificates.server_context(certificates.elsewhere)
    for host in ("localhost", "127.0.0.1"):
        text = refusal(run, context, Tls(certificates.ca), host)
        assert text.startswith(f"TlsError: the server's certificate is not for {host} (")
        assert text.endswith(f"or get one that contains {host}")


def test_an_expired_certificate(run: Run, certificates: Certificates) -> None:
    text = refusal(run, certificates.server_context(certificates.expired), Tls(certificates.ca))
    assert text == "TlsError: the server's certificate was refused: certificate has expired"


@pytest.mark.parametrize("verifies", ["nothing", "no name"])
def test_what_is_not_verified_is_accepted(run: Run, certificates: Certificates, verifies: str) -> None:
    nothing = verifies == "nothing"
    pair: KeyPair = certificates.foreign if nothing else certificates.elsewhere

    async def main() -> None:
        async with serving(certificates.server_context(pair)) as server:
            tls = Tls(certificates.ca, verify_server=not nothing, verify_host_name=False)
            assert await ask(server.address(), tls) == b"hello"

    run(main)


def test_a_server_in_this_process_is_not_verified(run: Run, certificates: Certificates) -> None:
    async def main() -> None:
        async with (
            serving(certificates.server_context(certificates.foreign)) as server,
            RemotingClient(tls=ClientTls(Tls(certificates.ca))) as client,
        ):
            client.is_own(server.address())
            assert (await client.invoke(server.address(), RemotingCommand.request(1, {}, b"me"), 5.0)).body == b"me"
            with pytest.raises(RemotingConnectError, match="not trusted"):
                await client.invoke(server.address("localhost"), RemotingCommand.request(1, {}, b"me"), 5.0)

    run(main)


def test_no_common_version(run: Run, certificates: Certificates) -> None:
    context = certificates.server_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3

    async def main() -> None:
        with accepting_once(context) as address, pytest.raises(RemotingConnectError) as caught:
            await ask(address, Tls(certificates.ca, protocols="TLSv1.2"))
        assert str(caught.value).endswith(
            "TlsError: the TLS handshake failed: the other side accepts none of the offered TLS versions"
        )

    run(main)


def test_a_server_that_closes(run: Run) -> None:
    """As a broker does whose TLS is off: the first byte of a hello is that of no frame."""
    texts: list[str] = []

    async def close(stream: SocketStream) -> None:
        await stream.receive()
        await stream.aclose()

    async def main() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plain, anyio.create_task_group() as tasks:
            tasks.start_soon(plain.serve, close)
            address = f"127.0.0.1:{plain.extra(SocketAttribute.local_port)}"
            with pytest.raises(RemotingConnectError) as caught:
                await ask(address, Tls())
            texts.append(str(caught.value))
            tasks.cancel_scope.cancel()

    run(main)
    assert "TlsError: the server closed the connection within the TLS handshake: it may not serve TLS" in texts[0]


def test_a_server_that_answers_in_plain(run: Run) -> None:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.send(encode(RemotingCommand.request(1, {}, b"in plain")))
            await anyio.sleep_forever()

    async def main() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plain, anyio.create_task_group() as tasks:
            tasks.start_soon(plain.serve, answer)
            address = f"127.0.0.1:{plain.extra(SocketAttribute.local_port)}"
            with pytest.raises(RemotingConnectError, match="TlsError: the server does not speak TLS on this port"):
                await ask(address, Tls())
            tasks.cancel_scope.cancel()

    run(main)


def test_a_server_that_says_nothing_ends_the_time_to_connect(run: Run) -> None:
    async def main() -> None:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as plain, anyio.create_task_group() as tasks:
            closed = anyio.Event()

            async def silent(stream: SocketStream) -> None:
                async with stream:
                    async for _ in stream:
                        pass
                    closed.set()

            tasks.start_soon(plain.serve, silent)
            address = f"127.0.0.1:{plain.extra(SocketAttribute.local_port)}"
            async with RemotingClient(tls=ClientTls(Tls()), connect_timeout=0.2) as client:
                with pytest.raises(RemotingConnectError, match="no answer to the TLS handshake in time"):
                    await client.invoke(address, RemotingCommand.request(1, {}, b""), 5.0)
                await closed.wait()  # the socket was closed with the handshake
            tasks.cancel_scope.cancel()

    run(main)


def test_a_host_that_no_certificate_can_have(run: Run, certificates: Certificates) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(handshake.TlsError, match=r"'\.x' is no name of a server with TLS"):
            await handshake.secured(ours, ".x", ClientTls(Tls(certificates.ca)), SocketNetwork())
        assert ours.fileno() == -1

    run(main)


def test_a_file_that_cannot_be_used(run: Run, tmp_path: Path, certificates: Certificates) -> None:
    text = refusal(run, certificates.server_context(), Tls(tmp_path / "no"))
    assert text == (
        f"TlsError: a file for TLS cannot be used: {tmp_path}/no: expected a file that can be read (No such file or "
        "directory)"
    )


def test_a_changed_file_counts_for_the_next_connection(run: Run, tmp_path: Path, certificates: Certificates) -> None:
    ca = tmp_path / "ca"

    async def main() -> None:
        shutil.copy(certificates.ca, ca)
        async with (
            serving(certificates.server_context()) as server,
            RemotingClient(tls=ClientTls(Tls(ca)), log=StructuredLog()) as client,
        ):

            async def ask_again() -> None:
                client.disconnect(server.address())
                await client.invoke(server.address(), RemotingCommand.request(1, {}, b""), 5.0)

            with structlog.testing.capture_logs() as logs:
                await ask_again()
                ca.write_text("broken")
                await ask_again()
                await ask_again()
            shutil.copy(certificates.other.cert, ca)
            with pytest.raises(RemotingConnectError, match="not trusted"):
                await ask_again()
            assert [(line["event"], line["reason"]) for line in logs] == [
                ("tls_reload_failed", f"{ca}: expected certificates in PEM")
            ]

    run(main)


def test_a_broken_file_that_keeps_the_wrong_ca_is_logged_and_named(
    run: Run, tmp_path: Path, certificates: Certificates
) -> None:
    """The handshake fails because the new file is not in use: the error and one line of the log say so."""
    ca = tmp_path / "ca"
    problem = f"{ca}: expected certificates in PEM"

    async def main() -> None:
        shutil.copy(certificates.other.cert, ca)
        tls = ClientTls(Tls(ca))
        tls.current()
        ca.write_text("broken")
        async with (
            serving(certificates.server_context()) as server,
            RemotingClient(tls=tls, log=StructuredLog()) as client,
        ):
            with structlog.testing.capture_logs() as logs:
                for _ in range(2):
                    with pytest.raises(RemotingConnectError) as caught:
                        await client.invoke(server.address(), RemotingCommand.request(1, {}, b""), 5.0)
                    assert f"trusted are those that were in {ca}; " in str(caught.value)
                    assert str(caught.value).endswith(f"; the former files of TLS are in use: {problem}")
            assert [(line["event"], line["reason"]) for line in logs] == [("tls_reload_failed", problem)]

    run(main)


def test_a_server_that_closes_is_asked_with_the_former_files(
    run: Run, tmp_path: Path, certificates: Certificates
) -> None:
    ca = tmp_path / "ca"
    shutil.copy(certificates.ca, ca)
    tls = ClientTls(Tls(ca))
    tls.current()
    ca.unlink()

    async def main() -> None:
        async def closing(stream: SocketStream) -> None:
            sock = stream.extra(SocketAttribute.raw_socket)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            await anyio.aclose_forcefully(stream)

        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(listener.serve, closing)
            address = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
            async with RemotingClient(tls=tls) as client:
                with pytest.raises(RemotingConnectError, match=r"; the former files of TLS are in use: .*No such file"):
                    await client.invoke(address, RemotingCommand.request(1, {}, b""), 5.0)
            tasks.cancel_scope.cancel()

    run(main)


class SlowSocket(socket.socket):
    """Takes nothing of the first send."""

    refusals = 1

    def send(self, data: object, flags: int = 0) -> int:
        if self.refusals:
            self.refusals -= 1
            raise BlockingIOError
        return super().send(data, flags)  # type: ignore[arg-type]


class SlowNetwork(SocketNetwork):
    waits = 0

    async def connect(self, host: str, port: int) -> socket.socket:
        slow = SlowSocket(fileno=(await super().connect(host, port)).detach())
        slow.setblocking(False)
        return slow

    async def wait_writable(self, sock: socket.socket) -> None:
        self.waits += 1
        await super().wait_writable(sock)


def test_a_hello_that_the_socket_does_not_take_is_sent_later(run: Run, certificates: Certificates) -> None:
    network = SlowNetwork()

    async def main() -> None:
        async with (
            serving(certificates.server_context()) as server,
            RemotingClient(tls=ClientTls(Tls(certificates.ca)), network=network) as client,
        ):
            assert (await client.invoke(server.address(), RemotingCommand.request(1, {}, b"me"), 5.0)).body == b"me"
        assert network.waits == 1

    run(main)


def test_the_end_is_seen_when_it_arrives_with_a_reply(run: Run, certificates: Certificates) -> None:
    """The socket stays open: no event reports the close_notify that was read with the reply."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        stream = certificates.server_context().wrap_bio(arrived, leaving, server_side=True)
        decoder = FrameDecoder()
        commands: list[RemotingCommand] = []
        with sock:
            while not commands:
                try:
                    stream.do_handshake()
                    commands += decoder.feed(stream.read(65536))
                except ssl.SSLWantReadError:
                    sock.sendall(leaving.read())
                    arrived.write(sock.recv(65536))
            stream.write(encode(commands[0].reply(body=b"last")))
            with suppress(ssl.SSLWantReadError):
                stream.unwrap()
            sock.sendall(leaving.read())
            over.wait(10)

    async def main() -> None:
        closed = anyio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=serve, args=(listener,))
            thread.start()
            try:
                async with RemotingClient(tls=ClientTls(Tls(certificates.ca))) as client:
                    client.on_close.append(lambda _: closed.set())
                    address = f"127.0.0.1:{listener.getsockname()[1]}"
                    assert (await client.invoke(address, RemotingCommand.request(1, {}, b""), 5.0)).body == b"last"
                    await closed.wait()
            finally:
                over.set()
                thread.join()

    run(main)


def test_a_connection_that_the_system_aborts(certificates: Certificates) -> None:
    error = ConnectionAbortedError("Software caused connection abort")
    assert handshake._reason(error, "h", ClientTls(Tls())) == "Software caused connection abort"
