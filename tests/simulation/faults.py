"""The faults of a simulation, drawn from its seed."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

import trio

from tests.simulation.machines import Machine
from tests.simulation.network import BROKER_HOSTS, SimNetwork
from tests.store.simdisk import Loss

_LOSSES: Final = tuple(Loss)


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

    async def run(self, count: int, nursery: trio.Nursery) -> None:
        """Let ``count`` faults happen, some of them at the same time."""
        kinds = [self._kill, self._restart, self._pause, self._cut, self._reset, self._step_clock, self._corrupt]
        if self.power:
            kinds += [self._power_cut] * 3
        async with trio.open_nursery() as faults:
            for _ in range(count):
                await trio.sleep(self.rng.random() * 0.6)
                faults.start_soon(self.rng.choice(kinds), nursery)

    async def _busy_moment(self, machine: Machine) -> None:
        """Return shortly after something has arrived at a machine, while it works on it; not always."""
        for _ in range(self.rng.randrange(6)):
            with trio.move_on_after(0.3):
                await self.network.arrival(machine.host)
            await trio.sleep(self.rng.random() * 0.004)

    def _duration(self) -> float:
        return self.rng.choice((0.05, 0.5, 2.0)) * (0.5 + self.rng.random())

    async def _kill(self, nursery: trio.Nursery) -> None:
        machine = self.rng.choice(self.servers)
        await self._busy_moment(machine)
        machine.kill()
        await self._start_again(machine, nursery)

    async def _restart(self, nursery: trio.Nursery) -> None:
        machine = self.rng.choice(self.servers)
        life = machine.life
        if life is None or not machine.shut_down():
            return
        await life.ended.wait()
        # It may have been killed in the meantime, and started by another fault.
        if machine.life is None:
            machine.start(nursery)

    async def _power_cut(self, nursery: trio.Nursery) -> None:
        machine = self.rng.choice(self.servers)
        await self._busy_moment(machine)
        machine.power_cut(self.rng.choice(_LOSSES))
        await self._start_again(machine, nursery)

    async def _start_again(self, machine: Machine, nursery: trio.Nursery) -> None:
        await trio.sleep(self._duration())
        if machine.life is None:
            machine.start(nursery)

    async def _pause(self, _nursery: trio.Nursery) -> None:
        machine = self.rng.choice(self.servers + self.clients)
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

    async def _cut(self, _nursery: trio.Nursery) -> None:
        one, other = self.rng.sample(self.servers + self.clients, 2)
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
        machine.clock.step_ms += self.rng.choice((-5_000, -1, 1_000, 3_600_000))
        self.trace(f"the clock of {machine} is {machine.clock.step_ms} ms off")
