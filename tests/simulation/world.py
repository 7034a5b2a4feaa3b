"""One simulation: a cluster and its clients, disturbed for some seconds, then whole again and checked.

All that happens follows from the seed: run it again, and the same happens.
"""

import gc
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final
from unittest import mock

import structlog
import trio

from tests.simulation.clients import (
    LATER_TOPIC,
    QUEUES,
    TOPIC,
    Administrator,
    Caller,
    Consumer,
    Producer,
    committed_offset,
    offset_bounds,
    read_all,
)
from tests.simulation.faults import STEPS, Faults
from tests.simulation.ledger import BrokenPromiseError, Ledger, QueueKey, UsersOf, check_queue
from tests.simulation.machines import (
    ADMINISTRATOR,
    CONTROLLER_PORT,
    SIGNED,
    USERS,
    BrokerProgram,
    ControllerProgram,
    EtcdProgram,
    Life,
    Machine,
    NamesrvProgram,
    ReplicaProgram,
    quick_starts,
)
from tests.simulation.network import SimNetwork
from tests.simulation.nodes import NODE, stoppable
from tests.simulation.times import VirtualClock, seeded
from tests.store.simdisk import Loss, SimDisk
from trimq.broker.store.durability import pending_puts
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.errors import RemotingTransportError

_SETTLE: Final = 200.0
"""Seconds that the cluster has to be whole again. A name server keeps a broker that is silent for two minutes."""
_LATER: Final = 60.0
"""Seconds in which all delayed and timed messages have to come once they are due."""
_MESSAGES: Final = 8
"""Messages of each producer; with controllers ``_MANY``, so that they send through several failovers."""
_MANY: Final = 24
_AFTERMATH: Final = 2.0
"""Seconds in which what the last faults did goes on: two leases."""
_USERS: Final = 0.3
"""The part of clusters with slaves that have users."""
_LOOK: Final = 0.05
"""Seconds between two looks at the users of all brokers."""
_GROUP: Final = "broker-a"
_answer: Final = pending_puts._answer


class NotSettledError(AssertionError):
    """The cluster does not serve although all faults are over."""


@dataclass
class Trace:
    """The events of a simulation: a digest of all, and their texts if ``keeps``."""

    keeps: bool = False
    lines: list[str] = field(default_factory=list)
    events: int = 0
    _hash: Any = field(default_factory=hashlib.sha256)

    def __call__(self, text: str) -> None:
        """Add an event, which happens now."""
        line = f"{trio.current_time():.6f} {text}"
        self._hash.update(line.encode())
        self.events += 1
        if self.keeps:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """The same for the same events at the same times."""
        return str(self._hash.hexdigest())


@dataclass(frozen=True)
class Scenario:
    """What kind of cluster a seed has.

    ``replicated``: there is one master, SYNC_MASTER, with a slave. ``takes_over``: the master is gone in the end, and
    an operator has made the slave the master. ``power_fails``: machines may lose their power, and what is not synced.
    ``later``: half of the messages are delayed or timed. ``controllers``: their number; with them there is one group of
    three brokers, whose master they elect, and which wait ``slave_timeout`` milliseconds for each other. A master
    lets members be taken out of the set after ``patience`` milliseconds. ``users``: brokers serve their users only, and
    an administrator makes and deletes users at the master.
    """

    name_servers: int
    brokers: int
    replicated: bool
    takes_over: bool
    sync_flush: bool
    power_fails: bool
    faults: int
    later: bool
    controllers: int = 0
    slave_timeout: int = 0
    patience: int = 0
    users: bool = False

    @classmethod
    def drawn(cls, rng: Random) -> "Scenario":
        """One by chance."""
        replicated, sync_flush = rng.random() < 0.5, rng.random() < 0.7
        found = cls(
            name_servers=rng.choice((1, 1, 2)),
            brokers=1 if replicated else rng.choice((1, 1, 1, 1, 2)),
            replicated=replicated,
            takes_over=replicated and rng.random() < 0.6,
            sync_flush=sync_flush,
            # A master that has lost what it did not sync refuses the slave that has it: an operator has to decide.
            power_fails=rng.random() < 0.7 and (sync_flush or not replicated),
            faults=rng.randrange(1, 5),
            later=rng.random() < 0.3,
        )
        if rng.random() >= 1 / 3:
            return replace(found, users=replicated and rng.random() < _USERS)
        found = replace(
            found,
            brokers=0,
            replicated=False,
            takes_over=False,
            power_fails=found.power_fails and sync_flush,
            faults=rng.randrange(3, 9),
            controllers=rng.choice((2, 2, 3)),
            # Less than a lease too: then a master that is cut off would go on without the others.
            patience=rng.choice((150, 600)),
            slave_timeout=rng.choice((700, 2500, 2500)),
            later=found.later and rng.random() < 0.5,  # they take three times as long
        )
        return replace(found, users=rng.random() < _USERS)

    @property
    def keeps(self) -> bool:
        """Whether nothing that was acknowledged may be lost."""
        return self.sync_flush or not self.power_fails


