"""The section of controller mode: the part of RocketMQ's configuration about brokers whose roles are assigned."""

from dataclasses import dataclass

from trimq.remoting.config.options import option


def controller_addresses(text: str) -> list[str]:
    """The addresses in `10.0.0.1:9878;10.0.0.2:9878`."""
    return [part.strip() for part in text.split(";") if part.strip()]


def _addresses_problem(text: str) -> str:
    for address in controller_addresses(text):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= 65535:
            return "HOST:PORT, several separated by ;"
    return ""


@dataclass(frozen=True)
class ControllerModeConfig:
    """Which controllers assign this broker's role, and how the master treats the SyncStateSet."""

    enable_controller_mode: bool = option(
        False,
        "Let controllers assign the role: brokerRole and brokerId are theirs then, and a dead master is replaced.",
    )
    controller_addr: str = option("", "The controllers, HOST:PORT separated by semicolons.", check=_addresses_problem)
    sync_broker_metadata_period: int = option(
        5000, "Time between two questions to a controller for the master and the SyncStateSet.", unit="ms", minimum=100
    )
    sync_controller_metadata_period: int = option(
        10_000, "Time between two questions for the leader of the controllers.", unit="ms", minimum=100
    )
    broker_heartbeat_interval: int = option(
        1000, "Time between two heartbeats to the controllers.", unit="ms", minimum=50
    )
    controller_heart_beat_timeout_mills: int = option(
        3000,
        "Time without a heartbeat after which controllers elect another master (RocketMQ: 10000).",
        unit="ms",
        minimum=1000,
    )
    check_sync_state_set_period: int = option(
        500, "Time between two looks at the members of the SyncStateSet (RocketMQ: 5000).", unit="ms", minimum=50
    )
    ha_max_time_slave_not_catchup: int = option(
        3000,
        "A member of the SyncStateSet that lags, or is silent, for this long is taken out of it. Sends wait until "
        "then; clients that wait for 3 s only send again (RocketMQ: 15000).",
        unit="ms",
        minimum=100,
    )
    broker_election_priority: int = option(
        2**31 - 1, "Among brokers with equal logs the lowest number becomes the master.", minimum=0, maximum=2**31 - 1
    )
    all_ack_in_sync_state_set: bool = option(
        True,
        "Every member of the SyncStateSet has a message before it is acknowledged (RocketMQ: false). In controller "
        "mode only true is supported: false loses acknowledged messages when the master fails.",
    )
    async_learner: bool = option(False, "Copy the log, but never join the SyncStateSet, and never become the master.")
    store_path_epoch_file: str | None = option(
        None, "File of the epochs of the log.", unset="epochFileCheckpoint in storePathRootDir"
    )
    store_path_broker_identity: str | None = option(
        None, "File of the id that the controllers have assigned.", unset="brokerIdentity in storePathRootDir"
    )

    @property
    def controllers(self) -> list[str]:
        """The addresses of the controllers."""
        return controller_addresses(self.controller_addr)

    def problem(self) -> tuple[str, str] | None:
        """Key and expectation of a value that does not fit the others."""
        if self.enable_controller_mode and not self.controllers:
            return "controllerAddr", "the addresses of the controllers, since enableControllerMode=true"
        if self.controller_heart_beat_timeout_mills < 2 * self.broker_heartbeat_interval:
            return "controllerHeartBeatTimeoutMills", "at least twice brokerHeartbeatInterval"
        if self.enable_controller_mode and not self.all_ack_in_sync_state_set:
            return "allAckInSyncStateSet", "true, since enableControllerMode=true"
        return None
