"""ReplayGuard: serves a stamped request once, only with the code that it was made for, and only while it is new.

A table of single requests would grow with their rate: 20,000 in a second are 6,000,000 within five minutes. So it has
an entry for each sender instead: the highest number seen, and which of the 1024 numbers before it. The guard forgets a
sender when all his requests are too old. If there is no space, it forgets the one that was silent longest, of the user
who has most, and from then on refuses this user's requests that are not newer than those of the forgotten one. The
same holds for the start of the process, which knows nothing of earlier requests. So no request is served twice,
whatever the clocks do: what is forgotten is refused.

The full path checks and records in one call (``check``). A fast path may decline a request that it has looked at, so it
first looks (``look``), and records what it has served (``record``); nothing else runs between the two.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from trimq.protocol.auth.model import User
from trimq.protocol.auth.stamp import is_stamped, read_stamp
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.native import RawStamp
from trimq.remoting.runtime.clock import Clock

WINDOW_SECONDS: Final = 300
MOST_SENDERS: Final = 65_536
"""About 450 bytes each: 30 MB if there are so many, which takes as many clients within some minutes."""
REMEMBERED: Final = 1024
"""Numbers before a sender's highest one. A sender's requests may overtake each other by as many."""
_SEEN: Final = (1 << REMEMBERED) - 1
_AT_ONCE: Final = 8
"""Senders that are forgotten when a new one comes."""

ALL: Final = "all"
SUPER_USERS: Final = "superUsers"

AGAIN: Final = "the request was received before, or after many later ones of its sender: it is not served again."
NO_STAMP: Final = (
    "requests of User:{name} have to say when they were made (authRequireReplayProtection), as those of TriMQ's SDK and"
    " mqadmin do: this one could be a recorded one."
)
BEFORE: Final = "the request was made before all those that this server remembers: send it anew."
SET_BACK: Final = (
    "the clock of this server was set back: for another {seconds} s, or until it is started again, it serves no "
    "requests that say when they were made."
)


class ReplayError(RemotingError):
    """The request may be a recorded one."""


class Sender:
    """``seen`` has bit n if the request with the number ``highest`` - n was received; ``last`` is the newest time."""

    __slots__ = ("highest", "last", "seen")

    def __init__(self, highest: int, last: int, seen: int = 1) -> None:
        self.highest = highest
        self.last = last
        self.seen = seen

    def accepts(self, number: int) -> bool:
        """Whether a request with this number was not received, and is not too far behind."""
        behind = self.highest - number
        return behind < 0 or (behind < REMEMBERED and not self.seen >> behind & 1)

    def take(self, number: int, time: int) -> None:
        """A request that it ``accepts`` was received."""
        ahead = number - self.highest
        if ahead > 0:
            self.seen = (self.seen << ahead | 1) & _SEEN if ahead < REMEMBERED else 1
            self.highest = number
        else:
            self.seen |= 1 << -ahead
        self.last = max(self.last, time)

    def copy(self) -> "Sender":
        """Another one that has received the same."""
        return Sender(self.highest, self.last, self.seen)


class _UserSenders:
    """A user's senders, the one that was silent longest first. Nothing up to the time ``floor`` is served."""

    __slots__ = ("floor", "senders")

    def __init__(self) -> None:
        self.floor = 0
        self.senders: OrderedDict[bytes, Sender] = OrderedDict()

    def forget(self) -> None:
        _, sender = self.senders.popitem(last=False)
        self.floor = max(self.floor, sender.last)


