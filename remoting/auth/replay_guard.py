"""ReplayGuard: serves a stamped request once, only with the code that it was made for, and only while it is new.

A table of single requests would grow with their rate: 20,000 in a second are 6,000,000 within five minutes. So it has
an entry for each sender instead: the highest number seen, and which of the 1024 numbers before it. The guard forgets a
sender when all his requests are too old. If there is no space, it forgets the one that was silent longest, of the user
who has most, and from then on refuses this user's requests that are not newer than those of the forgotten one. The
same holds for the start of the process, which knows nothing of earlier requests. So no request is served twice,
whatever the clocks do: what is forgotten is refused.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from trimq.protocol.auth.model import User
from trimq.protocol.auth.stamp import is_stamped, read_stamp
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
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


class ReplayError(RemotingError):
    """The request may be a recorded one."""


class _Sender:
    """``seen`` has bit n if the request with the number ``highest`` - n was received; ``last`` is the newest time."""

    __slots__ = ("highest", "last", "seen")

    def __init__(self, highest: int, last: int) -> None:
        self.highest = highest
        self.last = last
        self.seen = 1


class _UserSenders:
    """A user's senders, the one that was silent longest first. Nothing up to the time ``floor`` is served."""

    __slots__ = ("floor", "senders")

    def __init__(self) -> None:
        self.floor = 0
        self.senders: OrderedDict[bytes, _Sender] = OrderedDict()

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
            raise ReplayError(ResponseCode.SYSTEM_BUSY, BEFORE)
        sender = None if entry is None else entry.senders.get(stamp.sender)
        if entry is None or sender is None:
            self._add(user.username, stamp.sender, _Sender(stamp.number, stamp.time))
            return
        ahead = stamp.number - sender.highest
        if ahead > 0:
            sender.seen = (sender.seen << ahead | 1) & _SEEN if ahead < REMEMBERED else 1
            sender.highest = stamp.number
        elif -ahead >= REMEMBERED or sender.seen >> -ahead & 1:
            raise _refusal(AGAIN)
        else:
            sender.seen |= 1 << -ahead
        sender.last = max(sender.last, stamp.time)
        entry.senders.move_to_end(stamp.sender)

    def requires(self, user: User) -> bool:
        """Whether the requests of a user are served only with a stamp."""
        required = self._required
        return user.username in required or ALL in required or (user.is_super and SUPER_USERS in required)

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

    def _add(self, username: str, key: bytes, sender: _Sender) -> None:
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
