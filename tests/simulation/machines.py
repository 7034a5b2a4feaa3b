"""Machines of a simulated cluster, and the programs that run on them: name server, broker, client."""

import copy
import functools
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock

import trio

from tests.simulation.disk import NodeDisk
from tests.simulation.etcd import EtcdService, SimKv
from tests.simulation.network import NodeNetwork, SimNetwork
from tests.simulation.nodes import NODE, Node
from tests.simulation.times import NodeClock
from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker import open_store
from trimq.broker.auth import open_access
from trimq.broker.controller import BrokerController
from trimq.broker.replicated_broker import ReplicatedBroker
from trimq.broker.store import message_store
from trimq.broker.store.message_store import MessageStore, SyncPlace
from trimq.broker.testing import configuration
from trimq.controller.config import load_controller
from trimq.controller.local_kv import LocalKv
from trimq.controller.server import ControllerManager
from trimq.namesrv.config import load_namesrv
from trimq.namesrv.controller import NamesrvController
from trimq.protocol import frame_buffer
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import KeyRing, Secrets
from trimq.remoting.client.credentials import Credentials
from trimq.remoting.config import configuration as configuration_module
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime import memory_limit
from trimq.remoting.server import big_frame, intake

NAMESRV_PORT: Final = 9876
BROKER_PORT: Final = 10911
CONTROLLER_PORT: Final = 9878
ROOT: Final = "/store"

BROKER: Final[dict[str, object]] = {
    "bindAddress": "0.0.0.0",
    "listenPort": BROKER_PORT,
    "fastListenPort": 0,
    "mappedFileSizeCommitLog": 32 * 1024,
    "commitLogReserveStep": 8 * 1024,
    "mappedFileSizeConsumeQueue": 50 * 20,
    "maxMessageSize": 4096,
    "maxHashSlotNum": 32,
    "maxIndexNum": 60,
    "timerWheelEnable": False,
    "mappedFileSizeTimerLog": 4096,
    "shutdownWaitTimeSeconds": 6,
}
"""Settings with which files roll within a short simulation."""
ADMINISTRATOR: Final = Credentials("root", "secret of root")
_INNER: Final = json.dumps({"accessKey": "brokers", "secretKey": "secret of brokers"})
SIGNED: Final[dict[str, object]] = {"innerClientAuthenticationCredentials": _INNER}
"""Settings with which a controller signs what it sends."""
USERS: Final[dict[str, object]] = SIGNED | {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "allowAdminOverPlain": True,
    "authKeyFile": "/none/auth.key",
    "initAuthenticationUser": json.dumps({"username": "root", "password": ADMINISTRATOR.secret_key}),
}
"""Settings with which a broker serves its users only."""
REPLICA: Final[dict[str, object]] = {
    "enableControllerMode": True,
    "brokerHeartbeatInterval": 200,
    "controllerHeartBeatTimeoutMills": 1000,
    "syncBrokerMetadataPeriod": 1000,
    "checkSyncStateSetPeriod": 100,
    "haSendHeartbeatInterval": 200,
    "haHousekeepingInterval": 3000,
}
"""Settings of controller mode with which several failovers happen within a short simulation."""


class _Traced(list[str]):
    """The history of a disk, as events of the simulation."""

    def __init__(self, name: str, trace: Callable[[str], None]) -> None:
        super().__init__()
        self._name = name
        self._trace = trace

    def append(self, entry: str) -> None:
        self._trace(f"{self._name} {entry}")


class Life(Node):
    """One life of a machine: the node, with the disk and the network that its program sees."""

    def __init__(self, machine: "Machine") -> None:
        super().__init__(machine.name, machine.host)
        self.clock = machine.clock
        self.disk = machine.disk
        self.network = NodeNetwork(machine.network, self)
        self.trace = machine.trace
        self.credentials = machine.credentials
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        """Set when its program has ended or can do nothing any more."""


