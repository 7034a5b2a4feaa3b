"""What clients of a simulated cluster were answered, and what they saw: the promises that the checkers hold it to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

QueueKey = tuple[str, str, int]
"""Broker name, topic, queue id."""


class BrokenPromiseError(AssertionError):
    """The cluster did what it had promised not to do."""


class Acked(NamedTuple):
    """A message that was acknowledged: its offset in its queue, when its send began and when the reply arrived."""

    body: bytes
    offset: int
    began: int
    ended: int


class UsersOf(NamedTuple):
    """The users that a broker has now, with the version of their file."""

    machine: str
    version: int
    names: frozenset[str]


@dataclass
class UserLedger:
    """The users that an administrator has made and deleted. Each name is used once.

    A change that every broker has, with the same version of the file, is *known*: it may not be undone any more,
    whichever broker becomes the master. One that is only acknowledged may be lost with the master.
    """

    made: set[str] = field(default_factory=set)
    """Acknowledged, and their deletion was not asked for."""
    deleted: set[str] = field(default_factory=set)
    """Their deletion was acknowledged."""
    known_made: set[str] = field(default_factory=set)
    known_deleted: set[str] = field(default_factory=set)

    def begin_deletion(self, name: str) -> None:
        """The deletion is asked for: from now on a user may be there or not."""
        self.made.discard(name)
        self.known_made.discard(name)

    def check(self, found: list[UsersOf], *, all_of_them: bool) -> None:
        """Hold what brokers have against what is known. ``all_of_them``: no broker is missing in ``found``.

        Raises BrokenPromiseError.
        """
        for users in found:
            if back := self.known_deleted & users.names:
                raise BrokenPromiseError(f"{users.machine} has users again that were deleted: {sorted(back)}")
            if lost := self.known_made - users.names:
                raise BrokenPromiseError(f"{users.machine} does not have users any more: {sorted(lost)}")
        if all_of_them and len({users.version for users in found}) == 1:
            names = [users.names for users in found]
            self.known_made |= self.made.intersection(*names)
            self.known_deleted |= self.deleted.difference(*names)


@dataclass
class Ledger:
    """``acked`` by queue, in the order of the replies. ``attempted`` are the bodies of all sends.

    ``seen`` has the body that a consumer saw at each offset. ``committed`` has the offsets that were committed.
    """

    acked: dict[QueueKey, list[Acked]] = field(default_factory=dict)
    attempted: set[bytes] = field(default_factory=set)
    seen: dict[tuple[QueueKey, int], bytes] = field(default_factory=dict)
    committed: dict[tuple[str, QueueKey], int] = field(default_factory=dict)
    later: dict[str, set[bytes]] = field(default_factory=dict)
    """By broker: the delayed and timed messages that were acknowledged. They come at least once."""
    all_due: float = 0.0
    """Time in the simulation at which the last of them is due, if no clock has been set."""
    keeps: bool = True
    """Whether the cluster has promised to lose nothing."""
    refused: int = 0
    unknown: int = 0
    masters: dict[int, str] = field(default_factory=dict)
    """By epoch: the machine that has acknowledged messages as its master."""
    users: UserLedger = field(default_factory=UserLedger)
    """The users that were made and deleted."""
    broken: list[str] = field(default_factory=list)
    """Promises that were broken inside the cluster, where an exception would only disturb it."""
    _moments: int = 0

    def moment(self) -> int:
        """A number that grows with each call: for the order of events."""
        self._moments += 1
        return self._moments

    def add_acked(self, queue: QueueKey, body: bytes, offset: int, began: int) -> None:
        """The cluster has acknowledged a message."""
        self.acked.setdefault(queue, []).append(Acked(body, offset, began, self.moment()))

    def add_master(self, machine: str, epoch: int) -> None:
        """``machine`` acknowledges a message as the master of ``epoch``. No other one may, and no older one later."""
        if (other := self.masters.setdefault(epoch, machine)) != machine:
            self.broken.append(f"{other} and {machine} have both acknowledged in epoch {epoch}")
        if (newest := max(self.masters)) > epoch:
            self.broken.append(f"{machine} acknowledges in epoch {epoch}, after {self.masters[newest]} in {newest}")

    def add_later(self, broker: str, body: bytes, due: float) -> None:
        """The cluster has acknowledged a message that is to come later: at the time ``due``."""
        self.all_due = max(self.all_due, due)
        self.later.setdefault(broker, set()).add(body)

    def add_seen(self, queue: QueueKey, offset: int, body: bytes) -> None:
        """A consumer has got a message. Raises BrokenPromiseError if another one was seen at the same offset."""
        known = self.seen.setdefault((queue, offset), body)
        if self.keeps and known != body:
            raise BrokenPromiseError(f"{queue} offset {offset}: {known!r} was seen before, now {body!r}")
        if body not in self.attempted:
            raise BrokenPromiseError(f"{queue} offset {offset}: {body!r} was never sent")

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged messages."""
        return sum(map(len, self.acked.values()))


def check_queue(ledger: Ledger, queue: QueueKey, content: dict[int, bytes]) -> None:
    """Hold the final content of a queue, by offset, against the ledger. Raises BrokenPromiseError."""
    if ledger.keeps and content and sorted(content) != list(range(min(content), min(content) + len(content))):
        raise BrokenPromiseError(f"{queue}: offsets have holes: {sorted(content)}")
    acked = ledger.acked.get(queue, [])
    for message in acked:
        found = content.get(message.offset)
        if ledger.keeps and found != message.body:
            raise BrokenPromiseError(
                f"{queue} offset {message.offset}: {message.body!r} was acknowledged, and there is {found!r}"
            )
    check_order(queue, [message for message in acked if content.get(message.offset) == message.body])
    for (where, offset), body in ledger.seen.items():
        if ledger.keeps and where == queue and content.get(offset) != body:
            raise BrokenPromiseError(
                f"{queue} offset {offset}: a consumer saw {body!r}, and there is {content.get(offset)!r}"
            )
    check_once(queue, content.values())


def check_order(queue: QueueKey, acked: list[Acked]) -> None:
    """A message whose send began after another one was acknowledged has the higher offset."""
    by_offset = sorted(acked, key=lambda message: message.offset)
    earliest_end = float("inf")
    for message in reversed(by_offset):
        if message.began > earliest_end:
            raise BrokenPromiseError(f"{queue}: {message.body!r} was sent later and has the lower offset")
        earliest_end = min(earliest_end, message.ended)


def check_once(queue: QueueKey, bodies: Iterable[bytes]) -> None:
    """Each body was sent once, so it is there once at most."""
    found: set[bytes] = set()
    for body in bodies:
        if body in found:
            raise BrokenPromiseError(f"{queue}: {body!r} is there twice")
        found.add(body)
