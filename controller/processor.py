"""The handlers of the controllers' requests. Source: RocketMQ's ControllerRequestProcessor."""

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from trimq.controller.config import ControllerConfig
from trimq.controller.group_state import GroupState, UnreadableError
from trimq.controller.kv import KvError
from trimq.controller.replicas_info import Elected, ReplicasInfoManager
from trimq.protocol.body import (
    BrokerMemberGroup,
    BrokerReplicasInfo,
    ElectMasterResponseBody,
    ReplicaIdentity,
    ReplicasInfo,
    SyncStateSet,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.controller import (
    FENCE,
    KNOWN,
    LEASE,
    AlterSyncStateSetRequestHeader,
    AlterSyncStateSetResponseHeader,
    ApplyBrokerIdRequestHeader,
    ApplyBrokerIdResponseHeader,
    CleanControllerBrokerDataRequestHeader,
    ElectMasterRequestHeader,
    ElectMasterResponseHeader,
    GetMetaDataResponseHeader,
    GetNextBrokerIdRequestHeader,
    GetNextBrokerIdResponseHeader,
    GetReplicaInfoRequestHeader,
    GetReplicaInfoResponseHeader,
    LeaseResponseHeader,
    RegisterBrokerToControllerRequestHeader,
    RegisterBrokerToControllerResponseHeader,
)
from trimq.protocol.headers.namesrv import BrokerHeartbeatRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.run_time_changes import RunTimeChanges
from trimq.remoting.server.reactor import Connection, HandlerTable

_log = structlog.get_logger("controller")

STARTED: Final = "trimqStarted"
_MOST_NAMES: Final = 1000
_FIRST_HEARTBEAT_SECONDS: Final = 1.0
"""How long an election waits for the first heartbeat of the broker that asks: RocketMQ's sends both at once."""


class ControllerRequestProcessor:
    """``elected`` is called with the group of each new master, ``headless`` with the name of a group that needs one.

    ``heard`` is called with a broker's name, its id, and the connection on which it has sent a heartbeat.
    """

    def __init__(
        self,
        replicas: ReplicasInfoManager,
        configuration: Configuration,
        elected: Callable[[GroupState], None],
        headless: Callable[[str], None],
        heard: Callable[[str, int, Connection], None],
    ) -> None:
        self._replicas = replicas
        self._configuration = configuration
        self._elected = elected
        self._headless = headless
        self._heard = heard
        self._changes = RunTimeChanges(configuration, lambda: self._config.config_store_path)

    def register(self, table: HandlerTable) -> None:
        """Put the handlers into the table."""
        handlers: dict[RequestCode, Callable[[Connection, RemotingCommand], Awaitable[RemotingCommand]]] = {
            RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET: self.alter_sync_state_set,
            RequestCode.CONTROLLER_ELECT_MASTER: self.elect_master,
            RequestCode.CONTROLLER_REGISTER_BROKER: self.register_broker,
            RequestCode.CONTROLLER_GET_REPLICA_INFO: self.get_replica_info,
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA: self.get_sync_state_data,
            RequestCode.CONTROLLER_GET_NEXT_BROKER_ID: self.get_next_broker_id,
            RequestCode.CONTROLLER_APPLY_BROKER_ID: self.apply_broker_id,
            RequestCode.CLEAN_BROKER_DATA: self.clean_broker_data,
            RequestCode.BROKER_HEARTBEAT: self.broker_heartbeat,
        }
        for code, handler in handlers.items():
            table.register(code, _guarded(handler))
        table.register(RequestCode.CONTROLLER_GET_METADATA_INFO, self.get_metadata_info)
        table.register(RequestCode.GET_CONTROLLER_CONFIG, self.get_config)
        table.register(RequestCode.UPDATE_CONTROLLER_CONFIG, self.update_config)

    # brokers

    async def get_next_broker_id(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_GET_NEXT_BROKER_ID (1012)."""
        header = request.header(GetNextBrokerIdRequestHeader)
        number = await self._replicas.next_broker_id(header.broker_name)
        answer = GetNextBrokerIdResponseHeader(
            cluster_name=header.cluster_name, broker_name=header.broker_name, next_broker_id=number
        )
        return request.reply(header=answer)

    async def apply_broker_id(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_APPLY_BROKER_ID (1013)."""
        header = request.header(ApplyBrokerIdRequestHeader)
        await self._replicas.apply_broker_id(
            header.cluster_name,
            header.broker_name,
            header.applied_broker_id,
            header.register_check_code,
            has_had=KNOWN in request.ext_fields(),
        )
        answer = ApplyBrokerIdResponseHeader(cluster_name=header.cluster_name, broker_name=header.broker_name)
        return request.reply(header=answer)

    async def register_broker(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_REGISTER_BROKER (1003)."""
        header = request.header(RegisterBrokerToControllerRequestHeader)
        started = request.ext_fields().get(STARTED) == "true"
        found = await self._replicas.register(
            header.broker_name, header.broker_id, header.broker_address, started=started
        )
        state = found.state
        if found.changed:
            self._elected(state)
        answer = RegisterBrokerToControllerResponseHeader(
            cluster_name=header.cluster_name, broker_name=header.broker_name
        )
        master = state.living_master
        if master is not None:
            answer.master_broker_id, answer.master_address = master, state.address(master)
            answer.master_epoch, answer.sync_state_set_epoch = state.epoch, state.set_epoch
        return request.reply(header=answer, body=_set(state))

    async def broker_heartbeat(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """BROKER_HEARTBEAT (904). TriMQ's brokers wait for the reply, and get a lease with it."""
        header = request.header(BrokerHeartbeatRequestHeader)
        found = await self._replicas.heartbeat(header)
        assert header.broker_id is not None, "it was refused"
        self._heard(header.broker_name, header.broker_id, connection)
        if found.state.living_master is None and header.broker_id in found.state.members:
            # At once: RocketMQ's broker without a master sends a heartbeat each 5 s only, so it is not alive for long.
            self._headless(header.broker_name)
        if LEASE not in request.ext_fields():
            return request.reply()
        state = found.state
        answer = LeaseResponseHeader(lease_millis=found.ttl_ms, master_epoch=state.epoch)
        if state.living_master is not None:
            answer.master_broker_id, answer.master_address = state.living_master, state.address(state.living_master)
            answer.sync_state_set_epoch = state.set_epoch
        return request.reply(header=answer)

    async def get_replica_info(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_GET_REPLICA_INFO (1004)."""
        state = await self._replicas.state(request.header(GetReplicaInfoRequestHeader).broker_name)
        if state.group is None:
            text = f"broker {state.name} is not known"
            return request.reply(ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST, text)
        answer = GetReplicaInfoResponseHeader(master_epoch=state.epoch)
        if (master := state.living_master) is not None:
            answer.master_broker_id, answer.master_address = master, state.address(master)
        return request.reply(header=answer, body=_set(state))

    async def alter_sync_state_set(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_ALTER_SYNC_STATE_SET (1001)."""
        header = request.header(AlterSyncStateSetRequestHeader)
        body = decode_json(request.body, SyncStateSet)
        found = await self._replicas.alter_sync_state_set(
            header.broker_name,
            header.master_broker_id,
            header.master_epoch,
            body.sync_state_set,
            body.sync_state_set_epoch,
            fence=FENCE in request.ext_fields(),
        )
        answer = AlterSyncStateSetResponseHeader(new_sync_state_set_epoch=found.epoch)
        return request.reply(
            header=answer, body=encode_json(SyncStateSet(sync_state_set=found.ids, sync_state_set_epoch=found.epoch))
        )

    async def elect_master(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_ELECT_MASTER (1002), of a broker or of an admin tool."""
        header = request.header(ElectMasterRequestHeader)
        found = await self._elect(header)
        state = found.state
        if found.changed:
            self._elected(state)
        answer = ElectMasterResponseHeader(
            master_broker_id=state.master,
            master_address=state.address(state.master),
            master_epoch=state.epoch,
            sync_state_set_epoch=state.set_epoch,
        )
        assert state.group is not None
        addresses = {str(broker_id): record.address for broker_id, record in state.ids.items()}
        members = BrokerMemberGroup(cluster=state.group.cluster, broker_name=state.name, broker_addrs=addresses)
        body = encode_json(ElectMasterResponseBody(broker_member_group=members, sync_state_set=state.members))
        if found.changed:
            return request.reply(header=answer, body=body)
        text = f"the master of {state.name}, broker id {state.master}, is alive"
        return request.reply(ResponseCode.CONTROLLER_MASTER_STILL_EXIST, text, header=answer, body=body)

    async def _elect(self, header: ElectMasterRequestHeader) -> Elected:
        name, broker_id = header.broker_name, header.broker_id
        try:
            return await self._replicas.elect(name, broker_id, designate=header.designate_elect)
        except RemotingError as error:
            if header.designate_elect or error.code != ResponseCode.CONTROLLER_ELECT_MASTER_FAILED:
                raise
        await self._replicas.first_heartbeat(name, broker_id, _FIRST_HEARTBEAT_SECONDS)
        return await self._replicas.elect(name, broker_id)

    # admin tools

    async def get_sync_state_data(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_GET_SYNC_STATE_DATA (1006): names that are not known are left out."""
        table = {}
        for name in decode_json(request.body, list[str])[:_MOST_NAMES]:
            state = await self._replicas.state(name)
            if state.group is not None:
                table[name] = _replicas_info(state)
        return request.reply(body=encode_json(BrokerReplicasInfo(replicas_info_table=table)))

    async def clean_broker_data(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CLEAN_BROKER_DATA (1011)."""
        header = request.header(CleanControllerBrokerDataRequestHeader)
        ids = None
        if header.broker_controller_ids_to_clean:
            try:
                ids = [int(part) for part in header.broker_controller_ids_to_clean.split(";")]
            except ValueError:
                text = f"brokerControllerIdsToClean {header.broker_controller_ids_to_clean!r}: ids separated by ;"
                raise RemotingError(ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA, text) from None
        await self._replicas.clean(header.broker_name, ids, living=header.is_clean_living_broker)
        return request.reply()

    def get_metadata_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """CONTROLLER_GET_METADATA_INFO (1005): each controller is a leader, at the address at which it is asked."""
        host, port = connection.sock.getsockname()[:2]
        own = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        peers = self._config.controller_peers
        answer = GetMetaDataResponseHeader(
            group="trimq",
            controller_leader_id="n0",
            controller_leader_address=own,
            is_leader=True,
            peers=peers or f"n0:{own}",
        )
        return request.reply(header=answer)

    # configuration

    @property
    def _config(self) -> ControllerConfig:
        return self._configuration.section(ControllerConfig)

    def get_config(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """GET_CONTROLLER_CONFIG (1010); the reply's body is the configuration as a properties file."""
        return request.reply(body=self._configuration.properties_text().encode())

    def update_config(self, connection: Connection, request: RemotingCommand) -> Awaitable[RemotingCommand]:
        """UPDATE_CONTROLLER_CONFIG (1009): applies all changes or none, to the running controller and to its file."""
        changes = RunTimeChanges.parsed(request.body)

        async def save() -> RemotingCommand:
            if made := await self._changes.make(changes):
                _log.info("config_changed", changes=made, peer=connection.peer_text)
            return request.reply()

        return save()


def _guarded(
    handler: Callable[[Connection, RemotingCommand], Awaitable[RemotingCommand]],
) -> Callable[[Connection, RemotingCommand], Awaitable[RemotingCommand]]:
    """Answer a store that does not: another controller may reach it, unless the decision may have been made."""

    def guarded(connection: Connection, request: RemotingCommand) -> Awaitable[RemotingCommand]:
        request.copy_buffers()

        async def answered() -> RemotingCommand:
            try:
                return await handler(connection, request)
            except KvError as error:
                if error.sent:
                    return request.reply(ResponseCode.SYSTEM_ERROR, f"the outcome is not known: {error}")
                return request.reply(ResponseCode.CONTROLLER_NOT_LEADER, str(error))
            except UnreadableError as error:
                return request.reply(ResponseCode.SYSTEM_ERROR, str(error))

        return answered()

    return guarded


def _set(state: GroupState) -> bytes:
    return encode_json(SyncStateSet(sync_state_set=state.members, sync_state_set_epoch=state.set_epoch))


def _replicas_info(state: GroupState) -> ReplicasInfo:
    def identity(broker_id: int) -> ReplicaIdentity:
        return ReplicaIdentity(
            broker_name=state.name,
            broker_id=broker_id,
            broker_address=state.address(broker_id),
            alive=broker_id in state.alive,
        )

    return ReplicasInfo(
        master_broker_id=state.master,
        master_address=state.address(state.master) or None,
        master_epoch=state.epoch,
        sync_state_set_epoch=state.set_epoch,
        in_sync_replicas=[identity(found) for found in state.members],
        not_in_sync_replicas=[identity(found) for found in sorted(state.ids) if found not in state.members],
    )
