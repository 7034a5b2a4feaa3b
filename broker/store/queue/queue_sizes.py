"""Which files the queues of a store have, and how long they are.

A start checks all of them before it relies on any of them. A file with a wrong length was cut or has grown: its queue
is rebuilt from the log. But if all files have the same other length, which a setting could give them, the setting is
wrong and not the files. Then the start is refused, since queues without a record in the log would lose their offsets.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.protocol.file_names import offset_name, parse_offset_name
from trimq.protocol.queue_unit import UNIT_SIZE


class QueueFileError(StoreLoadError):
    """The queue files do not have the configured size: the text names one of them and says what to do."""


class OtherSize(NamedTuple):
    """The length of a store's queue files, other than the configured one, and a file that has it."""

    size: int
    path: str


def queue_directories(disk: Disk, base: str) -> Iterator[tuple[str, int, str]]:
    """Topic, queue id and directory of every queue below ``base``. Blocks."""
    for topic in disk.list(base):
        for name in disk.list(f"{base}/{topic}"):
            if name.isascii() and name.isdigit():
                yield topic, int(name), f"{base}/{topic}/{name}"


def file_lengths(disk: Disk, directory: str) -> dict[int, int]:
    """The files of a queue in order: start in bytes, and length. Blocks."""
    found = []
    for name, length in disk.lengths(directory).items():
        start = parse_offset_name(name)
        if start is not None:
            found.append((start, length))
    return dict(sorted(found))


def wrong_file(directory: str, lengths: dict[int, int], size: int) -> str:
    """The defect of a queue's files, except a last file that is too short; "" if there is none."""
    for before, after in pairwise(lengths):
        if after != before + size:
            return f"a file between offsets {before} and {after} is missing"
    last = next(reversed(lengths), 0)
    for start, length in lengths.items():
        if length > size or (length < size and start != last):
            return f"{directory}/{offset_name(start)} has {length} bytes, {size} are expected"
    if last % size:
        return f"{directory}/{offset_name(last)} does not start at a multiple of {size}"
    return ""


def other_size(disk: Disk, base: str, size: int, known: int | None) -> OtherSize | None:
    """The length that all files indicate, if it is not ``size``. Reads no content. Blocks.

    ``known`` is the size at the last orderly stop, and decides if any file has it. Without it the names must agree:
    consecutive files start one length apart. A single file that is shorter than ``size`` counts as cut.
    """
    counts: Counter[int] = Counter()
    paths: dict[int, str] = {}
    step = common = 0
    for _, _, directory in queue_directories(disk, base):
        lengths = file_lengths(disk, directory)
        for start, length in lengths.items():
            counts[length] += 1
            paths.setdefault(length, f"{directory}/{offset_name(start)}")
            common = gcd(common, start)
        for before, after in pairwise(lengths):
            step = min(step or after - before, after - before)
    possible = [length for length in counts if length > 0 and not length % UNIT_SIZE]
    if size in counts or not possible or size == known:
        return None
    if known in possible:
        return OtherSize(known, paths[known])
    usual = max(possible, key=lambda length: (counts[length], length))
    if common % usual or step not in (0, usual):
        return None
    if not step and usual < size and counts[usual] == 1:
        return None
    return OtherSize(usual, paths[usual])


def check_size(disk: Disk, base: str, size: int, known: int | None) -> None:
    """Raise QueueFileError if the files indicate another size than the configured one. Blocks."""
    other = other_size(disk, base, size, known)
    if other is not None:
        raise QueueFileError(
            f"{other.path} has {other.size} bytes, the configured file size of consume queues is {size}: start with "
            f"the size the store was made with (mappedFileSizeConsumeQueue={other.size}), or delete {base} to have "
            "the queues rebuilt from the log"
        )
