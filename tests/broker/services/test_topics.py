import errno
import json

import pytest
import trio
import trio.testing

from tests.broker.services.fakes import configuration
from tests.store.simdisk import Loss, SimDisk
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.broker.services.topic_attributes import alter, parse_changes
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import TopicConfig
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/topics.json"
SYSTEM = {
    "TBW102": (8, 7),
    "SCHEDULE_TOPIC_XXXX": (18, 6),
    "RMQ_SYS_TRANS_HALF_TOPIC": (1, 6),
    "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, 6),
    "rmq_sys_wheel_timer": (1, 6),
    "rmq_sys_REVIVE_LOG_c": (8, 6),
    "rmq_sys_SYNC_BROKER_MEMBER_b": (1, 1),
    "SELF_TEST_TOPIC": (1, 6),
    "BenchmarkTest": (1024, 6),
    "OFFSET_MOVED_EVENT": (1, 6),
    "c": (16, 7),
    "b": (1, 7),
    "c_REPLY_TOPIC": (1, 6),
}


async def loaded(disk: SimDisk, config: Configuration | None = None) -> TopicConfigManager:
    manager = TopicConfigManager(config or configuration(), disk, ManualClock())
    await manager.load()
    return manager


async def test_a_broker_has_its_system_topics_from_the_start() -> None:
    topics = await loaded(SimDisk())
    assert {name: (topic.read_queue_nums, topic.perm) for name, topic in topics.table.items()} == SYSTEM
    assert all(topic.read_queue_nums == topic.write_queue_nums for topic in topics.table.values())
    assert sorted(SYSTEM) == topics.system_topics()
    assert all(topics.is_system(name) for name in (*SYSTEM, "rmq_sys_anything", "TRANS_CHECK_MAX_TIME_TOPIC"))
    assert not topics.is_system("Orders")


async def test_the_file_is_what_java_writes_and_reads() -> None:
    disk = SimDisk()
    text = (
        '{"dataVersion":{"counter":2,"stateVersion":0,"timestamp":1700000000000},"topicConfigTable":{"Orders":'
        '{"attributes":{"+message.type":"FIFO"},"order":true,"perm":4,"readQueueNums":3,"topicFilterType":"SINGLE_TAG",'
        '"topicName":"Orders","topicSysFlag":1,"writeQueueNums":5,"later":{"a":1}}},"mappingDataVersion":{"counter":7}}'
    )
    replace_file(disk, PATH, text.encode())
    topics = await loaded(disk)
    assert topics.get("Orders") == TopicConfig(
        topic_name="Orders", read_queue_nums=3, write_queue_nums=5, perm=4, topic_sys_flag=1, order=True,
        attributes={"+message.type": "FIFO"},
    )  # fmt: skip
    await topics.persisted()
    written = json.loads(disk.content(PATH))
    assert written["topicConfigTable"]["Orders"] == json.loads(text)["topicConfigTable"]["Orders"]
    assert written["mappingDataVersion"] == {"counter": 7}
    assert written["dataVersion"]["counter"] == 3
    assert json.loads(topics.encode()) == written


async def test_a_broken_file_stops_the_start() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"topicConfigTable":{"T":{"perm":[]}}}')
    with pytest.raises(StateFileError, match="T"):
        await loaded(disk)


# creation on first use


async def test_a_send_creates_its_topic_after_the_model() -> None:
    topics = await loaded(SimDisk())
    changes: list[str] = []
    topics.listeners.append(lambda changed: changes.extend(topic.topic_name for topic in changed))
    made = topics.create_on_send("Orders", "TBW102", 4, 0)
    assert made == TopicConfig(topic_name="Orders", read_queue_nums=4, write_queue_nums=4, perm=6)
    assert topics.create_on_send("Orders", "TBW102", 99) is made
    assert topics.get("Orders") is made
    assert changes == ["Orders"]


@pytest.mark.parametrize(("wanted", "got"), [(4, 4), (8, 8), (9, 8), (0, 1), (-3, 1)])
async def test_it_gets_no_more_queues_than_the_model_has(wanted: int, got: int) -> None:
    made = (await loaded(SimDisk())).create_on_send("T", "TBW102", wanted)
    assert made is not None
    assert (made.read_queue_nums, made.write_queue_nums) == (got, got)


