"""The faults of a simulation, drawn from its seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from tests.simulation.machines import Machine
from tests.simulation.network import BROKER_HOSTS, SimNetwork
from tests.store.simdisk import Loss

_LOSSES: Final = tuple(Loss)
STEPS: Final = (-5_000, -1, 1_000, 3_600_000)
"""Milliseconds by which clocks are set."""


@dataclass
class Faults:
    """Disturbs a cluster. All its faults have an end, so that it is whole again after ``run``.

    ``servers`` may be stopped in every way, ``clients`` are paused and cut off only.
    """

    rng: Random
    network: SimNetwork
    servers: list[Machine]
    clients: list[Machine]
    trace: Callable[[str], None]
    power: bool = True
    """Whether the power may fail."""
    elects: bool = False
    """Whether there are several brokers of one name, of which controllers elect the master."""
    pause: float = 0.6
    """The most seconds between two faults."""
    controllers: Sequence[str] = ()
    """The hosts of those that elect it."""
    master: Callable[[], Machine | None] = lambda: None
    """The machine of the present master: half of the faults that stop a server are its own."""
    joining: Callable[[], Machine | None] = lambda: None
    """The machine that the present master, which is alone in the set, has just asked the controllers to add."""
    steps: Sequence[int] = STEPS
    """Milliseconds by which clocks are set."""
    steady: list[Machine] = field(default_factory=list)
    """Machines that are cut off only."""

    async def run(self, count: int, nursery: trio.Nursery) -> None:
        """Let ``count`` faults happen, some of them at the same time."""
        kinds = [self._kill, self._restart, self._pause, self._cut, self._reset, self._step_clock, self._corrupt]
        if self.power:
            kinds += [self._power_cut] * 3
        if self.elects:
            kinds += [self._isolate, self._freeze, self._refuse, self._lose_while_another_joins] * 2
            kinds.append(self._lose_unheard)
        async with trio.open_nursery() as faults:
            for _ in range(count):
                await trio.sleep(self.rng.random() * self.pause)
                faults.start_soon(self.rng.choice(kinds), nursery)

    def _victim(self, others: Sequence[Machine] = ()) -> Machine:
        """A server by chance, or one of ``others``."""
        master = self.master()
        if master is not None and self.rng.random() < 0.5:
            return master
        return self.rng.choice([*self.servers, *others])

    async def _busy_moment(self, machine: Machine) -> None:
        """Return shortly after something has arrived at a machine, while it works on it; not always."""
        for _ in range(self.rng.randrange(6)):
            with trio.move_on_after(0.3):
                await self.network.arrival(machine.host)
            await trio.sleep(self.rng.random() * 0.004)

    def _duration(self) -> float:
        return self.rng.choice((0.05, 0.5, 2.0)) * (0.5 + self.rng.random())

    async def _kill(self, nursery: trio.Nursery) -> None:
        machine = self._victim()
        await self._busy_moment(machine)
        machine.kill()
        await self._start_again(machine, nursery)

    async def _restart(self, nursery: trio.Nursery) -> None:
        machine = self._victim()
        life = machine.life
        if life is None or not machine.shut_down():
            return
        await life.ended.wait()
        # It may have been killed in the meantime, and started by another fault.
        if machine.life is None:
            machine.start(nursery)

    async def _power_cut(self, nursery: trio.Nursery) -> None:
        machine = self._victim()
        await self._busy_moment(machine)
        machine.power_cut(self.rng.choice(_LOSSES))
        await self._start_again(machine, nursery)

    async def _start_again(self, machine: Machine, nursery: trio.Nursery) -> None:
        await trio.sleep(self._duration())
        if machine.life is None:
            machine.start(nursery)

    async def _pause(self, _nursery: trio.Nursery) -> None:
        machine = self._victim(self.clients)
        await self._busy_moment(machine)
        life = machine.life
        if life is None or life.is_stopped:
            return
        self.trace(f"{machine} is paused")
        life.stop()
        await trio.sleep(self._duration())
        if not life.is_dead:
            self.trace(f"{machine} goes on")
            life.resume()

    async def _freeze(self, _nursery: trio.Nursery) -> None:
        """Pause the master when another broker has got something, perhaps from it, for as long as an election takes.

        What the other one answers waits for the master, which may be an old one when it goes on.
        """
        first = self.master()
        brokers = [found for found in self.servers if found.host.startswith(BROKER_HOSTS)]
        other = self.rng.choice([found for found in brokers if found is not first])
        for _ in range(self.rng.randrange(1, 6)):
            with trio.move_on_after(0.3):
                await self.network.arrival(other.host)
        machine = self.master()
        if machine is None or machine.life is None or machine.life.is_stopped:
            return
        life = machine.life
        self.trace(f"{machine} is paused")
        life.stop()
        await trio.sleep(self.rng.uniform(1.5, 4.0))
        if not life.is_dead:
            self.trace(f"{machine} goes on")
            life.resume()

    async def _lose_while_another_joins(self, nursery: trio.Nursery) -> None:
        """Lose a master that has asked for another member of the set: neither log nor answer get to where they should.

        Controllers may elect the new member from then on. So it must have what the master acknowledges meanwhile.
        """
        first = self.master()
        if first is None:
            return
        first.kill()
        async with trio.open_nursery() as both:
            both.start_soon(self._start_again, first, nursery)
            joining = master = None
            with trio.move_on_after(4.0):
                while joining is None:
                    await trio.sleep(0.003)
                    joining, master = self.joining(), self.master()
        if joining is None or master is None:
            return
        self.trace(f"{master} gets no answer, {joining} not its log, while it joins")
        wanted = {(master.host, joining.host), *((host, master.host) for host in self.controllers)}
        mine = sorted(wanted - self.network.cuts)
        for direction in mine:
            self.network.cut(*direction)
        await trio.sleep(self.rng.uniform(0.3, 0.9))
        master.kill()
        for direction in mine:
            self.network.heal(*direction)
        await self._start_again(master, nursery)

    async def _lose_unheard(self, nursery: trio.Nursery) -> None:
        """Lose a master that only clients have heard for a moment.

        Any member of the set may be elected then. So it must not take one out before the controllers know.
        """
        master = self.master()
        if master is None:
            return
        self.trace(f"{master} is heard by no server")
        mine = sorted({(master.host, found.host) for found in self.servers if found is not master} - self.network.cuts)
        for direction in mine:
            self.network.cut(*direction)
        await trio.sleep(self.rng.uniform(0.3, 0.8))
        master.kill()
        for direction in mine:
            self.network.heal(*direction)
        await self._start_again(master, nursery)

    async def _cut(self, _nursery: trio.Nursery) -> None:
        one, other = self.rng.sample(self.servers + self.clients + self.steady, 2)
        if self.master() is not None and self.rng.random() < 0.5:
            one = self._victim()
            other = self.rng.choice([found for found in self.servers + self.clients if found is not one])
        directions = [(one.host, other.host)]
        if self.rng.random() < 0.5:
            directions.append((other.host, one.host))
        self.trace(f"cut {one} -> {other}" + (" and back" if len(directions) > 1 else ""))
        for direction in directions:
            self.network.cut(*direction)
        await trio.sleep(self._duration())
        self.trace(f"{one} and {other} are connected again")
        for direction in directions:
            self.network.heal(*direction)

    async def _isolate(self, _nursery: trio.Nursery) -> None:
        """Cut a machine off from all other servers, or from some. Clients still reach it."""
        machine = self._victim()
        others = [found for found in self.servers if found is not machine]
        if self.rng.random() < 0.5:
            others = [found for found in others if self.rng.random() < 0.6]
        kind = self.rng.choice(("what it sends", "what it gets", "what it gets", "both"))
        directions = {(machine.host, found.host) for found in others} if kind != "what it gets" else set()
        if kind != "what it sends":
            directions |= {(found.host, machine.host) for found in others}
        # What is cut already has its own end.
        mine = sorted(directions - self.network.cuts)
        names = sorted({found.name for found in others})
        self.trace(f"{machine} is isolated from {', '.join(names)}: {kind}")
        for direction in mine:
            self.network.cut(*direction)
        await trio.sleep(self.rng.uniform(0.2, 3.5))
        self.trace(f"{machine} is not isolated any more")
        for direction in mine:
            self.network.heal(*direction)

    async def _refuse(self, _nursery: trio.Nursery) -> None:
        """Let controllers take the master for dead, which goes on: something on the way refuses connections to it."""
        machine = self.master()
        if machine is None:
            return
        await self._busy_moment(machine)
        # What is refused already has its own end.
        free = [host for host in self.controllers if (host, machine.host) not in self.network.refused]
        hosts = [host for host in free if self.rng.random() < 0.7]
        self.trace(f"{machine} is refused to {', '.join(hosts)}")
        for host in hosts:
            self.network.refuse(host, machine.host)
        await trio.sleep(self._duration())
        self.trace(f"{machine} is not refused any more")
        for host in hosts:
            self.network.refused.discard((host, machine.host))

    async def _reset(self, _nursery: trio.Nursery) -> None:
        if self.network.sockets:
            sock = self.rng.choice(self.network.sockets)
            self.trace(f"a connection of {sock.node.name} with {sock.peer_host} is reset")
            self.network.reset(sock)

    async def _corrupt(self, _nursery: trio.Nursery) -> None:
        """Flip bits of bodies on their way from one broker to another, which no checksum of the network notices."""
        self.trace("bodies between brokers are damaged")
        self.network.damaged.add(BROKER_HOSTS)
        await trio.sleep(self._duration())
        self.network.damaged.discard(BROKER_HOSTS)
        self.trace("bodies between brokers arrive whole")

    async def _step_clock(self, _nursery: trio.Nursery) -> None:
        machine = self.rng.choice(self.servers)
        machine.clock.step_ms += self.rng.choice(self.steps)
        self.trace(f"the clock of {machine} is {machine.clock.step_ms} ms off")
