"""StoreReplication: the side of replication that a store has by its role, and what is known of it."""

from collections.abc import Awaitable, Callable, Collection
from typing import Final

import trio

from trimq.broker.config import ControllerModeConfig, ReplicationConfig
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.durability.write_path import WritePath
from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.replication.auto_switch_client import AutoSwitchHAClient
from trimq.broker.store.replication.auto_switch_service import AutoSwitchHAService, Membership
from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.broker.store.replication.follower import StoreFollower
from trimq.broker.store.replication.ha_client import HAClient, MasterView
from trimq.broker.store.replication.ha_connection import HAConfig
from trimq.broker.store.replication.ha_service import HAService, InSync
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.replication.slave_log import SlaveLog
from trimq.broker.store.running_flags import RunningFlags

_SLAVE_TIMEOUT: Final = 3.0
_CHANGE_SECONDS: Final = 1.0
"""What a change of the SyncStateSet takes at the controllers."""


class StoreReplication:
    """``config`` has the options, ``syncs`` is true under SYNC_FLUSH.

    With ``leadership`` controllers have assigned the role: ``mode`` has the options of that, ``epochs`` is of the log.
    """

    def __init__(
        self,
        config: ReplicationConfig,
        *,
        syncs: bool,
        leadership: Leadership | None = None,
        epochs: EpochFileCache | None = None,
        mode: ControllerModeConfig | None = None,
    ) -> None:
        self.config = config
        self.leadership = leadership
        self.epochs = epochs
        self._mode = mode or ControllerModeConfig()
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
        if self.leadership is not None:
            return not self.is_slave
        return self.config.waits_for_slaves

    @property
    def slave_timeout(self) -> float:
        """Seconds for which a put waits for slaves.

        By default long enough for a member that has died to be taken out of the set: a delay then, and no error.
        """
        if self.config.slave_timeout is not None:
            return self.config.slave_timeout / 1000
        wait = _SLAVE_TIMEOUT
        if self.leadership is not None:
            mode = self._mode
            change = mode.ha_max_time_slave_not_catchup + mode.check_sync_state_set_period
            wait = max(wait, change / 1000 + _CHANGE_SECONDS)
        return wait

    @property
    def holds_back(self) -> bool:
        """Whether records of the log may not be dispatched yet: until enough replicas have them."""
        return self.waits_for_slaves or self.leadership is not None

    @property
    def cuts(self) -> bool:
        """Whether the log ends at its first damage: slaves take whole records only."""
        return self.is_slave or self.config.ha_listen_port is not None

    async def settle_epochs(self, log_min: int, log_end: int, truncate_at: int | None) -> None:
        """After recovery: let the epochs fit the log, and begin a master's. Raises StoreLoadError, OSError."""
        if self.leadership is None or self.epochs is None:
            return
        epochs, epoch = self.epochs, self.leadership.epoch
        await epochs.truncate_suffix(log_end, empty=truncate_at is not None)
        if self.is_slave:
            return
        if epochs.last_epoch > epoch:
            raise StoreLoadError(
                f"{epochs.path} knows epoch {epochs.last_epoch}, the controllers have given {epoch}: they have lost "
                "what they knew; restore their data, or delete that file on all brokers of this name"
            )
        if epochs.last_epoch < epoch:
            # A log without epochs is from the time before there were controllers: all of it is this master's.
            await epochs.append(epoch, log_end if epochs.entries else log_min)

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
        if self.leadership is not None and self.epochs is not None and not config.is_slave:
            mode = self._mode
            period, patience = mode.check_sync_state_set_period / 1000, mode.ha_max_time_slave_not_catchup / 1000
            self.ha = AutoSwitchHAService(
                log,
                flags,
                self.ha_config,
                Membership(period, patience, config.min_in_sync_replicas),
                self.leadership,
                self.epochs,
                end_offset,
                replicated_offset=replicated_offset,
            )
        elif not config.is_slave and config.ha_listen_port is not None:
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
        log, config = SlaveLog(path), self.ha_config
        if self.leadership is not None and self.epochs is not None:
            self.client = AutoSwitchHAClient(log, follower, master, config, open_stream, self.leadership, self.epochs)
        else:
            self.client = HAClient(log, follower, master, config, open_stream)
        return self.client

    @property
    def slave_ids(self) -> Collection[int]:
        """The slaves that are connected, if controllers assign the roles."""
        return self.ha.slave_ids if isinstance(self.ha, AutoSwitchHAService) else ()

    @property
    def slaves_serve_pulls(self) -> bool:
        """Whether a client may pull from a slave: this one, or one that has nearly all (slaveReadEnable on both)."""
        if not self.config.slave_read_enable:
            return False
        return self.is_slave or (self.ha is not None and self.ha.has_close_slave)

    def runtime_info(self) -> dict[str, str]:
        """The role, for a broker's runtime information; on a slave also what it knows of its master."""
        info = {"brokerRole": self.config.broker_role.value}
        if self.leadership is not None and self.epochs is not None:
            info["masterEpoch"] = str(self.leadership.epoch)
            info["logEpoch"] = str(self.epochs.last_epoch)
            if isinstance(self.ha, AutoSwitchHAService):
                info["syncStateSet"] = ",".join(map(str, sorted(self.leadership.members)))
                info["syncStateSetEpoch"] = str(self.leadership.set_epoch)
                info["confirmOffset"] = str(self.ha.confirmed_offset)
                info["leaseHolds"] = str(self.leadership.holds()).lower()
        if self.client is not None:
            state = self.client.state()
            info["masterCommitLogMaxOffset"] = str(state.master_offset)
            info["masterSilentMs"] = str(int(state.silent * 1000))
            info["slaveLagBytes"] = str(state.lag)
            info["slaveLagMs"] = str(int(state.lag_seconds * 1000))
            info["slaveError"] = state.error
            info |= {f"master{key[:1].upper()}{key[1:]}": value for key, value in self.master_settings.items()}
        return info
