"""The checks of a block in a bucket: each field that a row, a unit or a record has can be wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.store.tiered.bucket.records import TOPIC, Message, messages, record
from trimq.broker.tools.check_block import check_block, check_index, check_run, runs
from trimq.protocol.bucket_manifest import StoredObject
from trimq.protocol.bucket_object import Block, block_crc
from trimq.protocol.queue_unit import UNIT

STORED = StoredObject(1000, 9000, 0, 1, 0, 5000, 4000)
OFFSET = 5


def built(batch: Sequence[Message], **row: Any) -> tuple[Block, bytes]:
    """A block with these messages, and its bytes; ``row``: what its row says otherwise."""
    units = b"".join(message.unit for message in batch)
    data = units + b"".join(message.record for message in batch)
    times = [message.time for message in batch]
    size = len(data) - len(units)
    place = TOPIC, 0, batch[0].offset, len(batch), size, 64
    block = Block(*place, batch[0].physical, batch[-1].physical, min(times), max(times), block_crc(data, ()))
    return block._replace(**row), data


def good() -> list[Message]:
    return messages([30, 10, 20], first=OFFSET, body=b"a body")


def changed(**fields: Any) -> list[Message]:
    """The second message is another one, at the same place."""
    batch = good()
    values: dict[str, Any] = {"offset": OFFSET + 1, "physical": batch[1].physical, "time": 10, "body": b"a body"}
    batch[1] = batch[1]._replace(record=record(**values | fields))
    return batch


def with_unit(number: int, **fields: Any) -> tuple[Block, bytes]:
    batch = good()
    block, data = built(batch)
    unit = [*UNIT.unpack_from(data, number * UNIT.size)]
    for name, value in fields.items():
        unit[("phy", "size").index(name)] = value
    data = data[: number * UNIT.size] + UNIT.pack(*unit) + data[(number + 1) * UNIT.size :]
    return block._replace(crc=block_crc(data, ())), data


def wrong_body() -> tuple[Block, bytes]:
    block, data = built(good())
    at = data.rindex(b"a body")
    data = data[:at] + b"A" + data[at + 1 :]
    return block._replace(crc=block_crc(data, ())), data


def test_a_block_that_is_right() -> None:
    block, data = built(good())
    assert check_block(STORED, block, data) == (3, block.size, [])
    assert check_block(STORED, block, memoryview(data)) == (3, block.size, [])


SIZE = len(good()[1].record)
WRONG: dict[str, tuple[Callable[[], tuple[Block, bytes]], str, int]] = {
    "cut": (lambda: (built(good())[0], built(good())[1][:-1]), "ends before them", 0),
    "checksum": (lambda: built(good(), crc=1), "their checksum in log/", 0),
    "size": (lambda: with_unit(1, size=SIZE + 1), "units do not fit their records", 0),
    "no size": (lambda: with_unit(1, size=0), "units do not fit", 0),
    "first log offset": (lambda: built(good(), first_physical=999), "the directory of log/", 3),
    "last log offset": (lambda: built(good(), last_physical=8999), "the directory of log/", 3),
    "first time": (lambda: built(good(), begin_ms=9), "were stored from 10 to 30", 3),
    "last time": (lambda: built(good(), end_ms=31), "says 10 to 31", 3),
    "order": (lambda: with_unit(1, phy=1000), "is not behind the one before in the log", 2),
    "place": (lambda: with_unit(1, phy=1100), "its offset field is", 2),
    "queue offset": (lambda: built(changed(offset=77)), "its record is message 77 of queue 0", 2),
    "queue": (lambda: built(changed(queue_id=3)), f"its record is message {OFFSET + 1} of queue 3", 2),
    "topic": (lambda: built(changed(topic="XX")), "its record is one of topic XX", 2),
    "body": (wrong_body, "body CRC", 2),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_has_a_name(case: str) -> None:
    make, text, right = WRONG[case]
    block, data = make()
    found = check_block(STORED, block, data)
    assert text in "\n".join(found.faults)
    assert found.messages == right
    assert all(TOPIC in fault for fault in found.faults)


def test_small_records_are_none() -> None:
    batch = good()
    batch[1] = batch[1]._replace(record=b"short")
    block, data = built(batch)
    found = check_block(STORED, block, data)
    assert found.faults == [
        f"{TOPIC}/0 message {OFFSET + 1} in {STORED.name}: its unit says 5 bytes, which no message has"
    ]
    assert found.messages == 2


@pytest.mark.parametrize("stored", [STORED._replace(begin=1001), STORED._replace(end=1200)])
def test_messages_outside_of_the_stretch_of_their_object(stored: StoredObject) -> None:
    block, data = built(good())
    (fault,) = check_block(stored, block, data).faults
    assert "lie outside of the log" in fault


def test_blocks_are_read_together() -> None:
    one = built(good())[0]
    follows = one._replace(position=one.position + one.length)
    apart = one._replace(position=follows.position + follows.length + 1)
    large = apart._replace(position=apart.position + apart.length, size=4 * 1024 * 1024)
    assert list(runs([one, follows, apart, large])) == [[one, follows], [apart], [large]]
    assert list(runs([])) == []


def test_a_run_is_checked_block_by_block() -> None:
    block, data = built(good())
    second = block._replace(position=block.position + block.length, crc=1)
    assert [found.messages for found in check_run(STORED, [block, second], data + data)] == [3, 0]


def test_an_index_file_without_a_header() -> None:
    assert check_index(b"", 10) == (0, ["it has no header"])
