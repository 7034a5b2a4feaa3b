"""The native extension: the only module that imports ``trimq_native``, if that is installed.

The extension processes many messages in one call, in Rust (native/). It is optional, and the Python code is the
reference: callers check ``NATIVE.is_on`` before each call, and run the Python code if it is off.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Protocol, cast

VERSION: Final = "0.8.0"
"""The version of the extension that this code needs, as in native/Cargo.toml: others may take other arguments."""
VARIABLE: Final = "TRIMQ_NATIVE"
_HOW: Final = "with Rust (https://rustup.rs), make native in a checkout, or pip install ./native"


class Keys(Protocol):
    """Keys of messages, hashed for the index."""

    def __len__(self) -> int:
        """The number of keys."""
        ...

    def rows(self) -> list[tuple[int, int, int]]:
        """Hash, log offset and store time of each key."""
        ...

    def split(self, count: int, /) -> "tuple[Keys, Keys]":
        """The first ``count`` keys, and the others."""
        ...


class Messages(Protocol):
    """Messages that were read and are to be written to the log. The methods after ``write`` are valid after it."""

    def __len__(self) -> int:
        """The number of messages."""
        ...

    @property
    def total(self) -> int:
        """Total size of the records in bytes."""
        ...

    def queues(self) -> list[tuple[str, int, int, int]]:
        """Topic, queue id, number of messages and bytes of records of each queue. Queues are numbered in this order."""
        ...

    def parts(self) -> list[tuple[int, int]]:
        """For each span, the number of requests read, and the offset of the next one."""
        ...

    def real_places(self) -> list[tuple[str, int]]:
        """The real topic and queue of halves of transactions, also of those that are rolled back, each once."""
        ...

    def ends(self) -> list[tuple[int, int, bool]]:
        """For each end of a transaction, queue offset and log offset of the half, and whether it is committed."""
        ...

    def leave_out(self, good: list[bool], real: list[bool], /) -> None:
        """Drop requests, and the later requests of the same connections.

        Dropped are those to queues that are not ``good``, and halves and rollbacks for ``real_places`` that are not
        ``real``.
        """
        ...

    def write(
        self,
        frames: Any,
        buffer: memoryview,
        at: int,
        physical_offset: int,
        store_timestamp: int,
        starts: list[int],
        /,
    ) -> bytes:
        """Write the records into ``buffer`` at ``at``, except the first 8 bytes, which are returned.

        The caller writes these last, so that a process killed midway leaves no valid-looking record. ``frames`` are the
        bytes that the messages were read from, ``starts`` the next offset of each queue.
        """
        ...

    def units(self) -> bytes:
        """The units of all messages, grouped by queue."""
        ...

    def keys(self, store_timestamp: int, /) -> Keys:
        """The keys of all messages."""
        ...

    def physical_offsets(self) -> list[int]:
        """The commit-log offset of each message."""
        ...

    def replies(self) -> list[bytes]:
        """The replies to each span, as joined complete frames."""
        ...

    def requests(self) -> "list[ReadRequest]":
        """The requests, in the order of their messages."""
        ...


ReadRequest = tuple[int, int, bool, int, int, str, int, int, int, bool, bool]
"""A request: span, opaque, whether binary, queue, queue id that it names, unique key, log offset, queue offset, size,
whether it is the end of a transaction, and if so, whether its client expects no reply. Queue and offsets are -1 for a
rollback, which has no message."""
Pending = tuple[int, memoryview, int, bytearray]
"""The halves that may be ended: log offset and bytes of the readable part of the log; queue offset of the first half in
the table of states, and the states, which are 0 for a pending half."""
SingleSend = tuple[str, int, int, bytes, int, int, int, int, int, tuple[str, ...], bytes, int]
"""A send: topic, queue id, offset of the body in its frame, properties with those added, born timestamp, flag, sysFlag,
reconsumeTimes, tags code, keys, unique key, opaque."""


TierBatch = tuple[bytes, bytes, int, int, bytes, bytes]
"""Units, entries of the side file, smallest and largest store time; an item of the index for each key (without seconds
and link), and its store time (i64)."""


LogRows = tuple[int, int, list[int], list[tuple[str, int, int, int]], bytes, list[Keys]]
"""Size of the records, store time of the last one, log offset of each; (topic, queue id, first queue offset, number) of
each queue; the units by queue; the keys, those of messages with the same store time together."""


class Reader(Protocol):
    """Reads sends and batches by fixed rules: trimq_native.Reader."""

    def read(
        self,
        frames: memoryview,
        codes: Sequence[int],
        spans: list[tuple[int, int, int]],
        hosts: list[bytes],
        most: tuple[int, int],
        limits: tuple[int, int],
        pending: Pending,
        /,
    ) -> Messages:
        """Read the ordinary requests of ``codes`` at the start of each span (begin, end, most requests).

        ``hosts``: the packed address of each span's client. ``most``: requests in all, and halves of transactions among
        them. ``limits``: the most bytes of a body and of a record.
        """
        ...

    def send(self, frame: memoryview, codes: Sequence[int], /) -> SingleSend | Literal[True] | None:
        """Read a frame that is one ordinary JSON send of ``codes``; None for others. Limits are not checked here.

        True for a half of a transaction and for the end of one: ``read`` reads those as a round of one request.
        """
        ...

    def batch(
        self,
        body: Any,
        topic: str,
        queue_id: int,
        stamp: tuple[int, int, int],
        host: bytes,
        limits: tuple[int, int],
        /,
    ) -> Messages | None:
        """Read the messages of a batch; None if one of them is not ordinary.

        ``stamp``: the sysFlag, born timestamp and reconsumeTimes of all messages.
        """
        ...


class MakeReader(Protocol):
    """Creates a Reader; for the arguments see native/core/src/rules.rs."""

    def __call__(  # noqa: PLR0913 - all are passed by name
        self,
        *,
        slow: list[bytes],
        fast: list[bytes],
        slow_prefixes: list[bytes],
        not_in_a_batch: list[bytes],
        added: bytes,
        tags: bool,
        store_host: bytes,
        region: str,
        trace: str,
        language: tuple[str, int],
        version: int,
        half_topic: str,
        halves: bool,
    ) -> Reader:
        """Names are bytes. ``added`` is appended to each message's properties; ``store_host`` is a packed address."""
        ...


