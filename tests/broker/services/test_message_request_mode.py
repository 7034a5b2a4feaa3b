import json
from typing import Any

import pytest

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.state_file import StateFileError, replace_file
from trimq.protocol.body import SetMessageRequestModeRequestBody
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/messageRequestMode.json"
JAVA = {
    "messageRequestModeMap": {
        "T": {
            "G": {"consumerGroup": "G", "mode": "POP", "popShareQueueNum": -1, "topic": "T"},
            "H": {"consumerGroup": "H", "popShareQueueNum": 0, "topic": "T"},
        }
    }
}


async def loaded(disk: SimDisk, **config: Any) -> MessageRequestModeManager:
    manager = MessageRequestModeManager(configuration(**config), disk, ManualClock())
    await manager.load()
    return manager


def body(group: str, mode: str = "PULL", topic: str = "T", share: int = 0) -> SetMessageRequestModeRequestBody:
    return SetMessageRequestModeRequestBody(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)


async def test_the_file_is_what_java_writes_and_reads() -> None:
    disk = SimDisk()
    given = json.loads(json.dumps(JAVA))
    given["messageRequestModeMap"]["T"]["G"]["later"] = 1
    given["another"] = {"x": 1}
    replace_file(disk, PATH, json.dumps(given).encode())
    modes = await loaded(disk)
    modes.set(body("H"))
    await modes.persisted()
    given["messageRequestModeMap"]["T"]["H"]["mode"] = "PULL"
    assert json.loads(disk.content(PATH)) == given == json.loads(b"".join(modes.pieces()))
    modes.set(body("G"))
    await modes.persisted()
    entry = {"consumerGroup": "G", "mode": "PULL", "popShareQueueNum": 0, "topic": "T", "later": 1}
    assert json.loads(disk.content(PATH))["messageRequestModeMap"]["T"]["G"] == entry
    assert (await loaded(disk)).table == modes.table


async def test_without_a_file_there_is_none() -> None:
    disk = SimDisk()
    modes = await loaded(disk)
    assert json.loads(b"".join(modes.pieces())) == {"messageRequestModeMap": {}}
    await modes.persist()
    assert disk.stat(PATH) is None


@pytest.mark.parametrize("table", [[], {"T": []}, {"T": {"G": "POP"}}])
async def test_a_broken_file_stops_the_start(table: Any) -> None:
    disk = SimDisk()
    replace_file(disk, PATH, json.dumps({"messageRequestModeMap": table or [1]}).encode())
    with pytest.raises(StateFileError, match="messageRequestModeMap"):
        await loaded(disk)


async def test_modes_are_bounded() -> None:
    disk = SimDisk()
    replace_file(disk, PATH, json.dumps(JAVA).encode())
    modes = await loaded(disk, maxOffsetGroups=3)
    modes.set(body("G", topic="U"))
    for group, topic in (("H", "U"), ("G", "V")):
        with pytest.raises(RemotingError, match="maxOffsetGroups") as caught:
            modes.set(body(group, topic=topic))
        assert caught.value.code == ResponseCode.SYSTEM_BUSY
    assert "V" not in modes.table
    modes.set(body("G", "POP", topic="U", share=3))  # one that is there may change
    assert modes.table["U"]["G"]["popShareQueueNum"] == 3
