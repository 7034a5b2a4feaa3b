"""A client's connection over TLS: a frame that is encrypted already cannot be taken back."""

import socket
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.remoting.conftest import Main
from tests.remoting.tls_ends import contexts, over, shake_hands, socket_pair
from tests.tls_certificates import Certificates, certificates
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import FrameDecoder
from trimq.remoting.client.client_connection import ClientConnection
from trimq.remoting.client.client_log import StandardLog
from trimq.remoting.client.client_socket import SocketNetwork
from trimq.remoting.runtime.clock import SystemClock

__all__ = ["certificates"]


class MaybeFull(socket.socket):
    """A socket that takes nothing while it is ``full``."""

    full = False

    def send(self, data: Any, flags: int = 0) -> int:
        if self.full:
            raise BlockingIOError
        return super().send(data, flags)


@pytest.mark.parametrize("tls", [True, False])
def test_a_frame_that_is_encrypted_is_not_taken_back(
    run: Callable[[Main], None], certificates: Certificates, tls: bool
) -> None:
    async def main() -> None:
        left, right = socket_pair()
        raw = MaybeFull(fileno=right.detach())
        server, client = over(left, raw, *contexts(certificates))
        if tls:
            shake_hands(server, client)
        connection = ClientConnection(
            "there:1",
            client if tls else raw,
            {},
            lambda _: None,
            encoding=Encoding.JSON,
            clock=SystemClock(),
            log=StandardLog("test"),
            network=SocketNetwork(),
        )
        calls = [connection.new_call() for _ in range(3)]
        raw.full = True
        for number, call in enumerate(calls, 1):
            command = RemotingCommand.request(1, None, bytes(400_000))
            command.opaque = number
            connection.begin(command, connection.now() + 3600, call)
        for call in calls[:2]:
            connection.end(call)
        assert [call.written for call in calls] == [tls, False, False]
        raw.full = False
        decoder = FrameDecoder()
        arrived: list[RemotingCommand] = []
        end = server if tls else left
        view = memoryview(bytearray(1 << 20))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.run)
            while not arrived or arrived[-1].opaque != 3:
                try:
                    arrived += decoder.feed(bytes(view[: end.recv_into(view)]))
                except BlockingIOError:
                    await anyio.wait_readable(left)
            connection.close("the test is over")
        assert [command.opaque for command in arrived] == ([1, 3] if tls else [3])
        left.close()

    run(main)
