"""The section of replication: the part of RocketMQ's MessageStoreConfig that is about masters and slaves."""

import enum
from dataclasses import dataclass
from typing import Final

from trimq.protocol.auth.model import IPNetwork
from trimq.remoting.config.networks import names_everybody, parse_networks
from trimq.remoting.config.options import option

MIB: Final = 1024 * 1024
REPLICATION_SETTINGS: Final = ("brokerRole", "inSyncReplicas", "minInSyncReplicas", "enableAutoInSyncReplicas")
"""What a slave remembers of its master: as a master it needs the same values."""


class BrokerRole(enum.StrEnum):
    """Whether a broker leads, and whether its sends wait for slaves."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


def _networks_problem(text: str) -> str:
    try:
        parse_addresses(text)
    except ValueError:
        return "IP addresses or networks as 10.0.0.0/8, several separated by ;"
    return ""


def _address_problem(text: str) -> str:
    host, _, port = text.rpartition(":")
    return "" if host and port.isdigit() and 0 < int(port) <= 65535 else "HOST:PORT"


def parse_addresses(text: str) -> tuple[IPNetwork, ...]:
    """Parse `10.0.0.1;10.1.0.0/16`. Raises ValueError."""
    return parse_networks(text, ";")


@dataclass(frozen=True)
class ReplicationConfig:
    """The broker's role, and how the log gets from a master to its slaves."""

    broker_role: BrokerRole = option(
        BrokerRole.ASYNC_MASTER,
        "A master acknowledges at once (ASYNC_MASTER) or when slaves have the message too (SYNC_MASTER). A SLAVE, with "
        "a brokerId above 0, copies the log of the master of the same brokerName.",
    )
    ha_listen_port: int | None = option(
        None,
        "Port at which slaves connect. It opens only if it is set; a SYNC_MASTER that waits for slaves needs it.",
        minimum=0,
        maximum=65535,
        unset="no slaves",
    )
    ha_master_address: str | None = option(
        None,
        "HOST:PORT at which a slave gets the log of its master.",
        check=_address_problem,
        unset="as the name server says",
    )
    ha_allowed_addresses: str = option(
        "",
        "Addresses from which slaves may connect, as 10.0.0.1;10.1.0.0/16. Empty: those of the brokers that the name "
        "server lists under this brokerName.",
        check=_networks_problem,
        ours=True,
    )
    ha_secret_file: str | None = option(
        None,
        "A key file (mqstore authkey FILE), the same on all brokers of a brokerName: master and slave prove to each "
        "other that they have it before anything is replicated. RocketMQ's brokers cannot do that.",
        unset="slaves and masters prove nothing",
        ours=True,
    )
    ha_tls: bool = option(
        False,
        "TLS between master and slave, with the certificates of tls.server and tls.client; each side verifies the "
        "other. Needs tls.enable=true, tls.server.certPath and tls.server.authClient=true.",
        ours=True,
    )
    ha_allowed_without_proof: str = option(
        "",
        "With haSecretFile or haTls: addresses of RocketMQ's masters and slaves, as 10.0.0.1;10.1.0.0/16, which need "
        "not prove anything. haAllowedAddresses counts for them too.",
        check=_networks_problem,
        ours=True,
    )
    in_sync_replicas: int | None = option(
        None,
        "Copies of a message, the master's included, before a SYNC_MASTER acknowledges it.",
        minimum=1,
        maximum=9,
        unset="2",
    )
    min_in_sync_replicas: int = option(
        1, "The fewest copies that enableAutoInSyncReplicas goes down to.", minimum=1, maximum=9
    )
    enable_auto_in_sync_replicas: bool = option(
        False, "Wait only for the slaves that are in sync, if these are fewer than inSyncReplicas says."
    )
    slave_timeout: int | None = option(
        None,
        "Time after which a SYNC_MASTER answers that no slave has confirmed a message.",
        unit="ms",
        minimum=1,
        unset="3000; in controller mode haMaxTimeSlaveNotCatchup + checkSyncStateSetPeriod + 1000, if that is more",
    )
    ha_send_heartbeat_interval: int = option(
        5000, "Time between signs of life of master and slave while there is nothing to send.", unit="ms", minimum=100
    )
    ha_housekeeping_interval: int = option(
        20_000, "Time of silence after which master and slave close their connection.", unit="ms", minimum=200
    )
    ha_transfer_batch_size: int = option(
        MIB,
        "Most bytes of the log in one transfer. RocketMQ's slaves stop at more than the maximum.",
        unit="bytes",
        minimum=1024,
        maximum=4 * MIB - 12,
    )
    ha_max_gap_not_in_sync: int = option(
        256 * MIB, "A slave that is this many bytes behind does not count as in sync.", unit="bytes", minimum=1
    )
    slave_read_enable: bool = option(
        False, "Whether a slave serves pulls. With it a master names a slave to clients that read what has left memory."
    )

    def problem(self) -> tuple[str, str] | None:
        """Key and expectation of a value that does not fit the others."""
        if self.min_in_sync_replicas > (self.in_sync_replicas or 2):
            return "minInSyncReplicas", "at most inSyncReplicas"
        if self.ha_allowed_without_proof and self.ha_secret_file is None and not self.ha_tls:
            return "haAllowedWithoutProof", "nothing, since without haSecretFile and haTls nothing has to be proved"
        if names_everybody(parse_addresses(self.ha_allowed_without_proof)):
            expected = "addresses of RocketMQ's brokers: with all addresses no broker would have to prove anything"
            return "haAllowedWithoutProof", expected
        if self.ha_housekeeping_interval <= self.ha_send_heartbeat_interval:
            return "haHousekeepingInterval", "more than haSendHeartbeatInterval"
        if self.waits_for_slaves and self.ha_listen_port is None:
            return "haListenPort", "a port for slaves: a SYNC_MASTER waits for one, unless inSyncReplicas=1"
        return None

    @property
    def is_slave(self) -> bool:
        """Whether this broker follows a master."""
        return self.broker_role is BrokerRole.SLAVE

    @property
    def waits_for_slaves(self) -> bool:
        """Whether sends wait for slaves."""
        return self.broker_role is BrokerRole.SYNC_MASTER and self.wanted_copies > 1

    @property
    def settings(self) -> dict[str, str]:
        """The values of REPLICATION_SETTINGS."""
        adapts = str(self.enable_auto_in_sync_replicas).lower()
        values = self.broker_role.value, str(self.wanted_copies), str(self.min_in_sync_replicas), adapts
        return dict(zip(REPLICATION_SETTINGS, values, strict=True))

    @property
    def wanted_copies(self) -> int:
        """inSyncReplicas; RocketMQ's default, 1, would let a SYNC_MASTER wait for nothing."""
        return self.in_sync_replicas or 2
