"""Kinds of loss: which of the unsynced changes of a disk a power cut can take.

A loss decides for each change of names whose directory was not synced, and for each dirty sector, whether it reached
the device. A disk need not keep any order among them, so none is kept here; each kind below is a region of that space
in which a faulty store is likely to fail.
"""

import posixpath
from collections.abc import Callable, Iterator
from enum import Enum
from random import Random
from typing import Final, NamedTuple

from tests.crash.images import DiskImage, FileImage, Found, Names
from tests.store.simdisk import PAGE, SECTOR
from trimq.protocol import checkpoint_layout
from trimq.protocol.record import MAGIC_V1, MAGIC_V2


class Loss(Enum):
    """Kinds of loss. A change "came" if it reached the device although it was not synced."""

    ALL = "all"
    """No change came."""
    NOTHING = "nothing"
    """The process was killed, the machine is up: all changes are visible, and may still be lost at a later cut."""
    BYTES = "bytes"
    """All names and file lengths came, and none of the bytes."""
    LENGTHS = "lengths"
    """All names came; lengths and bytes are those of the last sync."""
    NAMES = "names"
    """All bytes came, and no name."""
    RENAMES = "renames"
    """Everything came except renames and deletions."""
    JOURNAL = "journal"
    """Names came in the order of their changes up to some point, pages at random."""
    PAGES = "pages"
    """Names and pages came at random, out of order."""
    SECTORS = "sectors"
    """Names and sectors came at random: torn pages."""
    FILES = "files"
    """Some files came as a whole, others not at all; names at random."""
    BACKWARDS = "backwards"
    """The newest changes came, the older ones did not: pages towards the end of a file, the last names."""
    ONE_LOST = "one lost"
    """One page, sector or name is missing, all others came."""
    ONE_CAME = "one came"
    """One page, sector or name came, all others are missing."""
    FLIP = "flip"
    """Everything came; one bit is wrong in a byte that was not durable, or in a file that has a checksum."""
    ROT = "rot"
    """Everything came; one bit is wrong in a record that the next start has to read."""


class Damage(NamedTuple):
    """A range of log offsets in which a bit was flipped: the record there may be missing."""

    begin: int
    end: int


class Survivor(NamedTuple):
    """The disk after a loss, and the record that may be missing although it was durable, if any."""

    found: Found
    damage: Damage | None = None


def survivor(image: DiskImage, loss: Loss, random: Random) -> Survivor | None:
    """The disk after a loss; None if this kind of loss does not apply to the image."""
    return _KINDS[loss](image, random)


# -- choices


def _all_names(_at: int) -> bool:
    return True


def _no_names(_at: int) -> bool:
    return False


def _names(image: DiskImage, came: Callable[[int], bool]) -> Names:
    names = dict(image.durable_names)
    for at, change in enumerate(image.pending):
        if came(at):
            change.apply(names)
    return _reachable(names)


def _reachable(names: Names) -> Names:
    """The names without those in directories that are lost."""
    kept: Names = {}
    for path, number in sorted(names.items()):
        if path == "/" or posixpath.dirname(path) in kept:
            kept[path] = number
    return kept


def _found(image: DiskImage, names: Names, data: dict[int, bytes]) -> Found:
    used = {number for number in names.values() if number is not None}
    files = [image.files[number] for number in sorted(used)]
    return Found(
        names,
        {file.number: data[file.number] for file in files},
        {file.number: file.blocks for file in files},
        {file.number: file.modified_ms for file in files},
    )


def _mixed(file: FileImage, size: int, step: int, came: Callable[[int, int], bool]) -> bytes:
    """The device's bytes, and of the dirty pages those pieces for which ``came(position, end)`` is true."""
    data = bytearray(file.durable[:size].ljust(size, b"\0"))
    for page in file.dirty_pages():
        for at in range(page * PAGE, min((page + 1) * PAGE, size), step):
            end = min(at + step, size)
            if came(at, end):
                data[at:end] = file.cache[at:end]
    return bytes(data)


def _size(file: FileImage, random: Random) -> int:
    return len(file.cache) if random.random() < 0.5 else len(file.durable)


# -- kinds


