"""Walks through the records of the commit log, for recovery and for the reput service.

A position without a record is not taken for the end of the log as long as any record follows it: the bytes in between
are reported as damaged. A record only counts if its offset, its lengths and its checksum are right. Behind damage it
must also not be older than the records before it: bytes of an earlier use of the file, which another writer cut off but
did not erase, must never come back. Source: RocketMQ's CommitLog.checkMessageAndReturnSize.
"""

import struct
from typing import Any, Final, NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file import MappedFile
from trimq.protocol import record, sysflag
from trimq.protocol.hashing import crc32
from trimq.protocol.property_text import decode_properties

_HEAD_V4: Final = struct.Struct(">IIIi4xqqi8x8xq8x4x8xi")
_HEAD_V4_SIZE: Final = _HEAD_V4.size
_V6: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_PAGE: Final = 4096
_SEARCH: Final = 1 << 20
_ZEROS: Final = bytes(_SEARCH)
_SECTOR: Final = 512
_MAGIC_FRONT: Final = b"\xda\xa3\x20"
_MAGICS: Final = (record.MAGIC_V1.to_bytes(4, "big"), record.MAGIC_V2.to_bytes(4, "big"))


class LogRecord(NamedTuple):
    """The fields of a record that the dispatch needs."""

    phy: int
    size: int
    topic: str
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp: int
    properties: str


class Blank(NamedTuple):
    """The filler at the end of a file; the log continues at ``next_offset``."""

    phy: int
    next_offset: int


class Damage(NamedTuple):
    """Bytes of the log that are not a record although records follow them."""

    phy: int
    length: int
    why: str


class NoRecordError(Exception):
    """There is no whole record at a position; the text says why, and is empty if nothing was ever written there."""