@dataclass
class Outcome:
    """What a simulation did."""

    seed: int
    trace: Trace
    scenario: Scenario
    ledger: Ledger
    seconds: float = 0.0
    """Time in the simulation."""

    def __str__(self) -> str:
        ledger = self.ledger
        return (
            f"seed {self.seed}: {self.trace.events} events in {self.seconds:.1f} s, {ledger.acknowledged} messages "
            f"acknowledged, {ledger.refused} refused, {ledger.unknown} unknown, {len(ledger.seen)} consumed"
        )


class World:
    """The cluster of one seed."""

    def __init__(self, seed: int, scenario: Scenario, clock: VirtualClock, trace: Trace) -> None:
        self.trace = trace
        self.scenario = scenario
        self.ledger = Ledger(keeps=scenario.keeps)
        self.network = SimNetwork(Random(f"network {seed}"), clock, trace)
        self.checked = trio.Event()
        self._seed = seed
        self._rng = Random(f"faults {seed}")
        self._hosts = [f"10.0.0.{number + 1}" for number in range(scenario.name_servers)]
        self.name_servers = [self._machine(f"namesrv-{host}", host, NamesrvProgram()) for host in self._hosts]
        self.brokers: dict[str, Machine] = {}
        self._programs: list[BrokerProgram] = []
        role: dict[str, object] = {}
        if scenario.replicated:
            role = {"brokerRole": "SYNC_MASTER", "haListenPort": 10912}
        for number in range(scenario.brokers):
            self._add_broker(f"broker-{'ab'[number]}", f"10.0.1.{number + 1}", **role)
        self.names = list(self.brokers) or [_GROUP]
        """Of the brokers."""
        self.etcd: Machine | None = None
        self._etcd_program = EtcdProgram()
        self.controllers: list[Machine] = []
        self.replicas: list[tuple[Machine, ReplicaProgram]] = []
        if scenario.controllers:
            self._add_group()
        self.slave: Machine | None = None
        if scenario.replicated:
            self.slave = self._machine("slave", "10.0.1.9", self._broker("broker-a", brokerId=1, brokerRole="SLAVE"))
        self._producers = [self._producer(f"p{number}") for number in range(2)]
        self.producers = [
            self._machine(program.name, f"10.0.2.{number + 1}", program)
            for number, program in enumerate(self._producers)
        ]
        self.consumer = self._machine("consumer", "10.0.3.1", Consumer(self.ledger, self._hosts))
        self._administrator = Administrator(self.ledger, self._hosts, Random(f"administrator {seed}"))
        self.administrator = self._machine("administrator", "10.0.3.2", self._administrator)
        self.checker = self._machine("checker", "10.0.4.1", self._check)
        if scenario.users:
            for machine in (*self.clients, self.checker):
                machine.credentials = ADMINISTRATOR

    def _add_broker(self, name: str, host: str, **settings: object) -> None:
        self.brokers[name] = self._machine(name, host, self._broker(name, **settings))

    def _add_group(self) -> None:
        """Controllers, their etcd, and the brokers whose master they elect."""
        self.etcd = self._machine("etcd", "10.0.6.1", self._etcd_program)
        hosts = [f"10.0.5.{number + 1}" for number in range(self.scenario.controllers)]
        for number, host in enumerate(hosts):
            program = ControllerProgram(self.etcd.host, **(SIGNED if self.scenario.users else {}))
            self.controllers.append(self._machine(f"controller-{number + 1}", host, program))
        addresses = ";".join(f"{host}:{CONTROLLER_PORT}" for host in hosts)
        for number in range(3):
            replica = ReplicaProgram(
                **self._settings(_GROUP),
                controllerAddr=addresses,
                slaveTimeout=self.scenario.slave_timeout,
                haMaxTimeSlaveNotCatchup=self.scenario.patience,
            )
            self.replicas.append((self._machine(f"replica-{'abc'[number]}", f"10.0.1.{number + 1}", replica), replica))

    def _settings(self, name: str) -> dict[str, object]:
        return {
            "brokerName": name,
            "namesrvAddr": ";".join(f"{host}:9876" for host in self._hosts),
            "flushDiskType": "SYNC_FLUSH" if self.scenario.sync_flush else "ASYNC_FLUSH",
            "timerWheelEnable": self.scenario.later,
            **(USERS if self.scenario.users else {}),
        }

    def _broker(self, name: str, **settings: object) -> BrokerProgram:
        program = BrokerProgram(**self._settings(name), **settings)
        self._programs.append(program)
        return program

    def _producer(self, name: str) -> Producer:
        rng = Random(f"{name} {self._seed}")
        seeks = self.scenario.controllers > 0
        count = _MANY if seeks else _MESSAGES
        return Producer(name, self.ledger, self._hosts, rng, count, later=self.scenario.later, seeks=seeks)

    def _machine(self, name: str, host: str, program: Any) -> Machine:
        return Machine(name, host, self.network, program, self.trace, self._seed)

    @property
    def servers(self) -> list[Machine]:
        """The machines of the cluster."""
        return [*self.name_servers, *self._stores, *self.controllers]

    @property
    def _stores(self) -> list[Machine]:
        return [*self.brokers.values(), *([self.slave] if self.slave is not None else []), *self._replicas]

    @property
    def _replicas(self) -> list[Machine]:
        return [machine for machine, _ in self.replicas]

    @property
    def _steady(self) -> list[Machine]:
        """Machines that are never lost."""
        return [self.etcd] if self.etcd is not None else []

    def _master(self) -> Machine | None:
        """The replica that serves as a master: of the newest epoch, if there are two."""
        found = [(program.epoch, machine.name, machine) for machine, program in self.replicas if program.leads]
        return max(found)[2] if found else None

    def _joining(self) -> Machine | None:
        """The replica that the present master, which is alone in the set, has just asked the controllers to add."""
        ids: dict[int, Machine] = {}
        added: frozenset[int] = frozenset()
        for machine, program in self.replicas:
            leadership = program.store.replication.leadership if program.store is not None else None
            if leadership is None:
                continue
            ids[leadership.broker_id] = machine
            if machine is self._master() and leadership.proposed and len(leadership.members) == 1:
                added = leadership.proposed - leadership.members
        return next((ids[found] for found in sorted(added) if found in ids), None)

    @property
    def clients(self) -> list[Machine]:
        """The machines of its users."""
        return [*self.producers, self.consumer, *([self.administrator] if self.scenario.users else [])]

    async def run(self) -> None:
        """Start, disturb, wait until all is well, check. Raises BrokenPromiseError, NotSettledError, in a group."""
        async with trio.open_nursery() as nursery:
            try:
                await self._run(nursery)
            finally:
                # Stopped tasks would never end by themselves.
                for machine in (*self.servers, *self._steady, *self.clients, self.checker):
                    machine.end_all()
                nursery.cancel_scope.cancel()

    async def _run(self, nursery: trio.Nursery) -> None:
        for machine in (*self._steady, *self.servers):
            machine.start(nursery)
        await self._until(lambda: all(program.serves for program in self._programs), "a broker does not start")
        if self.replicas:
            await self._until(self._is_whole, "the replicas do not join the set")
        for machine in self.clients:
            machine.start(nursery)
        if self.scenario.users:
            nursery.start_soon(self._watch_users)
        few_steps = (self.replicas or self.scenario.takes_over) and self.scenario.later
        # Brokers twice: their faults are the ones that count.
        servers = [*self.servers, *self._stores]
        faults = Faults(
            self._rng,
            self.network,
            servers,
            self.clients,
            self.trace,
            power=self.scenario.power_fails,
            elects=bool(self.replicas),
            pause=2.0 if self.replicas else 0.6,
            # A timed message is due by the clock of the master that took it, and another one has a clock of its own.
            # Requests with a stamp from another hour are refused.
            steps=STEPS[:3] if few_steps or self.scenario.users else STEPS,
            master=self._master,
            joining=self._joining,
            steady=self._steady,
            controllers=[machine.host for machine in self.controllers],
        )
        await faults.run(self.scenario.faults, nursery)
        self.trace("the faults are over")
        for machine in self.servers:
            if machine.life is None:
                machine.start(nursery)
        if self.replicas:
            # What a fault begins, as an election, goes on for a while. What comes later shows nothing more.
            await trio.sleep(_AFTERMATH)
            for producer in self._producers:
                producer.finish()
        await self._until(lambda: all(one.life is None for one in self.producers), "a producer does not end")
        if self.scenario.users:
            self._administrator.finish()
            await self._until(lambda: self.administrator.life is None, "the administrator does not end")
        if self.slave is not None:
            await self._end_replication(self.slave, nursery)
        if self.replicas:
            await self._end_failovers()
        self.checker.start(nursery)
        with trio.move_on_after(_SETTLE):
            await self.checked.wait()
            self._check_masters()
            return
        raise NotSettledError(f"the cluster cannot be read within {_SETTLE:g} s")

    async def _end_replication(self, slave: Machine, nursery: trio.Nursery) -> None:
        """Compare the logs of master and slave, or lose the master and let the slave take its place."""
        master, leader, follower = self.brokers["broker-a"], self._programs[0], self._programs[1]
        if not self.scenario.takes_over:
            await self._until(lambda: _is_in_sync(leader, follower), "the slave does not follow")
            self._compare(master, slave)
            await self._end_users()
            return
        if self.scenario.later:  # so that the slave has taken over some of what the master has done
            await trio.sleep(self._rng.random() * 8)
        self.trace("the master is lost, the slave takes over")
        master.kill()
        if self._rng.random() < 0.5 and slave.shut_down():
            await self._until(lambda: slave.life is None, "the slave does not stop")
        elif self.scenario.sync_flush and self._rng.random() < 0.5:
            slave.power_cut(Loss.ALL)
        else:
            slave.kill()
        follower.settings |= {"brokerId": 0, "brokerRole": "ASYNC_MASTER"}
        slave.start(nursery)
        await self._until(lambda: follower.serves, "the new master does not start")

    def _is_whole(self) -> bool:
        """Whether one replica leads, and both others are in its set and have all of its log."""
        leaders = [program for _, program in self.replicas if program.leads]
        if len(leaders) != 1 or (leader := leaders[0].store) is None or leader.replication.leadership is None:
            return False
        stores = [store for _, program in self.replicas if (store := program.store) is not None]
        leadership = leader.replication.leadership
        ends = {(store.appended_offset, store.dispatched_offset) for store in stores}
        return (
            len(stores) == len(self.replicas)
            and len(leadership.awaited) == len(leadership.members) == len(stores)
            and ends == {(leader.appended_offset, leader.appended_offset)}
        )

    async def _end_failovers(self) -> None:
        """Wait until all replicas have the same log. None may need an operator: nothing that counts was lost."""
        await self._until(self._is_whole, "the replicas do not join the set")
        master = self._master()
        assert master is not None
        for machine in self._replicas:
            self._compare(master, machine)
        await self._end_users()
        self.trace(f"masters by epoch: {self.ledger.masters}")

    async def _end_users(self) -> None:
        """Wait until all brokers have the same users and policies."""
        if self.scenario.users:
            await self._until(self._have_the_same_users, "the users do not get to all brokers")

    def _have_the_same_users(self) -> bool:
        stores = [store for _, store in self._users()]
        first = stores[0] if len(stores) == len(self._stores) else None
        return first is not None and all(dict(store.users) == dict(first.users) for store in stores)

    def _users(self) -> list[tuple[Machine, AuthStore]]:
        """The users and policies of all brokers that run and serve."""
        programs: list[tuple[Machine, BrokerProgram | ReplicaProgram]] = [
            *zip(self._stores, self._programs, strict=False),
            *self.replicas,
        ]
        running = [(machine, found) for machine, found in programs if machine.life and not machine.life.is_stopped]
        return [(machine, store) for machine, found in running if (store := found.users) is not None]

    async def _watch_users(self) -> None:
        """Hold the users of all brokers against the ledger, again and again. Raises BrokenPromiseError."""
        while True:
            found = [UsersOf(str(on), store._version, frozenset(store.users)) for on, store in self._users()]
            self.ledger.users.check(found, all_of_them=len(found) == len(self._stores))
            await trio.sleep(_LOOK)

    def _check_masters(self) -> None:
        if self.ledger.broken:
            raise BrokenPromiseError("; ".join(self.ledger.broken))

    def acknowledged(self, status: PutMessageStatus) -> None:
        """A broker answers a message, now. If that is an acknowledgement, note who gives it."""
        node = NODE.get()
        program = next((found for machine, found in self.replicas if machine.life is node), None)
        if program is not None and status is PutMessageStatus.PUT_OK:
            name = node.name if node is not None else ""
            self.ledger.add_master(name, program.epoch)
            self._check_elected(name, program)

    def _check_elected(self, name: str, program: ReplicaProgram) -> None:
        """The lease of the master that acknowledges has to end before controllers elect another one.

        Not if they took it for dead, as connections to it were refused: then it has what it acknowledges in common with
        that one, as always.
        """
        epoch, master = self._etcd_program.elected
        if epoch > program.epoch and master != program.broker_id and not self.network.was_refused:
            self.ledger.broken.append(
                f"{name} acknowledges in epoch {program.epoch}, after broker id {master} was elected in {epoch}"
            )

    def _compare(self, master: Machine, slave: Machine) -> None:
        assert master.life is not None
        assert slave.life is not None
        mine, theirs = log_of(master.life.disk), log_of(slave.life.disk)
        if mine != theirs:
            raise BrokenPromiseError(f"the logs of {master} and {slave} differ: {len(mine)} and {len(theirs)} bytes")

    async def _until(self, condition: Callable[[], bool], why: str) -> None:
        with trio.move_on_after(_SETTLE):
            while not condition():  # noqa: ASYNC110 - conditions of many programs; the time is virtual
                await trio.sleep(0.1)
            return
        raise NotSettledError(f"{why} within {_SETTLE:g} s")

    async def _check(self, life: Life) -> None:
        """Read all queues, once the cluster serves them, and hold them against the ledger."""
        caller = Caller(life, self._hosts)
        async with caller.remoting:
            for name in self.names:
                for number in range(QUEUES):
                    await self._check_queue(caller, (name, TOPIC, number))
                if wanted := self.ledger.later.get(name):
                    await self._check_later(caller, name, wanted)
        self.checked.set()

    async def _check_later(self, caller: Caller, broker: str, wanted: set[bytes]) -> None:
        """Wait until all delayed and timed messages have come. They may come again after a crash."""
        found: set[bytes] = set()
        # Earlier than ``all_due`` they cannot all be there, and each look takes time of the process.
        await trio.sleep_until(self.ledger.all_due)
        with trio.move_on_after(_LATER if self.ledger.keeps else _LATER / 4):
            while not wanted <= found:
                await trio.sleep(2)
                for number in range(QUEUES):
                    queue = broker, LATER_TOPIC, number
                    try:
                        found.update((await read_all(caller, queue, *await offset_bounds(caller, queue))).values())
                    except (RemotingTransportError, KeyError):
                        await caller.find_masters()
        self.trace(f"{broker}: {len(found)} delayed and timed messages have come, {len(wanted)} were acknowledged")
        if self.ledger.keeps and wanted - found:
            raise BrokenPromiseError(f"{broker}: {sorted(wanted - found)} were to come later, and have not")
        if found - self.ledger.attempted:
            raise BrokenPromiseError(f"{broker}: {sorted(found - self.ledger.attempted)} were never sent")

    async def _check_queue(self, caller: Caller, queue: QueueKey) -> None:
        first, end, committed, content = 0, 0, None, dict[int, bytes]()
        while True:
            try:
                committed = await committed_offset(caller, queue)
                first, end = await offset_bounds(caller, queue)
                content = await read_all(caller, queue, first, end)
                break
            except (RemotingTransportError, KeyError):
                await trio.sleep(0.2)
                await caller.find_masters()
        self.trace(f"{queue}: {first} to {end}, committed {committed}")
        # What was not synced can be lost in the middle too; recovery keeps the records behind it.
        if self.ledger.keeps and first:
            raise BrokenPromiseError(f"{queue}: starts at {first}, and nothing expires in a simulation")
        # More than ``end``: a send that no client waits for any more has arrived since.
        if self.ledger.keeps and len(content) < end:
            raise BrokenPromiseError(f"{queue}: {end} messages reported, {len(content)} found")
        check_queue(self.ledger, queue, content)
        if committed is not None and committed > end:
            raise BrokenPromiseError(f"{queue}: committed {committed}, above the end {end}")


