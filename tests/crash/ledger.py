"""Who sent what: one lane a queue, numbered messages whose content follows from their number.

A number is sent once at most, so that whatever a reader gets can be judged on the spot: it was sent, it is what was
sent, it comes behind its predecessor, and nothing that was acknowledged is left out on the way.
"""

import zlib
from array import array
from typing import Final, NamedTuple

SENT: Final = 1
ACKNOWLEDGED: Final = 2
SEEN: Final = 4
_SIZES: Final = (40, 120, 200, 700, 1500, 6000)


class Generation(NamedTuple):
    """Numbers that one life of the broker was sent, from ``first`` on."""

    first: int
    killed_at: float


class Lane:
    """One queue and its only sender. ``state`` says of each number what has become of it."""

    def __init__(self, topic: str, queue_id: int) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.name = f"{topic}/{queue_id}"
        self.state = bytearray()
        self.offsets = array("q")
        self.acknowledged_at = array("d")
        self.generations: list[Generation] = [Generation(0, 0.0)]

    def key(self, number: int) -> str:
        """The key that the message is found by, and that no other message has."""
        return f"{self.topic}-{self.queue_id}-{number}"

    def body(self, number: int) -> bytes:
        """What message ``number`` consists of."""
        head = self.key(number).encode() + b":"
        seed = zlib.crc32(head)
        return head + seed.to_bytes(4, "big") * (_SIZES[seed % len(_SIZES)] // 4)

    def take(self) -> int:
        """The next number, which is going to be sent now."""
        self.state.append(SENT)
        self.offsets.append(-1)
        self.acknowledged_at.append(0.0)
        return len(self.state) - 1

    def acknowledge(self, number: int, offset: int, now: float) -> None:
        """The broker says that it has it, at ``offset`` of the queue."""
        self.state[number] |= ACKNOWLEDGED
        self.offsets[number] = offset
        self.acknowledged_at[number] = now

    def killed(self, now: float) -> None:
        """The broker is gone: what is sent from here on, another life of it gets."""
        self.generations[-1] = self.generations[-1]._replace(killed_at=now)
        self.generations.append(Generation(len(self.state), 0.0))

    @property
    def acknowledged(self) -> int:
        """How many messages the broker has taken."""
        return sum(state & ACKNOWLEDGED > 0 for state in self.state)

    @property
    def seen(self) -> int:
        """How many messages a reader has got."""
        return sum(state & SEEN > 0 for state in self.state)


class Reader:
    """Follows a lane from its queue's beginning and complains where a promise is broken."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.offset = 0
        self.last = -1
        self.count = 0
        self.faults: list[str] = []

    def read(self, body: bytes, offset: int) -> None:
        """The next message of the queue, and the offset it came with."""
        lane = self.lane
        if offset != self.offset:
            self.faults.append(f"{lane.name}: offset {offset} came where {self.offset} was due")
        self.offset = offset + 1
        self.count += 1
        number = _number(lane, body)
        if not 0 <= number < len(lane.state) or body != lane.body(number):
            self.faults.append(f"{lane.name}@{offset}: {body[:60]!r} was never sent")
            return
        if number <= self.last:
            self.faults.append(f"{lane.name}: {number} came behind {self.last}")
        if lane.state[number] & ACKNOWLEDGED and lane.offsets[number] != offset:
            self.faults.append(f"{lane.name}: {number} stands at {offset}, was acknowledged at {lane.offsets[number]}")
        self.last = max(self.last, number)
        lane.state[number] |= SEEN


def _number(lane: Lane, body: bytes) -> int:
    prefix = f"{lane.topic}-{lane.queue_id}-".encode()
    digits, colon, _ = body.removeprefix(prefix).partition(b":")
    return int(digits) if body.startswith(prefix) and colon and digits.isdigit() else -1


class Losses(NamedTuple):
    """Acknowledged messages that nobody will ever read, and how long before a kill the oldest was acknowledged."""

    messages: int
    seconds: float
    faults: list[str]


def find_losses(lane: Lane) -> Losses:
    """What is missing once a reader has come to the end. A loss that is no tail of what a life was sent is a fault."""
    count, seconds = 0, 0.0
    faults: list[str] = []
    ends = [following.first for following in lane.generations[1:]] + [len(lane.state)]
    for generation, end in zip(lane.generations, ends, strict=True):
        lost = -1
        for number in range(generation.first, end):
            state = lane.state[number]
            if state & SEEN:
                if lost >= 0:
                    faults.append(f"{lane.name}: {lost} is missing, and {number} behind it is there")
                    break
            elif state & ACKNOWLEDGED:
                lost = number if lost < 0 else lost
                count += 1
                seconds = max(seconds, generation.killed_at - lane.acknowledged_at[number])
                if not generation.killed_at:
                    faults.append(f"{lane.name}: {number} is missing, and nobody killed the broker after it")
                    break
    return Losses(count, seconds, faults)
