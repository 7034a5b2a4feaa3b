"""Messages that were read from the tier, as they are kept in memory: in runs of consecutive offsets.

A run holds the records one behind the other, so that a reader gets many of them with one copy, and a message costs
little besides its record.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from trimq.broker.store.read.record_look import Place
from trimq.protocol.native import NATIVE
from trimq.protocol.tiered_layout import APACHE_UPLOADED


class TieredMessage(NamedTuple):
    """A message of a queue: offset in the queue, tags code, the record as clients get it."""

    offset: int
    tags_code: int
    record: bytes


class MessageRun(NamedTuple):
    """Messages of consecutive offsets.

    ``offset`` is that of the first. ``bounds``: where each record begins in ``data``, and where the last one ends.
    """

    offset: int
    tags_codes: Sequence[int]
    bounds: Sequence[int]
    data: bytes

    @property
    def end(self) -> int:
        """The offset behind the last message."""
        return self.offset + len(self.tags_codes)

    def message(self, number: int) -> TieredMessage:
        """The message of a number, from 0 on."""
        record = self.data[self.bounds[number] : self.bounds[number + 1]]
        return TieredMessage(self.offset + number, self.tags_codes[number], record)


class Messages:
    """Messages in the order of their offsets. There may be gaps between its runs."""

    __slots__ = ("_begins", "_count", "runs", "size")

    def __init__(self, runs: Sequence[MessageRun] = ()) -> None:
        self.runs = runs
        self._begins = [run.offset for run in runs]
        self._count = sum([len(run.tags_codes) for run in runs])
        self.size = sum([len(run.data) for run in runs])
        """Bytes of all records."""

    @classmethod
    def of(cls, messages: Sequence[TieredMessage]) -> "Messages":
        """Each of the messages in a run with those it follows."""
        runs: list[MessageRun] = []
        begin = 0
        for number in range(1, len(messages) + 1):
            if number == len(messages) or messages[number].offset != messages[number - 1].offset + 1:
                part = messages[begin:number]
                bounds = [0, *accumulate(len(message.record) for message in part)]
                data = b"".join([message.record for message in part])
                runs.append(MessageRun(part[0].offset, [message.tags_code for message in part], bounds, data))
                begin = number
        return cls(runs)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TieredMessage]:
        return (run.message(number) for run in self.runs for number in range(len(run.tags_codes)))

    def behind(self, offset: int) -> Iterator[tuple[MessageRun, int]]:
        """The runs with messages from an offset on, each with the number of its first such message."""
        first = max(0, bisect_right(self._begins, offset) - 1)
        for run in self.runs[first:]:
            number = max(0, offset - run.offset)
            if number < len(run.tags_codes):
                yield run, number

    def get(self, offset: int) -> TieredMessage | None:
        """The message of an offset, if it is there."""
        for run, number in self.behind(offset):
            return run.message(number) if run.offset + number == offset else None
        return None


class Fetched(NamedTuple):
    """Messages, and the queue offset behind them and behind what was skipped."""

    messages: Messages
    next_offset: int


def restored(data: Any, start: int, units: bytes, entries: bytes, offset: int, place: Place) -> bytes | None:
    """The records of units with the offsets that they have in the log, joined. None if Python has to look at each.

    ``data`` is what the tier has of them, which begins at stream position ``start``; ``entries`` are those of the side
    file. ``offset``: the queue offset of the first.
    """
    extension = NATIVE.extension
    if extension is None:
        return None
    its = place.queue_id, place.magic, place.topic_parts[place.magic]
    try:
        return extension.tier_records(data, start, units, entries, offset, its, APACHE_UPLOADED)
    except extension.NativeFault as fault:
        NATIVE.turn_off(str(fault))
        return None
