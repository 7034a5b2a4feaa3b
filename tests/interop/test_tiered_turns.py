"""Apache's broker with its tiered store and TriMQ's take turns on one store and one tier.

Each turn reads all messages sent so far by offset, time and key, then sends more and waits until they are in the tier.
The level FORCE makes both brokers read from the tier what is there, although the local store has it too.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from click.testing import CliRunner

from tests.interop.harness import wire
from tests.interop.harness.processes import ended_afterwards
from tests.interop.harness.servers import Broker, Peer
from tests.interop.harness.waiting import wait_until
from tests.interop.harness.wire import Sent, Wire, connected
from trimq.broker.tools.cli import main as mqstore
from trimq.protocol.lenient_json import loads
from trimq.protocol.record import decode_head
from trimq.protocol.tiered_layout import APACHE_UPLOADED

Exit = Literal["clean", "kill", "amid"]
"""The end of a turn: in order, or by a kill, after all is uploaded or amid uploads."""

PLUG_IN = "org.apache.rocketmq.tieredstore.TieredMessageStore"
POSIX = "org.apache.rocketmq.tieredstore.provider.PosixFileSegment"
TOPIC, QUEUES = "Tiered", 2
OPTIONS = {
    "messageStorePlugIn": PLUG_IN,
    "tieredBackendServiceProvider": POSIX,
    "tieredStorageLevel": "FORCE",
    "tieredStoreCommitLogMaxSize": "65536",
    "tieredStoreConsumeQueueMaxSize": "1000",
    "tieredStoreIndexFileMaxHashSlotNum": "1000",
    "tieredStoreIndexFileMaxIndexNum": "4000",
    "tieredStoreGroupCommitTimeout": "200",
    "autoCreateTopicEnable": "true",
    "timerWheelEnable": "false",
}
ONLY = {"apache": {}, "trimq": {"embeddedNamesrvEnable": "false"}}
_SEARCH_OFFSET = 29
_keys = itertools.count(1)


@dataclass
class Story:
    """The store, the tier, and what was sent so far, by queue."""

    directory: Path
    sent: dict[int, list[Sent]] = field(default_factory=lambda: {queue: [] for queue in range(QUEUES)})
    amid: set[tuple[int, int]] = field(default_factory=set)
    """Queue and offset of what TriMQ uploaded in a turn that was killed amid uploads."""
    turns: int = 0

    @property
    def tier(self) -> Path:
        return self.directory / "tier"

    def broker(self, peer: Peer) -> Broker:
        self.turns += 1
        properties = {**OPTIONS, **ONLY[peer], "tieredStoreFilePath": str(self.tier)}
        home = self.directory / f"turn-{self.turns}"
        return Broker(peer, home, [], self.directory / "store", properties=properties)

    def uploaded(self, queue: int) -> int:
        """The offset behind the last message of a queue in the tier, from the files alone."""
        folder = next(iter(self.tier.glob(f"*_DefaultCluster/broker-a/{TOPIC}/{queue}/CONSUME_QUEUE")), None)
        if folder is None:
            return -1
        files = [path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{8}\d{20}", path.name)]
        return max(((int(path.name[8:]) + path.stat().st_size) // 20 for path in files), default=-1)

    def metadata(self) -> dict[str, object]:
        loaded: dict[str, object] = loads((self.directory / "store/config/tieredStoreMetadata.json").read_bytes())
        return loaded


def records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        yield data[at : at + size]
        at += size


def read_all(broker: Wire, story: Story) -> list[bytes]:
    """Read each queue as a consumer does, and compare it with what was sent."""
    found: list[bytes] = []
    for queue, sent in story.sent.items():
        offset = 0
        got: list[bytes] = []
        while offset < len(sent):
            data = broker.pull(TOPIC, queue, offset, 32)
            assert data is not None, f"queue {queue} has nothing at {offset} of {len(sent)}"
            for record in records(data):
                head = decode_head(record)
                assert head.queue_offset == offset
                assert record[head.body_at : head.body_end] == sent[offset].body
                got.append(record)
                offset += 1
        assert broker.offsets(TOPIC, queue) == (0, len(sent))
        found += got
    return found


def look_by_time(broker: Wire, story: Story, found: list[bytes], peer: Peer) -> None:
    """The offset for a time at which messages were stored is that of the first one.

    Apache's broker looks into one segment only: if one ends between messages of the same time, it may find the second.
    """
    times: dict[int, dict[int, int]] = {queue: {} for queue in story.sent}
    same: dict[int, dict[int, set[int]]] = {queue: {} for queue in story.sent}
    for record in found:
        head = decode_head(record)
        times[head.queue_id].setdefault(head.store_timestamp, head.queue_offset)
        same[head.queue_id].setdefault(head.store_timestamp, set()).add(head.queue_offset)
    for queue, first in times.items():
        for time in list(first)[:: max(1, len(first) // 5)]:
            ext = broker.ask(_SEARCH_OFFSET, {"topic": TOPIC, "queueId": queue, "timestamp": time}).ext
            expected = {first[time]} if peer == "trimq" else same[queue][time]
            assert int(ext["offset"]) in expected, f"queue {queue} at {time}"


def look_by_key(broker: Wire, story: Story, peer: Peer) -> None:
    """The message is among those of its key.

    With FORCE Apache's broker looks for keys in the tier only: what a kill left to upload is found after that. What
    was uploaded just before the kill may have no key there, until TriMQ's next start.
    """

    def found(sent: Sent) -> bool:
        return any(
            record[decode_head(record).body_at : decode_head(record).body_end] == sent.body
            for record in records(broker.query(TOPIC, sent.key))
        )

    for sent in story.sent.values():
        unsure = story.amid if peer == "apache" else set()
        sure = [message for message in sent if (message.queue, message.offset) not in unsure]
        for message in sure[:: max(1, len(sure) // 4)]:
            what = f"the key {message.key} of {message.queue}/{message.offset}"
            wait_until(partial(found, message), what, 100 if peer == "apache" else 0)


def send_more(broker: Wire, story: Story, peer: Peer, count: int) -> None:
    for _ in range(count):
        for queue in story.sent:
            number = next(_keys)
            body = f"{peer}-{number}-".encode() + bytes([number % 251]) * (number * 37 % 1500)
            key = f"KEY{number:08d}"
            sent = broker.send(TOPIC, queue, body, {"UNIQ_KEY": key, "KEYS": f"word{number} shared", "TAGS": "T"})
            story.sent[queue].append(sent)


def turn(story: Story, peer: Peer, exit: Exit, count: int) -> None:
    """One turn of a broker on store and tier."""
    broker = story.broker(peer)
    with ended_afterwards(broker.process):
        broker.start()
        with connected("127.0.0.1", broker.port) as its:
            found = read_all(its, story)
            look_by_time(its, story, found, peer)
            look_by_key(its, story, peer)
            if peer == "trimq":
                look_by_id(its, story, found)
            before = {queue: story.uploaded(queue) for queue in story.sent}
            send_more(its, story, peer, count)

            def is_uploaded() -> bool:
                return all(story.uploaded(queue) == len(sent) for queue, sent in story.sent.items())

            def is_begun() -> bool:
                return sum(story.uploaded(queue) for queue in story.sent) > sum(before.values())

            if exit == "amid":
                wait_until(is_begun, f"an upload by {peer}", 100)
                send_more(its, story, peer, count // 2)
            else:
                wait_until(is_uploaded, f"the upload by {peer}", 100)
                look_by_time(its, story, read_all(its, story), peer)
        if exit == "clean":
            assert broker.stop() in (0, 143)
            # All keys are in the tier: no local index file is left.
            local = story.directory / "store/tiered_index_file"
            assert not [path for path in local.iterdir() if path.name.isdigit()]
            assert list(story.tier.glob("*_DefaultCluster/broker-a/rmq_sys_INDEX/0/INDEX/*"))
        else:
            broker.kill()
        story.amid = set()
        if exit == "amid" and peer == "trimq":
            story.amid = {
                (queue, at) for queue in story.sent for at in range(max(0, before[queue]), story.uploaded(queue))
            }


def look_by_id(broker: Wire, story: Story, found: list[bytes]) -> None:
    """By the offset in a record, a client gets this record or is refused; never another one."""
    for record in found[:: max(1, len(found) // 20)]:
        head = decode_head(record)
        sent = story.sent[head.queue_id][head.queue_offset]
        if head.physical_offset >= APACHE_UPLOADED:
            with pytest.raises(wire.RefusedError, match="uploaded to the tier by RocketMQ's broker"):
                broker.view(head.physical_offset)
        else:
            assert head.physical_offset == sent.phy
            assert broker.view(head.physical_offset) == record


def verify(story: Story) -> None:
    """``mqstore tiered verify`` finds no fault in what both brokers have uploaded."""
    conf = story.directory / "verify.conf"
    names = ("tieredStoreIndexFileMaxHashSlotNum", "tieredStoreIndexFileMaxIndexNum")
    conf.write_text("".join(f"{name}={OPTIONS[name]}\n" for name in names), encoding="utf-8")
    words = ["tiered", "verify", story.directory / "store", "--tier", story.tier, "-c", conf, "--json"]
    done = CliRunner().invoke(mqstore, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["messages"] == sum(map(len, story.sent.values()))
    assert 0 < report["known_offsets"] < report["messages"]  # of those that TriMQ has uploaded
    assert report["index_entries"] > report["messages"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("exit", ["amid", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("clean", "kill"))])
def test_both_brokers_continue_the_tier_of_the_other(tmp_path: Path, exit: Exit) -> None:
    story = Story(tmp_path)
    peers: list[Peer] = ["trimq", "apache", "trimq", "apache", "trimq"]
    for peer in peers:
        turn(story, peer, exit, 60)
    if exit == "amid":
        turn(story, "trimq", "clean", 10)
    verify(story)
    tables = story.metadata()
    assert tables["topicSerialNumber"] == 0
    assert set(tables["topicMetadataTable"]) == {TOPIC}  # type: ignore[call-overload]
