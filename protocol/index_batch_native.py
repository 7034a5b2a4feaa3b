"""The native form of index_batch: what puts entries while the broker serves."""

from collections.abc import Callable, Sequence
from typing import cast

from trimq.protocol.index_batch import Batch, Message, Pending, Row
from trimq.protocol.native import Extension, NativeExtension


class NativeBatch:
    """Calls the extension for as long as it is on, and another form else."""

    def __init__(self, native: NativeExtension, other: Callable[[], Batch]) -> None:
        """``other`` makes the form for what the extension does not do, which is not needed in most processes."""
        self._native = native
        self._make_other = other
        self._other: Batch | None = None

    @property
    def other(self) -> Batch:
        """The other form."""
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
            except UnicodeError:  # half of a pair of surrogates in a key: no text that can leave this process
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
            except extension.NativeFault as fault:  # what it has written is not counted: it is written again
                self._native.turn_off(str(fault))
        return self.other.put(view, slots, count, hashes, phys, cast("Row", seconds))

    def link(self, view: memoryview, slots: int, count: int) -> tuple[bytes, int, bool]:
        """See Batch."""
        return self.other.link(view, slots, count)
