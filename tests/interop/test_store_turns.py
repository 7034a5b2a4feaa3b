"""Apache's broker and TriMQ's take turns on one store directory, after orderly stops and after kills.

Each turn finds all messages acknowledged so far by queue, key and id, byte for byte, writes more messages of every
kind, and leaves the old part of the log unchanged.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from tests.interop.harness import probe, wire
from tests.interop.harness.log_image import LogImage, Record, live_image, split
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, Peer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, Wire, connected

Exit = Literal["clean", "kill"]

LOG_FILE = 32 * 1024
QUEUE_FILE = 20 * 40
DELAYS = {1: 1_000, 2: 6_000, 3: 60_000, 4: 3_600_000}
PROPERTIES = {
    "mappedFileSizeCommitLog": str(LOG_FILE),
    "mappedFileSizeConsumeQueue": str(QUEUE_FILE),
    "maxHashSlotNum": "64",
    "maxIndexNum": "150",
    "messageDelayLevel": "1s 6s 1m 1h",
    "flushConsumerOffsetInterval": "1000",
    "flushDelayOffsetInterval": "1000",
    # Half messages stay open until a turn ends them. Apache's broker also checks them when it stops.
    "transactionCheckInterval": "3600000",
    "transactionTimeOut": "3600000",
}
ONLY = {
    "apache": {"timerWheelEnable": "false"},
    "trimq": {"embeddedNamesrvEnable": "false", "bindAddress": "::", "commitLogReserveStep": "8192"},
}

SHORT = "Exchange"
LONGEST = "L" * 127
GROUP = "exchange_group"
RETRY = "%RETRY%"
LONGEST_GROUP = "G" * 100
OVERLONG_GROUP = "G" * 200  # Apache's broker does not create such a group, but serves one that it finds
TRANSACTION = "Transaction"
SCHEDULE = "SCHEDULE_TOPIC_XXXX"
QUEUES = 3

_keys = itertools.count(1)


@dataclass
class Story:
    """What the store has to contain after the turns so far."""

    store: Path
    sent: list[Sent] = field(default_factory=list)
    due: list[Sent] = field(default_factory=list)
    halves: list[tuple[Sent, int]] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    retrying: str = LONGEST_GROUP
    image: LogImage | None = None
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def look(self) -> LogImage:
        return LogImage(self.store, LOG_FILE)

    def look_now(self) -> LogImage:
        return live_image(self.store, LOG_FILE)


def java_hash(text: str) -> int:
    value = 0
    for unit in struct.unpack(f">{len(text.encode('utf-16-be')) // 2}H", text.encode("utf-16-be")):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


# -- one turn of one broker


@contextmanager
def turn(peer: Peer, story: Story, directory: Path, store_host: str, ending: Exit) -> Iterator[Broker]:
    """Run a broker on the store, end it as requested, and check the store; ``story.image`` is then the log on disk."""
    properties = {**PROPERTIES, **ONLY[peer], "brokerIP1": store_host}
    broker = Broker(peer, directory, [], store=story.store, properties=properties)
    with ended_afterwards(broker.process):
        broker.start()
        yield broker
        if ending == "kill":
            broker.kill()
        else:
            broker.stop()
        assert (story.store / "abort").exists() == (ending == "kill")
    assert stored_offsets(story.store, backup=ending == "kill") == story.offsets
    before, story.image = story.image, story.look()
    if before is not None:
        assert story.image.start == before.start
        assert story.image.data[: len(before.data)] == before.data, "the old part of the log was changed"
    check_acknowledged(story)
    if ending == "clean":
        check_queue_files(story)


def check_acknowledged(story: Story) -> None:
    """Check that acknowledged messages are in the log at the acknowledged offsets and that no queue has holes."""
    assert story.image is not None
    at = {record.phy: record for record in story.image.records}
    for sent in story.sent:
        record = at[sent.phy]
        assert (record.topic, record.queue, record.offset) == sent[:3]
        assert (record.body, record.properties["UNIQ_KEY"]) == (sent.body, sent.key)
    for queue, records in story.image.queues.items():
        assert [record.offset for record in records] == list(range(len(records))), queue
    stamps = [record.stored for record in story.image.records]
    assert stamps == sorted(stamps)


def check_queue_files(story: Story) -> None:
    """Check that, after an orderly stop, the files of every queue hold exactly the units of the log's records."""
    assert story.image is not None
    for (topic, queue), records in story.image.queues.items():
        files = sorted((story.store / "consumequeue" / topic / str(queue)).iterdir())
        assert [int(file.name) for file in files] == list(range(0, QUEUE_FILE * len(files), QUEUE_FILE))
        units = b"".join(file.read_bytes() for file in files)
        wanted = b"".join(struct.pack(">qiq", one.phy, len(one.data), tags_code(one)) for one in records)
        assert units[: len(wanted)] == wanted, (topic, queue)
        assert not any(units[len(wanted) :]), (topic, queue)


