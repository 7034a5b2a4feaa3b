import json

import pytest
import trio
import trio.testing

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.groups import FORBIDDEN_READ, SubscriptionGroupManager
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.protocol.body import SubscriptionGroupConfig
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import SYSTEM_GROUPS
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/subscriptionGroup.json"


async def loaded(disk: SimDisk, config: Configuration | None = None) -> SubscriptionGroupManager:
    manager = SubscriptionGroupManager(config or configuration(), disk, ManualClock())
    await manager.load()
    return manager


async def test_the_tools_groups_are_there_from_the_start() -> None:
    assert set((await loaded(SimDisk())).table) == set(SYSTEM_GROUPS)
    assert (await loaded(SimDisk(), configuration(enableCreateSysGroup=False))).table == {}


async def test_groups_exist_from_their_first_use() -> None:
    groups = await loaded(SimDisk())
    assert groups.get("G") is None
    made = groups.find("G")
    assert made == SubscriptionGroupConfig(group_name="G")
    assert groups.find("G") is groups.get("G") is made


@pytest.mark.parametrize("name", ["", " ", "a@b", "ä", "x" * 256])
async def test_but_not_with_any_name(name: str) -> None:
    assert (await loaded(SimDisk())).find(name) is None


async def test_creation_can_be_switched_off() -> None:
    config = configuration(autoCreateSubscriptionGroup=False)
    groups = await loaded(SimDisk(), config)
    assert groups.find("G") is None
    assert groups.find("CID_RMQ_SYS_SOMETHING") is not None
    config.change({"autoCreateSubscriptionGroup": "true"})
    assert groups.find("G") is not None


async def test_the_file_is_what_java_writes_and_reads() -> None:
    disk = SimDisk()
    group = {
        "attributes": {}, "brokerId": 0, "consumeBroadcastEnable": False, "consumeEnable": True,
        "consumeFromMinEnable": False, "consumeMessageOrderly": True, "consumeTimeoutMinute": 15, "groupName": "G",
        "groupRetryPolicy": {"type": "CUSTOMIZED"}, "groupSysFlag": 0, "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": 3, "retryQueueNums": 2, "whichBrokerWhenConsumeSlowly": 1, "later": True,
    }  # fmt: skip
    text = {"dataVersion": {"counter": 4}, "forbiddenTable": {"G": {"T": 4}}, "subscriptionGroupTable": {"G": group}}
    replace_file(disk, PATH, json.dumps(text).encode())
    groups = await loaded(disk)
    config = groups.table["G"]
    assert (config.retry_max_times, config.consume_message_orderly) == (3, True)
    assert not groups.may_read("G", "T")
    assert groups.may_read("G", "U")
    await groups.persisted()
    written = json.loads(disk.content(PATH))
    assert written["subscriptionGroupTable"]["G"] == group
    assert written["forbiddenTable"] == {"G": {"T": 4}}
    assert json.loads(b"".join(groups.pieces())) == written


async def test_a_broken_table_of_what_is_forbidden_stops_the_start() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, b'{"forbiddenTable":{"G":{"T":"all"}}}')
    with pytest.raises(StateFileError, match="forbiddenTable"):
        await loaded(disk)


async def test_forbidding_and_allowing_again() -> None:
    disk = SimDisk()
    groups = await loaded(disk)
    groups.set_forbidden("G", "T", FORBIDDEN_READ, True)
    assert not groups.may_read("G", "T")
    assert groups.forbidden("G", "T") == 4
    groups.set_forbidden("G", "T", 1, True)
    groups.set_forbidden("G", "T", FORBIDDEN_READ, False)
    assert groups.may_read("G", "T")
    assert groups.forbidden("G", "T") == 2
    groups.set_forbidden("G", "T", 1, False)
    assert groups.forbidden_table == {}


async def test_what_is_forbidden_is_bounded() -> None:
    groups = await loaded(SimDisk(), configuration(maxOffsetGroups=3))
    for group, topic in (("G", "T"), ("G", "U"), ("H", "T")):
        groups.set_forbidden(group, topic, FORBIDDEN_READ, True)
    version = groups.data_version.counter
    for group, topic, code in (
        ("G", "V", ResponseCode.SYSTEM_BUSY),
        ("I", "T", ResponseCode.SYSTEM_BUSY),
        ("a b", "T", ResponseCode.INVALID_PARAMETER),
        ("G", "a.b", ResponseCode.INVALID_PARAMETER),
    ):
        with pytest.raises(RemotingError) as caught:
            groups.set_forbidden(group, topic, FORBIDDEN_READ, True)
        assert caught.value.code == code
    assert groups.data_version.counter == version
    assert set(groups.forbidden_table) == {"G", "H"}
    groups.set_forbidden("G", "T", 1, True)  # one that is there may change
    groups.set_forbidden("H", "T", FORBIDDEN_READ, False)
    groups.set_forbidden("I", "T", FORBIDDEN_READ, True)
    # To allow what was not forbidden changes nothing, whatever the names are.
    groups.set_forbidden("a b", "a.b", FORBIDDEN_READ, False)
    assert groups.forbidden_table == {"G": {"T": 6, "U": 4}, "I": {"T": 4}}


async def test_putting_and_deleting() -> None:
    disk = SimDisk()
    groups = await loaded(disk)
    version = groups.data_version.counter
    groups.put(SubscriptionGroupConfig(group_name="A"), SubscriptionGroupConfig(group_name="B", retry_max_times=1))
    groups.set_forbidden("A", "T", FORBIDDEN_READ, True)
    assert groups.delete("A")
    assert not groups.delete("A")
    assert groups.may_read("A", "T")
    assert groups.data_version.counter == version + 3
    await groups.persist()
    again = await loaded(disk)
    assert "A" not in again.table
    assert again.table["B"].retry_max_times == 1


async def test_the_writer_writes_behind() -> None:
    disk = SimDisk()
    groups = await loaded(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(groups.run)
        groups.find("G")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert "G" in json.loads(disk.content(PATH))["subscriptionGroupTable"]
