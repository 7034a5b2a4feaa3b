"""Checks the history of a broker in a bucket: manifest, objects, messages, the state for a restore, index files.

Each object is read once, in pieces, so memory grows with the manifest only. A broker may go on meanwhile: what it
replaces is noted. That every key has an entry in the index is not checked.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from trimq.broker.store.tiered.bucket.index_objects import parse_index_name
from trimq.broker.store.tiered.bucket.manifest_reads import read_directory, read_newest_state
from trimq.broker.tools.bucket_entries import Entries, read_entries
from trimq.broker.tools.check_block import check_index, check_run, living, runs
from trimq.broker.tools.command_parts import Progress
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.verdicts import TierFindings
from trimq.protocol import lenient_json
from trimq.protocol.bucket_manifest import Entry, StoredObject, Stretch, stretches_of
from trimq.protocol.bucket_names import INDEXES, LOG, SEGMENTS, parse_saved
from trimq.protocol.bucket_object import (
    HEADER_SIZE,
    BucketFormatError,
    Directory,
    Kind,
    ObjectHeader,
    decode_header,
)
from trimq.protocol.bucket_state import decode_state
from trimq.protocol.queue_unit import UNIT_SIZE

_READ: Final = 4 * 1024 * 1024
_LISTED: Final = 1000
_SHOWN: Final = 20
"""Most notes of one kind."""
_MOST_INDEX: Final = 256 * 1024 * 1024
"""A larger index file is not read. Brokers write up to 60 MB."""


class BucketReport(TierFindings):
    """The result of a verification of a bucket."""

    bucket: str
    cluster: str
    broker: str
    epoch: int = 0
    end: int = 0
    """The log offset behind all messages."""
    pages: int = 0
    objects: int = 0
    queues: int = 0
    messages: int = 0
    """Messages that are right; without ``check_messages`` those that the directories of the objects have."""
    bytes: int = 0
    holes: int = 0
    """Messages between the first and the last of a queue that are not in the bucket."""
    index_files: int = 0
    index_entries: int = 0
    state_files: int = 0


class BucketVerification:
    """One verification. ``check_messages``: read all messages, not only both ends of each object."""

    def __init__(self, found: OfflineBucket, *, check_messages: bool = True) -> None:
        self._found = found
        self._bucket = found.bucket
        self._check_messages = check_messages
        self._report = BucketReport(found.url, found.cluster, found.broker)
        self._progress: Progress = lambda _: None
        self._done = 0
        self._missing: list[tuple[str, str]] = []
        """Objects that are not there, and what that means."""
        self._noted: dict[str, int] = {}
        self._topics: frozenset[str] = frozenset()
        self._named: Entries
        self._entries: list[Entry] = []
        self.total = 0
        """Bytes that ``run`` reads, about."""

    async def read(self, topics: frozenset[str] = frozenset()) -> None:
        """Read the manifest; ``run`` then checks all, or the queues of some topics and neither index nor state.

        Raises NotUsableError, OSError, BucketFormatError.
        """
        self._topics = topics
        found = await self._read_entries()
        if found is None:
            raise self._found.no_history()
        self._named = found
        for text in found.lost:
            self._report.lost.add(text)
        self._entries = list(_of_topics(found.entries, topics))
        self.total = sum(map(self._cost, self._entries))
        if not topics:
            self.total += sum(parts.size for parts in map(parse_index_name, found.indexes) if parts is not None)

    async def _read_entries(self) -> Entries | None:
        return await read_entries(self._bucket, self._found.cluster, self._found.broker, lambda: None)

    def _cost(self, entry: Entry) -> int:
        """Bytes that are read of an object, about."""
        stored = entry.object
        if not stored.length:
            return 0
        return _ends_of(stored) + (sum(map(_length, entry.stretches)) if self._check_messages else 0)

    async def run(self, progress: Progress) -> BucketReport:
        """Check what was read. Raises OSError."""
        self._progress = progress
        report, root = self._report, self._named.root
        report.epoch, report.pages = root.epoch, len(root.pages)
        report.end = self._named.entries[-1].object.end if self._named.entries else root.end
        self._check_order()
        self._check_queues()
        lengths = await self._lengths()
        for entry in self._entries:
            stored = entry.object
            if stored.length:
                end = self._done + self._cost(entry)
                report.objects += 1
                await self._check_object(entry, lengths.get(stored.name))
                self._read(max(0, end - self._done))  # what could not be read
        if not self._topics:
            await self._check_state()
            for name in self._named.indexes:
                report.index_files += 1
                parts = parse_index_name(name)
                end = self._done + (parts.size if parts is not None else 0)
                await self._check_index(name, lengths.get(name))
                self._read(max(0, end - self._done))
        await self._judge_missing()
        report.notes += [f"and {count - _SHOWN} more {kind}" for kind, count in self._noted.items() if count > _SHOWN]
        return report

    def _read(self, size: int) -> None:
        self._done += size
        self._progress(self._done)

    def _note(self, kind: str, text: str) -> None:
        self._noted[kind] = self._noted.get(kind, 0) + 1
        if self._noted[kind] <= _SHOWN:
            self._report.notes.append(text)

    # -- what the manifest says

    def _check_order(self) -> None:
        """Objects of different stretches of the log follow each other."""
        before: StoredObject | None = None
        for entry in self._named.entries:
            stored = entry.object
            if before is not None and (stored.begin, stored.end) != (before.begin, before.end):
                if stored.begin < before.end:
                    self._report.lost.add(f"{before.name} and {stored.name} cover the same part of the log")
                elif stored.begin > before.end:
                    text = f"the log from {before.end} to {stored.begin} is in no object: its messages have expired"
                    self._note("such parts of the log", text)
            if before is None or stored.end >= before.end:
                before = stored

    def _check_queues(self) -> None:
        """The messages of a queue follow each other, in queue and log."""
        ends: dict[tuple[str, int], tuple[int, int]] = {}
        for entry in self._entries:
            for stretch in entry.stretches:
                key = stretch.topic, stretch.queue_id
                end, physical = ends.get(key, (stretch.offset, -1))
                name = f"{stretch.topic}/{stretch.queue_id}"
                if stretch.offset < end:
                    self._report.lost.add(
                        f"{name}: {entry.object.name} begins with message {stretch.offset}, an object before it ends "
                        f"with {end - 1}"
                    )
                elif stretch.offset > end:
                    self._report.holes += stretch.offset - end
                    self._note(
                        "holes",
                        f"{name}: messages {end} to {stretch.offset - 1} are not in the bucket: they were deleted "
                        "before they were uploaded, or have expired",
                    )
                if stretch.messages and stretch.first_physical <= physical:
                    self._report.lost.add(f"{name}: message {stretch.offset} is not behind the one before in the log")
                ends[key] = max(end, stretch.end), max(physical, stretch.last_physical)
        self._report.queues = len(ends)

    # -- objects

    async def _lengths(self) -> dict[str, int]:
        """The lengths that the objects and the index files have."""
        named = {entry.object.name for entry in self._entries if entry.object.length} | set(self._named.indexes)
        lengths: dict[str, int] = {}
        others = 0
        for prefix in (LOG, SEGMENTS, INDEXES):
            after = ""
            while True:
                listed = await self._bucket.list(prefix, after, _LISTED)
                for info in listed:
                    if info.name in named:
                        lengths[info.name] = info.size
                    others += info.name not in named
                if len(listed) < _LISTED:
                    break
                after = listed[-1].name
        if others and not self._topics:
            self._report.notes.append(
                f"{others} objects with messages or keys are not in the manifest: they are being written, or wait for "
                "their deletion (mqstore tiered gc)"
            )
        return lengths

    async def _check_object(self, entry: Entry, length: int | None) -> None:
        stored = entry.object
        count = sum(stretch.messages for stretch in entry.stretches)
        try:
            directory = await self._read_ends(stored, length)
        except FileNotFoundError:
            self._missing.append((stored.name, f"{stored.name} is not in the bucket: {count} messages"))
            return
        except BucketFormatError as error:
            why = error.__cause__ or error  # without advice to run this command
            self._report.lost.add(f"{stored.name}, with {count} messages: {why}")
            return
        self._read(_ends_of(stored))
        self._check_stretches(entry, directory)
        blocks = living(entry.stretches, directory)
        if not self._check_messages:
            self._report.messages += sum(block.messages for block in blocks)
            self._report.bytes += sum(block.size for block in blocks)
            return
        for run in runs(blocks):
            begin, end = run[0].position, run[-1].position + run[-1].length
            try:
                data = await self._bucket.read_range(stored.name, begin, end - begin)
            except FileNotFoundError:
                self._missing.append((stored.name, f"{stored.name} has gone meanwhile: {count} messages"))
                return
            for checked in await self._bucket.run(check_run, stored, run, bytes(data)):
                self._report.messages += checked.messages
                self._report.bytes += checked.bytes
                for text in checked.faults:
                    self._report.lost.add(text)
            self._read(end - begin)

    async def _read_ends(self, stored: StoredObject, length: int | None) -> Directory:
        """Check both ends of an object. Raises FileNotFoundError, BucketFormatError."""
        if length is None:
            raise FileNotFoundError(stored.name)
        if length != stored.length:
            raise BucketFormatError(f"it has {length} bytes, the manifest says {stored.length}")
        _check_header(stored, decode_header(await self._bucket.read_range(stored.name, 0, HEADER_SIZE)))
        return await read_directory(self._bucket, stored)

    def _check_stretches(self, entry: Entry, directory: Directory) -> None:
        there = set(stretches_of(directory))
        for stretch in entry.stretches:
            if stretch not in there:
                self._report.lost.add(
                    f"{stretch.topic}/{stretch.queue_id} messages {stretch.offset} to {stretch.end - 1}: the directory "
                    f"of {entry.object.name} does not have them as the manifest says"
                )
        if self._topics:
            return
        known = {(stretch.topic, stretch.queue_id) for stretch in entry.stretches}
        for topic, queue_id in sorted({(stretch.topic, stretch.queue_id) for stretch in there} - known):
            self._note(
                "deleted queues",
                f"{entry.object.name} has messages of {topic}/{queue_id}, which the manifest does not name: deleted",
            )

    async def _judge_missing(self) -> None:
        """What was missing is lost, unless the owner has replaced it since."""
        if not self._missing:
            return
        now = await self._read_entries()
        named: set[str] = set()
        if now is not None:
            named = {now.root.state, *now.indexes, *(entry.object.name for entry in now.entries)}
        for name, text in self._missing:
            if name not in named:
                self._note("replaced objects", f"{name} was replaced or has expired meanwhile")
            elif parse_index_name(name) is not None:
                self._report.index.add(text)
            elif parse_saved(name) is not None:
                self._report.repairable.add(text)
            else:
                self._report.lost.add(text)

    # -- state and index

    async def _check_state(self) -> None:
        """The state that a restore would take: the newest one."""
        report, root = self._report, self._named.root
        upload = next((upload for upload in reversed(self._named.chain) if upload.state[1]), None)
        name = upload.entry.object.name if upload is not None else root.state
        if not name:
            report.notes.append("there is no state: a restore would bring messages without their topics")
            return
        # That of an upload object is read by the next owner too, before it can write another one.
        faults = report.repairable if upload is None else report.lost
        try:
            if upload is None:
                data = (await self._bucket.read(name)).data
            else:
                data = await read_newest_state(self._bucket, [upload]) or b""
            report.state_files = _check_files(data)
        except FileNotFoundError:
            self._missing.append((name, f"the state {name} is not in the bucket"))
        except BucketFormatError as error:
            faults.add(f"the state in {name}: {error}")

    async def _check_index(self, name: str, length: int | None) -> None:
        parts = parse_index_name(name)
        if parts is None or not 0 < parts.size <= _MOST_INDEX:
            self._report.index.add(f"{name} is no name of an index file")
            return
        if length is None:
            self._missing.append((name, f"{name} is not in the bucket: its keys are not found"))
            return
        if length != parts.size:
            self._report.index.add(f"{name} has {length} bytes, its name says {parts.size}")
            return
        data = bytearray()
        try:
            while len(data) < parts.size:
                piece = await self._bucket.read_range(name, len(data), min(_READ, parts.size - len(data)))
                data += piece
                self._read(len(piece))
        except FileNotFoundError:
            self._missing.append((name, f"{name} has gone meanwhile: its keys are not found"))
            return
        entries, faults = await self._bucket.run(check_index, data, self._report.end)
        self._report.index_entries += entries
        for text in faults:
            self._report.index.add(f"{name}: {text}")


def _of_topics(entries: Sequence[Entry], topics: frozenset[str]) -> Iterator[Entry]:
    for entry in entries:
        stretches = [stretch for stretch in entry.stretches if stretch.topic in topics] if topics else entry.stretches
        if stretches or not topics:
            yield Entry(entry.object, stretches)


def _ends_of(stored: StoredObject) -> int:
    """Bytes of header, directory and footer."""
    return HEADER_SIZE + stored.length - stored.directory


def _length(stretch: Stretch) -> int:
    return stretch.messages * UNIT_SIZE + stretch.size


def _check_files(data: bytes) -> int:
    """The number of the files of a state. Raises BucketFormatError."""
    files = decode_state(data)
    for name, content in files.items():
        try:
            lenient_json.loads(content)
        except ValueError as error:
            raise BucketFormatError(f"its file {name} is damaged") from error
    return len(files)


def _check_header(stored: StoredObject, header: ObjectHeader) -> None:
    kind = Kind.SEGMENT if stored.generation else Kind.LOG
    if (header.kind, header.epoch, header.begin, header.end) != (kind, stored.epoch, stored.begin, stored.end):
        raise BucketFormatError(
            f"its header says {header.kind.name} of epoch {header.epoch}, log {header.begin} to {header.end}"
        )
