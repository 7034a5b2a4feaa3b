"""The parts of the simulation do what their machines' counterparts do."""

import errno
import random
import select
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
import trio

from tests.simulation.disk import NodeDisk
from tests.simulation.etcd import EtcdService, SimKv
from tests.simulation.ledger import BrokenPromiseError, Ledger, UserLedger, UsersOf, check_queue
from tests.simulation.machines import Life, Machine
from tests.simulation.network import NodeNetwork, SimNetwork, SimStream
from tests.simulation.nodes import NODE, Node, stoppable
from tests.simulation.times import NodeClock, VirtualClock, seeded
from tests.store.simdisk import Loss, PowerCut
from trimq.controller.kv import Compare, Delete, KvError, Put

QUEUE = ("broker-a", "T", 0)


def simulated(main: Callable[[VirtualClock], Awaitable[None]], seed: int = 0) -> None:
    """Run ``main`` in a simulation of nothing else."""
    with stoppable(), seeded(seed) as clock:
        trio.run(main, clock, clock=clock)


# -- nodes and time


def start_on_a_node(nursery: trio.Nursery, work: Callable[[], Awaitable[None]]) -> Node:
    node = Node("n", "10.0.0.1")
    NODE.set(node)
    nursery.start_soon(work)
    NODE.set(None)
    return node


def test_a_stopped_node_does_nothing_and_goes_on_later() -> None:
    steps: list[float] = []

    async def work() -> None:
        while len(steps) < 10:
            steps.append(trio.current_time())
            await trio.sleep(1)

    async def main(_clock: VirtualClock) -> None:
        async with trio.open_nursery() as nursery:
            node = start_on_a_node(nursery, work)
            await trio.sleep(2.5)
            node.stop()
            await trio.sleep(10)
            node.resume()

    simulated(main)
    assert steps == [0, 1, 2, 12.5, 13.5, 14.5, 15.5, 16.5, 17.5, 18.5]


def test_a_task_that_is_cancelled_while_its_node_is_stopped_ends_after_it() -> None:
    ended: list[float] = []

    async def wait(event: trio.Event) -> None:
        try:
            with trio.move_on_after(3):
                await event.wait()
                await trio.sleep_forever()
        finally:
            ended.append(trio.current_time())

    async def main(_clock: VirtualClock) -> None:
        node, event = Node("n", "10.0.0.1"), trio.Event()
        async with trio.open_nursery() as nursery:
            NODE.set(node)
            nursery.start_soon(wait, event)
            NODE.set(None)
            await trio.sleep(1)
            node.stop()
            event.set()  # the task is to run, and is put aside; then its time is over too
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
            node.resume()

    simulated(main)
    assert ended == [6]


def test_the_clock_reaches_every_deadline() -> None:
    """With MockClock, 6.1 + (deadline - 6.1) can stay below the deadline for ever."""
    passed: list[float] = []

    async def main(clock: VirtualClock) -> None:
        rng = Random(1)
        for _ in range(500):
            deadline = trio.current_time() + rng.random() * 0.01
            await trio.sleep_until(deadline)
            passed.append(clock.now - deadline)

    simulated(main)
    assert set(passed) == {0.0}


def test_a_sleep_that_is_cancelled_ends_at_once_and_no_time_passes_for_its_rest() -> None:
    ended: list[float] = []

    async def main(clock: VirtualClock) -> None:
        with trio.move_on_after(1):
            await trio.sleep(100)
        ended.append(clock.now)
        with trio.move_on_after(1):
            await trio.sleep_forever()
        ended.append(clock.now)

    simulated(main)
    assert ended == [1, 2]


def test_a_shielded_wait_ends_at_its_time() -> None:
    ended: list[float] = []

    async def main(clock: VirtualClock) -> None:
        with trio.move_on_after(1) as scope:
            await clock.wait_until(3, shielded=True)
            ended.append(clock.now)
            await trio.sleep(1)
            ended.append(clock.now)
        assert scope.cancelled_caught

    simulated(main)
    assert ended == [3]


