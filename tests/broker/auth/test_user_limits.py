"""Limits of users: connections, requests a second, and bytes in flight, over all connections of a user."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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
from trimq.protocol.command import ONEWAY_FLAG, RemotingCommand
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
        nursery.cancel_scope.cancel()


class Tasks:
    """Serves requests as tasks that wait for ``goes_on``, and then have ``outcome``."""

    def __init__(self, served: Served) -> None:
        self.goes_on = trio.Event()
        self.outcome: Callable[[], Outcome] = lambda: None
        served.outcome = self.start

    def start(self, _connection: Connection, _command: RemotingCommand) -> Awaitable[Outcome]:
        return self.run()

    async def run(self) -> Outcome:
        await self.goes_on.wait()
        return self.outcome()

    async def end(self) -> None:
        self.goes_on.set()
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def running(served: Served) -> AsyncIterator[AsyncExitStack]:
    """Run the reactor; a stack for the connections."""
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        await nursery.start(served.reactor.run)
        yield stack
        nursery.cancel_scope.cancel()


def fails() -> Outcome:
    raise ValueError("test")


@pytest.mark.parametrize("outcome", [lambda: None, lambda: DEFERRED, fails], ids=["answered", "deferred", "failed"])
@pytest.mark.parametrize("flag", [0, ONEWAY_FLAG])
async def test_a_new_connection_is_no_new_allowance_while_tasks_of_the_old_one_run(
    served: Served, flag: int, outcome: Callable[[], Outcome]
) -> None:
    tasks = Tasks(served)
    tasks.outcome = outcome
    async with running(served) as stack:
        one = connected(served, stack)
        served.ask(one, 60, flag=flag)
        served.ask(one, 30, flag=flag)
        served.ask(one, 500, "other", flag=flag)
        await trio.testing.wait_all_tasks_blocked()
        one.close("test")
        assert (served.bytes, served.limits.bytes_in_flight("other")) == (90, 500)
        two = connected(served, stack)
        assert "maxBytesInFlightPerUser=100: requests of user app with 90 bytes" in served.is_busy(two, 11)
        two.close("test")
        three = connected(served, stack)
        assert served.is_busy(three, 11)
        with capture_logs():
            await tasks.end()
        assert (served.bytes, served.limits.bytes_in_flight("other")) == (0, 0)
        assert served.reactor.stats.inflight == 0
        assert not served.is_busy(three, 100)
        await trio.testing.wait_all_tasks_blocked()
        three.close("test")
        assert (served.bytes, len(served.limits._usages)) == (0, 0)


async def test_a_close_ends_the_bytes_of_what_has_not_begun(served: Served) -> None:
    tasks = Tasks(served)
    most = served.reactor.limits.max_tasks_per_connection
    async with running(served) as stack:
        connection = connected(served, stack)
        for number in range(most + 8):
            # The last ones wait: three with a reply, which are dropped, and five one-ways.
            served.ask(connection, 1, flag=ONEWAY_FLAG if number >= most + 3 else 0)
        served.outcome = lambda _connection, _command: DEFERRED
        served.ask(connection, 20)
        assert (served.bytes, served.reactor.stats.inflight) == (most + 28, most + 9)
        connection.close("test")
        assert (served.bytes, served.reactor.stats.inflight) == (most + 5, most + 5)
        await tasks.end()
        assert (served.bytes, served.reactor.stats.inflight) == (0, 0)
        assert not served.limits._usages


async def test_bytes_of_tasks_end_when_the_server_stops(served: Served) -> None:
    tasks = Tasks(served)
    most = served.reactor.limits.max_tasks_per_connection
    async with running(served) as stack:
        one, two = connected(served, stack), connected(served, stack)
        for _ in range(most + 5):
            served.ask(one, 1, flag=ONEWAY_FLAG)
        served.ask(two, 20)
        await trio.testing.wait_all_tasks_blocked()
        one.close("test")
        assert served.bytes == most + 25
        with capture_logs():
            await served.reactor.shutdown(0)
        assert not tasks.goes_on.is_set()
        assert (served.bytes, served.reactor.stats.inflight) == (0, 0)
        assert not served.limits._usages


async def test_a_handler_that_closes_its_connection_may_go_on_as_a_task(served: Served) -> None:
    tasks = Tasks(served)

    def closing(connection: Connection, command: RemotingCommand) -> Outcome:
        connection.close("test")
        return tasks.start(connection, command)

    served.outcome = closing
    async with running(served) as stack:
        served.ask(connected(served, stack), 60)
        assert (served.bytes, served.reactor.stats.inflight) == (60, 1)
        assert served.is_busy(connected(served, stack), 41)
        await tasks.end()
        assert (served.bytes, served.reactor.stats.inflight) == (0, 0)


async def test_what_a_task_leaves_to_be_answered_later_counts_on(served: Served) -> None:
    """A send that creates a topic waits for the topic's file, and then for the flush of its message."""
    tasks = Tasks(served)
    again = Tasks(served)
    rest: list[Outcome] = [DEFERRED, again.run()]
    tasks.outcome = rest.pop
    served.outcome = tasks.start
    async with running(served) as stack:
        connection = connected(served, stack)
        served.ask(connection, 60)
        served.ask(connection, 30)
        await tasks.end()
        assert served.bytes == 90
        assert connection.deferred == 1
        connection.complete(None)
        await again.end()
        assert (served.bytes, served.reactor.stats.inflight) == (0, 0)


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


async def test_sends_that_create_a_topic_on_a_slow_disk_count_after_their_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"maxBytesInFlightPerUser": 100, "maxRequestsInFlight": 20}
    async with closed_broker(tmp_path, **settings) as (broker, root), AsyncExitStack() as stack:
        await root.make("app", "Topic:* All", "Group:* All")
        on_disk, waiting, done = trio.Event(), trio.Semaphore(0), trio.Semaphore(0)
        persisted = broker.context.topics.persisted

        async def slow() -> None:
            waiting.release()
            await on_disk.wait()
            await persisted()
            done.release()

        monkeypatch.setattr(broker.context.topics, "persisted", slow)
        for number in range(2):
            async with WireClient.connect(broker.endpoint) as client:
                await User(client, "app").post(310, send_ext(f"New{number}"), bytes(50))
                with trio.fail_after(60):
                    await waiting.acquire()
                (connection,) = (each for each in broker.reactor.connections.values() if each.tasks)
                closed = trio.Event()
                connection.on_close.append(lambda _connection, event=closed: event.set())  # type: ignore[misc]
            await closed.wait()
        assert broker.reactor.stats.inflight == 2
        app = User(await stack.enter_async_context(WireClient.connect(broker.endpoint)), "app")
        reply = await app.ask(310, send_ext("New0"), bytes(1))
        assert (reply.code, "maxBytesInFlightPerUser=100" in (reply.remark or "")) == (BUSY, True)
        on_disk.set()
        with trio.fail_after(60):
            await done.acquire()
            await done.acquire()
        await trio.testing.wait_all_tasks_blocked()
        assert broker.reactor.stats.inflight == 0
        assert (await app.ask(310, send_ext("New0"), bytes(100))).code == 0