Asked = tuple[int, int, str | None]
"""A signed frame: number of the user, request code, and the topic that it names."""
RawStamp = tuple[int, int, bytes, int]
"""A stamp, see trimq.protocol.auth.stamp.Stamp: request code, time in ms, sender, number."""
StampedFrame = tuple[int, int, int, int, int, RawStamp]
"""A signed frame with a stamp: number of its span, number of the span's frames before it, and where these end; number
of the user, request code, stamp."""


class Signers(Protocol):
    """The users whose signatures are known; protocol/auth/signers.py is the same in Python.

    A signature that is found has been checked. None: the full path has to look at the request.
    """

    def add(self, name: str, secret: bytes, needs_stamp: bool, /) -> int:
        """Add a user, who must not be known yet. Returns the number: 0, 1, and so on.

        ``needs_stamp``: requests without a stamp are left.
        """
        ...

    def signer(self, head: Any, body: Any, /) -> int | tuple[int, RawStamp] | None:
        """The user who has signed a request with this JSON header, with the stamp of one that has one."""
        ...

    def asked(self, frame: Any, /) -> tuple[int, int, str | None, RawStamp | None] | None:
        """The same for a frame of one of the codes, and what it asks for: user, code, topic, and stamp."""
        ...

    def round(
        self, frames: Any, spans: list[tuple[int, int, int]], most: int, /
    ) -> tuple[list[tuple[int, int, list[tuple[Asked, int, int]]]], list[StampedFrame]]:
        """The signed frames at the start of each span (begin, end, most), at most ``most`` in all.

        For each span: their number, where they end, and what they ask for, each once, with the number of frames before
        the first one that asks for it, and where these end. Then those of the frames that have a stamp, in their order.
        """
        ...