class RecordReader:
    """Decodes records of a log with files of ``file_size`` bytes. Each topic becomes one shared string.

    The checksum of a record covers only its body. A power cut loses whole sectors, which then read as zeros: a record
    with such a hole in its topic or properties is not valid.
    """

    def __init__(self, file_size: int, *, check_crc: bool = True) -> None:
        self.file_size = file_size
        self._check_crc = check_crc
        self._topics: dict[bytes, str] = {}

    def read(self, view: Any, at: int, phy: int) -> LogRecord | Blank:
        """The record or BLANK at position ``at`` of ``view``, which is log offset ``phy``. Raises NoRecordError."""
        # The usual form is decoded inline: recovery and reput call this for every record. Any mismatch goes to the
        # full path, which also gives the reason.
        if len(view) - at >= _HEAD_V4_SIZE:
            size, magic, crc, queue_id, queue_offset, stored_phy, sys_flag, stored, body = _HEAD_V4.unpack_from(
                view, at
            )
            if magic == record.MAGIC_V1 and stored_phy == phy and not sys_flag & _V6 and body >= 0:
                body_at = at + _HEAD_V4_SIZE
                topic_at = body_at + body
                end = at + size
                if topic_at + 3 <= end <= len(view):
                    topic_end = topic_at + 1 + view[topic_at]
                    properties_at = topic_end + 2
                    if (
                        properties_at <= end
                        and properties_at + (view[topic_end] << 8 | view[topic_end + 1]) == end
                        and (not body or not self._check_crc or crc32(view[body_at:topic_at]) == crc)
                    ):
                        topic = self._topic(bytes(view[topic_at + 1 : topic_end]))
                        properties = str(view[properties_at:end], "utf-8", "replace")
                        if "\0" in properties or "\0" in topic:
                            self._check_whole(view, at, phy, (topic_at + 1, topic_end), (properties_at, end))
                        return LogRecord(phy, size, topic, queue_id, queue_offset, sys_flag, stored, properties)
        return self._read_any(view, at, phy)

    def _read_any(self, view: Any, at: int, phy: int) -> LogRecord | Blank:
        """As ``read``, for every form of record; raises NoRecordError with the reason if there is none."""
        check = record.check_record(view, at, physical_offset=phy, check_crc=self._check_crc)
        if check.state is record.RecordState.BLANK:
            return Blank(phy, phy + check.size)
        if check.state is not record.RecordState.RECORD or check.head is None:
            raise NoRecordError(check.why)
        head = check.head
        self._check_whole(view, at, phy, (head.topic_at, head.topic_end), (head.properties_at, head.properties_end))
        return LogRecord(
            phy,
            head.size,
            self._topic(bytes(view[head.topic_at : head.topic_end])),
            head.queue_id,
            head.queue_offset,
            head.sys_flag,
            head.store_timestamp,
            str(view[head.properties_at : head.properties_end], "utf-8", "replace"),
        )

    def _check_whole(self, view: Any, at: int, phy: int, *ranges: tuple[int, int]) -> None:
        """Raise NoRecordError if the part of a range that is in one sector consists of zeros only."""
        to_file = phy % self.file_size - at
        for begin, end in ranges:
            first = begin
            while first < end:
                stop = min(end, (first + to_file) // _SECTOR * _SECTOR + _SECTOR - to_file)
                if not any(view[first:stop]):
                    raise NoRecordError(f"bytes {first - at} to {stop - at} are zeros: a sector that was never written")
                first = stop

    def _topic(self, raw: bytes) -> str:
        topic = self._topics.get(raw)
        if topic is None:
            topic = self._topics[raw] = raw.decode("utf-8", "replace")
        return topic


class LogWalk:
    """Walks through mapped files from an offset to the last record. One step blocks for one record at most.

    After ``step`` has returned None, ``position`` is the end of the log.
    """

    def __init__(
        self, disk: Disk, files: list[MappedFile], position: int, reader: RecordReader, last_timestamp: int = 0
    ) -> None:
        self._disk = disk
        self._files = files
        self._reader = reader
        self._current: MappedFile | None = None
        self._probed: tuple[MappedFile | None, int, int] = (None, 0, 0)
        self.position = position
        self.last_timestamp = last_timestamp

    def step(self) -> LogRecord | Blank | Damage | None:
        """The next record, BLANK or damaged range; None at the end of the log."""
        file = self._file_at(self.position)
        if file is None:
            return None
        at = self.position - file.start
        try:
            found = self._read_checked(file, at)
        except NoRecordError as error:
            return self._skip(str(error) or "zeros where a record should be")
        if isinstance(found, Blank):
            self.position = file.end
        else:
            self.position += found.size
            self.last_timestamp = max(self.last_timestamp, found.store_timestamp)
        return found

    def _read_checked(self, file: MappedFile, at: int) -> LogRecord | Blank:
        self._probe(file, at)
        found = self._reader.read(file.view, at, self.position)
        if isinstance(found, Blank):
            if found.next_offset != file.end:
                raise NoRecordError(f"a BLANK of {found.next_offset - found.phy} bytes where {file.size - at} are left")
        # An older record is valid only if the clock was set back while the log was written. Otherwise it is a record
        # that another writer had cut off, which does not count.
        elif found.store_timestamp < self.last_timestamp and not self._time_comes_back(file, at):
            raise NoRecordError("a record of an earlier use of this file")
        return found

    def _probe(self, file: MappedFile, at: int) -> None:
        """Raise NoRecordError if the pages of a record's first bytes have never been written.

        Reading such a page through the map allocates memory for it on tmpfs: on a full tmpfs that is a SIGBUS.
        """
        end = min(at + _HEAD_V4_SIZE, file.size)
        probed, begin, until = self._probed
        if probed is file and begin <= at and end <= until:
            return
        for position in (at, end - 1):
            if self._disk.next_data(file.fd, position) > position:
                raise NoRecordError
        self._probed = (file, at // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE)

    def _file_at(self, phy: int) -> MappedFile | None:
        file = self._current
        if file is not None and file.start <= phy < file.end:
            return file
        for file in reversed(self._files):
            if file.start <= phy:
                self._current = file if phy < file.end else None
                return self._current
        return None

    def _time_comes_back(self, file: MappedFile, at: int) -> bool:
        """True if the clock was set back: the following records reach the time of those before ``at`` again."""
        reader = RecordReader(self._reader.file_size, check_crc=False)
        position = file.start + at
        while True:
            current = self._file_at(position)
            if current is None:
                return False
            try:
                self._probe(current, position - current.start)
                found = reader.read(current.view, position - current.start, position)
            except NoRecordError:
                return False
            if isinstance(found, Blank):
                position = current.end
                continue
            if found.store_timestamp >= self.last_timestamp:
                return True
            position += found.size

    def _skip(self, why: str) -> Damage | None:
        """Move to the next record behind a position without one. None, without a move, if no record follows."""
        following = self._find_next()
        if following is None:
            return None
        damage = Damage(self.position, following - self.position, why)
        self.position = following
        return damage

    def _find_next(self) -> int | None:
        file = self._file_at(self.position)
        if file is None:
            return None
        at = self.position - file.start
        # The length field of the damaged record often survives and leads to the next record. Otherwise search for one.
        if file.size - at >= record.BLANK_SIZE:
            size = int.from_bytes(self._disk.pread(file.fd, 4, at), "big")
            if record.OVERHEAD_V1 <= size < file.size - at and self._is_record(file, at + size):
                return self.position + size
        for later in self._files:
            if later.start >= file.start:
                begin = at + 1 if later is file else 0
                found = self._search(later, begin)
                if found is not None:
                    return later.start + found
        return None

    def _search(self, file: MappedFile, begin: int) -> int | None:
        """Position of the first whole record from ``begin`` on that is not older than the records before it."""
        at = begin
        while at < file.size - record.OVERHEAD_V1:
            # Holes are skipped: a new file of 1 GiB has no data in most of it.
            data_at = self._disk.next_data(file.fd, at)
            if data_at >= file.size:
                return None
            at = max(at, data_at - record.AT_MAGIC)
            chunk = self._disk.pread(file.fd, min(_SEARCH, file.size - at), at)
            hit = -1 if _is_zero(chunk) else chunk.find(_MAGIC_FRONT)
            while hit >= 0:
                candidate = at + hit - record.AT_MAGIC
                if candidate >= begin and chunk[hit : hit + 4] in _MAGICS and self._is_record(file, candidate):
                    return candidate
                hit = chunk.find(_MAGIC_FRONT, hit + 1)
            at += max(1, len(chunk) - 4)
        return None

    def _is_record(self, file: MappedFile, at: int) -> bool:
        try:
            self._probe(file, at)
            found = self._reader.read(file.view, at, file.start + at)
        except NoRecordError:
            return False
        return isinstance(found, LogRecord) and found.store_timestamp >= self.last_timestamp


def _is_zero(data: bytes) -> bool:
    """True if there are only zeros. A comparison is a hundred times as fast as a loop over the bytes."""
    return data == (_ZEROS if len(data) == len(_ZEROS) else bytes(len(data)))


def properties_of(found: LogRecord) -> dict[str, str]:
    """The properties of a record by name."""
    return decode_properties(found.properties)


def erase_behind(disk: Disk, file: MappedFile, position: int, *, sync: bool = True) -> int:
    """Write zeros over everything behind ``position`` of a file, durably. Returns the number of bytes. Blocks."""
    erased = 0
    at = position
    while at < file.size:
        at = max(at, disk.next_data(file.fd, at))
        end = min(at + _SEARCH, file.size)
        if at < end and not _is_zero(disk.pread(file.fd, end - at, at)):
            disk.pwrite(file.fd, bytes(end - at), at)
            erased += end - at
        at = end
    if erased and sync:
        disk.data_sync(file.fd)
    return erased
