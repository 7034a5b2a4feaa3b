"""The worked examples of docs/formats are what the code writes and reads."""

import re
from pathlib import Path

from protocol import checkpoint_layout, index_layout, lenient_json, queue_unit
from protocol.command import Encoding, RemotingCommand
from protocol.frame import encode
from protocol.hashing import key_hash, tags_code
from protocol.message import decode_message
from protocol.record import encode_record, pack_host

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


def test_queue_unit() -> None:
    assert queue_unit.UNIT.pack(4096, len(example("record")), tags_code("paid")) == example("queue-unit")


def test_index() -> None:
    time = 1_700_000_000_123
    assert index_layout.HEADER.pack(time, time, 4096, 4096, 1, 2) == example("index-header")
    assert index_layout.ENTRY.pack(key_hash("Orders", "ID1"), 4096, 0, 0) == example("index-entry")


def test_checkpoint() -> None:
    fields = checkpoint_layout.CheckpointFields(1_700_000_000_123, 1_700_000_000_100, logics_physical_offset=4096)
    assert checkpoint_layout.encode(fields)[:48] == example("checkpoint")


def test_consumer_offsets() -> None:
    assert lenient_json.loads(EXAMPLES["consumer-offset"])["offsetTable"] == {"Orders@billing": {"0": 12, "1": 9}}