class Extension(Protocol):
    """The type of the module ``trimq_native``, for type checks without it. A test compares it with the module."""

    VERSION: str
    NativeFault: type[Exception]

    @property
    def Reader(self) -> MakeReader:  # noqa: N802 - a class
        """Creates a reader of sends and batches."""
        ...

    def Keys(self, hashes: list[int], physical: list[int], store_timestamp: int, /) -> Keys:  # noqa: N802 - a class
        """Keys of messages with the same store timestamp."""
        ...

    def Signers(  # noqa: N802 - a class
        self, topics: list[tuple[int, str]], mark: bytes, unknown: bytes, /
    ) -> Signers:
        """No users. ``topics``: the codes of frames, and the field of each that names its topic.

        The signed text of a request with a stamp begins with ``mark``; empty: there are none. One whose stamp cannot be
        read is left. ``unknown``: a secret that no user has.
        """
        ...

    def flat(self, entries: Any, /) -> tuple[bytes, bytes, bytes]:
        """Hash (i32), log offset (i64) and store time (i64) of each key of index_batch.Pending entries."""
        ...

    def seconds(self, timestamps: memoryview, begin: int, /) -> bytearray:
        """Whole seconds (i32) from ``begin`` to each timestamp."""
        ...

    def put_entries(
        self,
        file: memoryview,
        slots: int,
        count: int,
        hashes: memoryview,
        physical: memoryview,
        seconds: memoryview,
        /,
    ) -> int:
        """See index_batch.Batch.put."""
        ...

    def are_messages(
        self, records: memoryview, start: int, units: bytes | bytearray, offset: int, place: tuple[int, int, bytes], /
    ) -> bool:
        """Whether each unit refers to an ordinary record with its queue offset; that of the first unit is ``offset``.

        ``records`` is the part of the log from log offset ``start`` on that has all of the records, consecutively.
        ``place``: the queue id, and magic and topic as encoded in a record.
        """
        ...

    def log_check(self, data: Any, physical_offset: int, room: int, /) -> tuple[int, int]:
        """The size of the ordinary, whole records at the start of ``data``, and the store time of the last one.

        ``data`` is at log offset ``physical_offset``, ``room`` bytes before the end of its log file.
        """
        ...

    def log_rows(self, data: Any, physical_offset: int, tags: bool, without: list[str], /) -> LogRows:
        """What the ordinary records at the start of ``data`` add to queues and index.

        ``data`` is at log offset ``physical_offset``. With ``tags``, tags are keys too. Ends before the first
        record that is not an ordinary message, that is of a topic in ``without``, or whose queue offset does not follow
        that of the message before it.
        """
        ...

    def tier_batch(
        self,
        log: memoryview,
        start: int,
        units: bytes,
        position: int,
        target: memoryview,
        queue: tuple[str, int, int] | None,
        /,
    ) -> TierBatch | None:
        """Copy the records of ``units`` into ``target`` as they stand in the tier, the first at ``position``.

        With a negative ``position`` they keep the offsets that they have in the log.
        ``log``: the part of the log from log offset ``start`` on, all of which is complete. ``target`` has the
        records' size, and is used by nothing else. With a ``queue`` (topic, topic id, queue id), items are made of the
        keys. None for anything unusual. The interpreter is released meanwhile.
        """
        ...

    def tier_records(
        self,
        stored: Any,
        start: int,
        units: bytes,
        entries: bytes,
        offset: int,
        place: tuple[int, int, bytes],
        unknown: int,
        /,
    ) -> bytes | None:
        """The records of ``units``, as the tier has them, with the log offsets of ``entries`` (of the side file).

        ``stored`` begins at stream position ``start``; ``place`` is as for ``are_messages``. ``unknown`` is added to
        the position of a record whose entry belongs to another one. None unless all are ordinary.
        """
        ...

    def put_tier_items(self, file: memoryview, slots: int, count: int, items: Any, begin_ms: int, times: Any, /) -> int:
        """See tiered_index_batch.put: ``items`` and ``times`` are buffers of bytes and of i64."""
        ...

    def panic(self) -> None:
        """Panic, for tests: raises NativeFault."""
        ...


class NativeExtension:
    """Whether the native extension is used in this process, and if not, why.

    ``extension`` is the module if it ``is_on``, and None if it is off for ``reason``. ``turn_off`` sets ``has_failed``.
    ``fault`` is the exception that the extension raises for a fault in itself. It stays set after the extension was
    switched off, since calls may still be running.
    """

    __slots__ = ("_listeners", "extension", "fault", "has_failed", "is_on", "reason")

    def __init__(self, extension: Extension | None, reason: str = "") -> None:
        self.extension = extension
        self.is_on = extension is not None
        self.reason = reason
        self.has_failed = False
        self.fault: type[Exception] | tuple[()] = () if extension is None else extension.NativeFault
        self._listeners: list[Callable[[], None]] = []

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Within the block, call ``listener`` when the extension is switched off."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def turn_off(self, fault: str) -> None:
        """Switch to Python for the rest of the process, after a fault of the extension. The first fault is recorded."""
        if self.is_on:
            self.extension = None
            self.is_on = False
            self.reason = f"a fault: {fault}"
            self.has_failed = True
            for listener in list(self._listeners):
                listener()

    @property
    def status(self) -> str:
        """The implementation in use, as a short text: ``native 0.8.0``, ``python (not installed)``."""
        return f"native {VERSION}" if self.is_on else f"python ({self.reason.partition(':')[0]})"


def load(environment: Mapping[str, str]) -> NativeExtension:
    """Import the extension, unless TRIMQ_NATIVE=off is in ``environment``."""
    if environment.get(VARIABLE, "").strip() == "off":
        return NativeExtension(None, f"{VARIABLE}=off")
    try:
        found = cast("Extension", importlib.import_module("trimq_native"))
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "trimq_native":
            return NativeExtension(None, f"not installed: {_HOW}")
        return NativeExtension(None, f"cannot be loaded: {error}")  # built for another C library, or truncated
    version = getattr(found, "VERSION", "unknown")
    if version != VERSION:
        return NativeExtension(None, f"version {version} where {VERSION} is expected: {_HOW}")
    return NativeExtension(found)


NATIVE: Final = load(os.environ)
"""The extension of this process."""
extension: Final = NATIVE.extension
"""The module as imported, for code that binds its functions once. ``NATIVE.is_on`` is whether it may be called."""