def tags_code(record: Record) -> int:
    if record.topic == SCHEDULE:
        return record.stored + DELAYS[int(record.properties["DELAY"])]
    return java_hash(record.properties.get("TAGS", ""))


# -- reading all records


def is_complete(broker: Wire, topic: str, queue: int, count: int) -> bool:
    return broker.offsets(topic, queue)[1] >= count


def indexed(broker: Wire, topic: str, key: str, places: set[int]) -> list[Record]:
    """The records that a key finds; none if some of these places are missing."""
    answer = split(broker.query(topic, key))
    return answer if places <= {record.phy for record in answer} else []


def check_served(broker: Wire, image: LogImage) -> None:
    """Check that the broker returns every record of the log by queue, key and id, byte for byte."""
    for (topic, queue), records in image.queues.items():
        wait_until(partial(is_complete, broker, topic, queue, len(records)), f"{topic}/{queue} complete")
        assert broker.offsets(topic, queue)[0] == 0
        got: list[Record] = []
        while len(got) < len(records):
            data = broker.pull(topic, queue, len(got), 32)
            assert data, f"{topic}/{queue} ends at {len(got)} of {len(records)}"
            got += split(data)
        assert [one.data for one in got[: len(records)]] == [one.data for one in records], (topic, queue)
    for (topic, key), places in image.by_key.items():
        # The index may come after the queue's unit.
        answer = wait_until(partial(indexed, broker, topic, key, places), f"{topic} {key}: {sorted(places)}")
        assert all(key in record.keys for record in answer)
    for record in image.records:
        assert broker.view(record.phy) == record.data


# -- writing all kinds


def properties(story: Story, label: str, number: int, **more: str) -> dict[str, str]:
    key = next(_keys)
    found = {
        "UNIQ_KEY": f"7F000001{key:024X}",
        "KEYS": f"order{key} {label}{number % 7}",
        "TAGS": story.random.choice(("Paid", "Shipped", "Zurückgegeben", "😀")),
        "WAIT": "true",
        **more,
    }
    if number % 5 == 0:
        del found["TAGS"]
    return found


def body(story: Story, label: str, number: int) -> bytes:
    return f"{label}-{number} ".encode() + story.random.randbytes(story.random.choice((0, 40, 300, 1200)))


def write(broker: Broker, v4: Wire, v6: Wire, story: Story, label: str, ending: Exit) -> None:
    """Write messages: single ones over IPv4 and IPv6, batches, delays, retries, half messages."""
    for topic in (SHORT, LONGEST, TRANSACTION):
        probe.create_topic(broker.address, topic, QUEUES)
    sent = []
    for number in range(120):
        connection = v6 if number % 3 == 0 else v4
        topic = LONGEST if number % 4 == 0 else SHORT
        text = body(story, label, number)
        sent.append(connection.send(topic, number % QUEUES, text, properties(story, label, number), flag=number))
    for number in range(3):
        batch = [(body(story, label, one), properties(story, label, one)) for one in range(12)]
        sent += (v6 if number else v4).send_batch(SHORT, number, batch)
    for level, one in itertools.product((2, 4), range(2)):
        given = properties(story, label, one, DELAY=str(level))
        delayed = v4.send(SHORT, one, body(story, label, one), given)
        if level == 2:
            story.due.append(delayed)
    story.sent += sent
    transactions(v4, story, label)
    if broker.peer == "trimq":
        story.retrying = OVERLONG_GROUP
    retry = RETRY + story.retrying
    back = len(story.look_now().of(retry))
    v4.send_back(sent[0], story.retrying, 1)
    v6.send_back(sent[1], story.retrying, 1)
    wait_until(lambda: len(story.look_now().of(retry)) >= back + 2, "retried messages")
    for queue in range(QUEUES):
        story.offsets[queue] = v4.offsets(SHORT, queue)[1] - queue
        v4.pull(SHORT, queue, 0, 1, GROUP)  # creates the group
        v4.commit_offset(GROUP, SHORT, queue, story.offsets[queue])
    if ending == "kill":  # a stop writes the offsets; else Apache's broker writes them ten seconds after its start
        wait_until(lambda: stored_offsets(story.store) == story.offsets, "consumer offsets in their file", 40)