class Machine:
    """A machine: it outlives its programs. ``program`` runs in each of its lives, until that ends.

    ``life`` is the present one; None while the machine or its program is down.
    """

    def __init__(
        self,
        name: str,
        host: str,
        network: SimNetwork,
        program: Callable[[Life], Awaitable[None]],
        trace: Callable[[str], None],
        seed: int,
    ) -> None:
        self.name = name
        self.host = host
        self.network = network
        self.clock = NodeClock()
        self.trace = trace
        self._rng = Random(f"disk of {name} {seed}")
        self._longest_call = self._rng.choice((0.001, 0.01, 0.1))
        self.disk = self._prepared(NodeDisk(seed=seed, now_ms=self.clock.wall_ms))
        self.life: Life | None = None
        self.credentials: Credentials | None = None
        """With these its clients sign their requests."""
        self.lost_unsynced = False
        """Whether a power cut may have taken what was not synced."""
        self._program = program
        self._ended: list[Life] = []
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return self.name

    def _prepared(self, disk: SimDisk) -> NodeDisk:
        found = disk if isinstance(disk, NodeDisk) else NodeDisk.of(disk)
        found.rng = self._rng
        found.longest = self._longest_call
        found.history = _Traced(f"disk of {self.name}:", self.trace)
        return found

    def start(self, nursery: trio.Nursery) -> None:
        """Start the program, in a new life."""
        assert self.life is None
        self._nursery = nursery
        self.network.dark.discard(self.host)
        self.life = Life(self)
        if isinstance(self._program, _SERVERS):
            self._program.controller = None
        self.trace(f"{self.name} starts")
        nursery.start_soon(self._run, self.life)

    async def _run(self, life: Life) -> None:
        NODE.set(life)
        with life.scope:
            try:
                await trio.lowlevel.checkpoint()
                await self._program(life)
            except* PowerCut:
                assert life.is_dead
        if self.life is life:  # it has ended by itself
            self.network.node_ended(life, silently=False)
            self.life = None
            self.trace(f"{self.name} has ended")
        life.ended.set()

    def shut_down(self) -> bool:
        """Ask the server on it for an orderly stop. False: there is none that runs."""
        program = self._program
        if self.life is None or not isinstance(program, _SERVERS) or program.controller is None:
            return False
        self.trace(f"{self.name} shuts down")
        program.controller.shutdown()
        return True

    def kill(self) -> None:
        """End the process as SIGKILL does. What it has written stays in the memory of the machine."""
        life = self.life
        if life is None:
            return
        self.trace(f"{self.name} is killed")
        self.disk = self._prepared(life.disk.after_kill())
        self._end(life, silently=False)

    def power_cut(self, loss: Loss) -> None:
        """End the process, and take from the disk what was not synced, according to ``loss``."""
        life = self.life
        if life is None:
            return
        self.trace(f"{self.name} loses its power, and {loss.value} of what was not synced")
        self.lost_unsynced = True
        self.disk = self._prepared(life.disk.copy_after_cut(loss))
        self._end(life, silently=True)

    def _end(self, life: Life, *, silently: bool) -> None:
        life.stop()
        life.is_dead = True
        life.disk.after_cut = life.disk  # from here on its calls raise PowerCut
        self.network.node_ended(life, silently=silently)
        self._ended.append(life)
        self.life = None
        life.ended.set()

    def end_all(self) -> None:
        """At the end of the simulation: let the tasks of all lives end, without any further effect."""
        if self.life is not None:
            self._end(self.life, silently=True)
        for life in self._ended:
            life.scope.cancel()
            life.resume()
        self._ended.clear()


class NamesrvProgram:
    """A name server. ``controller`` is that of the present life."""

    def __init__(self) -> None:
        self.controller: NamesrvController | None = None

    async def __call__(self, life: Life) -> None:
        """Run it."""
        self.controller = NamesrvController(_own(_namesrv_configuration()), life.clock, life.network)
        await self.controller.run()


class BrokerProgram:
    """A broker. ``settings`` has RocketMQ's keys; ``controller`` is that of the present life."""

    def __init__(self, **settings: object) -> None:
        self.settings = BROKER | settings
        self.controller: BrokerController | None = None

    async def __call__(self, life: Life) -> None:
        """Run it."""
        self.controller = None
        settings = _own(_broker_configuration(**self.settings | {"brokerIP1": life.host}))
        controller = BrokerController(
            settings, clock=life.clock, disk=life.disk, network=life.network, sync_place=SyncPlace.THREAD
        )
        self.controller = controller
        await controller.run()

    @property
    def serves(self) -> bool:
        """Whether it has started."""
        return self.controller is not None and self.controller.health.phase is None

    @property
    def users(self) -> AuthStore | None:
        """Its users and policies, once it serves."""
        return users_of(self.controller) if self.serves else None


class ReplicaProgram:
    """A broker in controller mode. ``controller`` is that of the present life: it has one more for each role."""

    def __init__(self, **settings: object) -> None:
        self.settings = BROKER | REPLICA | settings
        self.controller: ReplicatedBroker | None = None

    async def __call__(self, life: Life) -> None:
        """Run it."""
        self.controller = None
        settings = _own(_broker_configuration(**self.settings | {"brokerIP1": life.host}))
        self.controller = ReplicatedBroker(
            settings, clock=life.clock, disk=life.disk, network=life.network, sync_place=SyncPlace.THREAD
        )
        await self.controller.run()

    @property
    def serves(self) -> bool:
        """Whether it has started."""
        return self.controller is not None and self.controller.health.phase is None

    @property
    def store(self) -> MessageStore | None:
        """The store of the present role, if it is open."""
        inner = getattr(self.controller, "controller", None)
        return inner.context.store if inner is not None and inner.health.phase is None else None

    @property
    def users(self) -> AuthStore | None:
        """The users and policies of the present role, once it is served."""
        inner = getattr(self.controller, "controller", None)
        return users_of(inner) if inner is not None and inner.health.phase is None else None

    @property
    def epoch(self) -> int:
        """The epoch of the present role; 0 before there is one."""
        inner = getattr(self.controller, "controller", None)
        return inner._replica.leadership.epoch if inner is not None else 0

    @property
    def broker_id(self) -> int:
        """The id in the present role; -1 before there is one."""
        inner = getattr(self.controller, "controller", None)
        return inner._replica.leadership.broker_id if inner is not None else -1

    @property
    def leads(self) -> bool:
        """Whether it serves as a master."""
        store = self.store
        return store is not None and not store.replication.is_slave