def _is_in_sync(leader: BrokerProgram, follower: BrokerProgram) -> bool:
    """Whether the slave has all of its master's log, and the master knows it."""
    if not (leader.serves and follower.serves and leader.controller and follower.controller):
        return False
    mine, theirs = leader.controller.context.store, follower.controller.context.store
    return mine.dispatched_offset == mine.appended_offset == theirs.appended_offset == theirs.dispatched_offset


def log_of(disk: SimDisk) -> bytes:
    """The bytes of all commit log files, without what was never written."""
    paths = sorted(path for path in disk._names if path.startswith("/store/commitlog/"))
    return b"".join(disk.content(path) for path in paths).rstrip(b"\0")


def simulate(seed: int, *, keeps: bool = False) -> Outcome:
    """Run the simulation of ``seed``; with ``keeps`` the trace keeps its texts.

    Raises an exception group with BrokenPromiseError, NotSettledError, or what else went wrong. ``trace_of`` has the
    events until then.
    """
    trace = Trace(keeps)
    scenario = Scenario.drawn(Random(f"scenario {seed}"))
    outcome = Outcome(seed, trace, scenario, Ledger())

    async def main(clock: VirtualClock) -> None:
        world = World(seed, scenario, clock, trace)
        outcome.ledger = world.ledger

        def answered(on_done: Any, result: PutMessageResult) -> None:
            world.acknowledged(result.status)
            _answer(on_done, result)

        with mock.patch.object(pending_puts, "_answer", answered):
            await world.run()
        outcome.seconds = clock.now

    try:
        with quick_starts(), stoppable(), seeded(seed) as clock:
            trio.run(main, clock, clock=clock)
    except BaseException as error:
        error.add_note("\n".join(trace.lines))
        error.add_note(f"again: python -m tests.simulation --seeds {seed} --trace")
        raise
    return outcome


_LATE: Final = (
    "anyio._backends._trio",
    "numpy",
    "trimq.protocol.index_batch_native",
    "trimq.protocol.index_batch_numpy",
    "trimq.remoting.client.call_trio",
)
"""Modules that a broker imports at their first use. Each child process of the command would import them again."""


@contextmanager
def many() -> Iterator[None]:
    """For processes that run many simulations: logs below critical ones are off, and so is the garbage collector."""
    for module in _LATE:
        importlib.import_module(module)
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        structlog.configure(**before)
