"""Replication in the composition root: the port for slaves, who may connect there, and the client of a slave."""

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog
import trio

from trimq.broker.config import BrokerConfig, ReplicationConfig, parse_addresses
from trimq.broker.context import BrokerContext
from trimq.broker.processors.pull.back_to_master import refuse_pulls
from trimq.broker.security_files import SecurityFiles
from trimq.broker.services.master_end import MasterEnd
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.services.slave_synchronize import SlaveSynchronize
from trimq.broker.services.slave_timers import SlaveTimers
from trimq.broker.services.topic_followers import TopicWatch
from trimq.broker.start_error import StartError
from trimq.broker.store.message_store import HAClient, MessageStore
from trimq.broker.store.replication.ha_admission import HAAdmission, HATls, OpenStream
from trimq.broker.store.replication.reminders import Reminders
from trimq.protocol.auth.model import address_of
from trimq.protocol.body import GetBrokerMemberGroupResponseBody, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.namesrv import GetBrokerMemberGroupRequestHeader
from trimq.remoting.config.configuration import Configuration, NettyServerConfig
from trimq.remoting.errors import RemotingTransportError
from trimq.remoting.network import Network
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.reactor import HandlerTable

if TYPE_CHECKING:
    from trimq.broker.replicas.replica import Replica

_log = structlog.get_logger(__name__)

_TIMEOUT: Final = 3.0
_REGISTRATION: Final = 1.0
"""Seconds for which a slave waits for its name servers before it connects to its master."""


