"""Small commit logs, written with the encoder of protocol/."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimq.protocol.file_names import offset_name
from trimq.protocol.hashing import tags_code
from trimq.protocol.property_text import decode_properties, encode_properties
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import BLANK, BLANK_SIZE, MAGIC_BLANK, encode_record, host_flags, pack_host

START = 1_700_000_000_000


@dataclass
class Sent:
    """A message for the log; ``phy`` and ``size`` are set when it is appended."""

    topic: str = "Orders"
    body: bytes = b"body"
    queue_id: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    time: int = START
    born: int = START - 5
    flag: int = 0
    sys_flag: int = 0
    born_host: tuple[str, int] = ("10.0.0.2", 5000)
    store_host: tuple[str, int] = ("10.0.0.1", 10911)
    reconsume_times: int = 0
    raw_properties: bytes | None = None
    queue_offset: int = -1
    phy: int = -1
    size: int = 0


class LogWriter:
    """Appends records as a broker does: files of one size, a BLANK where the next record does not fit."""

    def __init__(self, root: Path, file_size: int = 16_384, start: int = 0) -> None:
        self.root = root
        self.file_size = file_size
        self.files: dict[int, bytearray] = {start: bytearray()}
        self.at = start
        self.offsets: dict[tuple[str, int], int] = {}
        self.sent: list[Sent] = []

    def put(self, message: Sent) -> Sent:
        """Append a message; if it has no queue offset it gets the next one of its queue."""
        key = message.topic, message.queue_id
        if message.queue_offset < 0:
            message.queue_offset = self.offsets.get(key, 0)
        self.offsets[key] = message.queue_offset + 1
        start = max(self.files)
        record = self._encode(message, self.at)
        space = start + self.file_size - self.at
        if len(record) + BLANK_SIZE > space:
            self.files[start] += BLANK.pack(space, MAGIC_BLANK)
            self.at = start + self.file_size
            self.files[self.at] = bytearray()
            record = self._encode(message, self.at)
        message.phy, message.size = self.at, len(record)
        self.files[max(self.files)] += record
        self.at += len(record)
        self.sent.append(message)
        return message

    def put_all(self, messages: Sequence[Sent]) -> "LogWriter":
        for message in messages:
            self.put(message)
        return self

    def _encode(self, message: Sent, phy: int) -> bytes:
        born, store = pack_host(*message.born_host), pack_host(*message.store_host)
        properties = message.raw_properties
        if properties is None:
            properties = encode_properties(message.properties).encode()
        return encode_record(
            topic=message.topic.encode(),
            body=message.body,
            properties=properties,
            queue_id=message.queue_id,
            queue_offset=message.queue_offset,
            physical_offset=phy,
            born_timestamp=message.born,
            born_host=born,
            store_timestamp=message.time,
            store_host=store,
            flag=message.flag,
            sys_flag=message.sys_flag | host_flags(born, store),
            reconsume_times=message.reconsume_times,
        )

    def write(self) -> Path:
        """Write the log files, each of full size."""
        directory = self.root / "commitlog"
        directory.mkdir(parents=True, exist_ok=True)
        for start, data in self.files.items():
            (directory / offset_name(start)).write_bytes(bytes(data).ljust(self.file_size, b"\0"))
        return self.root

    def write_queues(self, units_per_file: int = 10) -> Path:
        """Write consume queues with one unit for each record, at its offset."""
        size = units_per_file * 20
        files: dict[tuple[str, int, int], bytearray] = {}
        for message in self.sent:
            at = message.queue_offset * 20
            key = message.topic, message.queue_id, at // size * size
            data = files.setdefault(key, bytearray(size))
            tag = decode_properties(encode_properties(message.properties)).get("TAGS", "")
            UNIT.pack_into(data, at % size, message.phy, message.size, tags_code(tag))
        for (topic, queue_id, start), data in files.items():
            path = self.root / "consumequeue" / topic / str(queue_id) / offset_name(start)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.root
