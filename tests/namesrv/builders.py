from dataclasses import replace

from trimq.namesrv.config import NamesrvConfig
from trimq.namesrv.route_info import RouteInfoManager
from trimq.protocol.body import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
)
from trimq.protocol.headers.namesrv import RegisterBrokerRequestHeader
from trimq.remoting.runtime.clock import ManualClock

CLUSTER = "DefaultCluster"


def topic(name: str, *, read: int = 4, write: int = 4, perm: int = 6, sys_flag: int = 0) -> TopicConfig:
    return TopicConfig(
        topic_name=name, read_queue_nums=read, write_queue_nums=write, perm=perm, topic_sys_flag=sys_flag
    )


def registration_header(
    name: str = "broker-a",
    broker_id: int = 0,
    addr: str = "127.0.0.1:10911",
    *,
    cluster: str = CLUSTER,
    ha: str = "127.0.0.1:10912",
    timeout_ms: int | None = None,
    acting: bool | None = False,
) -> RegisterBrokerRequestHeader:
    return RegisterBrokerRequestHeader(
        broker_name=name,
        broker_addr=addr,
        cluster_name=cluster,
        ha_server_addr=ha,
        broker_id=broker_id,
        heartbeat_timeout_millis=timeout_ms,
        enable_acting_master=acting,
        compressed=False,
        body_crc32=0,
    )


def registration_body(
    *topics: TopicConfig, counter: int = 1, state_version: int = 0, filter_servers: list[str] | None = None
) -> RegisterBrokerBody:
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=DataVersion(counter=counter, state_version=state_version, timestamp=1_700_000_000_000),
            topic_config_table={each.topic_name: each for each in topics},
        ),
        filter_server_list=filter_servers or [],
    )


class Cluster:
    """A RouteInfoManager with its clock and configuration, and a helper for registrations."""

    def __init__(self, **config: object) -> None:
        self.clock = ManualClock()
        self.config = replace(NamesrvConfig(), **config)  # type: ignore[arg-type]
        self.order: dict[str, str] = {}
        self.routes = RouteInfoManager(lambda: self.config, self.clock, self.order.get)

    def register(
        self,
        *topics: TopicConfig,
        name: str = "broker-a",
        broker_id: int = 0,
        addr: str = "127.0.0.1:10911",
        cluster: str = CLUSTER,
        counter: int = 1,
        state_version: int = 0,
        timeout_ms: int | None = None,
        acting: bool | None = False,
        connection: object = None,
        filter_servers: list[str] | None = None,
    ) -> tuple[str | None, str | None]:
        """Register a broker; return the answer's (master address, HA address). A single topic is an increment."""
        header = registration_header(name, broker_id, addr, cluster=cluster, timeout_ms=timeout_ms, acting=acting)
        body = registration_body(*topics, counter=counter, state_version=state_version, filter_servers=filter_servers)
        answer = self.routes.register_broker(header, body, connection)
        return answer.master_addr, answer.ha_server_addr
