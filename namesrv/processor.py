"""The handlers of the name server's requests: each decodes a typed header, calls the state, and makes a typed reply.

ClientRequestProcessor answers with routes, DefaultRequestProcessor serves all other requests; the names are RocketMQ's.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import msgspec
import structlog

from trimq.namesrv.config import NamesrvConfig
from trimq.namesrv.conflicts import BrokerIdConflictError
from trimq.namesrv.kv_config import NAMESPACE_ORDER_TOPIC_CONFIG, KVConfigManager
from trimq.namesrv.route_info import RouteInfoManager
from trimq.protocol.body import (
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    TopicList,
    TopicRouteData,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.hashing import crc32
from trimq.protocol.headers.namesrv import (
    AddWritePermResponseHeader,
    BrokerHeartbeatRequestHeader,
    DeleteTopicFromNamesrvRequestHeader,
    GetBrokerMemberGroupRequestHeader,
    GetKVConfigResponseHeader,
    GetKVListByNamespaceRequestHeader,
    GetRouteInfoRequestHeader,
    GetTopicsByClusterRequestHeader,
    KVConfigRequestHeader,
    PutKVConfigRequestHeader,
    QueryDataVersionRequestHeader,
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    RegisterTopicRequestHeader,
    UnRegisterBrokerRequestHeader,
    WipeWritePermResponseHeader,
    WritePermRequestHeader,
)
from trimq.protocol.json_pieces import list_pieces, object_pieces, table_pieces
from trimq.protocol.register_broker_body import decode_register_broker_body
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.run_time_changes import RunTimeChanges
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices
from trimq.remoting.server.reactor import Connection, Handler, HandlerTable

_WATCHED: Final = "namesrv.watched"
"""The attachment of a connection whose closing removes brokers from the routes."""

_log = structlog.get_logger("namesrv")
_NO_TOPICS: Final = msgspec.to_builtins(TopicList())


class ClientRequestProcessor:
    """GET_ROUTEINFO_BY_TOPIC (105), the request of clients. A named listener answers with the addresses of its name."""

    def __init__(
        self, routes: RouteInfoManager, config: Callable[[], NamesrvConfig], clock: Clock, listener: str = ""
    ) -> None:
        self._routes = routes
        self._listener = listener
        self._config = config
        self._clock = clock
        self._started = clock.monotonic()

    def register(self, table: HandlerTable) -> None:
        """Put the handler into the table."""
        table.register(RequestCode.GET_ROUTEINFO_BY_TOPIC, self.get_route_info)

    def get_route_info(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """The topic's route, or TOPIC_NOT_EXIST with the reason."""
        topic = request.header(GetRouteInfoRequestHeader).topic
        config = self._config()
        if config.need_wait_for_service:
            remaining = config.wait_seconds_for_service - (self._clock.monotonic() - self._started)
            if remaining > 0:
                text = f"the name server has just started; it answers routes in {remaining:.0f} s (needWaitForService)"
                return request.reply(ResponseCode.SYSTEM_ERROR, text)
        body = self._routes.route(topic, self._listener)
        if body is None:
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, self._routes.why_no_route(topic))
        return request.reply(body=body)


