"""Connections on plain sockets: trying addresses in turn, and reading arrived bytes without running the event loop."""

import select
import socket
from collections.abc import Awaitable, Callable

import anyio
import pytest
import structlog.testing

from tests.ports import free_port
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder, encode
from trimq.remoting.client import client_socket
from trimq.remoting.client.client_socket import connect_socket
from trimq.remoting.client.remoting_client import ClientConnection, RemotingClient
from trimq.remoting.runtime.log_setup import StructuredLog

Main = Callable[[], Awaitable[None]]


def addresses(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in found]

    monkeypatch.setattr(anyio, "getaddrinfo", getaddrinfo)


def test_the_first_address_that_takes_a_connection_is_it(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            addresses(monkeypatch, ("127.0.0.1", free_port()), server.getsockname())
            with await connect_socket("name", 1) as sock:
                assert sock.getpeername() == server.getsockname()
                assert not sock.getblocking()

    run(main)


def test_where_no_address_takes_one_the_first_error_is_raised(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        addresses(monkeypatch, ("127.0.0.1", free_port()), ("127.0.0.1", free_port()))
        with pytest.raises(ConnectionRefusedError):
            await connect_socket("name", 1)
        addresses(monkeypatch)
        with pytest.raises(OSError, match="name has no address"):
            await connect_socket("name", 1)

    run(main)


def lookups(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, int]) -> list[tuple[str, int]]:
    """Each lookup of a name gives the next address; returns the list of those still to come."""
    left = list(found)

    async def getaddrinfo(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", left.pop(0))]

    monkeypatch.setattr(anyio, "getaddrinfo", getaddrinfo)
    return left


def was_closed(server: socket.socket) -> bool:
    """Whether the client has closed the connection that the server has accepted."""
    with server.accept()[0] as peer:
        return peer.recv(1) == b""


def test_a_name_whose_address_went_to_another_server(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two name servers' containers may restart and swap addresses while a broker connects to one of them."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as server:
            monkeypatch.setattr(client_socket, "_PROMPT", -1.0)  # every connection takes longer
            lookups(monkeypatch, other.getsockname(), server.getsockname())
            with await connect_socket("name", 1) as sock:
                assert sock.getpeername() == server.getsockname()
            assert was_closed(other)
            lookups(monkeypatch, server.getsockname(), server.getsockname())
            with await connect_socket("name", 1) as sock:
                assert sock.getpeername() == server.getsockname()
            lookups(monkeypatch, other.getsockname())
            with pytest.raises(IndexError):  # the second lookup fails
                await connect_socket("name", 1)
            assert was_closed(other)

    run(main)


def test_a_name_is_looked_up_once_where_its_server_answers_at_once(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            monkeypatch.setattr(client_socket, "_PROMPT", 60.0)
            left = lookups(monkeypatch, server.getsockname(), ("127.0.0.1", free_port()))
            with await connect_socket("name", 1) as sock:
                assert (sock.getpeername(), len(left)) == (server.getsockname(), 1)

    run(main)


class Asked:
    """A client whose request has reached a server that replies at the test's call, without running the event loop."""

    def __init__(self, client: RemotingClient, peer: socket.socket, request: RemotingCommand) -> None:
        self.client = client
        self.peer = peer
        self.request = request


async def asked(
    client: RemotingClient, server: socket.socket, tasks: anyio.abc.TaskGroup, replies: list[object]
) -> Asked:
    async def ask() -> None:
        try:
            replies.append(await client.invoke(f"127.0.0.1:{server.getsockname()[1]}", RemotingCommand.request(1)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            replies.append(error)

    tasks.start_soon(ask)
    await anyio.wait_readable(server)
    peer, _ = server.accept()
    await anyio.wait_readable(peer)
    (request,) = FrameDecoder().feed(peer.recv(10_000))
    await anyio.wait_all_tasks_blocked()  # the connection's own tasks have started
    return Asked(client, peer, request)


def arrived(connection: ClientConnection) -> None:
    """Wait without running the event loop: even on loopback the kernel delivers with a delay."""
    assert select.select([connection._socket], [], [], 5)[0]


def test_what_has_arrived_is_taken_by_who_looks(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        replies: list[object] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with RemotingClient() as client, anyio.create_task_group() as tasks:
                assert not client.read_arrived()
                one = await asked(client, server, tasks, replies)
                assert not client.read_arrived()
                (connection,) = client._connections()
                frame = encode(one.request.reply(body=b"hello"))
                one.peer.sendall(frame[:30])
                arrived(connection)
                assert (client.read_arrived(), connection.waiting) == (True, 1)  # part of the reply
                one.peer.sendall(frame[30:])
                arrived(connection)
                assert (client.read_arrived(), connection.waiting) == (True, 0)
                assert not client.read_arrived()
                one.peer.close()
            (reply,) = replies
            assert isinstance(reply, RemotingCommand)
            assert bytes(reply.body) == b"hello"

    run(main)


@pytest.mark.parametrize("how", ["closed", "reset", "nonsense"])
def test_who_looks_finds_a_broken_connection_and_is_not_harmed(run: Callable[[Main], None], how: str) -> None:
    async def main() -> None:
        replies: list[object] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with RemotingClient() as client, anyio.create_task_group() as tasks:
                one = await asked(client, server, tasks, replies)
                (connection,) = client._connections()
                if how == "nonsense":
                    one.peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                elif how == "reset":
                    one.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                if how != "nonsense":
                    one.peer.close()
                arrived(connection)
                assert not client.read_arrived()
                assert connection.closed
                one.peer.close()
            known = {"closed": "server closed", "reset": "was lost", "nonsense": "broken frame"}
            assert known[how] in str(replies[0])

    run(main)


def test_a_fault_of_ours_closes_the_connection_and_is_reported(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        replies: list[object] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            async with RemotingClient(log=StructuredLog()) as client, anyio.create_task_group() as tasks:
                one = await asked(client, server, tasks, replies)
                (connection,) = client._connections()
                connection._reply_arrived = None  # type: ignore[assignment,method-assign] # a fault
                one.peer.sendall(encode(one.request.reply()))
                arrived(connection)
                with structlog.testing.capture_logs() as logs:
                    assert not client.read_arrived()
                assert ([log["event"] for log in logs], connection.closed) == (["connection_failed"], True)
                one.peer.close()
            assert "internal error" in str(replies[0])

    run(main)
