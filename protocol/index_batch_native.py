"""The native implementation of index_batch, which puts entries while the broker serves."""

from collections.abc import Callable, Sequence
from typing import cast

from trimq.protocol.index_batch import Batch, Message, Pending, Row
from trimq.protocol.native import Extension, NativeExtension


class NativeBatch:
    """Calls the extension as long as it is on, else another implementation."""

    def __init__(self, native: NativeExtension, other: Callable[[], Batch]) -> None:
        """``other`` creates the other implementation, on first use: most processes never need it."""
        self._native = native
        self._make_other = other
        self._other: Batch | None = None

    @property
    def other(self) -> Batch:
        """The other implementation."""
        if self._other is None:
            self._other = self._make_other()
        return self._other

    def _extension(self) -> Extension | None:
        return self._native.extension

    def key_hashes(self, texts: Sequence[str]) -> list[int]:
        """See Batch."""
        return self.other.key_hashes(texts)

    def flat(self, messages: Sequence[Message]) -> tuple[Row, Row, Row]:
        """See Batch."""
        return self.flat_mixed(messages)

    def flat_mixed(self, entries: Sequence[Pending]) -> tuple[Row, Row, Row]:
        """See Batch."""
        extension = self._extension()
        if extension is not None:
            try:
                hashes, phys, timestamps = extension.flat(entries)
            except UnicodeError:  # a lone surrogate in a key, which has no UTF-8 form
                pass
            except extension.NativeFault as fault:
                self._native.turn_off(str(fault))
            else:
                return memoryview(hashes).cast("i"), memoryview(phys).cast("q"), memoryview(timestamps).cast("q")
        return self.other.flat_mixed(entries)

    def seconds(self, timestamps: Row, begin: int) -> Row:
        """See Batch."""
        extension = self._extension()
        if extension is not None and isinstance(timestamps, memoryview):
            return memoryview(extension.seconds(timestamps, begin)).cast("i")
        return self.other.seconds(timestamps, begin)

    def put(self, view: memoryview, slots: int, count: int, hashes: Row, phys: Row, seconds: Row) -> int:
        """See Batch."""
        extension = self._extension()
        if extension is not None and isinstance(seconds, memoryview):
            try:
                return extension.put_entries(view, slots, count, hashes, phys, seconds)
            except extension.NativeFault as fault:  # the entries it wrote are not counted yet: they are overwritten
                self._native.turn_off(str(fault))
        return self.other.put(view, slots, count, hashes, phys, cast("Row", seconds))

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """See Batch."""
        return self.other.link(view, slots, count)