class DefaultRequestProcessor:
    """The requests of brokers and of admin tools."""

    def __init__(
        self, routes: RouteInfoManager, kv_config: KVConfigManager, configuration: Configuration, listener: str = ""
    ) -> None:
        self._routes = routes
        self._listener = listener
        self._kv_config = kv_config
        self._configuration = configuration
        self._changes = RunTimeChanges(configuration, lambda: self._config.config_store_path)

    def register(self, table: HandlerTable) -> None:
        """Put the handlers into the table."""
        handlers: dict[RequestCode, Handler] = {
            RequestCode.REGISTER_BROKER: self.register_broker,
            RequestCode.UNREGISTER_BROKER: self.unregister_broker,
            RequestCode.BROKER_HEARTBEAT: self.broker_heartbeat,
            RequestCode.QUERY_DATA_VERSION: self.query_data_version,
            RequestCode.GET_BROKER_CLUSTER_INFO: self.get_broker_cluster_info,
            RequestCode.GET_BROKER_MEMBER_GROUP: self.get_broker_member_group,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self.wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self.add_write_perm,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.get_all_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self.get_topics_by_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self.get_system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self.get_unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self.get_has_unit_sub_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self.get_has_unit_sub_ununit_topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self.delete_topic,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self.register_topic,
            RequestCode.PUT_KV_CONFIG: self.put_kv_config,
            RequestCode.GET_KV_CONFIG: self.get_kv_config,
            RequestCode.DELETE_KV_CONFIG: self.delete_kv_config,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self.get_kv_list,
            RequestCode.UPDATE_NAMESRV_CONFIG: self.update_config,
            RequestCode.GET_NAMESRV_CONFIG: self.get_config,
        }
        for code, handler in handlers.items():
            table.register(code, handler)

    # brokers

    def register_broker(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """REGISTER_BROKER (103); the reply's body has the ordered topics if there are any."""
        header = request.header(RegisterBrokerRequestHeader)
        # The fast path first: most registrations repeat the last one, and their body need not be decoded.
        answer = self._routes.renew(header, request.body, connection)
        if answer is None:
            try:
                answer = self._register(header, connection, request)
            except BrokerIdConflictError as error:
                if isinstance(error.holder.connection, Connection):
                    # The holder's host may have died. Then the probe closes the connection, and the next attempt of
                    # the refused broker succeeds.
                    error.holder.connection.probe()
                refusal = RegisterBrokerResponseHeader(conflict=error.holder.broker_addr)
                return request.reply(error.code, error.remark, header=refusal)
        ordered = None
        if self._config.return_order_topic_config_to_broker:
            ordered = self._kv_config.namespace(NAMESPACE_ORDER_TOPIC_CONFIG)
        return request.reply(header=answer, body=encode_json(KVTable(table=dict(ordered))) if ordered else b"")

    def _register(
        self, header: RegisterBrokerRequestHeader, connection: Connection, request: RemotingCommand
    ) -> RegisterBrokerResponseHeader:
        if header.body_crc32 and crc32(request.body) != header.body_crc32:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, "the body does not have the checksum in bodyCrc32")
        body = decode_register_broker_body(request.body, compressed=bool(header.compressed), version=request.version)
        answer = self._routes.register_broker(header, body, connection)
        self._routes.remember(header, request.body)
        self._watch(connection)
        return answer

    def _watch(self, connection: Connection) -> None:
        if _WATCHED not in connection.data:
            connection.data[_WATCHED] = True
            connection.on_close.append(self._routes.connection_closed)

    def unregister_broker(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """UNREGISTER_BROKER (104)."""
        header = request.header(UnRegisterBrokerRequestHeader)
        self._routes.unregister_broker(header.cluster_name, header.broker_addr, header.broker_name)
        return request.reply()

    def broker_heartbeat(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """BROKER_HEARTBEAT (904)."""
        header = request.header(BrokerHeartbeatRequestHeader)
        self._routes.heartbeat(header.cluster_name, header.broker_addr)
        return request.reply()

    def query_data_version(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """QUERY_DATA_VERSION (322): whether the broker's topics differ from those here. Counts as a heartbeat."""
        header = request.header(QueryDataVersionRequestHeader)
        theirs = decode_json(request.body, DataVersion) if len(request.body) else None
        ours = self._routes.data_version(header.cluster_name, header.broker_addr)
        self._routes.heartbeat(header.cluster_name, header.broker_addr)
        header_out = QueryDataVersionResponseHeader(
            changed=ours is None or ours != theirs,
            conflict=self._routes.challenger(header.cluster_name, header.broker_addr),
        )
        return request.reply(header=header_out, body=encode_json(ours) if ours else b"")

    async def get_broker_cluster_info(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_BROKER_CLUSTER_INFO (106)."""
        info = self._routes.cluster_info(self._listener)
        pieces = object_pieces(
            ("brokerAddrTable", table_pieces(info.broker_addr_table)),
            ("clusterAddrTable", table_pieces(info.cluster_addr_table)),
        )
        return await in_slices(connection, request, pieces)

    def get_broker_member_group(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """GET_BROKER_MEMBER_GROUP (901)."""
        header = request.header(GetBrokerMemberGroupRequestHeader)
        group = self._routes.broker_member_group(header.cluster_name, header.broker_name)
        return request.reply(body=encode_json(GetBrokerMemberGroupResponseBody(broker_member_group=group)))

    def wipe_write_perm(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """WIPE_WRITE_PERM_OF_BROKER (205)."""
        name = request.header(WritePermRequestHeader).broker_name
        count = self._routes.topics.wipe_write_perm(name)
        _log.info("write_perm_wiped", broker_name=name, topics=count, peer=connection.peer_text)
        return request.reply(header=WipeWritePermResponseHeader(wipe_topic_count=count))

    def add_write_perm(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """ADD_WRITE_PERM_OF_BROKER (327)."""
        name = request.header(WritePermRequestHeader).broker_name
        count = self._routes.topics.add_write_perm(name)
        _log.info("write_perm_added", broker_name=name, topics=count, peer=connection.peer_text)
        return request.reply(header=AddWritePermResponseHeader(add_topic_count=count))

    # topics

    async def get_all_topics(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_ALL_TOPIC_LIST_FROM_NAMESERVER (206)."""
        if not self._config.enable_all_topic_list:
            return request.reply(ResponseCode.SYSTEM_ERROR, "disabled by enableAllTopicList=false")
        return await _topic_list(connection, request, self._routes.topics.names())

    async def get_topics_by_cluster(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_TOPICS_BY_CLUSTER (224); empty for an unknown cluster."""
        self._check_topic_lists()
        cluster = request.header(GetTopicsByClusterRequestHeader).cluster
        return await _topic_list(connection, request, self._routes.topics.names(self._routes.broker_names(cluster)))

    def get_system_topics(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """GET_SYSTEM_TOPIC_LIST_FROM_NS (304)."""
        topics, address = self._routes.system_topics()
        body = TopicList(topic_list=topics)
        if address is not None:
            body.broker_addr = address
        return request.reply(body=encode_json(body))

    async def get_unit_topics(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_UNIT_TOPIC_LIST (311)."""
        self._check_topic_lists()
        return await _topic_list(connection, request, self._routes.topics.unit_topics())

    async def get_has_unit_sub_topics(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_HAS_UNIT_SUB_TOPIC_LIST (312)."""
        self._check_topic_lists()
        return await _topic_list(connection, request, self._routes.topics.has_unit_sub_topics())

    async def get_has_unit_sub_ununit_topics(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST (313)."""
        self._check_topic_lists()
        return await _topic_list(connection, request, self._routes.topics.has_unit_sub_ununit_topics())

    def _check_topic_lists(self) -> None:
        if not self._config.enable_topic_list:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, "disabled by enableTopicList=false")

    def delete_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """DELETE_TOPIC_IN_NAMESRV (216); succeeds even if the topic does not exist."""
        header = request.header(DeleteTopicFromNamesrvRequestHeader)
        if self._routes.delete_topic(header.topic, header.cluster_name):
            _log.info("topic_deleted", topic=header.topic, cluster=header.cluster_name, peer=connection.peer_text)
        return request.reply()

    def register_topic(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """REGISTER_TOPIC_IN_NAMESRV (217); succeeds even if a broker is unknown, as in RocketMQ."""
        topic = request.header(RegisterTopicRequestHeader).topic
        route = decode_json(request.body, TopicRouteData) if len(request.body) else TopicRouteData()
        if not self._routes.register_topic(topic, route.queue_datas):
            names = [queues.broker_name for queues in route.queue_datas]
            _log.warning("topic_on_unknown_broker", topic=topic, brokers=names, peer=connection.peer_text)
        return request.reply()

    # keys and values

    def put_kv_config(self, connection: Connection, request: RemotingCommand) -> Awaitable[RemotingCommand]:
        """PUT_KV_CONFIG (100); the reply is sent when the change is on disk."""
        header = request.header(PutKVConfigRequestHeader)

        async def put() -> RemotingCommand:
            await _on_disk(self._kv_config.put(header.namespace, header.key, header.value))
            self._kv_changed(header.namespace, header.key, connection)
            return request.reply()

        return put()

    def get_kv_config(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """GET_KV_CONFIG (101)."""
        header = request.header(KVConfigRequestHeader)
        value = self._kv_config.get(header.namespace, header.key)
        if value is None:
            text = f"there is no key {header.key} in namespace {header.namespace}"
            return request.reply(ResponseCode.QUERY_NOT_FOUND, text)
        return request.reply(header=GetKVConfigResponseHeader(value=value))

    def delete_kv_config(self, connection: Connection, request: RemotingCommand) -> Awaitable[RemotingCommand]:
        """DELETE_KV_CONFIG (102); the reply is sent when the change is on disk."""
        header = request.header(KVConfigRequestHeader)

        async def delete() -> RemotingCommand:
            await _on_disk(self._kv_config.delete(header.namespace, header.key))
            self._kv_changed(header.namespace, header.key, connection)
            return request.reply()

        return delete()

    def _kv_changed(self, namespace: str, key: str, connection: Connection) -> None:
        if namespace == NAMESPACE_ORDER_TOPIC_CONFIG:
            self._routes.forget_route(key)
        _log.info("kv_config_changed", namespace=namespace, key=key, peer=connection.peer_text)

    async def get_kv_list(self, connection: Connection, request: RemotingCommand) -> Outcome:
        """GET_KVLIST_BY_NAMESPACE (219)."""
        namespace = request.header(GetKVListByNamespaceRequestHeader).namespace
        table = self._kv_config.namespace(namespace)
        if table is None:
            return request.reply(ResponseCode.QUERY_NOT_FOUND, f"there is no namespace {namespace}")
        return await in_slices(connection, request, object_pieces(("table", table_pieces(table))))

    # configuration

    @property
    def _config(self) -> NamesrvConfig:
        return self._configuration.section(NamesrvConfig)

    def get_config(self, _connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """GET_NAMESRV_CONFIG (319); the reply's body is the configuration as a properties file."""
        return request.reply(body=self._configuration.properties_text().encode())

    def update_config(self, connection: Connection, request: RemotingCommand) -> Awaitable[RemotingCommand]:
        """UPDATE_NAMESRV_CONFIG (318): applies all changes or none, to the running server and to its file.

        Unknown keys are skipped, as in RocketMQ.
        """
        changes = RunTimeChanges.parsed(request.body)

        async def save() -> RemotingCommand:
            if made := await self._changes.make(changes):
                _log.info("config_changed", changes=made, peer=connection.peer_text)
            return request.reply()

        return save()


async def _topic_list(connection: Connection, request: RemotingCommand, topics: Iterable[str | None]) -> Outcome:
    members = dict(_NO_TOPICS) | {"topicList": list_pieces(topics)}
    return await in_slices(connection, request, object_pieces(*members.items()))


async def _on_disk(change: Awaitable[None]) -> None:
    """Wait until a change is on disk. Turns an OSError into a RemotingError that names the file."""
    try:
        await change
    except OSError as error:
        text = f"the change could not be written to {error.filename}: {error.strerror}"
        raise RemotingError(ResponseCode.SYSTEM_ERROR, text) from error