def test_a_sleep_that_was_over_while_its_node_was_stopped_is_cancelled_with_its_task() -> None:
    went_on: list[float] = []

    async def work() -> None:
        await trio.sleep(2)
        went_on.append(trio.current_time())

    async def main(_clock: VirtualClock) -> None:
        async with trio.open_nursery() as nursery:
            node = start_on_a_node(nursery, work)
            await trio.sleep(1)
            node.stop()
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
            node.resume()

    simulated(main)
    assert went_on == []


def test_tasks_of_the_same_time_run_in_an_order_that_the_seed_decides() -> None:
    def order(seed: int) -> list[int]:
        ran: list[int] = []

        async def work(number: int) -> None:
            await trio.sleep(1)
            ran.append(number)

        async def main(_clock: VirtualClock) -> None:
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(work, number)

        simulated(main, seed)
        return ran

    orders = [order(seed) for seed in range(5)]
    assert all(sorted(found) == list(range(6)) for found in orders)
    assert len({tuple(found) for found in orders}) > 1
    assert [order(seed) for seed in range(5)] == orders


def test_what_other_threads_do_changes_nothing_in_a_simulation() -> None:
    """In a test run there may be brokers and clients in threads of their own, with loops and random numbers."""
    ended = threading.Event()

    async def spin() -> None:
        while not ended.is_set():
            random.random()
            await trio.lowlevel.checkpoint()

    async def others() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(spin)

    def drawn() -> list[float]:
        numbers: list[float] = []

        async def work(task: int) -> None:
            for _ in range(200):
                await trio.lowlevel.checkpoint()
                numbers.extend([task, number := random.random(), random.uniform(0, number), random.randrange(1000)])

        async def main(_clock: VirtualClock) -> None:
            async with trio.open_nursery() as nursery:
                for task in range(6):
                    nursery.start_soon(work, task)

        simulated(main, 7)
        return numbers

    alone = drawn()
    thread = threading.Thread(target=trio.run, args=(others,))
    thread.start()
    try:
        assert [drawn() for _ in range(5)] == [alone] * 5
    finally:
        ended.set()
        thread.join()


# -- the command


def _in_fresh_process(text: str) -> subprocess.CompletedProcess[str]:
    """A copy of this process would have its threads, which Python warns of."""
    text = "import os, time\nfrom tests.simulation.__main__ import Result, in_children\n" + text
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=30)


def test_child_processes_return_their_results() -> None:
    done = _in_fresh_process(
        "long = 'x' * 1_000_000\n"
        "calls = [lambda: Result(7, 2, long), lambda: {}['lost'], lambda: Result(1, 0, '')]\n"
        "for number, found in sorted(in_children(calls, 2)):\n"
        "    print(number, found and (found.run, found.failed, found.text == long))\n"
    )
    assert done.stdout.splitlines() == ["0 (7, 2, True)", "1 None", "2 (1, 0, False)"]
    assert "KeyError: 'lost'" in done.stderr


def test_no_more_children_run_than_workers() -> None:
    done = _in_fresh_process(
        "import tempfile\n"
        "from pathlib import Path\n"
        "with tempfile.TemporaryDirectory() as name:\n"
        "    def call():\n"
        "        mine = Path(name, str(os.getpid()))\n"
        "        mine.touch()\n"
        "        time.sleep(0.02)\n"
        "        found = len(list(Path(name).iterdir()))\n"
        "        mine.unlink()\n"
        "        return Result(found, 0, '')\n"
        "    print(max(found.run for _, found in in_children([call] * 8, 3)))\n"
    )
    assert int(done.stdout) <= 3


def test_children_end_when_no_more_results_are_wanted() -> None:
    done = _in_fresh_process(
        "results = in_children([lambda: Result(1, 1, ''), lambda: time.sleep(60)], 2)\n"
        "print(next(results)[0])\n"
        "results.close()\n"
        "try:\n    os.waitpid(-1, 0)\n"
        "except ChildProcessError:\n    print('none is left')\n"
    )
    assert done.stdout.splitlines() == ["0", "none is left"]


# -- the network


