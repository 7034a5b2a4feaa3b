"""StoreReplication: the side of replication that a store has by its role, and what is known of it."""

from collections.abc import Awaitable, Callable

import trio

from trimq.broker.config import ReplicationConfig
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.replication.follower import StoreFollower
from trimq.broker.store.replication.ha_client import HAClient, MasterView
from trimq.broker.store.replication.ha_connection import HAConfig
from trimq.broker.store.replication.ha_service import HAService, InSync
from trimq.broker.store.replication.slave_log import SlaveLog
from trimq.broker.store.running_flags import RunningFlags


class StoreReplication:
    """``config`` has the options, ``syncs`` is true under SYNC_FLUSH."""

    def __init__(self, config: ReplicationConfig, *, syncs: bool) -> None:
        self.config = config
        self.syncs = syncs
        self.ha: HAService | None = None
        """A master's side; None without slaves, and before the store is open."""
        self.client: HAClient | None = None
        """A slave's side; None on a master, and before it was made."""
        self.master_settings: dict[str, str] = {}
        """What a slave knows of its master's options of replication."""

    @property
    def is_slave(self) -> bool:
        """Whether the store follows a master."""
        return self.config.is_slave

    @property
    def waits_for_slaves(self) -> bool:
        """Whether a put is acknowledged, and may be read, only when slaves have it."""
        return self.config.waits_for_slaves

    @property
    def ha_config(self) -> HAConfig:
        """Settings of both sides."""
        config = self.config
        return HAConfig(
            config.ha_transfer_batch_size,
            config.ha_send_heartbeat_interval / 1000,
            config.ha_housekeeping_interval / 1000,
            config.ha_max_gap_not_in_sync,
        )

    def make_service(
        self, log: CommitLog, flags: RunningFlags, end_offset: Callable[[], int], *, replicated_offset: int
    ) -> HAService | None:
        """Make a master's side, if slaves may connect. See HAService."""
        config = self.config
        if not config.is_slave and config.ha_listen_port is not None:
            wanted = InSync(config.wanted_copies, config.min_in_sync_replicas, config.enable_auto_in_sync_replicas)
            self.ha = HAService(
                log,
                flags,
                self.ha_config,
                wanted if config.waits_for_slaves else None,
                end_offset,
                replicated_offset=replicated_offset,
            )
        return self.ha

    def make_client(
        self,
        path: WritePath,
        follower: StoreFollower,
        master: MasterView,
        open_stream: Callable[[str, int], Awaitable[trio.abc.Stream]],
    ) -> HAClient:
        """Make a slave's side, to be run while the store is open."""
        self.client = HAClient(SlaveLog(path), follower, master, self.ha_config, open_stream)
        return self.client

    @property
    def slaves_serve_pulls(self) -> bool:
        """Whether a client may pull from a slave: this one, or one that has nearly all (slaveReadEnable on both)."""
        if not self.config.slave_read_enable:
            return False
        return self.is_slave or (self.ha is not None and self.ha.has_close_slave)

    def runtime_info(self) -> dict[str, str]:
        """The role, for a broker's runtime information; on a slave also what it knows of its master."""
        info = {"brokerRole": self.config.broker_role.value}
        if self.client is not None:
            state = self.client.state()
            info["masterCommitLogMaxOffset"] = str(state.master_offset)
            info["masterSilentMs"] = str(int(state.silent * 1000))
            info["slaveLagBytes"] = str(state.lag)
            info["slaveLagMs"] = str(int(state.lag_seconds * 1000))
            info["slaveError"] = state.error
            info |= {f"master{key[:1].upper()}{key[1:]}": value for key, value in self.master_settings.items()}
        return info