def transactions(broker: Wire, story: Story, label: str) -> None:
    """Commit a half message left open by an earlier turn and a new one, roll back a third, and leave a fourth open."""
    wanted = [wire.COMMIT, wire.ROLLBACK, None]
    for half, offset in story.halves:
        broker.end_transaction(half, offset, wire.COMMIT, "exchange_pg")
    story.halves.clear()
    for number, outcome in enumerate(wanted):
        given = properties(story, label, 1, TRAN_MSG="true", PGROUP="exchange_pg")
        half = broker.send(TRANSACTION, number, body(story, label, number), given, sys_flag=wire.PREPARED)
        if outcome is None:
            story.halves.append((half, half.offset))
        else:
            broker.end_transaction(half, half.offset, outcome, "exchange_pg")


def stored_offsets(store: Path, *, backup: bool = False) -> dict[int, int]:
    """The group's offsets in the file; integer keys may be unquoted.

    Apache's broker renames the old file to the ``backup`` and then writes the new one: a kill in between leaves no new
    file or a part of it, and the next start reads the backup.
    """
    file = store / "config" / "consumerOffset.json"
    for path in (file, file.with_name(f"{file.name}.bak")) if backup else (file,):
        try:
            text = re.sub(r"([{,])\s*(-?\d+)\s*:", r'\1"\2":', path.read_text(encoding="utf-8"))
            table = json.loads(text)["offsetTable"]
        except (FileNotFoundError, ValueError):  # the file is being replaced
            continue
        return {int(queue): offset for queue, offset in table.get(f"{SHORT}@{GROUP}", {}).items()}
    return {}


def check_state(broker: Broker, story: Story) -> None:
    """Check that the consumer offsets are unchanged and that due delayed messages have been delivered."""
    for queue, offset in story.offsets.items():
        assert probe.committed_offset(broker.address, GROUP, SHORT, queue) == offset
    keys = {sent.key for sent in story.due}
    wait_until(
        lambda: keys <= {record.properties["UNIQ_KEY"] for record in story.look_now().of(SHORT)},
        "messages whose delay has passed",
    )


CHAINS: dict[str, list[tuple[Peer, Exit]]] = {
    "apache-first-clean": [("apache", "clean"), ("trimq", "clean"), ("apache", "clean")],
    "apache-first-killed": [("apache", "kill"), ("trimq", "kill"), ("apache", "kill"), ("trimq", "clean")],
    "trimq-first-clean": [("trimq", "clean"), ("apache", "clean"), ("trimq", "clean")],
    "trimq-first-killed": [("trimq", "kill"), ("apache", "kill"), ("trimq", "kill"), ("apache", "clean")],
}
RARE = ("apache-first-clean", "trimq-first-killed")
"""Run by night: the others have each turn too, but not on a store that the other broker has made."""


@pytest.mark.timeout(400, func_only=True)
@pytest.mark.parametrize(
    "chain", [pytest.param(chain, marks=[pytest.mark.nightly] if chain in RARE else []) for chain in CHAINS]
)
def test_every_byte_survives_the_turns(chain: str, tmp_path: Path) -> None:
    story = Story(tmp_path / "store")
    store_hosts = itertools.cycle(("127.0.0.1", "::1"))
    for number, (peer, ending) in enumerate(CHAINS[chain]):
        with (
            turn(peer, story, tmp_path / f"turn-{number}-{peer}", next(store_hosts), ending) as broker,
            connected("127.0.0.1", broker.port) as v4,
            connected("::1", broker.port) as v6,
        ):
            if story.image is not None:
                check_served(v4, story.image)
                check_state(broker, story)
            write(broker, v4, v6, story, f"turn{number}", ending)
            check_served(v6, story.look_now())
    assert story.image is not None
    check_richness(story.image)
    configuration = tmp_path / f"turn-{len(CHAINS[chain]) - 1}-{CHAINS[chain][-1][0]}" / "broker.conf"
    verify = [
        sys.executable,
        "-c",
        "from trimq.broker.tools.cli import main; main()",
        "verify",
        "-c",
        str(configuration),
    ]
    done = subprocess.run([*verify, str(story.store)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_richness(image: LogImage) -> None:
    """Check that the store contained every kind of record that these tests are about."""
    assert image.files > 5
    flags = {record.sys_flag & 0x30 for record in image.records}
    assert flags == {0, 0x10, 0x20, 0x30}
    assert {record.data[4:8].hex() for record in image.records} == {"daa320a7", "daa320ab"}
    assert len(image.of(RETRY + OVERLONG_GROUP)) >= 4
    assert {record.sys_flag & 12 for record in image.records} == {0, 8}