class ReplayGuard:
    """Checks the stamps of requests whose signature is right. ``senders`` counts those that it remembers.

    ``required`` are the names of the users whose requests are served only with a stamp; ``superUsers`` and ``all`` are
    among them for those. Everything of a server that checks signatures must have the same guard.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        window_seconds: int = WINDOW_SECONDS,
        required: Collection[str] = (),
        most_senders: int = MOST_SENDERS,
    ) -> None:
        self.senders = 0
        self._clock = clock
        self._window = window_seconds * 1000
        self._required = frozenset(required)
        self._most = most_senders
        self._floor = clock.wall_ms()
        self._users: OrderedDict[str, _UserSenders] = OrderedDict()

    def check(self, user: User, code: int, signed: bytes) -> None:
        """Return if a request may be served, which then has been: call this once, after the signature was compared.

        ``signed``: what the signature is of, or its beginning (``content``); ``code``: the request's. Raises
        ReplayError: NO_PERMISSION, or SYSTEM_BUSY for what may be sent anew.
        """
        if not is_stamped(signed):
            if self._required and self.requires(user):
                raise _refusal(NO_STAMP.format(name=user.username))
            return
        stamp = read_stamp(signed)
        if stamp is None:
            raise _refusal("the field !once cannot be read.")
        if stamp.code != code:
            raise _refusal(f"the request was made with the code {stamp.code}, and not {code}.")
        self._check_time(stamp.time)
        entry = self._users.get(user.username)
        if stamp.time <= self._floor or (entry is not None and stamp.time <= entry.floor):
            raise ReplayError(ResponseCode.SYSTEM_BUSY, self._before())
        sender = None if entry is None else entry.senders.get(stamp.sender)
        if entry is None or sender is None:
            self._add(user.username, stamp.sender, Sender(stamp.number, stamp.time))
            return
        if not sender.accepts(stamp.number):
            raise _refusal(AGAIN)
        sender.take(stamp.number, stamp.time)
        entry.senders.move_to_end(stamp.sender)

    def look(self, name: str, code: int, stamp: RawStamp) -> Sender | None:
        """The sender of a request of the user ``name`` that ``check`` would let through; nothing changes.

        None also for the first request of a sender: only ``check`` makes space for one.
        """
        made_for, time, key, number = stamp
        if made_for != code or time <= self._floor or abs(self._clock.wall_ms() - time) > self._window:
            return None
        entry = self._users.get(name)
        if entry is None or time <= entry.floor:
            return None
        sender = entry.senders.get(key)
        return sender if sender is not None and sender.accepts(number) else None

    def record(self, name: str, sender: Sender, stamp: RawStamp) -> None:
        """The same request was served, by a fast path: it is not served again."""
        _, time, key, number = stamp
        sender.take(number, time)
        entry = self._users.get(name)
        if entry is not None and entry.senders.get(key) is sender:
            entry.senders.move_to_end(key)
        else:  # forgotten since ``look``, with what it had received before
            self._floor = max(self._floor, time)

    def requires(self, user: User) -> bool:
        """Whether the requests of a user are served only with a stamp."""
        required = self._required
        return user.username in required or ALL in required or (user.is_super and SUPER_USERS in required)

    def _before(self) -> str:
        """Why a request was made too early."""
        ahead = self._floor - self._clock.wall_ms()
        return BEFORE if ahead <= 0 else SET_BACK.format(seconds=ahead // 1000 + 1)

    def _check_time(self, time: int) -> None:
        difference = self._clock.wall_ms() - time
        if abs(difference) > self._window:
            seconds = max(round(abs(difference) / 1000), self._window // 1000 + 1)
            side = "behind" if difference > 0 else "ahead of"
            late = ", or the request was sent so late" if difference > 0 else ""
            raise _refusal(
                f"your clock is {seconds} s {side} the server's{late}: up to {self._window // 1000} s are accepted "
                "(authReplayWindowSeconds)."
            )

    def _add(self, username: str, key: bytes, sender: Sender) -> None:
        self._collect()
        if self.senders >= self._most:
            # The user who has most: another one's many clients do not shorten the memory of this one.
            max(self._users.values(), key=lambda entry: len(entry.senders)).forget()
            self.senders -= 1
        entry = self._users.get(username)
        if entry is None:
            entry = self._users[username] = _UserSenders()
        entry.senders[key] = sender
        self.senders += 1

    def _collect(self) -> None:
        """Forget some senders whose requests are all too old, those of one user after the other."""
        if not self._users:
            return
        username, entry = next(iter(self._users.items()))
        oldest = self._clock.wall_ms() - self._window
        for _ in range(_AT_ONCE):
            if not entry.senders or next(iter(entry.senders.values())).last >= oldest:
                break
            entry.forget()
            self.senders -= 1
        if entry.senders or entry.floor >= oldest:
            self._users.move_to_end(username)
        else:
            # Nothing from before the window is served anyway, unless this clock is set back: then this one refuses it.
            self._floor = max(self._floor, entry.floor)
            del self._users[username]


def _refusal(text: str) -> ReplayError:
    return ReplayError(ResponseCode.NO_PERMISSION, text)
