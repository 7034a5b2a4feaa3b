"""The settled offset: from where on in the log a start has to look for commit records without an op record.

The rule that makes this exact: all commit records below the settled offset, and all expired halves, have a durable op
record. It is the log's end at the time when the oldest commit without a durable op record was put, or the durable end
of the log if there is none. It only moves forward, and is stored in config/transaction.json.

The file also says that the op queue is being rebuilt, from before the first op record is put until all ends are in
durable ones. Without that, the op queue would soon be as long as it was before the damage, and look complete.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from trimq.broker.services.state_file import StateFile, StateFileError, encode_pieces
from trimq.broker.store.disk.disk import Disk

_UNKNOWN: Final = -1
_STEP: Final = 64 << 20
"""Bytes by which the settled offset has to move before it is stored again while no half is pending."""


class SettledOffset:
    """The settled offset and its file.

    ``op_end`` returns the durable end of the op queue, which is stored too, ``interval`` the seconds between two
    writes.
    """

    def __init__(self, disk: Disk, path: str, op_end: Callable[[], int], interval: Callable[[], float]) -> None:
        self._op_end = op_end
        self._puts: dict[int, int] = {}  # origin of a half -> the log's end when its end was put, in that order
        self.offset = _UNKNOWN
        """-1 if it is not known."""
        self._stored = _UNKNOWN
        self.known_op_end = 0
        """The op queue ended there or later when the file was written; -1 if it was being rebuilt."""
        self._rebuilding = False
        self.file = StateFile(disk, path, self._pieces, interval)

    def __len__(self) -> int:
        """The number of commit records and expired halves whose op record is not durable."""
        return len(self._puts)

    async def load(self) -> None:
        """Read config/transaction.json. Raises StateFileError."""
        state = await self.file.load()
        if state is not None:
            settled, op_end = state.get("settledOffset"), state.get("opOffset")
            if type(settled) is not int or type(op_end) is not int:
                raise StateFileError(
                    f"{self.file.path}: settledOffset and opOffset have to be numbers: delete the file"
                )
            self.offset = self._stored = settled
            self.known_op_end = op_end

    def _pieces(self) -> Iterator[bytes]:
        op_end = _UNKNOWN if self._rebuilding else self._op_end()
        return encode_pieces({"settledOffset": self.offset, "opOffset": op_end})

    async def forget(self) -> None:
        """The op queue is damaged, so no commit record is known to have an op record.

        Returns when that is on disk: until the next ``settle`` every start rebuilds the op queue. Raises
        StateFileError.
        """
        self.offset = _UNKNOWN
        self._rebuilding = True
        self._write()
        await self.file.persisted()

    # -- ends

    def putting(self, origin: int, log_end: int) -> None:
        """The end of the half ``origin`` is put now, at ``log_end`` or later."""
        self._puts[origin] = log_end

    def putting_all(self, origins: Iterable[int], log_end: int) -> None:
        """The same for several halves."""
        self._puts.update(dict.fromkeys(origins, log_end))

    def found(self, origin: int) -> None:
        """A start has found an end without an op record."""
        self._puts[origin] = self.offset

    def not_put(self, origin: int) -> None:
        """The end could not be stored."""
        del self._puts[origin]

    def done(self, origin: int) -> None:
        """The half's op record is durable."""
        self._puts.pop(origin, None)

    # -- progress

    def settle(self, flushed: int, pending: int) -> None:
        """Move it: the log is durable up to ``flushed``. ``pending``: the number of halves that are pending.

        Not called while the op queue is being rebuilt, nor while halves are unreadable.
        """
        self.offset = max(self.offset, min(next(iter(self._puts.values()), flushed), flushed))
        rebuilt, self._rebuilding = self._rebuilding, False
        if rebuilt or (self.offset != self._stored and (pending or self.offset - self._stored >= _STEP)):
            self._write()

    def write(self) -> None:
        """Store it at the next interval, however little it has moved."""
        if self.offset != self._stored:
            self._write()

    def _write(self) -> None:
        self._stored = self.offset
        self.file.changed()
