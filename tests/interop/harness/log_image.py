"""A commit log read from disk by the tests' own decoder: the records that every broker has to serve from it."""

from __future__ import annotations

import struct
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tests.interop.harness.waiting import POLL_INTERVAL, wait_until

V1 = 0xDAA320A7
V2 = 0xDAA320AB
BLANK = 0xCBD43194
_FRONT = struct.Struct(">IIIiiqqi")


class Record(NamedTuple):
    """One record, and the fields by which it has to be found."""

    data: bytes
    phy: int
    topic: str
    queue: int
    offset: int
    sys_flag: int
    stored: int
    body: bytes
    properties: dict[str, str]

    @property
    def in_queue(self) -> bool:
        """Whether consumers get the record: half messages and rollback markers are in no queue."""
        return self.sys_flag & 12 in (0, 8)

    @property
    def keys(self) -> list[str]:
        """The keys by which a query has to find the record."""
        words = self.properties.get("KEYS", "").split(" ")
        return [key for key in (self.properties.get("UNIQ_KEY", ""), *words) if key]


def _decode(data: bytes) -> Record:
    _, magic, _, queue, _, offset, phy, sys_flag = _FRONT.unpack_from(data)
    at = 40 + 8 + (20 if sys_flag & 0x10 else 8)
    (stored,) = struct.unpack_from(">q", data, at)
    at += 8 + (20 if sys_flag & 0x20 else 8) + 4 + 8
    (length,) = struct.unpack_from(">i", data, at)
    body = data[at + 4 : at + 4 + length]
    at += 4 + length
    width = 1 if magic == V1 else 2
    topic_length = int.from_bytes(data[at : at + width], "big")
    topic = data[at + width : at + width + topic_length].decode()
    at += width + topic_length
    (length,) = struct.unpack_from(">h", data, at)
    if at + 2 + length != len(data):
        raise ValueError(f"the size of the record at {phy} does not match its fields")
    pairs = [pair.partition("\x01") for pair in data[at + 2 :].decode().split("\x02") if pair]
    return Record(data, phy, topic, queue, offset, sys_flag, stored, body, {name: value for name, _, value in pairs})


def split(data: bytes) -> list[Record]:
    """Split a reply's body into its consecutive records."""
    records = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        records.append(_decode(data[at : at + size]))
        at += size
    return records


class LogImage:
    """The whole log: ``data`` from offset ``start`` up to the end of the last record, and the records.

    ``killed``: its broker was, perhaps while it wrote. The log ends before a record, or a file, that is half written.
    """

    def __init__(self, store: Path, file_size: int, *, killed: bool = False) -> None:
        files = sorted((store / "commitlog").iterdir())
        if killed and files[-1].stat().st_size != file_size:
            del files[-1]
        self.start = int(files[0].name)
        self.files = len(files)
        raw = b"".join(file.read_bytes() for file in files)
        if len(raw) != file_size * len(files):
            raise ValueError(f"not all files of {store} have {file_size} bytes")
        self.records: list[Record] = []
        at = 0
        while at + 8 <= len(raw):
            size, magic = struct.unpack_from(">II", raw, at)
            if magic == BLANK:
                at += size
                if at % file_size:
                    raise ValueError(f"a BLANK ends at {at}, in the middle of a file")
            elif magic in (V1, V2):
                try:
                    found = _decode(raw[at : at + size])
                except (ValueError, IndexError, struct.error):
                    if killed:
                        break
                    raise
                if found.phy != self.start + at:
                    raise ValueError(f"the record at {self.start + at} contains the offset {found.phy}")
                self.records.append(found)
                at += size
            else:
                break
        self.data = raw[:at]

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    @cached_property
    def queues(self) -> dict[tuple[str, int], list[Record]]:
        """The records of each queue in the order of the log."""
        found: dict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in self.records:
            if record.in_queue:
                found[record.topic, record.queue].append(record)
        return dict(found)

    @cached_property
    def by_key(self) -> dict[tuple[str, str], set[int]]:
        """Log offsets of the records of each topic and key."""
        found: dict[tuple[str, str], set[int]] = defaultdict(set)
        for record in self.records:
            if record.sys_flag & 12 != 12:
                for key in record.keys:
                    found[record.topic, key].add(record.phy)
        return dict(found)

    def of(self, topic: str) -> list[Record]:
        return [record for record in self.records if record.topic == topic]


def live_image(store: Path, file_size: int) -> LogImage:
    """The log while a broker writes to it. A record or a file that is half written is waited for."""

    def look() -> LogImage | None:
        try:
            image = LogImage(store, file_size)
            time.sleep(POLL_INTERVAL)  # a record that was being copied at the first look is complete at the second one
            again = LogImage(store, file_size)
        except (ValueError, IndexError, FileNotFoundError, struct.error):
            return None
        return image if again.start == image.start and again.data.startswith(image.data) else None

    return wait_until(look, "the same log twice")
