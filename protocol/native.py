"""The native extension: the one module that imports ``trimq_native``, where that is installed.

The extension processes many messages in one call, in Rust (native/). It is optional, and the Python code is the
reference: a caller checks ``NATIVE.is_on`` each time, and runs the Python code where it is off.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

VERSION: Final = "0.2.0"
"""The extension's version that this code needs, as in native/Cargo.toml: another may take other arguments."""
VARIABLE: Final = "TRIMQ_NATIVE"
_HOW: Final = "with Rust (https://rustup.rs), make native in a checkout, or pip install ./native"


class Keys(Protocol):
    """Keys of messages, hashed for the index."""

    def __len__(self) -> int:
        """How many keys."""
        ...

    def rows(self) -> list[tuple[int, int, int]]:
        """Hash, log offset and store time of each."""
        ...

    def split(self, count: int, /) -> "tuple[Keys, Keys]":
        """The first ``count`` keys, and the others."""
        ...


class Messages(Protocol):
    """Messages that were read, on their way into the log. What follows ``write`` is known once they are written."""

    def __len__(self) -> int:
        """How many."""
        ...

    @property
    def total(self) -> int:
        """Bytes of all records."""
        ...

    def queues(self) -> list[tuple[str, int, int, int]]:
        """Topic, queue id, messages and bytes of records, of each queue. Its place in here is its number."""
        ...

    def parts(self) -> list[tuple[int, int]]:
        """Requests, and where the next one begins, of each span."""
        ...

    def leave_out(self, good: list[bool], /) -> None:
        """Leave out queues that are not ``good``, and what a connection has sent behind a message to one of them."""
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
        """Write the records into ``buffer`` from ``at`` on, all but the first 8 bytes, which are what is returned.

        ``frames``: what they were read from. ``starts``: the next offset of each queue.
        """
        ...

    def units(self) -> bytes:
        """The units of all messages, those of each queue side by side."""
        ...

    def keys(self, store_timestamp: int, /) -> Keys:
        """The keys of all messages."""
        ...

    def physical_offsets(self) -> list[int]:
        """Where each message lies."""
        ...

    def replies(self) -> list[bytes]:
        """Whole frames for each span, joined."""
        ...

    def requests(self) -> "list[tuple[int, int, bool, int, str, int, int, int]]":
        """Span, opaque, whether in binary, queue, unique key, log offset, queue offset and size of each."""
        ...


SingleSend = tuple[str, int, int, bytes, int, int, int, int, int, tuple[str, ...], bytes, int]
"""A send: topic, queue id, where the body begins in its frame, properties with what is added, born timestamp, flag,
sysFlag, reconsumeTimes, tags code, keys, unique key, opaque."""


class Reader(Protocol):
    """Reads sends and batches by rules that do not change: trimq_native.Reader."""

    def read(
        self,
        frames: memoryview,
        code: int,
        spans: list[tuple[int, int, int]],
        hosts: list[bytes],
        most: int,
        limits: tuple[int, int],
        /,
    ) -> Messages:
        """The ordinary sends of ``code`` at the begin of each span (begin, end, most requests), ``most`` in all.

        ``hosts``: the packed address of each span's client. ``limits``: most bytes of a body and of a record.
        """
        ...

    def send(self, frame: memoryview, code: int, /) -> SingleSend | None:
        """A frame that is one ordinary send of ``code`` in JSON; None for others. It has not been measured."""
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
        """The messages of a batch; None where one of them is not ordinary.

        ``stamp``: sysFlag, born timestamp and reconsumeTimes of all of them.
        """
        ...


class MakeReader(Protocol):
    """Makes a Reader: bytes and texts as core/src/rules.rs says."""

    def __call__(  # noqa: PLR0913 - by name, each of them
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
    ) -> Reader:
        """Names as bytes; ``added`` goes behind the properties of each message, ``store_host`` is a packed address."""
        ...


class Extension(Protocol):
    """What ``trimq_native`` has: its type for this code, installed or not. A test compares the two."""

    VERSION: str
    NativeFault: type[Exception]

    @property
    def Reader(self) -> MakeReader:  # noqa: N802 - a class
        """Makes what reads sends and batches."""
        ...

    def Keys(self, hashes: list[int], physical: list[int], store_timestamp: int, /) -> Keys:  # noqa: N802 - a class
        """Keys of messages that are stored at one time."""
        ...

    def flat(self, entries: Any, /) -> tuple[bytes, bytes, bytes]:
        """Hash (i32), log offset (i64) and store time (i64) of each key of entries of the index."""
        ...

    def seconds(self, timestamps: memoryview, begin: int, /) -> bytearray:
        """Whole seconds (i32) since ``begin`` of each time."""
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
        """Whether each unit leads to the usual record of its queue offset; the first unit's is ``offset``.

        ``records``: a part of the log that begins at log offset ``start``; all records are in it, one behind the other.
        ``place``: queue id, and magic and topic as they stand in a record.
        """
        ...

    def panic(self) -> None:
        """Panic, for tests: raises NativeFault."""
        ...


class NativeExtension:
    """Whether the native extension serves this process, and if not, why.

    ``extension`` is the module where it ``is_on``, and None where it is off; ``reason`` says why. ``turn_off`` sets
    ``has_failed``. ``fault`` is the exception that the extension raises for a mistake in itself; it stays set when the
    extension is switched off, for calls that are under way.
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
        """Call ``listener`` when the extension is switched off."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def turn_off(self, fault: str) -> None:
        """Python serves until the end of the process, because of a fault of the extension. The first one is kept."""
        if self.is_on:
            self.extension = None
            self.is_on = False
            self.reason = f"a fault: {fault}"
            self.has_failed = True
            for listener in list(self._listeners):
                listener()

    @property
    def status(self) -> str:
        """Which one runs, in a few words: ``native 0.2.0``, ``python (not installed)``."""
        return f"native {VERSION}" if self.is_on else f"python ({self.reason.partition(':')[0]})"


def load(environment: Mapping[str, str]) -> NativeExtension:
    """The extension as it is installed. TRIMQ_NATIVE=off in ``environment`` leaves it alone."""
    if environment.get(VARIABLE, "").strip() == "off":
        return NativeExtension(None, f"{VARIABLE}=off")
    try:
        found = cast("Extension", importlib.import_module("trimq_native"))
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "trimq_native":
            return NativeExtension(None, f"not installed: {_HOW}")
        return NativeExtension(None, f"cannot be loaded: {error}")  # made for another C library, or cut short
    version = getattr(found, "VERSION", "unknown")
    if version != VERSION:
        return NativeExtension(None, f"version {version} where {VERSION} is expected: {_HOW}")
    return NativeExtension(found)


NATIVE: Final = load(os.environ)
"""This process's."""
extension: Final = NATIVE.extension
"""The module as it was loaded, for who binds its functions once; whether it may be called, ``NATIVE.is_on`` says."""