class Pair:
    """Two machines with a connection between them."""

    def __init__(self, clock: VirtualClock, seed: int = 0) -> None:
        self.lines: list[str] = []
        self.network = SimNetwork(Random(seed), clock, self.lines.append)
        self.left = Node("left", "10.0.0.1")
        self.right = Node("right", "10.0.0.2")

    async def connected(self) -> tuple[SimStream, SimStream]:
        """A new connection: the end at the left, the end at the right."""
        right = self.network.of(self.right)
        port = 1 + max((port for _, port in self.network.listeners), default=0)
        sock = right.bind("0.0.0.0", port)
        right.open_port(sock)
        NODE.set(self.left)
        stream = await self.network.of(self.left).open_stream(self.right.host, port)
        NODE.set(None)
        accepted = await right.listener(sock).accept()
        assert isinstance(stream, SimStream)
        assert isinstance(accepted, SimStream)
        return stream, accepted


async def received(stream: SimStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await stream.receive_some()
    return data


def test_bytes_of_a_connection_arrive_in_order_and_others_may_come_first() -> None:
    orders = set()

    async def main(clock: VirtualClock) -> None:
        for seed in range(20):
            pair = Pair(clock, seed)
            one, one_end = await pair.connected()
            other, other_end = await pair.connected()
            order: list[str] = []

            async def read(name: str, stream: SimStream, order: list[str]) -> None:
                assert await received(stream, 3) == b"abc"
                order.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, "one", one_end, order)
                nursery.start_soon(read, "other", other_end, order)
                for piece in (b"a", b"b", b"c"):
                    await one.send_all(piece)
                await other.send_all(b"abc")
            orders.add(tuple(order))

    simulated(main)
    assert orders == {("one", "other"), ("other", "one")}


def test_a_cut_holds_one_direction_until_it_ends() -> None:
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)
        left, right = await pair.connected()
        pair.network.cut("10.0.0.1", "10.0.0.2")
        await left.send_all(b"later")
        await right.send_all(b"now")
        assert await received(left, 3) == b"now"
        with trio.move_on_after(30) as silence:
            await right.receive_some()
        assert silence.cancelled_caught
        pair.network.heal("10.0.0.1", "10.0.0.2")
        assert await received(right, 5) == b"later"

    simulated(main)


def test_a_reset_loses_what_is_under_way() -> None:
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)
        left, right = await pair.connected()
        await left.send_all(b"lost")
        pair.network.reset(left.socket)
        for end in (left, right):
            with pytest.raises(trio.BrokenResourceError) as raised:
                await end.receive_some()
            assert isinstance(raised.value.__cause__, OSError)
            assert raised.value.__cause__.errno == errno.ECONNRESET

    simulated(main)


def test_a_selector_is_shown_what_epoll_would_show() -> None:
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)
        left, right = await pair.connected()
        assert right.socket.ready == select.EPOLLOUT
        await left.send_all(b"abc")
        await trio.sleep(10)
        assert right.socket.ready == select.EPOLLIN | select.EPOLLOUT
        assert await received(right, 3) == b"abc"
        assert right.socket.ready == select.EPOLLOUT
        with trio.move_on_after(1):
            await left.send_all(bytes(1 << 20))
        assert left.socket.ready == 0, "its window is full"
        pair.network.reset(left.socket)
        assert left.socket.ready == select.EPOLLIN | select.EPOLLOUT | select.EPOLLERR
        left, right = await pair.connected()
        await left.aclose()
        await trio.sleep(10)
        assert right.socket.ready & select.EPOLLIN, "the end of the stream"

    simulated(main)


def test_who_does_not_read_stops_the_sender() -> None:
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)
        left, right = await pair.connected()
        pair.network.cut("10.0.0.1", "10.0.0.2")
        with trio.move_on_after(1) as blocked:
            await left.send_all(bytes(1 << 20))
        assert blocked.cancelled_caught
        pair.network.heal("10.0.0.1", "10.0.0.2")
        assert await received(right, 1 << 16) == bytes(1 << 16)

    simulated(main)


