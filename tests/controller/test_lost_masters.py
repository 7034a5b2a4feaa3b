"""Masters whose processes are gone, which a controller sees by their connections before their leases end."""

from __future__ import annotations

import errno
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from tests.controller.groups import NAME, Group
from tests.controller.server import ScriptedBroker, Server, heartbeat, running
from trimq.controller.group_state import GroupState
from trimq.controller.kv import KvError
from trimq.controller.lost_masters import LostMasters
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.runtime.clock import SystemClock
from trimq.remoting.server.reactor import Connection

REFUSED = OSError(errno.ECONNREFUSED, "refused")
NO_WAY = OSError(errno.EHOSTUNREACH, "no route")
FIRST, SECOND, THIRD = "127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"


class Answers:
    """A network: what connections to an address meet, in turn; the last one stays. None: no answer ever."""

    def __init__(self) -> None:
        self.of: dict[str, list[OSError | bool | None]] = defaultdict(lambda: [True])
        self.asked: list[tuple[str, float]] = []
        self.answering = {FIRST, SECOND, THIRD}
        """Addresses of brokers that answer requests."""
        self.before: Callable[[], object] = lambda: None
        """Called before each answer."""

    async def connect(self, host: str, port: int) -> socket.socket:
        self.asked.append((f"{host}:{port}", trio.current_time()))
        self.before()
        answers = self.of[f"{host}:{port}"]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        await trio.lowlevel.checkpoint()
        if isinstance(answer, OSError):
            raise answer
        if answer is None:
            await trio.sleep_forever()
        return socket.socket()

    async def answers(self, address: str) -> bool:
        self.asked.append((address, trio.current_time()))
        self.before()
        await trio.lowlevel.checkpoint()
        return address in self.answering


class Peer:
    """The part of a connection that counts here."""

    def __init__(self, host: str) -> None:
        self.closed = False
        self.peer = (host, 5)
        self.data: dict[str, Any] = {}
        self.on_close: list[Callable[[Any], None]] = []

    def close(self) -> None:
        self.closed = True
        for callback in self.on_close:
            callback(self)


class Watched:
    """A group of three, led by 1, with a connection of each broker to one controller."""

    def __init__(self, group: Group, network: Answers) -> None:
        self.group = group
        self.network = network
        self.replaced: list[tuple[int, set[int]]] = []
        clock: Any = SystemClock()
        client: Any = network
        self.lost = LostMasters(group.manager, client, clock, self._replace, network.answers)
        self.peers: dict[int, Peer] = {}
        for broker_id in (1, 2, 3):
            self.heard(broker_id)

    def heard(self, broker_id: int, host: str = "127.0.0.1") -> Peer:
        found = self.peers[broker_id] = Peer(host)
        self.lost.heard(NAME, broker_id, cast("Connection", found))
        return found

    async def _replace(self, state: GroupState, lost: int, among: set[int]) -> None:
        assert state.epoch == 1
        self.replaced.append((lost, among))

    async def loses(self, *broker_ids: int) -> None:
        """Their connections close; wait until all is looked at."""
        for broker_id in broker_ids:
            self.peers[broker_id].close()
        with trio.fail_after(60):
            while self.lost._lost:  # noqa: ASYNC110 - there is no event for it
                await trio.sleep(0.01)


@asynccontextmanager
async def watched(addresses: tuple[str, ...] = (FIRST, SECOND, THIRD)) -> AsyncIterator[Watched]:
    group = Group()
    await group.led_by(1, 2, 3)
    for broker_id, address in enumerate(addresses, 1):
        await group.manager.register(NAME, broker_id, address, started=False)
    found = Watched(group, Answers())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.lost.run)
        yield found
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("answers", [[REFUSED], [True, REFUSED], [REFUSED, True, REFUSED]])
async def test_two_refusals_in_a_row_show_that_a_process_is_gone(
    answers: list[OSError | bool | None], autojump_clock: trio.testing.MockClock
) -> None:
    async with watched() as one:
        one.network.of[FIRST] = list(answers)
        began = trio.current_time()
        await one.loses(1)
        assert one.replaced == [(1, {2, 3})]
        assert trio.current_time() - began < 0.5
        asked = [at - began for address, at in one.network.asked if address == FIRST]
        assert asked == pytest.approx([0.03 * at for at in range(len(answers) + 1)], abs=0.01)


