"""The file of the epochs of a log, and what can be said of two such lists (RocketMQ's epochFileCheckpoint). Sans-IO.

An epoch is the time of one master: everything from its start offset up to the start of the next epoch was appended by
the master that the controllers had elected with this number. The file is text: the number of entries, the CRC-32 of the
lines that follow (without its highest bit), and a line ``epoch-start`` for each entry.
Source: RocketMQ's CheckpointFile and EpochFileCache.
"""

import itertools
from typing import Final, NamedTuple

from trimq.protocol.hashing import crc32

MOST_EPOCHS: Final = 1000
"""The most entries of a list: RocketMQ's master sends no more."""

_LARGEST_EPOCH: Final = 2**31 - 1
_LARGEST_OFFSET: Final = 2**63 - 1


class Epoch(NamedTuple):
    """The epoch ``number`` begins at the log offset ``start``."""

    number: int
    start: int


def problem_of(entries: list[Epoch]) -> str:
    """What is wrong with a list, as a text; "" if its numbers and its starts rise."""
    if len(entries) > MOST_EPOCHS:
        return f"{len(entries)} epochs are more than {MOST_EPOCHS}"
    for number, start in entries:
        if not 0 <= number <= _LARGEST_EPOCH or not 0 <= start <= _LARGEST_OFFSET:
            return f"epoch {number} from {start} on is out of range"
    for before, entry in itertools.pairwise(entries):
        if entry.number <= before.number or entry.start < before.start:
            return f"epoch {entry.number} from {entry.start} on follows epoch {before.number} from {before.start} on"
    return ""


def encode(entries: list[Epoch]) -> bytes:
    """The bytes of a file."""
    lines = "".join(f"{number}-{start}\n" for number, start in entries).encode()
    return b"%d\n%d\n" % (len(entries), crc32(lines)) + lines


def decode(data: bytes) -> list[Epoch]:
    """The entries of a file. Raises ValueError if it is damaged; the text says how."""
    head = data.split(b"\n", 2)
    if len(head) != 3:
        raise ValueError("the file ends before its first entry")
    count, check, lines = _number(head[0]), _number(head[1]), head[2]
    if lines and not lines.endswith(b"\n"):
        lines += b"\n"  # RocketMQ reads lines, and takes a last one without an end for whole
    if check not in {0, crc32(lines)}:  # RocketMQ does not check a 0
        raise ValueError(f"the checksum of the entries is {crc32(lines)}, not {check}")
    entries = []
    for line in lines.splitlines():
        number, found, start = line.partition(b"-")
        if not found:
            raise ValueError(f"{line!r} is no entry")
        entries.append(Epoch(_number(number), _number(start)))
    if len(entries) != count:
        raise ValueError(f"the file has {len(entries)} entries, not {count}")
    problem = problem_of(entries)
    if problem:
        raise ValueError(problem)
    return entries


def entry_at(entries: list[Epoch], offset: int) -> tuple[Epoch, int | None] | None:
    """The entry of the epoch that the byte at ``offset`` is of, and where the epoch ends (None: it is the last one).

    None if ``offset`` is before the first entry.
    """
    for place in range(len(entries) - 1, -1, -1):
        if entries[place].start <= offset:
            return entries[place], entries[place + 1].start if place + 1 < len(entries) else None
    return None


def consistent_point(mine: list[Epoch], my_end: int, others: list[Epoch], others_end: int) -> int | None:
    """Up to where two logs are the same: the end, in the shorter one, of the newest epoch that began equally in both.

    None if no epoch did.
    """
    there = dict(_with_ends(others, others_end))
    for entry, end in reversed(_with_ends(mine, my_end)):
        other = there.get(entry)
        if other is not None:
            return min(end, other)
    return None


def _with_ends(entries: list[Epoch], log_end: int) -> list[tuple[Epoch, int]]:
    ends = [entry.start for entry in entries[1:]] + [log_end]
    return [(entry, min(end, log_end)) for entry, end in zip(entries, ends, strict=True)] if entries else []


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise ValueError(f"{text!r} is no number")
    return int(text)
