"""TriMQ's remoting client and server together."""

import trio

from tests.ports import free_port
from tests.remoting.harness import ECHO, echo_table, serving
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.remoting.client.remoting_client import ClientConnection, RemotingClient
from trimq.remoting.server.reactor import Connection, Outcome


async def test_many_callers_in_both_directions_in_every_encoding() -> None:
    """Each request makes the server ask its client before it answers."""

    async def ask_back(connection: Connection, command: RemotingCommand) -> Outcome:
        answer = await connection.request(RemotingCommand.request(307, body=command.body), 5)
        return command.reply(body=bytes(answer.body) + b"!")

    def answer(connection: ClientConnection, command: RemotingCommand) -> RemotingCommand:
        return command.reply(body=b"you sent " + command.body)

    async def call(client: RemotingClient, address: str, number: int) -> None:
        reply = await client.invoke(address, RemotingCommand.request(2, body=b"%d" % number), 5)
        assert bytes(reply.body) == b"you sent %d!" % number

    table = echo_table()
    table.register(2, ask_back)
    async with serving(table) as server:
        for encoding in Encoding:
            async with RemotingClient(encoding=encoding) as client, trio.open_nursery() as nursery:
                client.register_processor(307, answer)
                for number in range(100):
                    nursery.start_soon(call, client, server.text, number)
        assert server.reactor.stats.accepted == 3


async def test_a_server_that_restarts_is_found_again() -> None:
    async with RemotingClient() as client:
        async with serving(port=free_port()) as server:
            address = server.text
            await client.invoke(address, RemotingCommand.request(ECHO))
            await server.reactor.shutdown(1)
        while client.is_connected(address):
            await trio.lowlevel.checkpoint()
        async with serving(port=server.address[1]):
            await client.invoke(address, RemotingCommand.request(ECHO))
