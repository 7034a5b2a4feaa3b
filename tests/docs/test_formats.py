"""The worked examples of docs/formats are what the code writes and reads."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.broker.services.fakes import configuration
from tests.store.simdisk import SimDisk
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.services.consumer_filters import ConsumerFilterManager
from trimq.broker.services.message_request_mode import MessageRequestModeManager
from trimq.broker.services.state_file import replace_file
from trimq.broker.services.transaction.messages import HalfMessages
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.queue.consume_queue import QueueShape
from trimq.broker.store.queue.consume_queue_store import ConsumeQueueStore, QueueState
from trimq.broker.store.queue.deleted_topics import DeletedTopics
from trimq.broker.store.queue.queue_snapshot import read_snapshot
from trimq.broker.store.recovery.failed_sync_marker import FailedSyncMarker
from trimq.broker.store.running_flags import Flag
from trimq.broker.store.tiered.bucket import manifest_pages
from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.broker.store.tiered.bucket.queue_starts import RESTORED, Origin, read_restored
from trimq.broker.testing import configuration as configuration_of
from trimq.protocol import (
    bucket_manifest,
    bucket_names,
    bucket_object,
    checkpoint_layout,
    index_layout,
    lenient_json,
    queue_unit,
    timer_layout,
)
from trimq.protocol.auth.model import Acl, Action, Decision, Policy, PolicyEntry, PolicyType, Resource, UserChange
from trimq.protocol.body import SetMessageRequestModeRequestBody
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.hashing import key_hash, tags_code
from trimq.protocol.message import decode_message
from trimq.protocol.message_trace import (
    EndTransactionTrace,
    MessageType,
    PubTrace,
    RecallTrace,
    SubAfterTrace,
    SubBeforeTrace,
    decode_traces,
    encode_trace,
)
from trimq.protocol.property_text import join_properties
from trimq.protocol.recall_handle import encode_handle
from trimq.protocol.record import encode_record, pack_host
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC, TRANS_OP_HALF_TOPIC
from trimq.protocol.transaction import decode_half, make_half, op_body, op_offsets
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import KeyRing, Secrets
from trimq.remoting.runtime.clock import ManualClock

FORMATS = Path(__file__).resolve().parents[2] / "docs" / "formats"
BLOCK = re.compile(r"```(\w+) ([\w-]+)\n(.*?)```", re.DOTALL)
EXAMPLES = {
    name: text for page in FORMATS.glob("*.md") for _, name, text in BLOCK.findall(page.read_text(encoding="utf-8"))
}


def example(name: str) -> bytes:
    return bytes.fromhex(EXAMPLES[name])


def test_frames() -> None:
    for encoding in Encoding:
        command = RemotingCommand.request(14, {"consumerGroup": "g", "topic": "T", "queueId": "0"}, encoding=encoding)
        command.opaque = 5
        assert encode(command) == example(f"frame-{encoding.name.lower()}")


def test_record_and_message_id() -> None:
    record = encode_record(
        topic=b"Orders",
        body=b"hello",
        properties=b"TAGS\x01paid\x02UNIQ_KEY\x01ID1\x02",
        queue_id=2,
        queue_offset=7,
        physical_offset=4096,
        born_timestamp=1_700_000_000_000,
        born_host=pack_host("10.0.0.9", 50000),
        store_timestamp=1_700_000_000_123,
        store_host=pack_host("127.0.0.1", 10911),
    )
    assert record == example("record")
    message = decode_message(record)
    assert message.offset_message_id == "7F00000100002A9F0000000000001000"
    assert message.offset_message_id in (FORMATS / "record.md").read_text(encoding="utf-8")


def test_transaction() -> None:
    sent = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "ID1"}
    make_half(sent, "Orders", 2, "P")

    def record(topic: str, body: bytes, properties: bytes, **fields: Any) -> bytes:
        host = pack_host("127.0.0.1", 10911)
        usual: dict[str, Any] = {
            "queue_id": 0,
            "queue_offset": 0,
            "born_timestamp": 1_700_000_000_000,
            "store_host": host,
        }
        usual |= {"born_host": pack_host("10.0.0.9", 50000)}
        return encode_record(topic=topic.encode(), body=body, properties=properties, **(usual | fields))

    half = record(
        TRANS_HALF_TOPIC,
        b"hello",
        join_properties(sent).encode(),
        queue_offset=7,
        physical_offset=4096,
        store_timestamp=1_700_000_000_123,
    )
    assert half == example("half")
    committed = HalfMessages(pack_host("127.0.0.1", 10911), tags=False).committed(decode_half(half))
    assert (committed.topic, committed.queue_id) == ("Orders", 2)
    commit = record(
        "Orders",
        b"hello",
        committed.properties,
        queue_id=2,
        physical_offset=4096 + len(half),
        store_timestamp=1_700_000_000_200,
        sys_flag=committed.sys_flag,
        prepared_transaction_offset=committed.prepared_transaction_offset,
    )
    assert commit == example("commit")
    time = 1_700_000_003_000
    ended = HalfMessages(pack_host("127.0.0.1", 10911), tags=False).op(op_body([7]), time)
    op = record(
        TRANS_OP_HALF_TOPIC,
        ended.body,
        ended.properties,
        physical_offset=4096 + len(half) + len(commit),
        born_host=ended.born_host,
        born_timestamp=ended.born_timestamp,
        store_timestamp=time,
    )
    assert op == example("op")
    assert op_offsets(ended.body) == [7]
    state = lenient_json.loads(EXAMPLES["transaction"].encode())
    assert state == {"settledOffset": 4096 + len(half), "opOffset": 1}


def test_queue_unit() -> None:
    assert queue_unit.UNIT.pack(4096, len(example("record")), tags_code("paid")) == example("queue-unit")


def test_index() -> None:
    time = 1_700_000_000_123
    assert index_layout.HEADER.pack(time, time, 4096, 4096, 1, 2) == example("index-header")
    assert index_layout.ENTRY.pack(key_hash("Orders", "ID1"), 4096, 0, 0) == example("index-entry")


def test_message_trace() -> None:
    sent = PubTrace(
        1_700_000_000_000, "DefaultRegion", "orders", "Orders", "7F01", None, "o-1", "127.0.0.1:10911",
        6, 3, MessageType.NORMAL, "7F00000100002A9F0000000000001000", True,
    )  # fmt: skip
    processed = SubAfterTrace("0A01", "7F01", 12, True, "o-1", 0, 1_700_000_000_456, "billing")
    body = example("message-trace")
    assert body == f"{encode_trace(sent)}{encode_trace(processed)}".encode()
    assert decode_traces(body.decode()) == ([sent, processed], 0)
    page = (FORMATS / "message-trace.md").read_text(encoding="utf-8")
    for trace in (PubTrace, SubBeforeTrace, SubAfterTrace, EndTransactionTrace, RecallTrace):
        kind = trace.__name__.removesuffix("Trace")
        [row] = re.findall(rf"^\| `{kind}` \| (.*) \|$", page, re.MULTILINE)
        fields = [name for name in trace._fields if name != "client_host"]  # old clients only
        assert len(row.split(", ")) == len(fields), kind


def test_checkpoint() -> None:
    fields = checkpoint_layout.CheckpointFields(1_700_000_000_123, 1_700_000_000_100, logics_physical_offset=4096)
    assert checkpoint_layout.encode(fields)[:48] == example("checkpoint")


def test_checkpoint_mark() -> None:
    fields = checkpoint_layout.CheckpointFields(1_700_000_000_123, 1_700_000_000_100, logics_physical_offset=4096)
    mark = checkpoint_layout.CheckpointMark(
        position=4096,
        last_record=3900,
        store_timestamp=1_700_000_000_100,
        queues=1,
        units=12,
        index_file=20231114221320123,
        index_count=13,
        index_files=1,
        clean=True,
    )
    data = checkpoint_layout.encode(fields, mark)
    written = example("checkpoint-mark")
    assert data[512 : 512 + len(written)] == written
    assert not any(data[512 + len(written) :])
    assert checkpoint_layout.decode_mark(data) == mark


def test_queue_snapshot(tmp_path: Path) -> None:
    (tmp_path / "consumequeue.snapshot").write_bytes(example("queue-snapshot"))
    queues = ConsumeQueueStore(RealDisk(), str(tmp_path), QueueShape(300_000, 1 << 30))
    assert read_snapshot(queues, 8192, 4096) == {"Orders": {0: QueueState(0, 7, 12, 8192)}}
    assert read_snapshot(queues, 8193, 4096) is None


async def test_deleted_topics(tmp_path: Path) -> None:
    deleted = DeletedTopics(RealDisk(), str(tmp_path))
    deleted.note("Orders", 8192, 1_700_000_000_123)
    await deleted.save()
    assert (tmp_path / "topics.dropped").read_text() == EXAMPLES["topics-dropped"].strip()
    assert deleted.has("Orders", 8191, 1_700_000_000_123)
    assert not deleted.has("Orders", 8192, 1_700_000_000_123)


def test_failed_sync(tmp_path: Path) -> None:
    marker = FailedSyncMarker(RealDisk(), str(tmp_path))
    marker.add(Flag.WRITE_LOGICS_QUEUE_ERROR, 4096, "first")
    marker.add(Flag.NOT_WRITEABLE, 8192, "Input/output error")
    assert (tmp_path / "failed_sync").read_text() == EXAMPLES["failed-sync"].strip()


async def test_users_and_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimq.remoting.auth.secrets.os.urandom", lambda count: bytes(range(count)))
    entry = PolicyEntry(Resource.parse("Topic:Orders"), (Action.PUB,), Decision.ALLOW, ("10.0.0.0/8",))
    for secrets, name in [
        (Secrets(KeyRing([bytes(range(32))])), "auth-encrypted"),
        (Secrets(allow_clear=True), "auth-clear"),
    ]:
        file = DiskAuthFile(RealDisk(), f"{tmp_path}/{name}")
        store = AuthStore(file, secrets)
        await store.create_user("shop", UserChange("shop-secret"))
        await store.write_acl(Acl("User:shop", (Policy(PolicyType.CUSTOM, (entry,)),)))
        assert await file.read() == EXAMPLES[name].encode()


def test_every_example_is_checked() -> None:
    """A page whose example is not tested becomes wrong unnoticed."""
    source = Path(__file__).read_text(encoding="utf-8")
    unread = {name for name in EXAMPLES if f'"{name}"' not in source and not name.startswith("frame-")}
    assert not unread


async def test_consumer_filters(tmp_path: Path) -> None:
    path = tmp_path / "config" / "consumerFilter.json"
    path.parent.mkdir()
    path.write_text(EXAMPLES["consumer-filter"])
    filters = ConsumerFilterManager(configuration_of(tmp_path), RealDisk(), ManualClock())
    await filters.load()
    entry = filters.get("Orders", "billing")
    assert entry is not None
    accept = filters.compiled(entry)
    assert accept is not None
    assert [accept.match_record(b"amount\x01%d\x02" % amount) for amount in (10, 11)] == [False, True]
    assert (entry.is_dead, entry.dead_time) == (True, 1_700_000_060_000)
    assert json.loads(b"".join(filters.pieces())) == json.loads(EXAMPLES["consumer-filter"])


def test_consumer_offsets() -> None:
    assert lenient_json.loads(EXAMPLES["consumer-offset"])["offsetTable"] == {"Orders@billing": {"0": 12, "1": 9}}


def test_timer() -> None:
    sent, out = 1_700_000_000_000, timer_layout.out_time(1_700_000_010_500, 1000)
    assert out == 1_700_000_010_000
    assert (out // 1000 % timer_layout.SLOTS, out // 1000 % timer_layout.SLOTS * 32) == (512_010, 16_384_320)
    unit = timer_layout.TimerUnit(-1, 1, sent, out, 4096, 272, tags_code("Orders"))
    assert timer_layout.pack_unit(unit) == example("timer-unit")
    assert timer_layout.SLOT.pack(out // 1000, 0, 0, 1, 0) == example("timer-slot")
    checkpoint = timer_layout.TimerCheckpoint(sent, 52, 1, 1, timestamp=1_700_000_001_500, counter=1)
    assert timer_layout.encode_checkpoint(checkpoint, padded=False) == example("timer-check")
    assert encode_handle("Orders", "broker-a", out, "ID1") == EXAMPLES["timer-handle"].strip()


async def test_message_request_modes() -> None:
    text = EXAMPLES["message-request-mode"].strip()
    disk = SimDisk()
    replace_file(disk, "/store/config/messageRequestMode.json", text.encode())
    modes = MessageRequestModeManager(configuration(), disk, ManualClock())
    await modes.load()
    assert b"".join(modes.pieces()).decode() == text
    entry = SetMessageRequestModeRequestBody(
        topic="Orders", consumer_group="billing", mode="POP", pop_share_queue_num=2
    )
    modes.set(entry)
    assert b"".join(modes.pieces()).decode() == text


def test_bucket() -> None:
    block = bucket_object.Block("T", 0, 5, 1, 80, 64, 4096, 4096, 1_700_000_000_000, 1_700_000_000_000, 0)
    units = queue_unit.UNIT.pack(4096, 80, 0)
    block = block._replace(crc=bucket_object.block_crc(units, [bytes(80)]))
    header = bucket_object.ObjectHeader(bucket_object.Kind.LOG, 3, 4096, 8192, 1_700_000_000_500)
    body = bucket_object.encode_header(header) + units + bytes(80)
    data = body + bucket_object.encode_end([block], len(body))
    assert data == example("bucket-object")

    directory = bucket_object.decode_end(data, len(data))
    stored = bucket_manifest.StoredObject(4096, 8192, 0, 3, 0, len(data), directory.position)
    assert stored.name == "log/00000000000000004096-00000003"
    entry = bucket_manifest.Entry(stored, bucket_manifest.stretches_of(directory))
    page = bucket_manifest.encode_page([entry])
    assert zlib.decompress(page[16:]) == example("bucket-page")

    # Another zlib may pack the page to another length than the example's.
    ref = bucket_manifest.PageRef("manifest/page-000000000018-00000003-0000", 79, 1)
    text = EXAMPLES["bucket-root"].replace("\n", "")
    root = bucket_manifest.decode_root(text.encode())
    saved = "state/000000000018-00000003", bucket_names.indexes_name(17, 3)
    assert root == bucket_manifest.Root("C1", "broker-a", 3, "8f1f2c6f0d5e4b7a", 18, 8192, (ref,), *saved)
    assert bucket_manifest.encode_root(root).decode() == text
    text = EXAMPLES["bucket-indexes"].replace("\n", "")
    names = bucket_manifest.decode_indexes(text.encode())
    assert names == (str(IndexName(1_700_000_000_000, 1_700_003_599_000, 4096, 6040, 3)),)
    assert bucket_manifest.encode_indexes(names).decode() == text


def test_capacity_of_a_bucket() -> None:
    """The figures of the page's last section."""
    name = bucket_names.page_name(1, 1, 0)
    pages = (bucket_manifest.PageRef(name, 900_000, 50_000),) * 1100
    assert len(bucket_manifest.encode_root(bucket_manifest.Root("C", "b", 1, "o", pages=pages))) <= 65_536
    row = bucket_manifest.STRETCH.itemsize
    assert (row, bucket_manifest.OBJECT.itemsize, bucket_object.ROW.itemsize) == (80, 48, 72)
    assert manifest_pages.PAGE_ROWS // row == 52_428
    assert 1100 // 2 * manifest_pages.PAGE_ROWS // row > 28_800_000


def test_the_queues_of_a_restored_store(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / RESTORED).write_text(EXAMPLES["tier-restored"], encoding="utf-8")
    starts = {("Orders", 0): 60, ("Orders", 1): 9}
    found = read_restored(RealDisk(), str(tmp_path))
    assert (found.starts, found.origin) == (starts, Origin(5000, 8192))
    (tmp_path / RESTORED).write_text('{"queues":{"Orders":{"0":60,"1":9}}}', encoding="utf-8")  # an older version's
    found = read_restored(RealDisk(), str(tmp_path))
    assert (found.starts, found.origin) == (starts, None)