@pytest.mark.parametrize("silently", [False, True])
def test_the_end_of_a_process_is_noticed_unless_its_power_failed(silently: bool) -> None:
    async def main(clock: VirtualClock) -> None:
        pair = Pair(clock)
        left, _ = await pair.connected()
        pair.network.node_ended(pair.right, silently=silently)
        with trio.move_on_after(60) as silence:
            with pytest.raises(trio.BrokenResourceError):
                await left.receive_some()
        assert silence.cancelled_caught == silently
        # When the machine is back, it answers what is sent to it with a reset.
        pair.network.dark.clear()
        if silently:
            await left.send_all(b"who is there?")
        with pytest.raises(trio.BrokenResourceError):
            await left.receive_some()

    simulated(main)


def test_the_end_of_a_stream_comes_behind_its_bytes() -> None:
    async def main(clock: VirtualClock) -> None:
        left, right = await Pair(clock).connected()
        await left.send_all(b"all")
        await left.aclose()
        assert await received(right, 3) == b"all"
        assert await right.receive_some() == b""

    simulated(main)


# -- machines


def on_a_machine(program: Callable[[Life], Awaitable[None]], then: Callable[[Machine, Any], Awaitable[None]]) -> None:
    async def main(clock: VirtualClock) -> None:
        network = SimNetwork(Random(0), clock, lambda _: None)
        machine = Machine("m", "10.0.0.1", network, program, lambda _: None, 0)
        async with trio.open_nursery() as nursery:
            machine.start(nursery)
            await trio.sleep(1)
            await then(machine, nursery)
            machine.end_all()

    simulated(main)


async def write_twice(life: Life) -> None:
    """Write two pages, and sync the first."""
    fd = life.disk.create("/f", 8192)
    life.disk.sync_directory("/")
    for page, synced in ((b"a", True), (b"b", False)):
        life.disk.pwrite(fd, page * 4096, 0 if page == b"a" else 4096)
        if synced:
            await life.disk.run(life.disk.data_sync, fd)
    await trio.sleep_forever()


def test_a_killed_process_leaves_what_it_wrote() -> None:
    async def then(machine: Machine, _nursery: trio.Nursery) -> None:
        machine.kill()
        assert machine.disk.content("/f") == b"a" * 4096 + b"b" * 4096

    on_a_machine(write_twice, then)


def test_a_power_cut_takes_what_was_not_synced() -> None:
    async def then(machine: Machine, _nursery: trio.Nursery) -> None:
        life = machine.life
        assert life is not None
        machine.power_cut(Loss.ALL)
        assert machine.disk.content("/f") == b"a" * 4096 + bytes(4096)
        with pytest.raises(PowerCut):
            life.disk.open("/f")

    on_a_machine(write_twice, then)


def test_nothing_of_an_ended_life_happens_in_the_next() -> None:
    events: list[str] = []

    async def program(life: Life) -> None:
        number = len(events)
        events.append(f"{number} starts")
        await life.clock.sleep(2)
        events.append(f"{number} goes on")

    async def then(machine: Machine, nursery: trio.Nursery) -> None:
        machine.kill()
        machine.start(nursery)
        await trio.sleep(5)

    on_a_machine(program, then)
    assert events == ["0 starts", "1 starts", "1 goes on"]


def test_a_call_in_a_thread_happens_at_the_begin_or_at_the_end_of_its_time() -> None:
    moments = set()

    async def main(clock: VirtualClock) -> None:
        disk = NodeDisk()
        disk.rng = Random(1)
        for _ in range(20):
            begin = clock.now
            happened = await disk.run(lambda: clock.now)
            moments.add("begin" if happened == begin else "end" if happened == clock.now else "between")

    simulated(main)
    assert moments == {"begin", "end"}


# -- the ledger of users


def users_on(machine: str, version: int, *names: str) -> UsersOf:
    return UsersOf(machine, version, frozenset(names))


