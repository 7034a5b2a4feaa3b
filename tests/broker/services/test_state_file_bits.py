"""A flipped bit in a state file: which flips go unnoticed, since RocketMQ's JSON files have no checksum."""

import json
from typing import Any

from tests.store.simdisk import SimDisk
from trimq.broker.services.state_file import StateFile, encode_pieces, replace_file
from trimq.remoting.runtime.clock import ManualClock

PATH = "/store/config/topics.json"
TABLE = "topicConfigTable"


def _state() -> dict[str, Any]:
    topics = {name: {"topicName": name, "readQueueNums": 4, "perm": 6} for name in ("Orders", "Prices", "Stock")}
    return {"dataVersion": {"counter": 7, "timestamp": 1_700_000_000_000}, TABLE: topics}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> int:
    """The number of entries that have changed."""
    return sum(after.get(name) != fields for name, fields in before.items())


async def test_every_flipped_bit_of_a_state_file() -> None:
    """A start uses the backup, or one entry differs; a flip in a table's own name loses that table."""
    disk = SimDisk()
    old = _state() | {"dataVersion": {"counter": 6}}
    replace_file(disk, PATH, json.dumps(old).encode())
    replace_file(disk, PATH, json.dumps(_state()).encode())
    outcomes = {"backup": 0, "one entry": 0, "version": 0, "table": 0}
    for bit in range(8 * len(disk.content(PATH))):
        copy = disk.copy()
        copy.flip(PATH, bit // 8, bit % 8)
        found = await StateFile(copy, PATH, lambda: encode_pieces({})).load()
        assert found is not None
        if found == old:
            outcomes["backup"] += 1
        elif TABLE not in found:
            outcomes["table"] += 1
            assert len(found) == 2
        elif found[TABLE] != _state()[TABLE]:
            outcomes["one entry"] += 1
            assert _changed(_state()[TABLE], found[TABLE]) == 1
            assert found["dataVersion"] == _state()["dataVersion"]
        else:
            outcomes["version"] += 1
    assert all(outcomes.values()), outcomes
    assert outcomes["table"] <= 8 * len(TABLE)


async def test_a_clock_that_was_set_back() -> None:
    """The newest state is the one written last, whatever its timestamp."""
    disk = SimDisk()
    clock = ManualClock()
    state = {"value": 0, "at": 0}
    file = StateFile(disk, PATH, lambda: encode_pieces(state))
    for value, wall_ms in ((1, 1_700_000_000_000), (2, 1_600_000_000_000), (3, 5)):
        clock.set_wall_ms(wall_ms)
        state.update(value=value, at=clock.wall_ms())
        file.changed()
        await file.persisted()
        assert await StateFile(disk.copy(), PATH, lambda: encode_pieces({})).load() == {"value": value, "at": wall_ms}