async def test_models_without_the_inherit_bit_make_nothing() -> None:
    topics = await loaded(SimDisk())
    assert topics.create_on_send("T", "BenchmarkTest", 4) is None
    assert topics.create_on_send("T", "NoSuchTopic", 4) is None
    made = topics.create_on_send("T", "b", 4, 1)
    assert made is not None
    assert (made.perm, made.write_queue_nums, made.topic_sys_flag) == (6, 1, 1)


async def test_creation_on_first_use_can_be_switched_off_and_on() -> None:
    config = configuration(autoCreateTopicEnable=False)
    topics = await loaded(SimDisk(), config)
    assert topics.get("TBW102") is None
    assert topics.create_on_send("T", "TBW102", 4) is None
    config.change({"autoCreateTopicEnable": "true"})
    assert topics.create_on_send("T", "TBW102", 4) is not None
    config.change({"autoCreateTopicEnable": "false"})
    assert topics.create_on_send("U", "TBW102", 4) is None


async def test_retry_topics_are_made_once_and_kept() -> None:
    topics = await loaded(SimDisk())
    made = topics.create_on_send_back("%RETRY%G", 2, 6)
    assert (made.read_queue_nums, made.perm, made.topic_sys_flag) == (2, 6, 0)
    version = topics.data_version
    assert topics.create_on_send_back("%RETRY%G", 5, 2) is made
    assert topics.data_version is version
    assert topics.create_on_send_back("%RETRY%G", 2, 6, 2).topic_sys_flag == 2


# administration


async def test_changes_raise_the_version_and_reach_the_disk() -> None:
    disk, clock = SimDisk(), ManualClock()
    topics = TopicConfigManager(configuration(), disk, clock)
    await topics.load()
    before = topics.data_version
    clock.advance(1)
    topics.put(TopicConfig(topic_name="A"), TopicConfig(topic_name="B"))
    assert (topics.data_version.counter, topics.data_version.timestamp) == (before.counter + 1, clock.wall_ms())
    await topics.persisted()
    assert (await loaded(disk.power_cut(Loss.ALL))).get("B") == TopicConfig(topic_name="B")


async def test_a_deleted_topic_is_gone() -> None:
    disk = SimDisk()
    topics = await loaded(disk)
    gone: list[str] = []
    topics.delete_listeners.append(gone.append)
    topics.put(TopicConfig(topic_name="A"))
    assert topics.delete("A")
    assert not topics.delete("A")
    assert gone == ["A"]
    await topics.persist()
    assert "A" not in (await loaded(disk)).table


async def test_who_waits_hears_of_a_full_disk() -> None:
    disk = SimDisk()
    topics = await loaded(disk)
    disk.fail("pwrite", errno.ENOSPC)
    topics.put(TopicConfig(topic_name="A"))
    with pytest.raises(StateFileError):
        await topics.persisted()