def test_what_all_brokers_have_with_the_same_version_is_known() -> None:
    ledger = UserLedger(made={"a", "b"}, deleted={"c"})
    ledger.check([users_on("m", 5, "a", "b"), users_on("s", 4, "a", "b")], all_of_them=True)
    ledger.check([users_on("m", 5, "a", "b")], all_of_them=False)
    assert (ledger.known_made, ledger.known_deleted) == (set(), set())
    ledger.check([users_on("m", 5, "a", "b"), users_on("s", 5, "a")], all_of_them=True)
    assert (ledger.known_made, ledger.known_deleted) == ({"a"}, {"c"})
    ledger.begin_deletion("a")
    ledger.check([users_on("m", 6), users_on("s", 5, "a")], all_of_them=True)  # it may be there, or not


def test_known_users_may_not_go_and_those_known_as_deleted_may_not_come_back() -> None:
    ledger = UserLedger(made={"a"}, deleted={"c"})
    ledger.check([users_on("m", 5, "a"), users_on("s", 5, "a")], all_of_them=True)
    with pytest.raises(BrokenPromiseError, match=r"s has users again that were deleted: \['c'\]"):
        ledger.check([users_on("m", 5, "a"), users_on("s", 4, "a", "c")], all_of_them=True)
    with pytest.raises(BrokenPromiseError, match=r"m does not have users any more: \['a'\]"):
        ledger.check([users_on("m", 6)], all_of_them=False)


# -- the ledger


def ledger_of(*acked: tuple[bytes, int], keeps: bool = True) -> Ledger:
    ledger = Ledger(keeps=keeps)
    for body, offset in acked:
        ledger.attempted.add(body)
        ledger.add_acked(QUEUE, body, offset, ledger.moment())
    return ledger


def test_a_ledger_is_content_with_what_was_promised() -> None:
    check_queue(ledger_of((b"a", 0), (b"b", 1)), QUEUE, {0: b"a", 1: b"b", 2: b"unknown"})


@pytest.mark.parametrize(
    ("acked", "content", "why"),
    [
        ([(b"a", 0), (b"b", 1)], {0: b"a"}, "was acknowledged, and there is None"),
        ([(b"a", 0)], {0: b"b"}, "was acknowledged, and there is b'b'"),
        ([(b"a", 1), (b"b", 0)], {0: b"b", 1: b"a"}, "was sent later and has the lower offset"),
        ([(b"a", 0)], {0: b"a", 1: b"a"}, "is there twice"),
        ([(b"a", 0)], {0: b"a", 2: b"b"}, "holes"),
    ],
)
def test_a_ledger_notices(acked: list[tuple[bytes, int]], content: dict[int, bytes], why: str) -> None:
    with pytest.raises(BrokenPromiseError, match=why):
        check_queue(ledger_of(*acked), QUEUE, content)


def test_consumers_see_one_message_at_an_offset_which_stays() -> None:
    ledger = ledger_of((b"a", 0), (b"b", 0))
    ledger.add_seen(QUEUE, 0, b"a")
    with pytest.raises(BrokenPromiseError, match="was seen before"):
        ledger.add_seen(QUEUE, 0, b"b")
    with pytest.raises(BrokenPromiseError, match="was never sent"):
        ledger.add_seen(QUEUE, 1, b"c")
    with pytest.raises(BrokenPromiseError, match="a consumer saw b'a', and there is None"):
        check_queue(Ledger(seen=ledger.seen), QUEUE, {})


def test_what_was_not_promised_may_be_lost() -> None:
    ledger = ledger_of((b"a", 0), (b"b", 1), keeps=False)
    ledger.add_seen(QUEUE, 0, b"a")
    ledger.add_seen(QUEUE, 0, b"b")
    check_queue(ledger, QUEUE, {3: b"b"})


def test_two_masters_of_one_epoch_are_noticed() -> None:
    ledger = Ledger()
    ledger.add_master("a", 1)
    ledger.add_master("a", 1)
    ledger.add_master("b", 2)
    assert not ledger.broken
    ledger.add_master("a", 2)
    assert "both" in ledger.broken[-1]


def test_an_acknowledgement_in_an_older_epoch_is_noticed() -> None:
    ledger = Ledger()
    ledger.add_master("a", 1)
    ledger.add_master("b", 3)
    assert not ledger.broken
    ledger.add_master("a", 1)
    assert "after b in 3" in ledger.broken[-1]