class Replication:
    """What a broker's role adds to its start. ``port`` is where slaves connect; 0 if nowhere."""

    def __init__(
        self, configuration: Configuration, network: Network, files: SecurityFiles, replica: "Replica | None" = None
    ) -> None:
        """``replica``: the role that controllers have assigned."""
        self._replica = replica
        self._files = files
        self._configuration = configuration
        self._network = network
        self._sock: socket.socket | None = None
        self._not_known = Reminders()
        self._proofs: HAAdmission | None = None
        """With haSecretFile or haTls."""
        self.master: SlaveMaster | None = None
        """A slave's view of its master."""
        self.client: HAClient | None = None
        """A slave's side of replication, once it runs."""
        self.synchronize: SlaveSynchronize | None = None
        """What a slave takes over from its master besides the log, once it runs."""
        self.timers: SlaveTimers | None = None
        """What a slave knows of its master's timed messages."""

    @property
    def config(self) -> ReplicationConfig:
        """The options of replication."""
        return self._configuration.section(ReplicationConfig)

    def bind(self) -> None:
        """Bind the port for slaves, if one is configured. Raises StartError if it is taken."""
        config = self.config
        if config.is_slave or config.ha_listen_port is None:
            return
        server = self._configuration.section(NettyServerConfig)
        try:
            self._sock = self._network.bind(server.bind_address, config.ha_listen_port, server)
            self._network.open_port(self._sock, server)
        except OSError as error:
            raise StartError(f"{error.strerror or error}: set haListenPort") from error

    async def prove(self) -> None:
        """Read the secret. Raises StartError."""
        config, contexts = self.config, self._files.contexts
        keys = await self._files.ha_keys()
        client = self._files.client_tls if config.ha_tls else None
        if keys or client is not None:
            self._proofs = HAAdmission(
                keys,
                self._configuration.section(BrokerConfig).broker_name,
                parse_addresses(config.ha_allowed_without_proof),
                tls=None if client is None else HATls(lambda: contexts.server, client),
                silence=config.ha_housekeeping_interval / 1000,
            )

    @property
    def port(self) -> int:
        """Where slaves connect; 0 if nowhere."""
        return int(self._sock.getsockname()[1]) if self._sock is not None else 0

    def close(self) -> None:
        """Close the port."""
        if self._sock is not None:
            self._sock.close()

    def refuse_pulls(self, table: HandlerTable, store: MessageStore) -> None:
        """On a slave that does not serve pulls."""
        if self.config.is_slave and not self.config.slave_read_enable:
            refuse_pulls(table, store)

    async def start(self, context: BrokerContext, nursery: trio.Nursery) -> None:
        """Start the side that the role has."""
        store = context.store
        # Of a SYNC_MASTER too: what it had not dispatched as a slave waits for its slaves now.
        store.on_anew.append(context.offsets.remove_topic)
        if self._sock is not None and store.replication.ha is not None:
            listener = self._network.listener(self._sock)
            nursery.start_soon(
                store.replication.ha.serve,
                listener,
                self._network.peer_of,
                self._admission(context.registration),
                None if self._proofs is None else self._proofs.of_slave,
            )
        if self.master is not None:
            open_stream: OpenStream = self._network.open_stream
            if self._proofs is not None:
                open_stream = self._proofs.proving(open_stream, self._network.peer_of)
            self.client = store.make_client(self.master, open_stream)
            self.synchronize = SlaveSynchronize(
                self.master,
                self.client,
                context.clock,
                store=store,
                topics=context.topics,
                groups=context.groups,
                offsets=context.offsets,
                modes=context.modes,
                schedule=context.schedule,
                timers=self.timers or SlaveTimers(store),
                users=None if context.users is None else context.users.store,
            )
            store.hear_waiting(self.synchronize.message_waits)
            store.message_arriving.append(self.synchronize.message_arriving)
            await nursery.start(self.synchronize.run)
            if self._replica is not None:
                nursery.start_soon(self._watch(context.clock, self.synchronize, self.client).run)
            store.replication.master_settings = self.master.settings
            nursery.start_soon(self.client.run)
            if self._replica is not None:
                nursery.start_soon(self._follow, self._replica, context.registration)
            nursery.start_soon(MasterEnd(self.master, self.client, context.clock).run)

    async def _follow(self, replica: "Replica", registration: BrokerOuterAPI) -> None:
        """Connect to the master once this broker is registered: it lets in whom the name server lists."""
        assert self.master is not None
        await registration.registered(_REGISTRATION)
        await replica.follow(self.master)

    def _watch(self, clock: Clock, synchronize: SlaveSynchronize, client: HAClient) -> TopicWatch:
        assert self.master is not None
        assert self._replica is not None
        return TopicWatch(
            self.master,
            clock,
            self._replica.leadership.broker_id,
            follows=lambda: client.follows,
            take=synchronize.take_topics,
            version=lambda: synchronize.topics_version,
        )

    def _admission(self, registration: BrokerOuterAPI) -> Callable[[str], Awaitable[int]]:
        networks = parse_addresses(self.config.ha_allowed_addresses)

        async def admitted(address: str) -> int:
            """How many slaves may connect from ``address``."""
            peer = address_of(address)
            if peer is None:
                return 0
            if networks:
                # A peer that is named counts as often as it is named; a network only lets it in.
                named = sum(peer in network for network in networks if network.num_addresses == 1)
                return named or int(any(peer in network for network in networks))
            hosts = [await _addresses(host) for host in await self._listed(registration)]
            return sum(peer in found for found in hosts)

        return admitted

    async def _listed(self, registration: BrokerOuterAPI) -> list[str]:
        """The hosts of the slaves that a name server lists under this broker's name."""
        broker = self._configuration.section(BrokerConfig)
        header = GetBrokerMemberGroupRequestHeader(
            cluster_name=broker.broker_cluster_name, broker_name=broker.broker_name
        )
        try:
            reply = await registration.ask(
                RemotingCommand.request(RequestCode.GET_BROKER_MEMBER_GROUP, header), _TIMEOUT
            )
            if reply.code != ResponseCode.SUCCESS or not len(reply.body):
                return []
            group = decode_json(reply.body, GetBrokerMemberGroupResponseBody).broker_member_group
        except (RemotingTransportError, RemotingError) as error:
            # Each connection asks: the log shows it once a minute.
            if self._not_known.is_due("", trio.current_time()):
                _log.warning("slaves_not_known", reason=str(error))
            return []
        return [address.rpartition(":")[0] for number, address in group.broker_addrs.items() if number != "0"]


async def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host, which may be one already."""
    try:
        return {ipaddress.ip_address(host)}
    except ValueError:
        pass
    try:
        found = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {ipaddress.ip_address(entry[4][0]) for entry in found}