def users_of(broker: BrokerController | None) -> AuthStore | None:
    """The users and policies of a broker that has started; None if authentication is off."""
    return None if broker is None or broker.context.users is None else broker.context.users.store


class ControllerProgram:
    """A controller, whose etcd is at ``etcd``. ``controller`` is that of the present life."""

    def __init__(self, etcd: str, **settings: object) -> None:
        self.controller: ControllerManager | None = None
        self._etcd = etcd
        self._settings = settings

    async def __call__(self, life: Life) -> None:
        """Run it."""
        kv = SimKv(life.network, self._etcd)
        self.controller = ControllerManager(
            _own(_controller_configuration(**self._settings)), life.clock, life.network, kv
        )
        await self.controller.run()


class EtcdProgram:
    """What stands for a quorum of etcd, for one broker name."""

    def __init__(self) -> None:
        self._kv: LocalKv | None = None

    async def __call__(self, life: Life) -> None:
        """Run it."""
        service = EtcdService(life.clock, life.network)
        self._kv = service.kv
        await service.run()

    @property
    def elected(self) -> tuple[int, int]:
        """The newest epoch, and the id of its master. It is only looked at: no lease ends by that."""
        entries = self._kv._entries if self._kv is not None else {}
        found = {key.rpartition("/")[2]: int(entry.value) for key, entry in entries.items() if key.endswith(_ELECTED)}
        return found.get("epoch", 0), found.get("master", -1)


_ELECTED: Final = ("/epoch", "/master")
_SERVERS: Final = (NamesrvProgram, BrokerProgram, ReplicaProgram, ControllerProgram)


@functools.cache
def _namesrv_configuration() -> Configuration:
    settings = {"listenPort": str(NAMESRV_PORT), "bindAddress": "0.0.0.0", "kvConfigPath": "/none/kvConfig.json"}
    return load_namesrv(flags={key: (value, "simulation") for key, value in settings.items()})


@functools.cache
def _controller_configuration(**more: object) -> Configuration:
    settings = {"listenPort": CONTROLLER_PORT, "bindAddress": "0.0.0.0", "scanInactiveMasterInterval": 1000} | more
    return load_controller(flags={key: (str(value), "simulation") for key, value in settings.items()})


@functools.cache
def _broker_configuration(**settings: object) -> Configuration:
    return configuration(Path(ROOT), settings)


def _own(configuration: Configuration) -> Configuration:
    """A copy that can be changed at run time. Its sections are immutable."""
    found = copy.copy(configuration)
    for name, value in vars(configuration).items():
        if isinstance(value, dict | list):
            setattr(found, name, value.copy())
    return found


def quick_starts() -> ExitStack:
    """Starts leave out what takes long, as a process has hundreds of them, and what depends on the machine.

    They neither look up the options again, nor ask how much memory there is, nor read a file with keys. Their buffers
    are small, as the messages are.
    """
    stack = ExitStack()
    for module, name, instead in (
        (configuration_module, "options_of", _options_of),
        (open_store, "MessageStore", _SMALL_WHEEL),
        (open_access, "secrets_of", _secrets),
        (message_store, "memory_limit", _memory),
        (memory_limit, "memory_allowed", _memory),
        (frame_buffer, "_SIZE", 16 * 1024),
        (frame_buffer, "_MIN_SPACE", 4 * 1024),
        (intake, "RECEIVE_BUFFER", 16 * 1024),
        (big_frame, "RECEIVE_BUFFER", 16 * 1024),
    ):
        stack.enter_context(mock.patch.object(module, name, instead))
    return stack


def _secrets(_config: object) -> Secrets:
    """The keys that all brokers have."""
    return Secrets(KeyRing([bytes(32)]))


def _memory() -> int:
    """Bytes of memory of each machine."""
    return 4 << 30


_SMALL_WHEEL: Final = functools.partial(MessageStore, timer_slots=16_384)
"""Half a MiB instead of 37; some hours of slots, because clocks are set."""
_options_of = functools.cache(configuration_module.options_of)
