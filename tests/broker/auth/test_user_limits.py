"""Limits of users: connections, requests a second, and bytes in flight, over all connections of a user."""

import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from tests.broker.auth.signed import ROOT, User, closed_broker, signed
from tests.broker.wire_client import WireClient, send_ext
from trimq.broker.auth.user_limits import COUNT_SECONDS, UserLimits
from trimq.broker.auth.user_limits_config import UserLimitsConfig
from trimq.broker.testing import configuration
from trimq.protocol.auth.model import User as AuthUser
from trimq.protocol.codes import VERSION, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.runtime.clock import ManualClock
from trimq.remoting.server import intake
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import DEFERRED, HELD, Outcome
from trimq.remoting.server.limits import ReactorStats
from trimq.remoting.server.reactor import Reactor

BUSY = ResponseCode.SYSTEM_BUSY


async def test_requests_of_a_user_on_all_connections(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = {"clock": clock, "maxRequestsPerSecondPerUser": 5}
    async with closed_broker(tmp_path, **settings) as (broker, root), AsyncExitStack() as stack:
        users = broker.context.users
        assert users is not None
        app = await root.make("app", "Topic:* All", "Group:* All")
        two = await stack.enter_async_context(WireClient.connect(broker.endpoint))
        codes, text = [], ""
        for client in (app.client, two) * 4:
            reply = await User(client, "app").ask(310, send_ext("T"), b"x")
            codes.append(reply.code)
            text = reply.remark or ""
        assert codes == [0] * 5 + [BUSY] * 3
        assert text == (
            "system busy: maxRequestsPerSecondPerUser=5: user app has sent 5 requests in the last second; "
            "the next one is served in 200 ms"
        )
        assert broker.reactor.stats.limited == {"maxRequestsPerSecondPerUser": 3}
        clock.advance(0.5)
        assert [(await app.ask(310, send_ext("T"), b"x")).code for _ in range(3)] == [0, 0, BUSY]
        # A wrong signature takes nothing from the user whose name it has.
        for _ in range(9):
            assert (await User(two, ROOT, "guess").ask(310, send_ext("T"), b"x")).code == 16
        assert (await User(two).ask(26)).code == 0


async def test_connections_of_a_user(tmp_path: Path) -> None:
    async with closed_broker(tmp_path, maxConnectionsPerUser=2) as (broker, root):
        await root.make("app", "Topic:* All")
        async with AsyncExitStack() as stack:
            one, two, three = [await stack.enter_async_context(WireClient.connect(broker.endpoint)) for _ in range(3)]
            for client in (one, two, one):
                assert (await User(client, "app").ask(310, send_ext("T"), b"x")).code == 0
            reply = await User(three, "app").ask(310, send_ext("T"), b"x")
            assert (reply.code, reply.remark) == (
                BUSY,
                "system busy: maxConnectionsPerUser=2: there are 2 connections of user app; close one, and try again",
            )
            assert (await User(three).ask(26)).code == 0  # another user
            await one.stream.aclose()
            with trio.fail_after(10):
                while (await User(three, "app").ask(310, send_ext("T"), b"x")).code == BUSY:
                    pass


@pytest.mark.parametrize("key", ["maxConnectionsPerUser", "maxRequestsPerSecondPerUser", "maxBytesInFlightPerUser"])
def test_limits_of_users_need_authentication(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){key}.*authenticationEnabled=true"):
        configuration(tmp_path, {key: 1})


async def test_no_feature_without_a_limit(tmp_path: Path) -> None:
    async with closed_broker(tmp_path) as (broker, _):
        assert [feature.name for feature in broker.gate.features] == ["access", "request_users"]
    limited = {
        "maxBytesInFlightPerUser": 1000,
        "maxRequestsPerSecondPerAddress": 1000,
        "adminListenAddress": "127.0.0.1:0",
    }
    async with closed_broker(tmp_path / "other", **limited) as (broker, _):
        assert [feature.name for feature in broker.gate.features] == [
            "address_limits",
            "admin_port",
            "access",
            "user_limits",
            "request_users",
        ]


class Served:
    """A reactor whose handlers answer when the test says so, and the limits with a clock that the test moves."""

    def __init__(self, limit: int = 100) -> None:
        self.clock = ManualClock()
        self.reactor = Reactor(clock=self.clock)
        self.outcome: Callable[[Connection, RemotingCommand], Outcome] = lambda _connection, _command: DEFERRED
        stats: ReactorStats = self.reactor.stats
        self.limits = UserLimits(UserLimitsConfig(0, 0, limit), self.clock, stats, self.user)
        self.table = HandlerTable()
        self.table.register(1, self.handle)
        self.table.gate.register(self.limits.feature)

    def handle(self, connection: Connection, command: RemotingCommand) -> Outcome:
        return self.outcome(connection, command)

    @staticmethod
    def user(command: RemotingCommand) -> AuthUser | None:
        name = command.ext_fields().get("AccessKey", "")
        return AuthUser(name, "secret") if name else None

    def ask(self, connection: Connection, size: int, name: str = "app", flag: int = 0) -> None:
        """Serve a request as the intake does. Raises RemotingError."""
        command = RemotingCommand(1, 1, flag, ext={"AccessKey": name} if name else {}, body=bytes(size))
        self.reactor.conclude(connection, command, self.table.handlers[1](connection, command))

    def is_busy(self, connection: Connection, size: int, name: str = "app") -> str:
        """Ask; the remark of a refusal, empty without."""
        try:
            self.ask(connection, size, name)
        except RemotingError as error:
            return error.remark if error.code == BUSY else ""
        return ""

    @property
    def bytes(self) -> int:
        return self.limits.bytes_in_flight("app")


@pytest.fixture
async def served() -> Served:
    return Served()


def connected(served: Served, stack: AsyncExitStack) -> Connection:
    ours, theirs = socket.socketpair()
    stack.callback(theirs.close)
    connection = served.reactor.adopt(ours, served.table)
    stack.callback(connection.close, "test")
    return connection


async def test_bytes_until_the_replies(served: Served) -> None:
    async with AsyncExitStack() as stack:
        one, two = connected(served, stack), connected(served, stack)
        served.ask(one, 60)
        served.ask(two, 30)
        assert served.bytes == 90
        with capture_logs() as logs:
            assert served.is_busy(two, 20) == (
                "system busy: maxBytesInFlightPerUser=100: requests of user app with 90 bytes are not answered yet, "
                "and this one has 20; wait for their replies"
            )
        assert [(line["event"], line["caller"]) for line in logs] == [("requests_limited", "user app")]
        assert served.reactor.stats.limited == {"maxBytesInFlightPerUser": 1}
        served.ask(two, 10)
        served.ask(two, 0)  # without a body
        served.ask(two, 1000, "other")
        assert served.is_busy(one, 1)
        two.complete(None)
        served.clock.advance(2 * COUNT_SECONDS)
        assert served.is_busy(one, 31)
        assert not served.is_busy(one, 30)
        assert served.bytes == 100
        one.complete(None, 2)
        two.complete(None, 3)
        assert served.bytes == 0
        assert served.limits.bytes_in_flight("unknown") == 0


async def test_one_request_alone_may_be_longer_than_the_limit(served: Served) -> None:
    async with AsyncExitStack() as stack:
        connection = connected(served, stack)
        served.ask(connection, 1000)
        assert served.is_busy(connection, 1)
        connection.complete(None)
        assert not served.is_busy(connection, 1000)  # at once: on its own connection


async def test_all_connections_are_counted_at_most_every_few_milliseconds(served: Served) -> None:
    async with AsyncExitStack() as stack:
        one, two = connected(served, stack), connected(served, stack)
        served.ask(one, 100)
        assert served.is_busy(two, 1)
        one.complete(None)
        assert served.is_busy(two, 1)
        served.clock.advance(2 * COUNT_SECONDS)
        assert not served.is_busy(two, 1)


async def test_a_close_ends_the_bytes_of_a_connection(served: Served) -> None:
    async with AsyncExitStack() as stack:
        one, two = connected(served, stack), connected(served, stack)
        served.ask(one, 60)
        served.ask(two, 40)
        one.close("test")
        assert served.bytes == 40
        assert not served.is_busy(two, 60)
        two.close("test")
        assert served.bytes == 0


def _returned(outcome: Outcome, _connection: Connection, _command: RemotingCommand) -> Outcome:
    return outcome


async def test_requests_answered_at_once_or_held_do_not_count(served: Served) -> None:
    async with AsyncExitStack() as stack:
        connection = connected(served, stack)
        outcomes: list[Outcome] = [None, b"", HELD, RemotingCommand(1, 1).reply()]
        for outcome in outcomes:
            served.outcome = partial(_returned, outcome)
            served.ask(connection, 500)
        assert served.bytes == 0

        def closing(connection: Connection, _command: RemotingCommand) -> Outcome:
            connection.close("test")
            return DEFERRED

        served.outcome = closing
        served.ask(connection, 500)
        assert served.bytes == 0


async def test_a_request_of_no_user_stands_for_one_in_flight(served: Served) -> None:
    async with AsyncExitStack() as stack:
        connection = connected(served, stack)
        served.ask(connection, 70, "")
        served.ask(connection, 30)
        connection.complete(None)
        assert served.bytes == 30
        connection.complete(None)
        assert served.bytes == 0


async def test_tasks_count_until_they_end_however_they_do(served: Served) -> None:
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(served.reactor.run)
        connection = connected(served, stack)
        goes_on = trio.Event()

        async def task(connection: Connection, command: RemotingCommand) -> Outcome:
            await goes_on.wait()
            if len(command.body) == 11:
                raise ValueError("test")
            return None

        def start(connection: Connection, command: RemotingCommand) -> Awaitable[Outcome]:
            return task(connection, command)

        served.outcome = start
        served.ask(connection, 10)
        served.ask(connection, 11)
        served.outcome = lambda _connection, _command: DEFERRED
        served.ask(connection, 12)
        served.ask(connection, 13)
        assert served.bytes == 46
        connection.complete(None)
        assert served.bytes == 34
        with capture_logs():
            goes_on.set()
            await trio.testing.wait_all_tasks_blocked()
        assert served.bytes == 13
        connection.complete(None)
        assert served.bytes == 0
        # Those that have not begun are dropped with their connection.
        goes_on = trio.Event()
        served.outcome = start
        for _ in range(served.reactor.limits.max_tasks_per_connection + 5):
            served.ask(connection, 1)
        assert served.bytes == served.reactor.limits.max_tasks_per_connection + 5
        connection.close("test")
        assert served.bytes == 0
        goes_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert served.bytes == 0
        nursery.cancel_scope.cancel()


async def test_bytes_of_sends_that_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The handlers of sends drop body and header when they defer: what is counted has to be known before.
    settings = {"maxBytesInFlightPerUser": 100, "flushDiskType": "SYNC_FLUSH"}
    async with closed_broker(tmp_path, **settings) as (broker, root):
        app = await root.make("app", "Topic:* All")
        assert (await app.ask(310, send_ext("T"), bytes(60))).code == 0
        frames = b""
        for number, size in enumerate((60, 40, 1, 70), 7000):
            body = bytes(size)
            ext = signed(send_ext("T"), body, app.name, app.secret)
            frames += encode(RemotingCommand(310, number, 0, VERSION, ext=ext, body=body))
        # In one write, and so in one turn, which has no end: none of them is answered before the last one is served.
        monkeypatch.setattr(intake, "perf_counter", lambda: 0.0)
        await app.client.stream.send_all(frames)
        replies = [await app.client.reply(7000 + number) for number in range(4)]
        assert [reply.code for reply in replies] == [0, 0, BUSY, BUSY]
        assert "maxBytesInFlightPerUser=100: requests of user app with 100 bytes are not" in (replies[2].remark or "")
        assert (await app.ask(310, send_ext("T"), bytes(100))).code == 0
        assert broker.reactor.stats.limited == {"maxBytesInFlightPerUser": 2}
