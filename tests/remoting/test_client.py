"""The client, on trio and on asyncio, against a scripted server."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
import structlog.testing
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME, FrameDecoder, encode
from trimq.remoting.client.client_socket import SocketNetwork
from trimq.remoting.client.remoting_client import CallbackCall, ClientConnection, RemotingClient, split_address
from trimq.remoting.errors import RemotingConnectError, RemotingSendError, RemotingTimeoutError
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.runtime.log_setup import StructuredLog

Main = Callable[[], Awaitable[None]]


class FakeServer:
    """Reply to every request with its own body, unless ``serve`` replies otherwise."""

    def __init__(self) -> None:
        self.address = ""
        self.streams: list[ByteStream] = []
        self.seen: list[RemotingCommand] = []
        self.arrived = anyio.Event()
        self.serve: Callable[[ByteStream, RemotingCommand], Awaitable[None]] = self.echo

    async def echo(self, stream: ByteStream, command: RemotingCommand) -> None:
        if not command.is_oneway and not command.is_reply:
            await stream.send(encode(command.reply(header=command.ext_fields(), body=command.body)))

    async def never(self, stream: ByteStream, command: RemotingCommand) -> None:
        """No reply."""

    async def handle(self, stream: SocketStream) -> None:
        self.streams.append(stream)
        decoder = FrameDecoder()
        try:
            while True:
                for command in decoder.feed(await stream.receive()):
                    self.seen.append(command)
                    self.arrived.set()
                    self.arrived = anyio.Event()
                    await self.serve(stream, command)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def until_seen(self, count: int) -> None:
        while len(self.seen) < count:
            await self.arrived.wait()


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[FakeServer]:
    server = FakeServer()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener:
        server.address = f"127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, server.handle)
            yield server
            tasks.cancel_scope.cancel()


def command(body: bytes = b"", code: int = 1, **ext: str) -> RemotingCommand:
    return RemotingCommand.request(code, ext, body)


def test_a_request_and_its_reply(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient() as client:
            reply = await client.invoke(server.address, command(b"hello", key="value"))
            assert (bytes(reply.body), reply.ext_fields()) == (b"hello", {"key": "value"})
            assert client.is_connected(server.address)

    run(main)


@pytest.mark.parametrize("encoding", Encoding)
def test_headers_travel_in_the_encoding_that_the_client_was_given(
    run: Callable[[Main], None], encoding: Encoding
) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient(encoding=encoding) as client:
            reply = await client.invoke(server.address, command(key="value"))
            assert server.seen[0].encoding == reply.encoding == encoding
            assert reply.ext_fields() == {"key": "value"}

    run(main)


def test_the_encoding_of_one_connection_changes_until_it_ends(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient() as client:
            client.use_encoding(server.address, Encoding.MSGPACK)  # no connection yet: nothing to change
            await client.invoke(server.address, command())
            client.use_encoding(server.address, Encoding.MSGPACK)
            await client.invoke(server.address, command())
            client.disconnect(server.address)
            await client.invoke(server.address, command())
            assert [one.encoding for one in server.seen] == [Encoding.JSON, Encoding.MSGPACK, Encoding.JSON]

    run(main)


def test_callers_share_one_connection_and_replies_find_them_in_any_order(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        waiting: list[RemotingCommand] = []

        async def backwards(stream: ByteStream, one: RemotingCommand) -> None:
            waiting.append(one)
            if len(waiting) == 50:
                for each in reversed(waiting):
                    await server.echo(stream, each)

        async def ask(number: int) -> None:
            reply = await client.invoke(server.address, command(b"%d" % number))
            assert bytes(reply.body) == b"%d" % number
            done.append(number)

        done: list[int] = []
        async with serving() as server, RemotingClient() as client:
            server.serve = backwards
            async with anyio.create_task_group() as tasks:
                for number in range(50):
                    tasks.start_soon(ask, number)
            assert sorted(done) == list(range(50))
            assert len(server.streams) == 1

    run(main)


def test_an_error_reply_is_a_reply(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def refuse(stream: ByteStream, one: RemotingCommand) -> None:
            await stream.send(encode(one.reply(ResponseCode.NO_PERMISSION, "no")))

        async with serving() as server, RemotingClient() as client:
            server.serve = refuse
            reply = await client.invoke(server.address, command())
            assert (reply.code, reply.remark) == (16, "no")

    run(main)


def test_oneways_are_flagged_and_arrive_even_if_the_client_is_closed_at_once(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server:
            async with RemotingClient() as client:
                for number in range(100):
                    await client.invoke_oneway(server.address, command(b"%d" % number))
            await server.until_seen(100)
            assert [bytes(one.body) for one in server.seen] == [b"%d" % number for number in range(100)]
            assert all(one.is_oneway for one in server.seen)

    run(main)


def test_no_reply_in_time(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient() as client:
            await client.invoke(server.address, command())  # connect first: it may take longer than the timeout
            server.serve = server.never
            with pytest.raises(RemotingTimeoutError, match=r"it was sent") as error:
                await client.invoke(server.address, command(code=77), timeout=0.3)
            assert (error.value.code, error.value.timeout, error.value.written) == (77, 0.3, True)
            assert error.value.address == server.address
            server.serve = server.echo
            late = server.seen[-1].reply(body=b"late")
            await server.streams[0].send(encode(late))
            assert bytes((await client.invoke(server.address, command(b"next"))).body) == b"next"

    run(main)


def test_a_request_that_never_left_is_taken_back(run: Callable[[Main], None]) -> None:
    """The peer reads nothing: the first request fills the socket, the second waits behind it."""

    async def main() -> None:
        async def deaf(stream: ByteStream, one: RemotingCommand) -> None:
            await anyio.sleep_forever()

        async with serving() as server, RemotingClient() as client:
            server.serve = deaf
            await client.invoke_oneway(server.address, command())
            await server.until_seen(1)
            (connection,) = client._connections()
            first, large, last = (connection.new_call() for _ in range(3))
            in_time = connection.now() + 3600
            client.begin(connection, command(bytes(15_000_000)), in_time, first)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RemotingTimeoutError, match="it was not sent") as error:
                await client.invoke(server.address, command(b"second"), timeout=0.05)
            assert not error.value.written
            client.begin(connection, command(bytes(9_000_000)), in_time, large)
            assert not connection.has_space
            with pytest.raises(RemotingTimeoutError, match="it was not sent"):
                await client.invoke(server.address, command(b"no space even to queue it"), timeout=0.05)
            with pytest.raises(RemotingTimeoutError, match="it was not sent"):
                await client.invoke_oneway(server.address, command(), timeout=0.01)
            async with anyio.create_task_group() as tasks:

                async def queue() -> None:
                    await connection.wait_for_space()
                    client.begin(connection, command(b"last"), in_time, last)

                tasks.start_soon(queue)
                await anyio.wait_all_tasks_blocked()
                assert connection.waiting == 2
                connection.end(large)
            for call in (first, last):
                connection.end(call)
            assert [call.written for call in (first, large, last)] == [True, False, False]
            assert (connection._queued, connection.waiting) == (0, 0)
            client.disconnect(server.address)

    run(main)


@pytest.mark.parametrize("end", ["reply", "time", "closed"])
def test_a_call_without_a_task_learns_its_end(run: Callable[[Main], None], end: str) -> None:
    async def main() -> None:
        over = anyio.Event()
        bodies: list[bytes | None] = []

        def then(call: CallbackCall) -> None:
            connection.end(call)
            bodies.append(None if call.reply is None else bytes(call.reply.body))
            over.set()

        async with serving() as server, RemotingClient() as client:
            await client.invoke(server.address, command())
            connection = await client.connection(server.address)
            server.serve = server.echo if end == "reply" else server.never
            deadline = connection.now() + (0.05 if end == "time" else 3600)
            client.begin(connection, command(b"x"), deadline, CallbackCall(then))
            assert connection.waiting == 1
            if end == "closed":
                connection.close("enough")
            await over.wait()
            assert (bodies, connection.waiting) == ([b"x" if end == "reply" else None], 0)

    run(main)


def test_a_broken_connection_fails_its_requests_and_the_next_one_gets_a_new_one(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def drop(stream: ByteStream, one: RemotingCommand) -> None:
            await anyio.aclose_forcefully(stream)

        opened: list[ClientConnection] = []
        closed: list[ClientConnection] = []
        async with serving() as server, RemotingClient() as client:
            client.on_connect.append(opened.append)
            client.on_close.append(closed.append)
            await client.invoke(server.address, command())
            server.serve = drop
            with pytest.raises(RemotingSendError, match="it may have arrived") as error:
                await client.invoke(server.address, command())
            assert error.value.written
            assert closed == opened
            assert not client.is_connected(server.address)
            server.serve = server.echo
            await client.invoke(server.address, command())
            assert len(opened) == 2

    run(main)


def test_no_server_at_the_address(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unused.getsockname()[1]}"
            async with RemotingClient(clock=ManualClock()) as client:
                with pytest.raises(RemotingConnectError, match=f"cannot connect to {address}") as error:
                    await client.invoke(address, command())
                assert isinstance(error.value.cause, OSError)
                assert (error.value.address, error.value.written) == (address, False)

    run(main)


class Line(SocketNetwork):
    """Count the attempts to connect, which all fail."""

    def __init__(self) -> None:
        self.attempts = 0
        self.gate: anyio.Event | None = None

    async def connect(self, host: str, port: int) -> socket.socket:
        self.attempts += 1
        if self.gate:
            await self.gate.wait()
        raise ConnectionRefusedError(111, "refused")


def test_reconnects_wait_longer_and_longer_as_far_as_the_request_allows(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        clock, line = ManualClock(), Line()
        async with RemotingClient(clock=clock, network=line) as client:
            for failures in range(1, 8):
                async with anyio.create_task_group() as tasks:

                    async def ask() -> None:
                        with pytest.raises(RemotingConnectError, match="refused"):
                            await client.invoke("a:1", command(), timeout=60)

                    tasks.start_soon(ask)
                    await anyio.wait_all_tasks_blocked()
                    clock.advance(0.1 * 2**failures)
                assert line.attempts == failures
            client._peers["a:1"].back_off._not_before = clock.monotonic() + 5
            with pytest.raises(RemotingConnectError, match=r"refused.*tried again in 5\.0 s") as raised:
                await client.invoke("a:1", command(), timeout=1)
            assert raised.value.lasting == str(raised.value).partition(";")[0]
            assert line.attempts == 7

    run(main)


def test_those_who_wait_for_the_same_attempt_share_its_failure(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        line = Line()
        line.gate = anyio.Event()
        failed = []
        async with RemotingClient(network=line) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(RemotingConnectError):
                    await client.invoke("a:1", command())
                failed.append(1)

            for _ in range(10):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            line.gate.set()
        assert (line.attempts, len(failed)) == (1, 10)

    run(main)


def test_connecting_takes_no_longer_than_allowed(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        line = Line()
        line.gate = anyio.Event()
        async with RemotingClient(network=line, connect_timeout=0.01) as client:
            with pytest.raises(RemotingConnectError, match="TimeoutError"):
                await client.invoke("a:1", command(), timeout=60)
        async with RemotingClient(network=line) as client:
            with pytest.raises(RemotingConnectError, match="TimeoutError"):
                await client.invoke("a:1", command(), timeout=0.01)

    run(main)


def test_a_cancelled_attempt_leaves_the_next_caller_to_try(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient() as client:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await client.invoke(server.address, command())
            assert scope.cancelled_caught
            await client.invoke(server.address, command())

    run(main)


def test_accepted_and_dropped_without_a_word_is_as_bad_as_refused(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def drop(stream: ByteStream, one: RemotingCommand) -> None:
            await anyio.aclose_forcefully(stream)

        async with serving() as server, RemotingClient(clock=ManualClock()) as client:
            server.serve = drop
            with pytest.raises(RemotingSendError):
                await client.invoke(server.address, command())
            assert client._peers[server.address].back_off.failures == 1

    run(main)


def test_requests_of_the_server_are_served(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        asked: list[tuple[str, bytes]] = []

        def notify(connection: ClientConnection, one: RemotingCommand) -> None:
            asked.append((connection.address, bytes(one.body)))

        def refuse(connection: ClientConnection, one: RemotingCommand) -> RemotingCommand:
            raise RemotingError(16, "no")

        async def slow(connection: ClientConnection, one: RemotingCommand) -> RemotingCommand:
            await anyio.lowlevel.checkpoint()
            return one.reply(body=b"slow " + one.body)

        def broken(connection: ClientConnection, one: RemotingCommand) -> RemotingCommand:
            raise ZeroDivisionError("oops")

        async def broken_later(connection: ClientConnection, one: RemotingCommand) -> RemotingCommand:
            raise ZeroDivisionError("later")

        async with serving() as server, RemotingClient(log=StructuredLog()) as client:
            for code, processor in ((40, notify), (41, refuse), (42, slow), (43, broken), (44, broken_later)):
                client.register_processor(code, processor)
            await client.invoke(server.address, command())
            with structlog.testing.capture_logs() as logs:
                for code in (40, 41, 42, 43, 44, 45):
                    one = command(b"x", code)
                    one.opaque = code
                    await server.streams[0].send(encode(one))
                    one.flag = 2
                    await server.streams[0].send(encode(one))
                await server.until_seen(6)
                await client.invoke(server.address, command())
            answers = {one.opaque: one for one in server.seen[1:6]}
            assert asked == [(server.address, b"x")] * 2
            assert {code: (one.code, one.remark) for code, one in answers.items()} == {
                41: (16, "no"),
                42: (0, None),
                43: (1, "ZeroDivisionError: oops"),
                44: (1, "ZeroDivisionError: later"),
                45: (3, " request type 45 not supported"),
            }
            assert bytes(answers[42].body) == b"slow x"
            assert [log["event"] for log in logs] == ["request_failed"] * 4

    run(main)


def test_a_server_that_talks_nonsense(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def nonsense(stream: ByteStream, one: RemotingCommand) -> None:
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        async with serving() as server, RemotingClient() as client:
            server.serve = nonsense
            with pytest.raises(RemotingSendError, match="broken frame"):
                await client.invoke(server.address, command())

    run(main)


def test_what_does_not_fit_a_frame_is_refused_and_harms_no_other_request(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, RemotingClient() as client:
            with pytest.raises(FrameError):
                await client.invoke(server.address, command(bytes(MAX_FRAME)))
            with pytest.raises(FrameError):
                await client.invoke_oneway(server.address, command(bytes(MAX_FRAME)))
            await client.invoke(server.address, command())
            assert len(server.streams) == 1

    run(main)


def test_idle_connections_are_closed(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        clock = ManualClock()
        closed: list[str] = []
        async with serving() as server, RemotingClient(clock=clock) as client:
            client.on_close.append(lambda connection: closed.append(connection.close_reason))
            await client.invoke(server.address, command())
            clock.advance(119)
            await anyio.wait_all_tasks_blocked()
            assert client.is_connected(server.address)
            await client.invoke(server.address, command())
            clock.advance(119)
            await anyio.wait_all_tasks_blocked()
            assert client.is_connected(server.address)
            clock.advance(1)
            while not closed:
                await anyio.lowlevel.checkpoint()
            assert closed == ["neither sent nor received for 120 s"]

    run(main)


def test_leaving_the_client_ends_what_waits_and_an_exception_stays_itself(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server, anyio.create_task_group() as tasks:
            server.serve = server.never

            async def ask(client: RemotingClient) -> None:
                with pytest.raises(RemotingSendError, match="closed"):
                    await client.invoke(server.address, command(), timeout=60)

            async with RemotingClient() as client:
                tasks.start_soon(ask, client)
                await server.until_seen(1)

            async def fail() -> None:
                async with RemotingClient() as client:
                    await client.invoke_oneway(server.address, command())
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await fail()
            with pytest.raises(RuntimeError, match="not open"):
                await client.invoke(server.address, command())

    run(main)


def test_cancellation_from_outside_leaves_the_client(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with serving() as server:
            server.serve = server.never
            with anyio.move_on_after(0.02) as scope:
                async with RemotingClient() as client:
                    await client.invoke(server.address, command())
            assert scope.cancelled_caught

    run(main)


def test_a_faulty_listener_does_not_matter(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        def fail(connection: ClientConnection) -> None:
            raise ZeroDivisionError

        async with serving() as server, RemotingClient(log=StructuredLog()) as client:
            client.on_connect.append(fail)
            client.on_close.append(fail)
            with structlog.testing.capture_logs() as logs:
                await client.invoke(server.address, command())
                client.disconnect(server.address)
                await anyio.wait_all_tasks_blocked()
            assert [log["event"] for log in logs] == ["connection_callback_failed"] * 2

    run(main)


def test_addresses() -> None:
    assert split_address("broker:10911") == ("broker", 10911)
    assert split_address("[::1]:9876") == ("::1", 9876)
    for wrong in ("", "broker", ":1", "broker:", "broker:x", "broker:70000"):
        with pytest.raises(ValueError, match="is not host:port"):
            split_address(wrong)
