"""The record of all messages sent: one stream for each queue, numbered messages whose content follows from the number.

A number is sent at most once, so that a reader can check each message as it arrives: it was sent, its body is the one
that was sent, it follows its predecessor, and no acknowledged message is missing in between.
"""

import zlib
from array import array
from typing import Final, NamedTuple

SENT: Final = 1
ACKNOWLEDGED: Final = 2
SEEN: Final = 4
_SIZES: Final = (40, 120, 200, 700, 1500, 6000)


class Generation(NamedTuple):
    """The numbers sent during one life of the broker, from ``first`` on."""

    first: int
    killed_at: float


class Stream:
    """The messages of one queue and its only sender. ``state`` has the flags SENT, ACKNOWLEDGED, SEEN by number."""

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.name = f"{topic}/{queue_id}"
        self.state = bytearray()
        self.offsets = array("q")
        self.acknowledged_at = array("d")
        self.generations: list[Generation] = [Generation(0, 0.0)]

    def key(self, number: int) -> str:
        """The message's key, which no other message has."""
        return f"{self.topic}-{self.queue_id}-{number}"

    def body(self, number: int) -> bytes:
        """The body of message ``number``: its key and padding of a size that follows from the key."""
        head = self.key(number).encode() + b":"
        seed = zlib.crc32(head)
        return head + seed.to_bytes(4, "big") * (_SIZES[seed % len(_SIZES)] // 4)

    def take(self) -> int:
        """Allocate the next number; the caller sends it now."""
        self.state.append(SENT)
        self.offsets.append(-1)
        self.acknowledged_at.append(0.0)
        return len(self.state) - 1

    def acknowledge(self, number: int, offset: int, now: float) -> None:
        """Note that the broker acknowledged the message at ``offset`` of the queue."""
        self.state[number] |= ACKNOWLEDGED
        self.offsets[number] = offset
        self.acknowledged_at[number] = now

    def killed(self, now: float) -> None:
        """Note that the broker was killed: numbers sent from now on belong to its next life."""
        self.generations[-1] = self.generations[-1]._replace(killed_at=now)
        self.generations.append(Generation(len(self.state), 0.0))

    @property
    def acknowledged(self) -> int:
        """The number of messages that the broker has acknowledged."""
        return sum(state & ACKNOWLEDGED > 0 for state in self.state)

    @property
    def seen(self) -> int:
        """The number of messages that a reader has received."""
        return sum(state & SEEN > 0 for state in self.state)


class Reader:
    """Reads a stream from the start of its queue and reports broken promises in ``faults``."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.offset = 0
        self.last = -1
        self.count = 0
        self.faults: list[str] = []

    def read(self, body: bytes, offset: int) -> None:
        """Check the queue's next message, received with ``offset``."""
        stream = self.stream
        if offset != self.offset:
            self.faults.append(f"{stream.name}: offset {offset} came instead of {self.offset}")
        self.offset = offset + 1
        self.count += 1
        number = _number(stream, body)
        if not 0 <= number < len(stream.state) or body != stream.body(number):
            self.faults.append(f"{stream.name}@{offset}: {body[:60]!r} was never sent")
            return
        if number <= self.last:
            self.faults.append(f"{stream.name}: {number} came after {self.last}")
        if stream.state[number] & ACKNOWLEDGED and stream.offsets[number] != offset:
            self.faults.append(f"{stream.name}: {number} is at {offset}, was acknowledged at {stream.offsets[number]}")
        self.last = max(self.last, number)
        stream.state[number] |= SEEN


def _number(stream: Stream, body: bytes) -> int:
    prefix = f"{stream.topic}-{stream.queue_id}-".encode()
    digits, colon, _ = body.removeprefix(prefix).partition(b":")
    return int(digits) if body.startswith(prefix) and colon and digits.isdigit() else -1


class Losses(NamedTuple):
    """Acknowledged messages that cannot be read any more, and how long before a kill the oldest was acknowledged."""

    messages: int
    seconds: float
    faults: list[str]


def find_losses(stream: Stream) -> Losses:
    """Find the messages that are missing after a reader has reached the end of the queue.

    A kill may take only the last messages of its life: a missing message that is followed by a stored one of the same
    life is a fault.
    """
    count, seconds = 0, 0.0
    faults: list[str] = []
    ends = [following.first for following in stream.generations[1:]] + [len(stream.state)]
    for generation, end in zip(stream.generations, ends, strict=True):
        lost = -1
        for number in range(generation.first, end):
            state = stream.state[number]
            if state & SEEN:
                if lost >= 0:
                    faults.append(f"{stream.name}: {lost} is missing, and {number} after it is stored")
                    break
            elif state & ACKNOWLEDGED:
                lost = number if lost < 0 else lost
                count += 1
                seconds = max(seconds, generation.killed_at - stream.acknowledged_at[number])
                if not generation.killed_at:
                    faults.append(f"{stream.name}: {number} is missing, and the broker was not killed after it")
                    break
    return Losses(count, seconds, faults)
