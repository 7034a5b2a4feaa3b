"""Names of the objects of a broker in a bucket.

All are below ``{prefix}/{cluster}/{broker}/``. Numbers have a fixed number of digits, so the names sort as the log
does. An object is written once, except for the root.
"""

import re
from typing import Final, NamedTuple
from urllib.parse import quote

ROOT: Final = "manifest/root"
LOG: Final = "log/"
SEGMENTS: Final = "segments/"
PAGES: Final = "manifest/page-"
INDEX_LISTS: Final = "manifest/indexes-"
STATES: Final = "state/"
INDEXES: Final = "index/"

MOST_EPOCH: Final = 10**8 - 1
"""Greatest epoch that fits the names."""

_SAVED: Final = re.compile(
    r"(?:manifest/page-(\d{12})-(\d{8})-\d{4}|(?:manifest/indexes-|state/)(\d{12})-(\d{8}))", re.ASCII
)
_NAME: Final = re.compile(r"segments/(\d{20})-(\d{20})-(\d{4})-(\d{8})-(\d{4})|log/(\d{20})-(\d{8})", re.ASCII)


class ObjectName(NamedTuple):
    """An object with messages.

    ``begin``: the first log offset that it covers. ``end``: the log offset behind the last one, 0 for an upload object
    (its header has it). ``generation``: how often its messages were joined, 0 for an upload object. ``epoch``: that of
    the owner who wrote it. ``number``: several segments come from one join.
    """

    begin: int
    end: int
    generation: int
    epoch: int
    number: int

    def __str__(self) -> str:
        if not self.generation:
            return f"{LOG}{self.begin:020d}-{self.epoch:08d}"
        return f"{SEGMENTS}{self.begin:020d}-{self.end:020d}-{self.generation:04d}-{self.epoch:08d}-{self.number:04d}"


def parse_name(name: str) -> ObjectName | None:
    """The parts of a name below the broker's prefix; None if it is not that of an object with messages."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    numbers = found.groups()
    if numbers[0] is None:
        return ObjectName(int(numbers[5]), 0, 0, int(numbers[6]), 0)
    begin, end, generation, epoch, number = map(int, numbers[:5])
    return ObjectName(begin, end, generation, epoch, number) if generation else None


def broker_prefix(prefix: str, cluster: str, broker: str) -> str:
    """What stands before the names of a broker's objects; ends in a slash.

    Characters of the names that are special in URLs or in object stores stand percent-encoded.
    """
    parts = [*(part for part in prefix.split("/") if part), quote(cluster, safe=""), quote(broker, safe="")]
    return "/".join(parts) + "/"


def page_name(sequence: int, epoch: int, number: int) -> str:
    """The name of page ``number`` that was written with the root of a sequence number."""
    return f"{PAGES}{sequence:012d}-{epoch:08d}-{number:04d}"


def state_name(sequence: int, epoch: int) -> str:
    """The name of the state that was written with the root of a sequence number."""
    return f"{STATES}{sequence:012d}-{epoch:08d}"


def indexes_name(sequence: int, epoch: int) -> str:
    """The name of the list of index files that was written with the root of a sequence number."""
    return f"{INDEX_LISTS}{sequence:012d}-{epoch:08d}"


def parse_saved(name: str) -> tuple[int, int] | None:
    """Sequence number and epoch in the name of a page, a state or a list of index files; None if it is another name."""
    found = _SAVED.fullmatch(name)
    if found is None:
        return None
    sequence, epoch = (number for number in found.groups() if number is not None)
    return int(sequence), int(epoch)
