"""Who a request is from: the user whose signature it has, and whether it may be a recorded one.

An unknown user and a wrong signature get the same text after the same work, so that names cannot be tried. After too
many wrong signatures with a name from an address, requests with that name from there are refused for the rest of a
minute without a look at them. Other users of the address, behind a router that translates addresses, are served.
"""

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from trimq.protocol.auth.model import MOST_NAME_BYTES, User, refused
from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, content, is_same, mac_of, secret_bytes
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.replay_guard import ReplayGuard
from trimq.remoting.runtime.address_key import address_key
from trimq.remoting.runtime.clock import Clock

FAILURES_PER_MINUTE: Final = 300
MOST_ADDRESSES: Final = 10_000
MOST_NAMES: Final = 100
"""Names of an address that are counted each for itself. Any further ones count together."""
MOST_COUNTS: Final = 50_000
"""Names of all addresses, about 20 MB: one client can have 10,000 networks of IPv6."""

NO_USERNAME: Final = "username cannot be null."
WRONG_SIGNATURE: Final = "check signature failed."


class Authenticator:
    """Checks signatures. ``failures`` counts requests that were refused, ``limited`` those of them without a look."""

    def __init__(
        self,
        store: AuthStore,
        clock: Clock,
        *,
        replay_guard: ReplayGuard | None = None,
        failures_per_minute: int = FAILURES_PER_MINUTE,
        most_addresses: int = MOST_ADDRESSES,
    ) -> None:
        self.failures = 0
        self.limited = 0
        self.replay_guard = replay_guard or ReplayGuard(clock)
        self._store = store
        self._limit = _FailureLimit(clock, failures_per_minute, most_addresses)
        self._generation = -1
        self._macs: dict[str, tuple[User, Any]] = {}
        self._no_user = mac_of(os.urandom(16))

    def verify(
        self, fields: Mapping[str, str], body: bytes | bytearray | memoryview, version: int, address: str, code: int
    ) -> User:
        """The user who has signed a request, which is to be served: the same one is not accepted again.

        ``fields``: all its ext fields as text; ``body``: as sent; ``version`` and ``code``: of its header; ``address``:
        where it comes from, without the port. Raises RemotingError(NO_PERMISSION), of which ReplayError is about a
        request that may be a recorded one; that also with SYSTEM_BUSY.
        """
        name = fields.get(ACCESS_KEY)
        if not name:
            raise self._failed(NO_USERNAME)
        limit = self._limit
        if limit.addresses and limit.is_over(address, name):
            self.limited += 1
            raise self._failed(
                f"too many requests with this user's name and a wrong signature came from {address}: all such are "
                "refused for up to a minute."
            )
        user, kept = self._mac(name)
        mac = kept.copy()
        signed = content(fields, body, version)
        mac.update(signed)
        if not is_same(fields.get(SIGNATURE), mac.digest()) or user is None:
            limit.failed(address, name)
            raise self._failed(WRONG_SIGNATURE)
        # After the signature: only who has the secret learns that there is such a user.
        if not user.is_enabled:
            raise self._failed(f"User:{name} is disabled.")
        self.replay_guard.check(user, code, signed)
        return user

    @property
    def has_failures(self) -> bool:
        """Whether there are addresses with wrong signatures. Without one, none is limited."""
        return bool(self._limit.addresses)

    def is_limited(self, address: str) -> bool:
        """Whether requests of some user are refused from there without a look: too many had a wrong signature."""
        limit = self._limit
        return bool(limit.addresses) and limit.is_over(address, None)

    def _failed(self, text: str) -> RemotingError:
        self.failures += 1
        return refused(text)

    def _mac(self, name: str) -> tuple[User | None, Any]:
        """The user, and an HMAC with his secret, which is copied for each request: that costs half as much."""
        store = self._store
        if self._generation != store.generation:
            self._macs.clear()
            self._generation = store.generation
        found = self._macs.get(name)
        if found is None:
            user = store.user(name)
            if user is None:
                return None, self._no_user
            found = self._macs[name] = user, mac_of(secret_bytes(user.password))
        return found


class _Failures:
    """Wrong signatures from one address in its current minute, by the name in the request."""

    __slots__ = ("began", "counts", "most")

    def __init__(self, began: float) -> None:
        self.began = began
        self.counts: dict[str, int] = {}
        self.most = 0


class _FailureLimit:
    """The failures of the addresses that failed last. Names count whether such a user exists or not."""

    def __init__(self, clock: Clock, per_minute: int, most_addresses: int) -> None:
        self.addresses: OrderedDict[str, _Failures] = OrderedDict()
        self.counts = 0
        self._clock = clock
        self._per_minute = per_minute
        self._most = most_addresses

    def is_over(self, address: str, name: str | None) -> bool:
        """Whether requests with ``name`` are not looked at from there; with None: whether there is such a name."""
        address = address_key(address)
        found = self.addresses.get(address)
        if found is None:
            return False
        if self._clock.monotonic() - found.began >= 60:
            del self.addresses[address]
            self.counts -= len(found.counts)
            return False
        count = found.most if name is None else found.counts.get(_counted(found.counts, name), 0)
        if count < self._per_minute:
            return False
        self.addresses.move_to_end(address)  # others, of which each fails once, do not drive it out
        return True

    def failed(self, address: str, name: str) -> None:
        """A signature from there was wrong."""
        address = address_key(address)
        found = self.addresses.pop(address, None) or _Failures(self._clock.monotonic())
        self.addresses[address] = found
        name = _counted(found.counts, name)
        self.counts += name not in found.counts
        count = found.counts[name] = found.counts.get(name, 0) + 1
        found.most = max(found.most, count)
        if len(self.addresses) > self._most or self.counts > MOST_COUNTS:
            _, oldest = self.addresses.popitem(last=False)
            self.counts -= len(oldest.counts)


def _counted(counts: dict[str, int], name: str) -> str:
    """The name that a failure counts for; empty for those that count together."""
    return name if name in counts or (len(counts) < MOST_NAMES and len(name) <= MOST_NAME_BYTES) else ""
