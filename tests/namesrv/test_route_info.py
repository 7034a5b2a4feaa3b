import msgspec
import pytest

from tests.namesrv.builders import CLUSTER, Cluster, registration_body, registration_header, topic
from trimq.protocol.body import DataVersion, QueueData, TopicQueueMappingInfo, TopicRouteData
from trimq.protocol.errors import RemotingError

A, B, C = topic("A"), topic("B"), topic("C")
TBW102 = topic("TBW102", read=8, write=8, perm=7)


def route_of(cluster: Cluster, name: str) -> TopicRouteData:
    body = cluster.routes.route(name)
    assert body is not None
    return msgspec.json.decode(body, type=TopicRouteData)


def addresses(cluster: Cluster, name: str) -> dict[str, str]:
    return {
        f"{data.broker_name}/{broker_id}": addr
        for data in route_of(cluster, name).broker_datas
        for broker_id, addr in data.broker_addrs.items()
    }


def perm(cluster: Cluster, name: str, broker: str = "broker-a") -> int:
    return next(queues.perm for queues in route_of(cluster, name).queue_datas if queues.broker_name == broker)


class TestRoutes:
    def test_golden_bytes(self) -> None:
        cluster = Cluster()
        cluster.register(A, TBW102)
        assert cluster.routes.route("A") == (
            b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
            b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
            b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
        )

    def test_golden_bytes_of_two_brokers_with_a_slave(self) -> None:
        cluster = Cluster()
        cluster.register(A, TBW102, name="broker-b", addr="127.0.0.1:20911", filter_servers=["127.0.0.1:1"])
        cluster.register(A, TBW102)
        cluster.register(name="broker-a", broker_id=1, addr="127.0.0.1:10921")
        assert cluster.routes.route("A") == (
            b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911","1":"127.0.0.1:10921"},"brokerName":"broker-a",'
            b'"cluster":"DefaultCluster","enableActingMaster":false},{"brokerAddrs":{"0":"127.0.0.1:20911"},'
            b'"brokerName":"broker-b","cluster":"DefaultCluster","enableActingMaster":false}],'
            b'"filterServerTable":{"127.0.0.1:20911":["127.0.0.1:1"]},"queueDatas":['
            b'{"brokerName":"broker-a","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4},'
            b'{"brokerName":"broker-b","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
        )

    def test_a_route_is_made_once(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        first = cluster.routes.route("A")
        cluster.register(A, B)
        cluster.routes.heartbeat(CLUSTER, "127.0.0.1:10911")
        assert cluster.routes.route("A") is first

    def test_a_route_follows_what_it_shows_of_the_broker(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        assert b'"enableActingMaster":false' in (cluster.routes.route("A") or b"")
        cluster.register(A, B, acting=True)
        assert b'"enableActingMaster":true' in (cluster.routes.route("A") or b"")
        cluster.register(A, B, acting=True, filter_servers=["127.0.0.1:1"])
        assert b'{"127.0.0.1:10911":["127.0.0.1:1"]}' in (cluster.routes.route("A") or b"")

    def test_unknown_topics_are_not_remembered(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        assert cluster.routes.route("Nope") is None
        assert not any(cluster.routes._routes.values())

    def test_order_conf_is_shown_only_where_it_is_switched_on(self) -> None:
        cluster = Cluster(order_message_enable=True)
        cluster.register(A, B)
        cluster.order["A"] = "broker-a:4"
        assert b'"orderTopicConf":"broker-a:4"' in (cluster.routes.route("A") or b"")
        assert b"orderTopicConf" not in (cluster.routes.route("B") or b"")
        off = Cluster()
        off.register(A, B)
        off.order["A"] = "broker-a:4"
        assert b"orderTopicConf" not in (off.routes.route("A") or b"")

    def test_static_topics_bring_their_mapping(self) -> None:
        cluster = Cluster()
        body = registration_body(A, B)
        mapping = TopicQueueMappingInfo(topic="A", total_queues=2, bname="broker-a", curr_id_map={"0": 1})
        body.topic_config_serialize_wrapper.topic_queue_mapping_info_map = {"A": mapping}
        cluster.routes.register_broker(registration_header(), body, None)
        assert route_of(cluster, "A").topic_queue_mapping_by_broker == {"broker-a": mapping}
        assert b"topicQueueMappingByBroker" not in (cluster.routes.route("B") or b"")


class TestRegistration:
    def test_topics_missing_from_a_registration_stay(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, counter=1)
        cluster.register(A, C, counter=2)
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B", "C"]

    def test_topics_missing_from_a_registration_go_where_that_is_configured(self) -> None:
        cluster = Cluster(delete_topic_with_broker_registration=True)
        cluster.register(A, B, counter=1)
        cluster.register(A, B, name="broker-b", addr="127.0.0.1:20911")
        cluster.register(A, C, counter=2)
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B", "C"]
        assert addresses(cluster, "B") == {"broker-b/0": "127.0.0.1:20911"}

    def test_one_topic_is_a_change_and_deletes_nothing(self) -> None:
        cluster = Cluster(delete_topic_with_broker_registration=True)
        cluster.register(A, B, counter=1)
        cluster.register(C, counter=2)
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B", "C"]

    def test_one_topic_of_a_broker_that_never_registered_is_refused(self) -> None:
        cluster = Cluster()
        with pytest.raises(RemotingError, match="has not registered here"):
            cluster.register(A)
        assert not cluster.routes.live_brokers()
        assert not cluster.routes.clusters()
        assert cluster.routes.route("A") is None

    def test_one_topic_of_another_id_is_refused_too(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        with pytest.raises(RemotingError):
            cluster.register(C, broker_id=1, addr="127.0.0.1:10921")

    @pytest.mark.parametrize(
        "version", [{"counter": 2}, {"state_version": 1}, {"counter": 0}], ids=["counter", "state", "lower"]
    )
    def test_queues_follow_a_version_that_differs(self, version: dict[str, int]) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(topic("A", read=8, write=2), B, **version)  # type: ignore[arg-type]
        queues = route_of(cluster, "A").queue_datas[0]
        assert (queues.read_queue_nums, queues.write_queue_nums) == (8, 2)

    def test_queues_do_not_change_under_the_same_version_but_new_topics_come(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(topic("A", read=8), B, C)
        assert route_of(cluster, "A").queue_datas[0].read_queue_nums == 4
        assert addresses(cluster, "C") == {"broker-a/0": "127.0.0.1:10911"}

    def test_a_deleted_topic_comes_back_with_the_next_registration(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        assert cluster.routes.delete_topic("A")
        cluster.register(A, B)
        assert cluster.routes.route("A") is not None

    def test_topics_are_taken_from_the_master_only(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(A, C, broker_id=1, addr="127.0.0.1:10921")
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B"]
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911", "broker-a/1": "127.0.0.1:10921"}

    def test_a_slave_of_an_old_version_brings_no_topics(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, broker_id=1, acting=None)
        assert list(filter(None, cluster.routes.topics.names())) == []

    def test_the_slave_with_the_lowest_id_brings_topics_where_there_is_no_master(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, broker_id=2, addr="127.0.0.1:10921")
        cluster.register(A, C, broker_id=3, addr="127.0.0.1:10931")
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B"]
        assert perm(cluster, "A") == 6

    def test_a_slave_learns_where_its_master_is(self) -> None:
        cluster = Cluster()
        assert cluster.register(A, B) == (None, None)
        assert cluster.register(broker_id=1, addr="127.0.0.1:10921") == ("127.0.0.1:10911", "127.0.0.1:10912")

    def test_the_same_address_under_another_id_replaces_the_old_entry(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, broker_id=1, acting=True)
        cluster.register(A, B, broker_id=0, acting=True)
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911"}
        assert perm(cluster, "A") == 6
        assert len(cluster.routes.live_brokers()) == 1

    def test_a_new_address_replaces_the_old_one_of_its_id(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(A, B, addr="127.0.0.1:10999")
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10999"}
        assert cluster.routes.data_version(CLUSTER, "127.0.0.1:10911") is None

    def test_a_lower_state_version_does_not_take_an_id_away(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, state_version=5)
        cluster.register(A, C, addr="127.0.0.1:10999", state_version=4, counter=9)
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911"}
        assert list(filter(None, cluster.routes.topics.names())) == ["A", "B"]

    def test_the_loser_of_a_conflict_is_not_listed_under_its_old_id_either(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, state_version=5)
        cluster.register(broker_id=1, addr="127.0.0.1:10999", state_version=4)
        cluster.register(A, B, addr="127.0.0.1:10999", state_version=4)
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911"}

    def test_a_broker_that_comes_back_under_another_name_leaves_nothing_behind(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(A, C, name="broker-z")
        assert addresses(cluster, "A") == {"broker-z/0": "127.0.0.1:10911"}
        assert cluster.routes.route("B") is None
        assert cluster.routes.clusters() == {CLUSTER: ["broker-z"]}

    def test_a_broker_that_comes_back_in_another_cluster_leaves_nothing_behind(self) -> None:
        cluster = Cluster()
        old, new = object(), object()
        cluster.register(A, B, connection=old)
        cluster.register(A, B, cluster="other", connection=new)
        cluster.routes.connection_closed(old)
        assert cluster.routes.clusters() == {"other": ["broker-a"]}
        assert route_of(cluster, "A").broker_datas[0].cluster == "other"


class TestLiveness:
    def test_silence_of_120_s_removes_a_broker(self) -> None:
        cluster = Cluster()
        connection = object()
        cluster.register(A, B, connection=connection)
        cluster.clock.advance(120)
        assert cluster.routes.scan_not_active_brokers() == []
        cluster.clock.advance(0.001)
        assert [info.connection for info in cluster.routes.scan_not_active_brokers()] == [connection]
        assert cluster.routes.route("A") is None
        assert list(filter(None, cluster.routes.topics.names())) == []
        assert cluster.routes.clusters() == {}

    def test_a_broker_may_ask_for_another_time(self) -> None:
        cluster = Cluster()
        cluster.register(A, B, timeout_ms=1000)
        cluster.clock.advance(1.1)
        assert len(cluster.routes.scan_not_active_brokers()) == 1

    def test_heartbeats_and_registrations_count_as_life(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.clock.advance(100)
        cluster.routes.heartbeat(CLUSTER, "127.0.0.1:10911")
        cluster.clock.advance(100)
        assert cluster.routes.scan_not_active_brokers() == []
        cluster.register(A, B)
        cluster.clock.advance(100)
        assert cluster.routes.scan_not_active_brokers() == []

    def test_a_heartbeat_of_a_stranger_registers_no_broker(self) -> None:
        cluster = Cluster()
        cluster.routes.heartbeat(CLUSTER, "127.0.0.1:10911")
        assert cluster.routes.live_brokers() == []

    def test_a_closed_connection_removes_its_brokers_at_once(self) -> None:
        cluster = Cluster()
        one, other = object(), object()
        cluster.register(A, B, connection=one)
        cluster.register(A, C, name="broker-b", addr="127.0.0.1:20911", connection=one)
        cluster.register(A, B, name="broker-c", addr="127.0.0.1:30911", connection=other)
        cluster.routes.connection_closed(one)
        assert addresses(cluster, "A") == {"broker-c/0": "127.0.0.1:30911"}
        assert cluster.routes.route("C") is None

    def test_an_old_connection_that_closes_late_does_no_harm(self) -> None:
        cluster = Cluster()
        old, new = object(), object()
        cluster.register(A, B, connection=old)
        cluster.register(A, B, connection=new)
        cluster.routes.connection_closed(old)
        assert cluster.routes.route("A") is not None

    def test_unregistering_keeps_the_slave(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(broker_id=1, addr="127.0.0.1:10921")
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        assert addresses(cluster, "A") == {"broker-a/1": "127.0.0.1:10921"}
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10921", "broker-a")
        assert cluster.routes.route("A") is None

    def test_unregistering_a_stranger_does_nothing(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-z")
        cluster.routes.unregister_broker("other", "127.0.0.1:10911", "broker-a")
        assert cluster.routes.route("A") is not None

    def test_data_version(self) -> None:
        cluster = Cluster()
        assert cluster.routes.data_version(CLUSTER, "127.0.0.1:10911") is None
        cluster.register(A, B, counter=7)
        expected = DataVersion(counter=7, timestamp=1_700_000_000_000)
        assert cluster.routes.data_version(CLUSTER, "127.0.0.1:10911") == expected


class TestActingMaster:
    def two(self, **config: object) -> Cluster:
        cluster = Cluster(**config)
        cluster.register(A, B, acting=True)
        cluster.register(A, B, broker_id=1, addr="127.0.0.1:10921", acting=True)
        cluster.register(A, B, broker_id=2, addr="127.0.0.1:10931", acting=True)
        return cluster

    def test_topics_become_read_only_when_the_master_goes(self) -> None:
        cluster = self.two()
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        assert perm(cluster, "A") == 4
        assert set(addresses(cluster, "A")) == {"broker-a/1", "broker-a/2"}

    def test_the_lowest_slave_is_shown_as_master(self) -> None:
        cluster = self.two(support_acting_master=True)
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10921", "broker-a/2": "127.0.0.1:10931"}

    def test_the_master_takes_its_place_back(self) -> None:
        cluster = self.two(support_acting_master=True)
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        cluster.register(A, B, acting=True)
        assert perm(cluster, "A") == 6
        assert addresses(cluster, "A")["broker-a/0"] == "127.0.0.1:10911"

    def test_a_slave_that_stands_in_registers_its_topics_read_only(self) -> None:
        cluster = Cluster(support_acting_master=True)
        cluster.register(A, B, broker_id=1, acting=True)
        assert perm(cluster, "A") == 4
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911"}

    def test_no_slave_acts_as_master_on_the_topic_of_the_members_themselves(self) -> None:
        cluster = Cluster(support_acting_master=True)
        name = "rmq_sys_SYNC_BROKER_MEMBER_broker-a"
        cluster.register(A, topic(name, perm=1), broker_id=1, acting=True)
        assert addresses(cluster, name) == {"broker-a/1": "127.0.0.1:10911"}

    def test_without_acting_master_nothing_becomes_read_only(self) -> None:
        cluster = Cluster(support_acting_master=True)
        cluster.register(A, B)
        cluster.register(broker_id=1, addr="127.0.0.1:10921")
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        assert perm(cluster, "A") == 6
        assert addresses(cluster, "A") == {"broker-a/1": "127.0.0.1:10921"}


class TestTopics:
    def test_wiping_write_permission_lasts_until_the_broker_says_otherwise(self) -> None:
        cluster = Cluster()
        cluster.register(A, TBW102)
        cluster.register(A, B, name="broker-b", addr="127.0.0.1:20911")
        assert cluster.routes.topics.wipe_write_perm("broker-a") == 2
        assert [perm(cluster, "A"), perm(cluster, "TBW102"), perm(cluster, "A", "broker-b")] == [4, 5, 6]
        cluster.register(A, TBW102)
        assert perm(cluster, "A") == 4
        cluster.register(A, TBW102, counter=2)
        assert perm(cluster, "A") == 6

    def test_adding_write_permission_keeps_the_other_bits(self) -> None:
        cluster = Cluster()
        cluster.register(A, TBW102)
        cluster.routes.topics.wipe_write_perm("broker-a")
        assert cluster.routes.topics.add_write_perm("broker-a") == 2
        assert [perm(cluster, "A"), perm(cluster, "TBW102")] == [6, 7]

    def test_permissions_of_an_unknown_broker(self) -> None:
        cluster = Cluster()
        assert cluster.routes.topics.wipe_write_perm("unknown") == 0
        assert cluster.routes.topics.add_write_perm("unknown") == 0

    def test_deletion_by_cluster(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(A, B, name="broker-b", addr="127.0.0.1:20911", cluster="other")
        assert cluster.routes.delete_topic("A", "other")
        assert addresses(cluster, "A") == {"broker-a/0": "127.0.0.1:10911"}
        assert not cluster.routes.delete_topic("A", "nowhere")
        assert cluster.routes.delete_topic("A")
        assert cluster.routes.route("A") is None
        assert not cluster.routes.delete_topic("A")

    def test_registering_a_topic_by_hand(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        assert cluster.routes.register_topic("Hand", [QueueData(broker_name="broker-a", read_queue_nums=1)])
        assert addresses(cluster, "Hand") == {"broker-a/0": "127.0.0.1:10911"}

    def test_a_topic_on_an_unknown_broker_is_not_registered_at_all(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        both = [QueueData(broker_name="broker-a"), QueueData(broker_name="unknown")]
        assert not cluster.routes.register_topic("Hand", both)
        assert cluster.routes.route("Hand") is None

    def test_lists(self) -> None:
        cluster = Cluster()
        cluster.register(A, topic("U", sys_flag=1), topic("S", sys_flag=2), topic("US", sys_flag=3))
        cluster.register(A, B, name="broker-b", addr="127.0.0.1:20911", cluster="other")
        topics = cluster.routes.topics
        assert list(filter(None, topics.names())) == ["A", "B", "S", "U", "US"]
        assert list(filter(None, topics.names(cluster.routes.broker_names("other")))) == ["A", "B"]
        assert list(filter(None, topics.names(cluster.routes.broker_names("nowhere")))) == []
        assert list(filter(None, topics.unit_topics())) == ["U", "US"]
        assert list(filter(None, topics.has_unit_sub_topics())) == ["S", "US"]
        assert list(filter(None, topics.has_unit_sub_ununit_topics())) == ["S"]
        assert cluster.routes.system_topics() == (
            ["DefaultCluster", "broker-a", "broker-b", "other"],
            "127.0.0.1:10911",
        )
        assert Cluster().routes.system_topics() == ([], None)

    def test_cluster_info(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.register(broker_id=1, addr="127.0.0.1:10921")
        assert msgspec.to_builtins(cluster.routes.cluster_info()) == {
            "brokerAddrTable": {
                "broker-a": {
                    "cluster": CLUSTER,
                    "brokerName": "broker-a",
                    "brokerAddrs": {"0": "127.0.0.1:10911", "1": "127.0.0.1:10921"},
                    "enableActingMaster": False,
                }
            },
            "clusterAddrTable": {CLUSTER: ["broker-a"]},
        }

    def test_member_group(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        group = cluster.routes.broker_member_group(CLUSTER, "broker-a")
        assert group.broker_addrs == {"0": "127.0.0.1:10911"}
        assert cluster.routes.broker_member_group(CLUSTER, "unknown").broker_addrs == {}


class TestWhyNoRoute:
    def test_no_broker_ever(self) -> None:
        assert Cluster().routes.why_no_route("A") == (
            "no route for topic A: no broker is registered with this name server"
        )

    def test_the_last_broker_left(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        cluster.clock.advance(7)
        assert cluster.routes.why_no_route("Nope") == (
            "no route for topic Nope: no broker is registered with this name server; "
            "the last one: broker broker-a left 7 s ago: it unregistered"
        )

    def test_the_brokers_of_the_topic_left(self) -> None:
        cluster = Cluster()
        connection = object()
        cluster.register(A, B, connection=connection)
        cluster.register(B, TBW102, name="broker-b", addr="127.0.0.1:20911")
        cluster.routes.connection_closed(connection)
        assert cluster.routes.why_no_route("A") == (
            "no route for topic A: no live broker has it; broker broker-a left 0 s ago: its connection closed"
        )
        cluster.clock.advance(121)
        cluster.routes.scan_not_active_brokers()
        assert cluster.routes.why_no_route("B") == (
            "no route for topic B: no live broker has it; broker broker-b left 0 s ago: no heartbeat for 120 s; "
            "broker broker-a left 121 s ago: its connection closed"
        )

    def test_a_broker_that_is_back_is_no_reason_any_more(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        cluster.routes.unregister_broker(CLUSTER, "127.0.0.1:10911", "broker-a")
        cluster.register(B, TBW102)
        assert "left" not in cluster.routes.why_no_route("A")

    def test_auto_creation_is_off(self) -> None:
        cluster = Cluster()
        cluster.register(A, B)
        assert cluster.routes.why_no_route("Nope") == (
            "no route for topic Nope: the 1 registered broker name(s) (broker-a) do not have it and do not create "
            "topics automatically (autoCreateTopicEnable=false); create it with mqadmin updateTopic"
        )
        assert "autoCreateTopicEnable=false" in cluster.routes.why_no_route("TBW102")

    def test_auto_creation_is_off_by_permission(self) -> None:
        cluster = Cluster()
        cluster.register(A, topic("TBW102", perm=6))
        assert "autoCreateTopicEnable=false" in cluster.routes.why_no_route("Nope")

    def test_auto_creation_is_on(self) -> None:
        cluster = Cluster()
        cluster.register(A, TBW102)
        assert cluster.routes.why_no_route("Nope") == (
            "no route for topic Nope: the 1 registered broker name(s) (broker-a) do not have it; "
            "the first message sent to it creates it, or mqadmin updateTopic"
        )