def _all(image: DiskImage, random: Random) -> Survivor:
    return Survivor(_found(image, _names(image, _no_names), {n: f.durable for n, f in image.files.items()}))


def _nothing(image: DiskImage, random: Random) -> Survivor:
    return Survivor(_found(image, _names(image, _all_names), {n: f.cache for n, f in image.files.items()}))


def _kill(image: DiskImage, random: Random) -> Survivor:
    found = _nothing(image, random).found
    found.still_up = image
    return Survivor(found)


def _bytes(image: DiskImage, random: Random) -> Survivor:
    data = {n: f.durable[: len(f.cache)].ljust(len(f.cache), b"\0") for n, f in image.files.items()}
    return Survivor(_found(image, _names(image, _all_names), data))


def _lengths(image: DiskImage, random: Random) -> Survivor:
    return Survivor(_found(image, _names(image, _all_names), {n: f.durable for n, f in image.files.items()}))


def _only_bytes(image: DiskImage, random: Random) -> Survivor:
    return Survivor(_found(image, _names(image, _no_names), {n: f.cache for n, f in image.files.items()}))


def _renames(image: DiskImage, random: Random) -> Survivor | None:
    if not any(change.gone for change in image.pending):
        return None
    names = _names(image, lambda at: not image.pending[at].gone)
    return Survivor(_found(image, names, {n: f.cache for n, f in image.files.items()}))


def _journal(image: DiskImage, random: Random) -> Survivor:
    stop = random.randint(0, len(image.pending))
    data = {
        n: _mixed(f, _size(f, random), PAGE, lambda _at, _end: random.random() < 0.5) for n, f in image.files.items()
    }
    return Survivor(_found(image, _names(image, lambda at: at < stop), data))


def _by_chance(step: int) -> Callable[[DiskImage, Random], Survivor]:
    def kind(image: DiskImage, random: Random) -> Survivor:
        share = random.choice((0.2, 0.5, 0.8))
        data = {
            n: _mixed(f, _size(f, random), step, lambda _at, _end: random.random() < share)
            for n, f in image.files.items()
        }
        return Survivor(_found(image, _names(image, lambda _at: random.random() < share), data))

    return kind


def _files(image: DiskImage, random: Random) -> Survivor:
    data = {n: f.cache if random.random() < 0.5 else f.durable for n, f in image.files.items()}
    return Survivor(_found(image, _names(image, lambda _at: random.random() < 0.7), data))


def _backwards(image: DiskImage, random: Random) -> Survivor:
    def late(file: FileImage) -> bytes:
        size, pages = len(file.cache), file.dirty_pages()
        first = random.choice(pages) * PAGE + random.randrange(0, PAGE, SECTOR) if pages else 0
        return _mixed(file, size, SECTOR, lambda at, _end: at >= first)

    first_name = random.randint(0, len(image.pending))
    data = {n: late(f) for n, f in image.files.items()}
    return Survivor(_found(image, _names(image, lambda at: at >= first_name), data))


def _one(lost: bool) -> Callable[[DiskImage, Random], Survivor | None]:
    def kind(image: DiskImage, random: Random) -> Survivor | None:
        choices: list[tuple[int, int] | int] = list(range(len(image.pending)))
        choices += [(n, page) for n, f in image.files.items() for page in f.dirty_pages()]
        if not choices:
            return None
        chosen = random.choice(choices)
        step = random.choice((PAGE, SECTOR))
        sector = random.randrange(0, PAGE, step)

        def piece(number: int) -> Callable[[int, int], bool]:
            if isinstance(chosen, int) or chosen[0] != number:
                return lambda _at, _end: lost
            place = chosen[1] * PAGE + sector
            return lambda at, _end: (at == place) != lost

        data = {n: _mixed(f, len(f.cache), step, piece(n)) for n, f in image.files.items()}
        return Survivor(_found(image, _names(image, lambda at: (at == chosen) != lost), data))

    return kind


# -- flipped bits

_CHECKED: Final = ("checkpoint", "consumequeue.snapshot", "abort", "lock")
_CRC_AT: Final = 8
_HEAD: Final = 88