@pytest.mark.parametrize(
    "answers",
    [[True], [REFUSED, True], [None], [REFUSED, None], [NO_WAY], [REFUSED, NO_WAY], [TimeoutError()]],
)
async def test_anything_else_is_left_to_the_lease(
    answers: list[OSError | bool | None], autojump_clock: trio.testing.MockClock
) -> None:
    async with watched() as one:
        one.network.of[FIRST] = list(answers)
        began = trio.current_time()
        await one.loses(1)
        assert one.replaced == []
        assert 1 <= len(one.network.asked) <= 3
        assert trio.current_time() - began < 0.7


@pytest.mark.parametrize("closes", [2, 3])
async def test_a_slave_is_not_looked_at(closes: int, autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as one:
        one.network.of[SECOND] = one.network.of[THIRD] = [REFUSED]
        await one.loses(closes)
        assert (one.replaced, one.network.asked) == ([], [])
        assert one.group.manager.silent == {(NAME, closes)}, "what it has said does not count any more"


async def test_a_heartbeat_on_another_connection_shows_that_it_lives(autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as one:
        one.network.of[FIRST] = [REFUSED]
        old = one.peers[1]
        one.heard(1)
        old.close()
        await one.loses()
        assert one.network.asked == [], "it was there before"
        one.network.before = lambda: one.heard(1) if len(one.network.asked) == 1 else None
        await one.loses(1)
        assert (one.replaced, len(one.network.asked)) == ([], 1), "it came between two looks"
        # Or while the others are looked at.
        one.network.asked.clear()
        one.network.before = lambda: one.heard(1) if one.network.asked[-1][0] == SECOND else None
        await one.loses(1)
        assert one.replaced == []
        assert SECOND in [address for address, _ in one.network.asked]


async def test_one_that_has_died_together_with_the_master_does_not_follow_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as one:
        one.network.of[FIRST] = one.network.of[SECOND] = [REFUSED]
        await one.loses(2, 1)
        assert one.replaced == [(1, {3})]
        assert SECOND not in [address for address, _ in one.network.asked], "it has no connection"


async def test_members_that_do_not_answer_do_not_follow_it(autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as one:
        one.network.of[FIRST] = [REFUSED]
        one.network.answering.remove(SECOND)
        await one.loses(1)
        assert one.replaced == [(1, {3})]


async def test_a_master_without_others_keeps_its_role(autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as one:
        one.network.of[FIRST] = [REFUSED]
        await one.loses(3, 2, 1)
        assert one.replaced == []


@pytest.mark.parametrize(
    ("address", "host", "looks"),
    [
        ("127.0.0.1:1001", "127.0.0.1", True),
        ("127.0.0.1:1001", "::ffff:127.0.0.1", True),
        ("[::1]:1001", "::1", True),
        ("10.0.0.1:1001", "10.0.0.9", True),
        ("master:1001", "10.0.0.9", True),
        ("127.0.0.1:1001", "10.0.0.9", False),
        ("localhost:1001", "10.0.0.9", False),
        ("[::1]:1001", "fd00::9", False),
    ],
)
async def test_the_own_machine_says_nothing_about_a_broker_elsewhere(
    address: str, host: str, looks: bool, autojump_clock: trio.testing.MockClock
) -> None:
    async with watched((address, SECOND, THIRD)) as one:
        one.network.of.update({found: [REFUSED] for found in (FIRST, "::1:1001", "10.0.0.1:1001", "master:1001")})
        one.heard(1, host)
        await one.loses(1)
        assert bool(one.replaced) is looks


async def test_what_is_no_address_says_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with watched(("nowhere", SECOND, THIRD)) as one:
        await one.loses(1)
        assert one.replaced == []


async def test_a_store_that_does_not_answer_leaves_it_to_the_lease(autojump_clock: trio.testing.MockClock) -> None:
    async with watched() as one:
        one.network.of[FIRST] = [REFUSED]

        async def fails(_name: str) -> GroupState:
            raise KvError("cut off", sent=False)

        whole = one.group.manager.state
        one.group.manager.state = fails  # type: ignore[method-assign, assignment]
        await one.loses(1)
        assert one.network.asked == []
        one.group.manager.state = whole  # type: ignore[method-assign]
        one.heard(1)
        await one.loses(1)
        assert one.replaced == [(1, {2, 3})], "the next one is looked at"


async def test_many_connections_that_close_are_few_looks_at_a_time(autojump_clock: trio.testing.MockClock) -> None:
    """And one at a time at each broker, however often it connects."""
    async with watched() as one:
        most = now = 0

        async def counted(_name: str) -> GroupState:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await trio.sleep(0.01)
            now -= 1
            raise KvError("cut off", sent=False)

        one.group.manager.state = counted  # type: ignore[method-assign, assignment]
        for number in range(2000):
            peer = Peer("10.0.0.1")
            one.lost.heard(f"b{number % 1500}", 1, cast("Connection", peer))
            peer.close()
        assert len(one.lost._lost) == 1000
        await one.loses()
        assert most == 16
        assert one.lost._connections.keys() == {(NAME, 1), (NAME, 2), (NAME, 3)}


async def test_a_heartbeat_that_is_done_after_its_connection_counts_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with watched() as one:
        one.peers[1].closed = True
        one.lost._connections.clear()
        one.group.manager.silent.clear()
        one.lost.heard(NAME, 1, cast("Connection", one.peers[1]))
        assert one.lost._connections == {}
        assert one.group.manager.silent == {(NAME, 1)}


class TestController:
    """With sockets."""

    @pytest.fixture(autouse=True)
    def _virtual(self) -> None:
        """In real time: the kernel does not jump."""

    @asynccontextmanager
    async def group(self, tmp_path: Path, frozen: int = -1) -> AsyncIterator[tuple[Server, list[ScriptedBroker]]]:
        """Three brokers with listeners; each sends one-way heartbeats, as RocketMQ's, on a connection of its own.

        ``frozen``: the place of one of which only the kernel answers.
        """
        brokers = [ScriptedBroker(answers=at != frozen) for at in range(3)]
        self.scopes = [trio.CancelScope() for _ in brokers]
        self.wires: list[trio.SocketStream] = []

        async def run(at: int, task_status: trio.TaskStatus[None]) -> None:
            with self.scopes[at]:
                await brokers[at].run(task_status)

        async with trio.open_nursery() as nursery, running(tmp_path) as server:
            for at in range(3):
                await nursery.start(run, at)
            await server.led_by_1(*(broker.address for broker in brokers))
            assert server.controller.address is not None
            for broker_id in (1, 2, 3):
                stream = await trio.open_tcp_stream(*server.controller.address)
                self.wires.append(stream)
                oneway = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, heartbeat(broker_id), oneway=True)
                await stream.send_all(encode(oneway))
            with trio.fail_after(5):
                while len(set(server.controller.lost._connections.values())) < 3:  # noqa: ASYNC110 - no event
                    await trio.sleep(0.001)
            yield server, brokers
            for scope, wire in zip(self.scopes, self.wires, strict=True):
                await wire.aclose()
                scope.cancel()

    async def kill(self, at: int) -> None:
        self.scopes[at].cancel()
        await trio.testing.wait_all_tasks_blocked()
        await self.wires[at].aclose()

    async def test_another_member_leads_before_the_lease_ends(self, tmp_path: Path) -> None:
        async with self.group(tmp_path) as (server, brokers):
            began = server.clock.boot_seconds()
            await self.kill(0)
            with trio.fail_after(10):
                while (state := await server.controller.replicas.state("broker-a")).epoch == 1:
                    server.clock.advance(0.02)
                    await trio.sleep(0.001)
                while (await brokers[1].notified.receive()).ext_fields()["masterEpoch"] != "2":
                    pass
            assert server.clock.boot_seconds() - began < 1
            assert (state.master, state.members, 1 in state.alive) == (2, [2], True)

    async def test_a_member_that_is_frozen_does_not_follow_it(self, tmp_path: Path) -> None:
        async with self.group(tmp_path, frozen=1) as (server, _):
            await self.kill(0)
            with trio.fail_after(10):
                while (state := await server.controller.replicas.state("broker-a")).epoch == 1:
                    server.clock.advance(0.01)
                    await trio.sleep(0.01)
            assert (state.master, state.members, 1 in state.alive) == (3, [3], True)

    async def test_an_address_that_is_none_ends_no_controller(self, tmp_path: Path) -> None:
        async with running(tmp_path) as server:
            await server.led_by_1("fe80::1%a\0b:1", "fe80::1%a\0b:2")
            await server.wire.stream.aclose()
            lost = server.controller.lost
            with trio.fail_after(10):
                while lost._connections or lost._lost:  # noqa: ASYNC110 - no event
                    await trio.sleep(0.001)
            state = await server.controller.replicas.state("broker-a")
            assert (state.master, state.epoch) == (1, 1)

    async def test_a_broker_that_lives_is_not_replaced(self, tmp_path: Path) -> None:
        async with self.group(tmp_path) as (server, _):
            lost = server.controller.lost
            await self.wires[0].aclose()
            with trio.fail_after(10):
                while not lost._lost:  # noqa: ASYNC110 - there is no event for it
                    await trio.sleep(0.001)
                while lost._lost:
                    server.clock.advance(0.02)
                    await trio.sleep(0.001)
            assert (await server.controller.replicas.state("broker-a")).epoch == 1
