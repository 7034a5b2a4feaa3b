"""The timer wheel: which units of the timer log are due when (RocketMQ's TimerWheel).

The wheel is in memory as pages, of which only those in use exist, and goes to its file in changed pages: first the
log is synced, then these pages, then the checkpoint. So the file never refers to units that are not on disk, and a
power cut leaves each slot as it was at some moment between two checkpoints. A new file gets its name when it has all
slots: one that lacks some would count as a wheel without them. RocketMQ leaves delivered slots in the wheel; here they
are cleared, so that the read time may go back when the wall clock is set back.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from typing import Final

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably
from trimq.protocol.timer_layout import EMPTY_SLOT, PRECISIONS, SLOT, SLOT_SIZE, SLOTS, Slot

_PAGE: Final = 4096
_SLOTS_OF_PAGE: Final = _PAGE // SLOT_SIZE
_ZEROS: Final = bytes(_PAGE)
_READ: Final = 256 * _PAGE
_FAR: Final = 1.8
"""A time that differs from the read time by this factor was computed with another precision."""
OTHER_PRECISION: Final = "its slots were written with another precision"

_unpack: Final = SLOT.unpack_from
_pack_into: Final = SLOT.pack_into
_NO_SLOT: Final = (0, 0, 0, 0, 0)


class TimerWheel:
    """The slots, each ``precision`` ms long; one wheel covers ``slots`` of them. A time means the slot it is in."""

    def __init__(self, disk: Disk, path: str, precision: int, slots: int = SLOTS) -> None:
        self._disk = disk
        self.path = path
        self.precision = precision
        self.slots = slots
        self._size = slots * SLOT_SIZE
        self._pages: dict[int, bytearray] = {}
        """The pages that are not empty, by their number in the file."""
        self._dirty: set[int] = set()
        self._in_file = False
        """The file has all slots but those of changed pages, and its name is on disk."""
        self.count = 0
        """The sum of the counts of all slots: pending messages, less their delete marks."""

    # -- slots

    def find(self, time: int) -> Slot | None:
        """The slot of a time; None if it is empty."""
        number, first, last, count, _ = self._read(time)
        found = number and number == time // self.precision
        return Slot(number * self.precision, first, last, count) if found else None

    def holds(self, time: int, position: int) -> bool:
        """Whether the unit at ``position``, which is due at ``time``, is pending.

        The time alone does not say it: the read time may have gone back. The units of a slot that was delivered before
        are in the log before the first one that the slot has now.
        """
        slot = self.find(time)
        return slot is not None and slot.first <= position <= slot.last

    def is_taken(self, time: int) -> bool:
        """Whether the place of a time holds a slot of another turn: there is one if the wall clock was set back far."""
        number = self._read(time)[0]
        return number != 0 and number != time // self.precision

    def put(self, time: int, position: int, count: int) -> None:
        """Add a unit at ``position`` to the slot of a time; ``count`` is 1, or -1 for a delete mark."""
        number, first, _, total, _ = self._read(time)
        if number != time // self.precision:
            first, total = position, 0
        self._write(time, first, position, total + count)
        self.count += count

    def set(self, slot: Slot) -> None:
        """Replace the slot of a time that is not empty."""
        before = self.find(slot.time)
        self._write(*slot)
        self.count += slot.messages - (before.messages if before is not None else 0)

    def clear(self, time: int) -> None:
        """Empty the slot of a time."""
        slot = self.find(time)
        if slot is None:
            return
        number, at = self._place(time)
        page = self._pages[number]
        page[at : at + SLOT_SIZE] = EMPTY_SLOT
        if page == _ZEROS:
            del self._pages[number]
        self._dirty.add(number)
        self.count -= slot.messages

    def next_time(self, begin: int, end: int) -> int:
        """The time of the first slot in [begin, end) that is not empty; ``end`` if there is none."""
        time, step = begin, self.precision
        turn = begin + self.slots * step
        while time < min(end, turn):
            index = time // step % self.slots
            if index // _SLOTS_OF_PAGE not in self._pages:
                in_page = min(_SLOTS_OF_PAGE - index % _SLOTS_OF_PAGE, self.slots - index)
                time += in_page * step
            elif self._read(time)[0] == time // step:
                return time
            else:
                time += step
        # Behind a whole turn only slots from before the wall clock was set back, perhaps by years: not one by one.
        later = (slot.time for slot in self.all_slots() if begin <= slot.time < end) if time < end else ()
        return min(later, default=end)

    def all_slots(self) -> Iterator[Slot]:
        """All slots that are not empty."""
        for number in sorted(self._pages):
            for found, first, last, count, _ in SLOT.iter_unpack(self._pages[number]):
                if found:
                    yield Slot(found * self.precision, first, last, count)

    @property
    def is_empty(self) -> bool:
        """Whether all slots are empty."""
        return not self._pages

    def _place(self, time: int) -> tuple[int, int]:
        """The page of a time, and the position in it."""
        number, slot = divmod(time // self.precision % self.slots, _SLOTS_OF_PAGE)
        return number, slot * SLOT_SIZE

    def _read(self, time: int) -> tuple[int, ...]:
        number, at = self._place(time)
        page = self._pages.get(number)
        return _NO_SLOT if page is None else _unpack(page, at)

    def _write(self, time: int, first: int, last: int, count: int) -> None:
        number, at = self._place(time)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = bytearray(_PAGE)
        _pack_into(page, at, time // self.precision, first, last, count, 0)
        self._dirty.add(number)

    # -- file

    def load(self, read_time: int) -> str:
        """Read the file. Blocks. Returns why it cannot be used, or "". Slots before ``read_time`` are left out.

        The wheel is empty if it cannot be used.
        """
        info = self._disk.stat(self.path)
        if info is None:
            return "there is no wheel"
        if info.size != self._size:
            return f"{self.path} has {info.size} bytes, not {self._size}"
        problem = self._load(read_time)
        if problem:
            self.reset()
        else:
            self._in_file = True
        return problem

    def _load(self, read_time: int) -> str:
        fd = self._disk.open(self.path, writable=False)
        try:
            at = 0
            while (at := self._disk.next_data(fd, at) // _PAGE * _PAGE) < self._size:
                data = self._disk.pread(fd, min(_READ, self._size - at), at)
                for begin in range(0, len(data), _PAGE):
                    page = bytearray(data[begin : begin + _PAGE].ljust(_PAGE, b"\0"))
                    if page != _ZEROS and (problem := self._take(page, (at + begin) // _PAGE, read_time)):
                        return problem
                at += len(data)
        finally:
            self._disk.close(fd)
        return ""

    def _take(self, page: bytearray, number: int, read_time: int) -> str:
        """Take a page without its old slots. Returns what is wrong with it, or ""."""
        for slot, (found, first, last, count, _) in enumerate(SLOT.iter_unpack(bytes(page))):
            if not found:
                continue
            time = found * self.precision
            if not read_time / _FAR < time < read_time * _FAR:
                return OTHER_PRECISION
            if found % self.slots != number * _SLOTS_OF_PAGE + slot:
                return f"slot {slot} of page {number} has the time of another one"
            if time < read_time:  # delivered; RocketMQ leaves it in the file
                page[slot * SLOT_SIZE : (slot + 1) * SLOT_SIZE] = EMPTY_SLOT
                self._dirty.add(number)  # before a checkpoint whose read time has gone back
            elif not 0 <= first <= last:
                return f"slot {slot} of page {number} has the positions {first} and {last}"
            else:
                self.count += count
        if page != _ZEROS:
            self._pages[number] = page
        return ""

    def with_other_precision(self, read_time: int) -> "TimerWheel | None":
        """The wheel that the file has, if it was written with another precision. Blocks."""
        for precision in PRECISIONS:
            if precision != self.precision:
                wheel = TimerWheel(self._disk, self.path, precision, self.slots)
                if not wheel.load(read_time - read_time % precision):
                    return wheel
        return None

    def discard(self) -> None:
        """Empty all slots and delete the file, so that a start makes the wheel from the timer log. Blocks."""
        delete_durably(self._disk, self.path)
        self.reset()

    def reset(self) -> None:
        """Empty all slots. The next snapshot replaces all pages of the file. Blocks."""
        self._pages.clear()
        self._dirty = set(range(-(-self._size // _PAGE))) if self._disk.stat(self.path) is not None else set()
        self._in_file = False
        self.count = 0

    def snapshot(self) -> dict[int, bytes]:
        """The pages that have changed since the last snapshot, by their number; all if there is no file to change."""
        numbers = self._dirty if self._in_file else self._dirty.union(self._pages)
        pages = {number: bytes(self._pages.get(number, _ZEROS)) for number in numbers}
        self._dirty = set()
        return pages

    def take_back(self, pages: Iterable[int]) -> None:
        """The pages of a snapshot could not be written: they are part of the next one."""
        self._dirty.update(pages)

    def write(self, pages: dict[int, bytes]) -> None:
        """Write the pages of a snapshot and sync them. Blocks. Raises OSError.

        Also if the file has vanished: the next snapshot has all pages then, for a new one.
        """
        info = self._disk.stat(self.path)
        if self._in_file:
            if info is None or info.size != self._size:
                self._in_file = False
                raise FileNotFoundError(errno.ENOENT, "the wheel has vanished, or has another size", self.path)
            self._write_pages(self._disk.open(self.path), pages)
            return
        temporary = f"{self.path}.tmp"
        if self._disk.stat(temporary) is not None:
            self._disk.delete(temporary)
        self._write_pages(self._disk.create(temporary, self._size), pages)
        self._disk.rename(temporary, self.path)
        self._disk.sync_directory(os.path.dirname(self.path))
        self._in_file = True

    def _write_pages(self, fd: int, pages: dict[int, bytes]) -> None:
        disk = self._disk
        try:
            for number, data in sorted(pages.items()):
                at = number * _PAGE
                disk.pwrite(fd, data[: self._size - at], at)
            disk.data_sync(fd)
        finally:
            disk.close(fd)