# -- etcd


def with_etcd(work: Callable[[SimKv, SimNetwork, EtcdService], Awaitable[None]]) -> None:
    """Run ``work`` on a machine that reaches an etcd on another one."""

    async def main(clock: VirtualClock) -> None:
        network = SimNetwork(Random(1), clock, lambda _text: None)
        here, there = Node("controller", "10.0.5.1"), Node("etcd", "10.0.6.1")
        service = EtcdService(NodeClock(), NodeNetwork(network, there))
        async with trio.open_nursery() as nursery:
            NODE.set(there)
            nursery.start_soon(service.run)
            NODE.set(here)
            await trio.sleep(0.1)
            await work(SimKv(NodeNetwork(network, here), there.host), network, service)
            nursery.cancel_scope.cancel()

    simulated(main)


def test_etcd_does_what_it_is_asked_for_by_the_network() -> None:
    async def work(kv: SimKv, _network: SimNetwork, _service: EtcdService) -> None:
        lease = await kv.grant(1000)
        assert await kv.txn([Compare("/a", 0)], [Put("/a", "1", lease.number), Put("/b", "2")])
        assert not await kv.txn([Compare("/a", 0)], [Delete("/b")])
        found = await kv.range("/")
        assert {key: entry.value for key, entry in found.entries.items()} == {"/a": "1", "/b": "2"}
        assert found.entries["/a"].lease == lease.number
        assert await kv.keep(lease.number) == 1000
        await trio.sleep(1.1)
        assert await kv.keep(lease.number) == 0
        assert list((await kv.range("/")).entries) == ["/b"]

    with_etcd(work)


def test_a_watch_shows_what_was_deleted_since_a_revision() -> None:
    async def work(kv: SimKv, _network: SimNetwork, _service: EtcdService) -> None:
        await kv.txn([], [Put("/x/1", ""), Put("/x/2", ""), Put("/y", ""), Put("/x/0", "")])
        await kv.txn([], [Delete("/x/0")])
        before = await kv.range("/x/")
        await kv.txn([], [Delete("/x/1"), Delete("/y")])
        deleted: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kv.watch, "/x/", before.revision, deleted.append)
            await trio.sleep(0.5)
            assert deleted == ["/x/1"]
            await kv.txn([], [Delete("/x/2")])
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        assert deleted == ["/x/1", "/x/2"]

    with_etcd(work)


def test_an_operation_whose_reply_is_cut_off_may_have_been_done() -> None:
    async def work(kv: SimKv, network: SimNetwork, service: EtcdService) -> None:
        await kv.range("/")  # a connection is there
        network.cut("10.0.6.1", "10.0.5.1")
        with pytest.raises(KvError) as caught:
            await kv.txn([], [Put("/a", "1")])
        assert caught.value.sent
        assert "/a" in (await service.kv.range("/")).entries
        with pytest.raises(KvError) as caught:  # there is no connection any more
            await kv.range("/")
        assert not caught.value.sent

    with_etcd(work)


def test_connections_that_a_closed_listener_has_not_accepted_are_reset() -> None:
    async def main(clock: VirtualClock) -> None:
        network = SimNetwork(Random(1), clock, lambda _text: None)
        here, there = NodeNetwork(network, Node("a", "10.0.0.1")), NodeNetwork(network, Node("b", "10.0.0.2"))
        sock = there.bind("0.0.0.0", 80)
        there.open_port(sock)
        NODE.set(here._node)
        stream = await here.open_stream("10.0.0.2", 80)
        sock.close()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()

    simulated(main)


def test_other_threads_keep_their_time() -> None:
    """A broker of the whole test session may run in one: its sleeps would never end."""
    begun, slept = threading.Event(), threading.Event()

    async def sleeps() -> None:
        begun.wait(10)
        await trio.sleep(0.01)
        slept.set()

    thread = threading.Thread(target=trio.run, args=(sleeps,))
    thread.start()
    with seeded(1):
        begun.set()
        assert slept.wait(10)
    thread.join(10)
    assert not thread.is_alive()
