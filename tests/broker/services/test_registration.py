from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from structlog.testing import capture_logs

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.health import name_server_reasons
from trimq.broker.services.registration import ALL_TOPICS, BrokerOuterAPI
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import (
    BrokerMemberGroup,
    DataVersion,
    GetBrokerMemberGroupResponseBody,
    KVTable,
    RegisterBrokerBody,
    TopicConfig,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.hashing import crc32
from trimq.protocol.headers.namesrv import (
    QueryDataVersionResponseHeader,
    RegisterBrokerRequestHeader,
    RegisterBrokerResponseHeader,
    UnRegisterBrokerRequestHeader,
)
from trimq.protocol.register_broker_body import decode_register_broker_body
from trimq.remoting.errors import RemotingConnectError
from trimq.remoting.runtime.clock import ManualClock


class NameServers:
    """A client connected to name servers. One that is down refuses connections, one that hangs does not answer."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.hang: set[str] = set()
        self.refuse: set[str] = set()
        self.requests: list[tuple[str, RemotingCommand]] = []
        self.orders: dict[str, str] | None = None
        self.changed = True
        self.refuse_with = ""
        self.refuses: set[str] | None = None
        self.conflict = ""
        self.members: dict[str, str] | None = None

    async def invoke(self, address: str, command: RemotingCommand, timeout: float) -> RemotingCommand:
        await trio.lowlevel.checkpoint()
        if address in self.down:
            raise RemotingConnectError(address, ConnectionRefusedError())
        self.requests.append((address, command))
        if address in self.hang:
            await trio.sleep_forever()
        if address in self.refuse:
            return command.reply(ResponseCode.SYSTEM_ERROR, "no")
        if command.code == RequestCode.QUERY_DATA_VERSION:
            found = QueryDataVersionResponseHeader(changed=self.changed, conflict=self.conflict or None)
            return command.reply(header=found)
        if command.code == RequestCode.GET_BROKER_MEMBER_GROUP:
            if self.members is None:
                return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "no")
            group = BrokerMemberGroup(broker_addrs=self.members)
            return command.reply(body=encode_json(GetBrokerMemberGroupResponseBody(broker_member_group=group)))
        if command.code == RequestCode.REGISTER_BROKER:
            if self.refuse_with and address in (self.refuses or {address}):
                header = RegisterBrokerResponseHeader(conflict=self.refuse_with)
                return command.reply(ResponseCode.SYSTEM_ERROR, "no", header=header)
            if self.conflict:
                return command.reply(header=RegisterBrokerResponseHeader(conflict=self.conflict))
        if command.code == RequestCode.REGISTER_BROKER and self.orders is not None:
            return command.reply(body=encode_json(KVTable(table=self.orders)))
        return command.reply()

    def take(self, address: str = "ns:1") -> list[RegisterBrokerBody]:
        """The registrations since the last call."""
        found = []
        for to, command in self.requests:
            if command.code == RequestCode.REGISTER_BROKER and to == address:
                header = command.header(RegisterBrokerRequestHeader)
                assert header.body_crc32 == crc32(command.body)
                body = decode_register_broker_body(command.body, compressed=bool(header.compressed), version=479)
                found.append(body)
        self.requests = [(to, command) for to, command in self.requests if to != address]
        return found


class World:
    def __init__(self, *addresses: str, **config: Any) -> None:
        self.clock = ManualClock()
        self.config = configuration(**config)
        self.servers = NameServers()
        self.topics = TopicConfigManager(self.config, SimDisk(), self.clock)
        self.api = BrokerOuterAPI(
            self.config, self.servers, self.topics, self.clock, addresses=addresses or ("ns:1",),
            address="10.0.0.1:10911", ha_address="10.0.0.1:10912",
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.topics.load()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.api.run)
            await trio.testing.wait_all_tasks_blocked()
            yield
            nursery.cancel_scope.cancel()

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await trio.testing.wait_all_tasks_blocked()


def names(body: RegisterBrokerBody) -> set[str]:
    return set(body.topic_config_serialize_wrapper.topic_config_table)


async def test_it_registers_at_the_start_and_every_30_s() -> None:
    world = World()
    async with world.running():
        ((address, command),) = world.servers.requests
        header = command.header(RegisterBrokerRequestHeader)
        assert (address, header.broker_name, header.cluster_name, header.broker_id) == ("ns:1", "b", "c", 0)
        assert (header.broker_addr, header.ha_server_addr) == ("10.0.0.1:10911", "10.0.0.1:10912")
        (body,) = world.servers.take()
        assert names(body) == set(world.topics.table)
        assert body.topic_config_serialize_wrapper.data_version == world.topics.data_version
        await world.advance(29.9)
        assert world.servers.take() == []
        await world.advance(0.1)
        (body,) = world.servers.take()
        assert names(body) == set(world.topics.table)


async def test_a_change_of_a_topic_is_registered_immediately() -> None:
    world = World()
    async with world.running():
        world.servers.take()
        world.topics.put(TopicConfig(topic_name="T"))
        assert await world.api.registered()
        (body,) = world.servers.take()
        assert "T" in names(body)
        assert body.topic_config_serialize_wrapper.data_version == world.topics.data_version
        assert await world.api.registered()
        world.topics.delete("T")
        assert await world.api.registered()
        (body,) = world.servers.take()
        assert "T" not in names(body)


async def test_of_very_many_topics_only_the_changed_ones_are_sent() -> None:
    world = World()
    world.topics.put(*(TopicConfig(topic_name=f"T{number}") for number in range(ALL_TOPICS)))
    async with world.running():
        (body,) = world.servers.take()
        assert len(names(body)) > ALL_TOPICS
        world.topics.put(TopicConfig(topic_name="T"))
        await trio.testing.wait_all_tasks_blocked()
        (body,) = world.servers.take()
        assert names(body) == {"T"}


async def test_changes_during_a_registration_go_with_the_next() -> None:
    world = World()
    async with world.running():
        world.servers.take()
        world.topics.put(TopicConfig(topic_name="A"))
        await trio.lowlevel.checkpoint()
        world.topics.put(TopicConfig(topic_name="B"))
        world.topics.put(TopicConfig(topic_name="C"))
        assert await world.api.registered()
        bodies = world.servers.take()
        assert len(bodies) <= 2
        assert {"A", "B", "C"} <= names(bodies[-1])


async def test_one_name_server_down_does_not_hold_up_the_other() -> None:
    world = World("ns:1", "ns:2")
    world.servers.down = {"ns:2"}
    async with world.running():
        assert len(world.servers.take("ns:1")) == 1
        world.topics.put(TopicConfig(topic_name="T"))
        assert await world.api.registered()
        assert len(world.servers.take("ns:1")) == 1
        assert world.servers.take("ns:2") == []
        world.servers.down = set()
        for _ in range(20):
            await world.advance(0.5)
        assert [names(body) for body in world.servers.take("ns:2")] == [set(world.topics.table)]


async def test_a_name_server_that_hangs_is_waited_for_once() -> None:
    world = World("ns:1", "ns:2")
    world.servers.hang = {"ns:2"}
    async with world.running():
        world.topics.put(TopicConfig(topic_name="T"))
        assert not await world.api.registered(timeout=0.01)
        assert await world.api.registered(timeout=60)


async def test_tries_get_rarer_and_a_refusal_is_a_failure_too() -> None:
    world = World()
    world.servers.refuse = {"ns:1"}
    async with world.running():
        for _ in range(600):
            await world.advance(0.1)
        assert 6 <= len(world.servers.take()) <= 20
        world.servers.refuse = set()
        for _ in range(100):
            await world.advance(0.1)
        assert len(world.servers.take()) == 1


async def test_a_lost_connection_means_to_register_again_at_once() -> None:
    world = World()
    async with world.running():
        world.servers.take()
        world.api.connection_lost("ns:1")
        world.api.connection_lost("unknown:1")
        await trio.testing.wait_all_tasks_blocked()
        (body,) = world.servers.take()
        assert names(body) == set(world.topics.table)


async def test_the_brokers_permission_limits_that_of_its_topics() -> None:
    world = World()
    async with world.running():
        world.servers.take()
        world.config.change({"brokerPermission": "4"})
        await trio.testing.wait_all_tasks_blocked()
        (body,) = world.servers.take()
        table = body.topic_config_serialize_wrapper.topic_config_table
        assert {topic.perm for topic in table.values()} == {4, 0}
        assert world.topics.table["TBW102"].perm == 7


async def test_compressed_registration() -> None:
    world = World(compressedRegister=True)
    async with world.running():
        assert world.servers.requests[0][1].ext_fields()["compressed"] == "true"
        (body,) = world.servers.take()
        assert names(body) == set(world.topics.table)


async def test_without_force_it_asks_first() -> None:
    world = World(forceRegister=False)
    world.servers.changed = False
    async with world.running():
        assert len(world.servers.take()) == 1
        await world.advance(30)
        codes = [command.code for _, command in world.servers.requests]
        assert codes == [RequestCode.GET_BROKER_MEMBER_GROUP, RequestCode.QUERY_DATA_VERSION]
        command = world.servers.requests[-1][1]
        assert decode_json(command.body, DataVersion) == world.topics.data_version
        world.servers.changed = True
        await world.advance(30)
        assert len(world.servers.take()) == 1
        world.topics.put(TopicConfig(topic_name="T"))
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.servers.take()) == 1


async def test_the_reply_says_which_topics_are_ordered() -> None:
    world = World()
    world.servers.orders = {"b": "b:1"}
    async with world.running():
        assert world.topics.table["b"].order
        assert not world.topics.table["c"].order
        assert len(world.servers.take()) == 2


async def test_at_shutdown_it_unregisters_everywhere_and_stays_away() -> None:
    world = World("ns:1", "ns:2", "ns:3")
    world.servers.down = {"ns:2"}
    async with world.running():
        world.servers.requests.clear()
        await world.api.unregister_all()
        world.topics.put(TopicConfig(topic_name="T"))
        await world.advance(60)
        assert sorted(address for address, _ in world.servers.requests) == ["ns:1", "ns:3"]
        for _, command in world.servers.requests:
            assert command.code == RequestCode.UNREGISTER_BROKER
            assert command.header(UnRegisterBrokerRequestHeader) == UnRegisterBrokerRequestHeader(
                broker_name="b", broker_addr="10.0.0.1:10911", cluster_name="c", broker_id=0
            )


async def test_without_name_servers_there_is_nothing_to_wait_for() -> None:
    world = World()
    world.api._servers.clear()
    async with world.running():
        world.topics.put(TopicConfig(topic_name="T"))
        assert await world.api.registered()
        await world.api.unregister_all()


# two brokers of one name and id


async def test_a_trimq_name_server_reports_another_broker_with_our_name_and_id() -> None:
    # guards the second broker (refused: not ready, one log line, retries) and the first one (notified, and ready)
    world = World()
    with capture_logs() as logs:
        world.servers.refuse_with = "10.0.0.2:1"
        async with world.running():
            assert world.api.conflicts() == {"ns:1": "10.0.0.2:1"}
            (reason,) = name_server_reasons(world.api)
            assert (reason.code, "10.0.0.2:1" in reason.text) == ("broker_id_conflict", True)
            for _ in range(3):
                await world.advance(10)
            assert len(world.servers.take()) >= 3
            world.servers.refuse_with = ""
            await world.advance(10)
            assert world.api.conflicts() == {}
            assert list(name_server_reasons(world.api)) == []
            world.servers.conflict = "10.0.0.3:1"  # now this broker is the first, and another one registers
            await world.advance(30)
            assert world.api.conflicts() == {}
            assert list(name_server_reasons(world.api)) == []
    conflicts = [log for log in logs if log["event"] == "broker_id_conflict"]
    assert [log["other"] for log in conflicts] == ["10.0.0.2:1", "10.0.0.3:1"]
    assert "give one of the two brokers another brokerName" in conflicts[0]["remedy"]
    assert len([log for log in logs if log["event"] == "registration_failed"]) == 1


async def test_with_apaches_name_server_it_is_seen_when_the_other_one_has_taken_the_route() -> None:
    # guards the query before each further registration: Apache's name servers answer with the broker registered last
    world = World()
    with capture_logs() as logs:
        async with world.running():
            await world.advance(30)
            assert world.api.conflicts() == {}
            world.servers.members = {"0": "10.0.0.2:1", "1": "10.0.0.9:1"}
            for _ in range(2):
                await world.advance(30)
                assert world.api.conflicts() == {"ns:1": "10.0.0.2:1"}
                assert [reason.code for reason in name_server_reasons(world.api)] == ["broker_id_conflict"]
            assert world.api.reached() == {"ns:1": True}
            world.servers.members = {"0": "10.0.0.1:10911"}
            await world.advance(30)
            assert world.api.conflicts() == {}
            world.servers.members = None  # a RocketMQ 4 name server
            await world.advance(30)
            assert world.api.conflicts() == {}
    assert [log["other"] for log in logs if log["event"] == "broker_id_conflict"] == ["10.0.0.2:1"]


async def test_a_broker_that_comes_to_an_old_entry_of_its_own_sees_no_conflict() -> None:
    # guards a restart at another address: an entry at Apache's name server before our first registration is no conflict
    world = World()
    world.servers.members = {"0": "10.0.0.2:1"}
    async with world.running():
        assert world.api.conflicts() == {}


async def test_a_conflict_at_one_of_two_name_servers_shows_too() -> None:
    world = World("ns:1", "ns:2")
    world.servers.refuse_with, world.servers.refuses = "10.0.0.2:1", {"ns:2"}
    async with world.running():
        assert world.api.reached() == {"ns:1": True, "ns:2": False}
        assert world.api.conflicts() == {"ns:2": "10.0.0.2:1"}
        assert [reason.code for reason in name_server_reasons(world.api)] == ["broker_id_conflict"]
        world.servers.down.add("ns:2")
        await world.advance(10)
        assert world.api.conflicts() == {}  # no name server reports it any more


async def test_a_name_server_that_was_away_gets_all_topics_however_many() -> None:
    # guards the topics of a failed registration: with many topics a change sends its topic only, a new start sends all
    world = World()
    async with world.running():
        world.topics.put(*(TopicConfig(topic_name=f"T{n}") for n in range(ALL_TOPICS + 1)))
        await world.advance(0)
        world.servers.take()
        world.servers.down.add("ns:1")
        world.topics.put(TopicConfig(topic_name="Lost"))
        await world.advance(0)
        world.servers.down.clear()
        await world.advance(1)
        (body,) = world.servers.take()
        assert "Lost" in names(body)
        assert names(body) == set(world.topics.table)


async def test_a_broker_that_only_asks_hears_of_a_conflict_too() -> None:
    # guards forceRegister=false, where the broker does not register until something has changed
    world = World(forceRegister=False)
    with capture_logs() as logs:
        async with world.running():
            world.servers.changed = False
            world.servers.conflict = "10.0.0.3:1"
            await world.advance(30)
            assert world.api.conflicts() == {}
    assert [log["other"] for log in logs if log["event"] == "broker_id_conflict"] == ["10.0.0.3:1"]