async def test_the_writer_writes_behind() -> None:
    disk = SimDisk()
    topics = await loaded(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(topics.run)
        topics.put(TopicConfig(topic_name="A"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert "A" in json.loads(disk.content(PATH))["topicConfigTable"]


async def test_queues_without_a_topic_are_adopted() -> None:
    topics = await loaded(SimDisk())
    topics.put(TopicConfig(topic_name="Known"))
    assert topics.adopt({"Known": 9, "Lost": 3, "Empty": 0}) == ["Lost"]
    lost = topics.get("Lost")
    assert lost is not None
    assert (lost.read_queue_nums, lost.write_queue_nums, lost.perm) == (3, 3, 6)
    assert topics.adopt({"Lost": 4}) == []


async def test_ordered_topics_follow_the_name_servers() -> None:
    topics = await loaded(SimDisk())
    topics.put(TopicConfig(topic_name="A"), TopicConfig(topic_name="B", order=True))
    topics.update_order({"A": "b:4"})
    assert (topics.table["A"].order, topics.table["B"].order) == (True, False)
    version = topics.data_version
    topics.update_order({"A": "b:4"})
    assert topics.data_version is version


async def test_a_schedule_topic_has_a_queue_for_each_level() -> None:
    levels = " ".join(f"{n}s" for n in range(1, 31))
    topics = await loaded(SimDisk(), configuration(messageDelayLevel=levels))
    assert topics.table["SCHEDULE_TOPIC_XXXX"].read_queue_nums == 30


@pytest.mark.parametrize("name", ["RMQ_SYS_TRACE_TOPIC", "Traces"])
async def test_the_trace_topic_exists_and_belongs_to_the_broker_if_it_is_enabled(name: str) -> None:
    off = await loaded(SimDisk(), configuration(msgTraceTopicName=name))
    assert name not in off.table
    topics = await loaded(SimDisk(), configuration(traceTopicEnable="true", msgTraceTopicName=name))
    assert topics.table[name] == TopicConfig(topic_name=name, read_queue_nums=1, write_queue_nums=1, perm=6)
    assert topics.is_system(name)
    assert name in topics.system_topics()


async def test_a_trace_topic_that_exists_stays_as_it_is() -> None:
    disk = SimDisk()
    topics = await loaded(disk)
    topics.put(TopicConfig(topic_name="RMQ_SYS_TRACE_TOPIC", read_queue_nums=4, write_queue_nums=4, perm=6))
    await topics.persisted()
    again = await loaded(disk, configuration(traceTopicEnable="true"))
    assert again.table["RMQ_SYS_TRACE_TOPIC"].read_queue_nums == 4


# attributes


def test_attribute_changes_are_parsed() -> None:
    assert parse_changes("+message.type=FIFO, -reserve.time,") == {"+message.type": "FIFO", "-reserve.time": ""}
    for wrong in ("message.type=FIFO", "+message.type", "+", "+=1", "+a=1,-a", "*a=1"):
        with pytest.raises(ValueError):
            parse_changes(wrong)


def test_attributes_are_changed() -> None:
    made = alter(None, {"+message.type": "FIFO", "+queue.type": "SimpleCQ"})
    assert made == {"message.type": "FIFO", "queue.type": "SimpleCQ"}
    assert alter(made, {"+message.type": "DELAY", "+reserve.time": "-1"})["message.type"] == "DELAY"
    assert alter(made, {"-message.type": ""}) == {"queue.type": "SimpleCQ"}


@pytest.mark.parametrize(
    "changes",
    [
        {"+colour": "red"},
        {"+message.type": "PURPLE"},
        {"+queue.type": "BatchCQ"},
        {"+cleanup.policy": "COMPACTION"},
        {"+reserve.time": "soon"},
        {"-reserve.time": ""},
        {"-queue.type": ""},
    ],
)
def test_attributes_that_mean_nothing_here_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        alter({"queue.type": "SimpleCQ"}, changes)


def test_nothing_can_be_removed_while_creating() -> None:
    with pytest.raises(ValueError):
        alter(None, {"-message.type": ""})


async def test_a_topic_that_may_be_newer_than_the_masters_answer_stays_until_the_next_one() -> None:
    slave = await loaded(SimDisk())
    state = json.loads(slave.encode()) | {"dataVersion": {"stateVersion": 0, "timestamp": 5, "counter": 9}}
    slave.follow_queue("New", 1)
    assert not slave.follow(state, keep={"New"})
    assert slave.table["New"].read_queue_nums == 2
    assert slave.follow(state)  # the version alone must not hide it
    assert slave.follow(state)
    assert "New" not in slave.table
    assert slave.data_version.counter == 9


async def test_a_slaves_own_change_does_not_count_as_its_masters() -> None:
    """Both may make the next version in the same millisecond."""
    slave, master = await loaded(SimDisk()), await loaded(SimDisk())
    slave.follow(json.loads(master.encode()))
    slave.follow_queue("New", 0)
    master.put(TopicConfig("New", read_queue_nums=4, write_queue_nums=4))
    assert slave.data_version == master.data_version
    slave.follow(json.loads(master.encode()))
    assert slave.table["New"].write_queue_nums == 4
    before = slave.table["New"]
    slave.follow(json.loads(master.encode()))
    assert slave.table["New"] is before
