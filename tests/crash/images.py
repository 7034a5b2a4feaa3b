"""Images of the simulated disk at each of its calls; consecutive images share the parts that did not change."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.store.simdisk import PAGE, SimDisk, _Inode, _NameChange

Names = dict[str, int | None]
"""Inode numbers by path; None for a directory."""


@dataclass(eq=False, slots=True)
class FileImage:
    """One file: its content in the page cache and on the device, and the pages that have allocated blocks."""

    number: int
    cache: bytes
    durable: bytes
    blocks: frozenset[int]
    modified_ms: int
    _dirty: tuple[int, ...] | None = None

    def dirty_pages(self) -> tuple[int, ...]:
        """Numbers of the pages whose content is not on the device."""
        if self._dirty is None:
            pages = range((len(self.cache) + PAGE - 1) // PAGE)
            self._dirty = tuple(
                number
                for number in pages
                if self.cache[number * PAGE : (number + 1) * PAGE] != self.durable[number * PAGE : (number + 1) * PAGE]
            )
        return self._dirty


class NameChange(NamedTuple):
    """Names removed and added by one call, atomically; their directories have not been synced since."""

    gone: tuple[str, ...]
    come: tuple[tuple[str, int | None], ...]

    def apply(self, names: Names) -> None:
        for path in self.gone:
            names.pop(path, None)
        names.update(self.come)


@dataclass(frozen=True, slots=True)
class DiskImage:
    """A disk between two calls. ``moment`` is the value that ``RecordingDisk.moment`` returned at that time."""

    call: str
    names: Names
    durable_names: Names
    pending: tuple[NameChange, ...]
    files: dict[int, FileImage]
    moment: Any

    def key(self) -> int:
        """A hash that is equal for disks with the same names and files, both as they are seen and on the device."""
        files = tuple((n, f.cache, f.durable, f.blocks, f.modified_ms) for n, f in sorted(self.files.items()))
        return hash((tuple(self.names.items()), tuple(self.durable_names.items()), self.pending, files))


class RecordingDisk(SimDisk):
    """Stores an image before each call whose number ``wanted`` accepts; ``images`` maps call numbers to images.

    None accepts no call.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.images: dict[int, DiskImage] = {}
        self.wanted: Callable[[int], bool] | None = None
        self.moment: Callable[[], Any] = lambda: None
        self._files: dict[int, FileImage] = {}
        self._last: DiskImage | None = None

    def _call(self, method: str, path: object = "") -> None:
        if self.wanted is not None and self.after_cut is None and self.wanted(self.calls + 1):
            self.images[self.calls + 1] = self.picture(f"{method} {path}", self.moment())
        super()._call(method, path)

    def picture(self, call: str, moment: Any) -> DiskImage:
        """The disk as it is now."""
        files: dict[int, FileImage] = {}
        names = self._numbers(self._names, files)
        durable_names = self._numbers(self._durable_names, files)
        pending = tuple(
            NameChange(change.gone, tuple((path, self._number(inode, files)) for path, inode in change.come))
            for change in self._pending
        )
        last = self._last
        if last is not None:  # equal parts are stored once
            names = last.names if last.names == names else names
            durable_names = last.durable_names if last.durable_names == durable_names else durable_names
            files = last.files if last.files == files else files
        self._last = DiskImage(call, names, durable_names, pending, files, moment)
        return self._last

    def _numbers(self, names: dict[str, _Inode | None], files: dict[int, FileImage]) -> Names:
        return {path: self._number(inode, files) for path, inode in names.items()}

    def _number(self, inode: _Inode | None, files: dict[int, FileImage]) -> int | None:
        if inode is None:
            return None
        if inode.number in files:
            return inode.number
        known = self._files.get(inode.number)
        if (
            known is None
            or known.cache != inode.cache
            or known.durable != inode.durable
            or known.blocks != inode.blocks
        ):
            known = FileImage(
                inode.number, bytes(inode.cache), bytes(inode.durable), frozenset(inode.blocks), inode.modified_ms
            )
            self._files[inode.number] = known
        files[inode.number] = known
        return inode.number


_CAPACITY: Final = 1 << 40


@dataclass(slots=True)
class Found:
    """The disk that a machine finds when the power comes back: names, and the bytes of each file."""

    names: Names
    data: dict[int, bytes]
    blocks: dict[int, frozenset[int]] = field(default_factory=dict)
    modified_ms: dict[int, int] = field(default_factory=dict)
    still_up: DiskImage | None = None
    """Set if the machine did not go down: the page cache survives, and its dirty pages are still not on the device."""

    def key(self) -> int:
        """A hash that is equal for disks of which a store sees, and can lose, the same."""
        if self.still_up is not None:
            return self.still_up.key()
        files = [(number, self.blocks.get(number), self.modified_ms.get(number)) for number in sorted(self.data)]
        return hash((tuple(sorted(self.names.items())), tuple((*file, self.data[file[0]]) for file in files)))

    def disk(self, *, seed: int = 0, kind: type[SimDisk] = SimDisk, **more: Any) -> SimDisk:
        """Build a disk with this content, all of it durable unless the machine is still up."""
        disk = kind(capacity=_CAPACITY, seed=seed, **more)
        if self.still_up is not None:
            revive(self.still_up, disk)
            return disk
        made: dict[int, _Inode] = {}
        for path, number in sorted(self.names.items()):
            if number is None:
                disk._names[path] = None
                continue
            inode = made.get(number)
            if inode is None:
                data = self.data[number]
                pages = (len(data) + PAGE - 1) // PAGE
                blocks = {page for page in self.blocks.get(number, ()) if page < pages}
                blocks |= {page for page in range(pages) if any(data[page * PAGE : (page + 1) * PAGE])}
                inode = made[number] = _Inode(number, bytearray(data), bytearray(data), blocks)
                inode.modified_ms = self.modified_ms.get(number, 0)
            disk._names[path] = inode
        disk._durable_names = dict(disk._names)
        disk._next_inode = 1 + max(made, default=0)
        return disk


def revive(image: DiskImage, disk: SimDisk) -> None:
    """Put ``disk`` into the state of the image, dirty pages and unsynced names included."""
    made = {
        number: _Inode(number, bytearray(file.cache), bytearray(file.durable), set(file.blocks))
        for number, file in image.files.items()
    }
    for number, file in image.files.items():
        made[number].modified_ms = file.modified_ms

    def inodes(names: Names) -> dict[str, _Inode | None]:
        return {path: None if number is None else made[number] for path, number in names.items()}

    disk._names = inodes(image.names)
    disk._durable_names = inodes(image.durable_names)
    disk._pending = [_NameChange(change.gone, tuple(inodes(dict(change.come)).items())) for change in image.pending]
    disk._next_inode = 1 + max(made, default=0)
