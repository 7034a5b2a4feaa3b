"""What controllers and other replicas ask: where the log is sent (906), its epochs (1007), another role (1008)."""

from typing import Protocol

from trimq.broker.config import BrokerConfig
from trimq.broker.services.registration import BrokerOuterAPI
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.body import EpochEntry, EpochEntryCache, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.admin import ExchangeHAInfoResponseHeader
from trimq.protocol.headers.controller import NotifyBrokerRoleChangedRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable


class Assigned(Protocol):
    """The part of ReplicasManager that hears of another role."""

    def notified(self, header: NotifyBrokerRoleChangedRequestHeader) -> None:
        """A controller says that there is another master."""
        ...


class ReplicaAdminProcessor:
    """``assigned`` is None outside of controller mode."""

    def __init__(
        self,
        *,
        store: MessageStore,
        configuration: Configuration,
        registration: BrokerOuterAPI,
        assigned: Assigned | None,
    ) -> None:
        self._store = store
        self._configuration = configuration
        self._registration = registration
        self._assigned = assigned

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.EXCHANGE_BROKER_HA_INFO, self.exchange_ha_info)
        table.register(RequestCode.GET_BROKER_EPOCH_CACHE, self.epoch_cache)
        table.register(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, self.notify_role_changed)

    def exchange_ha_info(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """EXCHANGE_BROKER_HA_INFO (906): where this master sends its log; a slave's reply has no addresses.

        RocketMQ's acting masters also send addresses with it. Nothing is done with these.
        """
        header = ExchangeHAInfoResponseHeader()
        if self._store.replication.ha is not None:
            header = ExchangeHAInfoResponseHeader(
                master_address=self._registration.address,
                master_ha_address=self._registration.ha_address,
                master_flush_offset=self._store.flushed_offset,
            )
        return command.reply(header=header)

    def epoch_cache(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_EPOCH_CACHE (1007): the epochs of the log."""
        epochs = self._store.replication.epochs
        if epochs is None:
            return command.reply(ResponseCode.SYSTEM_ERROR, "this broker is not in controller mode")
        config = self._configuration.section(BrokerConfig)
        known = epochs.entries
        ends = [entry.start for entry in known[1:]] + [2**63 - 1]
        body = EpochEntryCache(
            cluster_name=config.broker_cluster_name,
            broker_name=config.broker_name,
            broker_id=config.broker_id,
            epoch_list=[
                EpochEntry(epoch=entry.number, start_offset=entry.start, end_offset=end)
                for entry, end in zip(known, ends, strict=True)
            ],
            max_offset=self._store.appended_offset,
        )
        return command.reply(body=encode_json(body))

    def notify_role_changed(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """NOTIFY_BROKER_ROLE_CHANGED (1008): there is another master, perhaps this broker."""
        if self._assigned is None:
            return command.reply(ResponseCode.SYSTEM_ERROR, "this broker is not in controller mode")
        self._assigned.notified(command.header(NotifyBrokerRoleChangedRequestHeader))
        return command.reply()