def _flip(image: DiskImage, random: Random) -> Survivor | None:
    found = _nothing(image, random).found
    paths = [path for path, number in sorted(found.names.items()) if number is not None and found.data[number]]
    random.shuffle(paths)
    for path in paths:
        number = found.names[path]
        assert number is not None
        places = list(_flippable(image.files[number], path))
        if places:
            position, damage = random.choice(places)
            _turn(found, number, position, random)
            return Survivor(found, damage)
    return None


def _turn(found: Found, number: int, position: int, random: Random) -> None:
    data = bytearray(found.data[number])
    data[position] ^= 1 << random.randrange(8)
    found.data[number] = bytes(data)


def _flippable(file: FileImage, path: str) -> Iterator[tuple[int, Damage | None]]:
    """Positions at which the store must detect a flipped bit, each with the record that may be missing then."""
    name = posixpath.basename(path)
    if name in _CHECKED:
        yield from ((at, None) for at in range(len(file.cache)))
    elif "/commitlog/" in path:
        fresh = set(_not_durable(file))
        for damage in _records(file.cache, int(name)) if fresh else ():
            checked = _checked_bytes(file.cache, damage.begin - int(name))
            yield from ((at, damage) for at in checked if at in fresh)
    elif "/config/" not in path:
        yield from ((at, None) for at in _not_durable(file))


def _not_durable(file: FileImage) -> Iterator[int]:
    durable = file.durable.ljust(len(file.cache), b"\0")
    for page in file.dirty_pages():
        end = min((page + 1) * PAGE, len(file.cache))
        yield from (at for at in range(page * PAGE, end) if file.cache[at] != durable[at])


def _records(data: bytes, start: int) -> Iterator[Damage]:
    """The records of a log file, up to the first position without a valid-looking head."""
    at = 0
    while at + _HEAD < len(data):
        size, magic = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
        if magic not in (MAGIC_V1, MAGIC_V2) or not _HEAD < size <= len(data) - at:
            return
        yield Damage(start + at, start + at + size)
        at += size


def _checked_bytes(data: bytes, at: int) -> Iterator[int]:
    """Positions that recovery checks: length, magic, CRC, own offset, body length and body of a record (IPv4 hosts)."""
    size = int.from_bytes(data[at : at + 4], "big")
    body = int.from_bytes(data[at + 84 : at + 88], "big")
    yield from range(at, at + 12)
    yield from range(at + 28, at + 36)
    yield from range(at + 84, min(at + 88 + body, at + size))  # an earlier flip may have hit the body length


def _rot(image: DiskImage, random: Random) -> Survivor | None:
    found = _nothing(image, random).found
    begin = _read_from(found)
    choices = []
    for path, number in found.names.items():
        if number is not None and "/commitlog/" in path:
            start = int(posixpath.basename(path))
            choices += [(number, start, one) for one in _records(found.data[number], start) if one.begin >= begin]
    if not choices:
        return None
    number, start, damage = random.choice(choices)
    place = random.choice(list(_checked_bytes(found.data[number], damage.begin - start)))
    _turn(found, number, place, random)
    return Survivor(found, damage)


def _read_from(found: Found) -> int:
    """The log offset from which the next start reads every record."""
    number = found.names.get("/store/checkpoint")
    if number is None:
        return 0
    mark = checkpoint_layout.decode_mark(found.data[number])
    return mark.position if mark is not None else 0


_KINDS: Final[dict[Loss, Callable[[DiskImage, Random], Survivor | None]]] = {
    Loss.ALL: _all,
    Loss.NOTHING: _kill,
    Loss.BYTES: _bytes,
    Loss.LENGTHS: _lengths,
    Loss.NAMES: _only_bytes,
    Loss.RENAMES: _renames,
    Loss.JOURNAL: _journal,
    Loss.PAGES: _by_chance(PAGE),
    Loss.SECTORS: _by_chance(SECTOR),
    Loss.FILES: _files,
    Loss.BACKWARDS: _backwards,
    Loss.ONE_LOST: _one(lost=True),
    Loss.ONE_CAME: _one(lost=False),
    Loss.FLIP: _flip,
    Loss.ROT: _rot,
}
