"""Metrics of masters and slaves. A broker has those of its role; one without slaves has only the role itself."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import Metric

from trimq.broker.config import BrokerRole
from trimq.broker.store.message_store import MessageStore, SlaveState
from trimq.remoting.http.metrics import counter, gauge, gauges

MOST_SLAVES: Final = 16
"""Slaves with a series of their own: addresses come from the network."""


def replication_families(store: MessageStore, broker_name: str) -> Iterator[Metric]:
    """The role, and what its side of replication knows. ``broker_name`` is the name of the set of replicas."""
    role = store.replication.config.broker_role
    yield gauges(
        "trimq_replication_role",
        "1 for the role of this broker (brokerRole), 0 for the others.",
        ("role",),
        {(other.value,): int(other is role) for other in BrokerRole},
    )
    yield from _master(store)
    yield from _slave(store)
    yield from _assigned(store, broker_name)


def _assigned(store: MessageStore, broker_name: str) -> Iterator[Metric]:
    """In controller mode."""
    leadership, epochs = store.replication.leadership, store.replication.epochs
    if leadership is None or epochs is None:
        return
    yield gauges(
        "trimq_replica_id",
        "The id that the controllers have assigned, under the label broker: the name that the replicas share.",
        ("broker",),
        {(broker_name,): leadership.broker_id},
    )
    yield gauge("trimq_replica_master_epoch", "The epoch of the master.", leadership.epoch)
    yield gauge("trimq_replica_log_epoch", "The last epoch of this log.", max(epochs.last_epoch, 0))
    if store.replication.ha is not None:
        yield gauge(
            "trimq_replica_sync_state_set_members",
            "Members of the SyncStateSet, this master included: all have each acknowledged message.",
            len(leadership.members),
        )
        yield gauges(
            "trimq_replica_lease",
            "1 while no other broker can be the master; without it nothing is acknowledged.",
            ("broker",),
            {(broker_name,): int(leadership.holds())},
        )


def _master(store: MessageStore) -> Iterator[Metric]:
    if store.replication.ha is None:
        return
    state = store.replication.ha.state()
    yield gauge("trimq_replication_slaves", "Slaves that are connected with this master.", len(state.slaves))
    yield gauge("trimq_replication_copies_in_sync", "Copies of the log in sync, the master's included.", state.in_sync)
    yield gauge(
        "trimq_replication_copies_needed",
        "Copies that a message needs before it is acknowledged, the master's included.",
        state.needed,
    )
    yield gauge(
        "trimq_replication_unconfirmed_bytes",
        "Bytes of the log that too few slaves have acknowledged. 0 on an ASYNC_MASTER.",
        store.appended_offset - store.replication.ha.confirmed_offset,
    )
    yield counter("trimq_replication_sent_bytes_total", "Bytes of the log sent to slaves.", state.sent_bytes)
    yield counter(
        "trimq_replication_slaves_refused_total",
        "Connections to haListenPort that were refused: not a slave's address, or too many at a time.",
        state.refused,
    )
    # The worst of those that share an address.
    by_address: dict[str, list[SlaveState]] = {}
    for slave in state.slaves:
        by_address.setdefault(slave.address, []).append(slave)
    first = list(by_address.items())[:MOST_SLAVES]
    yield gauges(
        "trimq_replication_slave_lag_bytes",
        "Bytes of the log that a slave has not acknowledged.",
        ("slave",),
        {(address,): max(slave.behind for slave in slaves) for address, slaves in first},
    )
    yield gauges(
        "trimq_replication_slave_lag_seconds",
        "How long this master has had the oldest byte that a slave has not acknowledged.",
        ("slave",),
        {(address,): max(slave.behind_seconds for slave in slaves) for address, slaves in first},
    )


def _slave(store: MessageStore) -> Iterator[Metric]:
    if store.replication.client is None:
        return
    state = store.replication.client.state()
    yield gauge("trimq_replication_connected", "1 while this slave is connected with its master.", int(state.connected))
    yield gauge("trimq_replication_lag_bytes", "Bytes of its master's log that this slave does not have.", state.lag)
    yield gauge(
        "trimq_replication_lag_seconds",
        "How long this slave has known that its master has the oldest byte that it does not have.",
        state.lag_seconds,
    )
    yield gauge(
        "trimq_replication_master_silent_seconds",
        "Time since the master has sent something that was right.",
        state.silent,
    )
    yield counter("trimq_replication_received_bytes_total", "Bytes received from the master.", state.received_bytes)
    yield counter(
        "trimq_replication_bad_transfers_total",
        "Connections ended because what the master had sent could not follow in this log.",
        state.bad_transfers,
    )
