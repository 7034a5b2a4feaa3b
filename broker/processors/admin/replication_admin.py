"""The state of replication: GET_BROKER_HA_STATUS (907)."""

import trio
from msgspec import UNSET

from trimq.broker.store.message_store import MessageStore
from trimq.protocol.body import HAClientRuntimeInfo, HAConnectionRuntimeInfo, HARuntimeInfo, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable


class ReplicationAdminProcessor:
    """Serves requests about masters and slaves."""

    def __init__(self, *, store: MessageStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.GET_BROKER_HA_STATUS, self.ha_status)

    def ha_status(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_HA_STATUS (907): a master's slaves, or a slave's master. A broker alone is a master without them.

        Where RocketMQ has the address of a slave's connection, here it is the slave's IP address. The header of the
        reply has the master's settings, which slaves remember.
        """
        store = self._store
        info = HARuntimeInfo(master=not store.replication.is_slave)
        header = None
        if info.master:
            header = store.replication.config.settings
            info.master_commit_log_max_offset = store.appended_offset
            self._add_slaves(info)
        elif store.replication.client is not None:
            info.ha_client_runtime_info = self._client()
        return command.reply(header=header, body=encode_json(info))

    def _add_slaves(self, info: HARuntimeInfo) -> None:
        service = self._store.replication.ha
        if service is None:
            return
        for slave in service.state().slaves:
            info.in_sync_slave_nums += slave.in_sync
            info.ha_connection_info.append(
                HAConnectionRuntimeInfo(
                    addr=slave.address,
                    slave_ack_offset=slave.ack_offset,
                    diff=slave.behind,
                    in_sync=slave.in_sync,
                    transferred_byte_in_second=slave.bytes_per_second,
                    transfer_from_where=slave.sent_offset,
                )
            )

    def _client(self) -> HAClientRuntimeInfo:
        client = self._store.replication.client
        assert client is not None
        state = client.state()
        return HAClientRuntimeInfo(
            master_addr=state.master or UNSET,
            transferred_byte_in_second=state.bytes_per_second,
            max_offset=state.max_offset,
            last_read_timestamp=self._wall_ms(state.last_read_at),
            last_write_timestamp=self._wall_ms(state.last_write_at),
            # RocketMQ: where the master's log was flushed to when this slave asked for it.
            master_flush_offset=state.master_offset,
        )

    def _wall_ms(self, moment: float) -> int:
        """A time of trio's clock as ms since the epoch; 0 for 0."""
        return self._clock.wall_ms() - int((trio.current_time() - moment) * 1000) if moment else 0
