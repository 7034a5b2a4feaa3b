"""Random sequences of registrations, timeouts and closed connections, compared with a simple model of the rules."""

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.namesrv.builders import CLUSTER, Cluster, topic
from trimq.protocol.body import TopicRouteData
from trimq.protocol.errors import RemotingError

TIMEOUT_S = 120.0
NAMES = st.sampled_from(["broker-a", "broker-b"])
IDS = st.integers(0, 2)
ADDRESSES = st.sampled_from(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
CLUSTERS = st.sampled_from([CLUSTER, "other"])
TOPICS = st.dictionaries(st.sampled_from(["A", "B", "C"]), st.integers(1, 3), max_size=3)
CONNECTIONS = [object(), object(), object()]


@dataclass
class Live:
    cluster: str
    addr: str
    name: str
    broker_id: int
    counter: int
    state_version: int
    connection: object
    heard: float


@dataclass
class Model:
    live: list[Live] = field(default_factory=list)
    topics: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """(queues, perm) by topic and broker name"""
    acting: dict[str, bool] = field(default_factory=dict)

    def members(self, name: str) -> dict[int, Live]:
        return {each.broker_id: each for each in self.live if each.name == name}

    def route(self, name: str) -> dict[str, object] | None:
        if not self.topics.get(name):
            return None
        return {
            broker: (queues, {str(i): each.addr for i, each in self.members(broker).items()})
            for broker, queues in self.topics[name].items()
        }

    def leave(self, gone: Live) -> None:
        self.live.remove(gone)
        if not self.members(gone.name):
            for brokers in self.topics.values():
                brokers.pop(gone.name, None)
        elif self.acting[gone.name] and 0 not in self.members(gone.name):
            self.wipe(gone.name)

    def wipe(self, name: str) -> None:
        for brokers in self.topics.values():
            if name in brokers:
                brokers[name] = (brokers[name][0], brokers[name][1] & ~2)

    def register(self, new: Live, topics: dict[str, int], acting: bool | None) -> bool:
        members = self.members(new.name)
        holder = members.get(new.broker_id)
        same = next((each for each in self.live if (each.cluster, each.addr) == (new.cluster, new.addr)), None)
        if holder and holder.addr != new.addr and holder.state_version > new.state_version:
            if same:
                self.leave(same)
            return True
        elected = (
            same and same.name == new.name and same.broker_id != new.broker_id and same.connection is new.connection
        )
        if (
            holder
            and not elected
            and holder.addr != new.addr
            and holder.connection is not new.connection
            and holder.state_version == new.state_version
            and new.heard - holder.heard <= TIMEOUT_S
        ):
            return False
        if holder is None and len(topics) == 1:
            return False
        same_version = same and (same.counter, same.state_version) == (new.counter, new.state_version)
        if same and same.name != new.name:
            self.leave(same)
        self.live = [
            each
            for each in self.live
            if each is not same
            and not (each.name == new.name and (each.addr == new.addr or each.broker_id == new.broker_id))
        ]
        self.live.append(new)
        self.acting[new.name] = bool(acting)
        lowest = new.broker_id == min(self.members(new.name))
        if new.broker_id == 0 or (acting is not None and lowest):
            perm = 4 if acting and new.broker_id else 6
            for name, queues in topics.items():
                brokers = self.topics.setdefault(name, {})
                if holder is None or not same_version or new.name not in brokers:
                    brokers[new.name] = (queues, perm)
        return True


class Registrations(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.model = Model()

    @rule(
        name=NAMES,
        broker_id=IDS,
        addr=ADDRESSES,
        cluster=CLUSTERS,
        counter=st.integers(0, 1),
        state_version=st.integers(0, 1),
        topics=TOPICS,
        acting=st.sampled_from([None, False, True]),
        connection=st.sampled_from(CONNECTIONS),
    )
    def register(
        self,
        *,
        name: str,
        broker_id: int,
        addr: str,
        cluster: str,
        counter: int,
        state_version: int,
        topics: dict[str, int],
        acting: bool | None,
        connection: object,
    ) -> None:
        now = self.cluster.clock.monotonic()
        new = Live(cluster, addr, name, broker_id, counter, state_version, connection, now)
        accepted = self.model.register(new, topics, acting)
        try:
            self.cluster.register(
                *(topic(each, read=queues, write=queues) for each, queues in topics.items()),
                name=name,
                broker_id=broker_id,
                addr=addr,
                cluster=cluster,
                counter=counter,
                state_version=state_version,
                acting=acting,
                connection=connection,
            )
        except RemotingError:
            assert not accepted
        else:
            assert accepted

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        info = data.draw(st.sampled_from(self.model.live))
        info.heard = self.cluster.clock.monotonic()
        self.cluster.routes.heartbeat(info.cluster, info.addr)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        info = data.draw(st.sampled_from(self.model.live))
        self.model.leave(info)
        self.cluster.routes.unregister_broker(info.cluster, info.addr, info.name)

    @rule(connection=st.sampled_from(CONNECTIONS))
    def close(self, connection: object) -> None:
        for info in [each for each in self.model.live if each.connection is connection]:
            self.model.leave(info)
        self.cluster.routes.connection_closed(connection)

    @rule(seconds=st.sampled_from([30, 61, 121]))
    def silence(self, seconds: int) -> None:
        self.cluster.clock.advance(seconds)
        now = self.cluster.clock.monotonic()
        for info in [each for each in self.model.live if now - each.heard > TIMEOUT_S]:
            self.model.leave(info)
        self.cluster.routes.scan_not_active_brokers()

    @rule(name=st.sampled_from(["A", "B", "C"]))
    def delete_topic(self, name: str) -> None:
        self.model.topics.pop(name, None)
        self.cluster.routes.delete_topic(name)

    @rule(name=NAMES)
    def wipe(self, name: str) -> None:
        self.model.wipe(name)
        self.cluster.routes.topics.wipe_write_perm(name)

    @invariant()
    def routes_agree(self) -> None:
        for name in "ABC":
            body = self.cluster.routes.route(name)
            route = msgspec.json.decode(body, type=TopicRouteData) if body else None
            members = {data.broker_name: data.broker_addrs for data in route.broker_datas} if route else {}
            seen = route and {
                queues.broker_name: ((queues.read_queue_nums, queues.perm), members[queues.broker_name])
                for queues in route.queue_datas
            }
            assert seen == self.model.route(name)

    @invariant()
    def clusters_agree(self) -> None:
        expected: dict[str, set[str]] = {}
        for each in self.model.live:
            expected.setdefault(each.cluster, set()).add(each.name)
        assert {cluster: set(names) for cluster, names in self.cluster.routes.clusters().items()} == expected
        table = self.cluster.routes.cluster_info().broker_addr_table
        assert {name: data.broker_addrs for name, data in table.items()} == {
            name: {str(i): each.addr for i, each in self.model.members(name).items()}
            for name in {each.name for each in self.model.live}
        }


TestRegistrations = Registrations.TestCase
