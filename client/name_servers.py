"""Asking name servers: one is asked as long as it answers, the next in turn when it does not."""

import os
import random
from collections.abc import Awaitable, Callable, Iterable

from trimq.client.errors import PerhapsStoredError, RocketMQError, UnreachableError, UsageError
from trimq.protocol.command import RemotingCommand

NO_NAME_SERVER = "no name server: give namesrv='host:port', or set NAMESRV_ADDR"

Invoke = Callable[[str, RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request to an address and gives its reply; raises RocketMQError where none comes."""


def parse_addresses(namesrv: str | Iterable[str] | None, *, needed: bool = True) -> list[str]:
    """``host:port`` of each name server; None takes the environment's NAMESRV_ADDR.

    Raises UsageError for what is no address, and for none at all unless it can do without (``needed``).

    >>> parse_addresses("127.0.0.1:9876; 127.0.0.2")
    ['127.0.0.1:9876', '127.0.0.2:9876']
    """
    if namesrv is None:
        namesrv = os.environ.get("NAMESRV_ADDR", "")
    parts = namesrv.replace(",", ";").split(";") if isinstance(namesrv, str) else list(namesrv)
    found = [part.strip().removeprefix("http://") for part in parts if part.strip()]
    if needed and not found:
        raise UsageError(NO_NAME_SERVER)
    addresses = []
    for address in found:
        host, colon, port = address.rpartition(":")
        if not colon or address.endswith("]"):
            address = f"{address}:9876"  # noqa: PLW2901 - the default port is part of the address
        elif not host or not port.isdigit():
            raise UsageError(f"the name server address {address!r} is not of the form host:port")
        addresses.append(address)
    return addresses


class NameServers:
    """The name servers of a client; starts with one by chance, so that many clients spread over them.

    ``note`` learns of one that does not answer.
    """

    def __init__(self, addresses: list[str], invoke: Invoke, note: Callable[[str, RocketMQError], None]) -> None:
        self.addresses = addresses
        self._invoke = invoke
        self._note = note
        self._at = random.randrange(max(1, len(addresses)))  # noqa: S311 - spreads load

    async def ask(self, command: RemotingCommand, *, but: int | None = None) -> RemotingCommand:
        """The first reply that any of them gives, whatever its code; one with the code ``but`` only where all say so.

        Raises UnreachableError, with each one's reason, where none answers, and UsageError where none was given.
        """
        if not self.addresses:
            raise UsageError(NO_NAME_SERVER)
        reasons = []
        answer: RemotingCommand | None = None
        began = self._at
        for number in range(len(self.addresses)):
            at = (began + number) % len(self.addresses)
            address = self.addresses[at]
            try:
                reply = await self._invoke(address, command)
            except (UnreachableError, PerhapsStoredError) as error:
                reasons.append(str(error))
                self._note("a name server", error)
                continue
            if answer is None or reply.code != but:
                self._at = at
                answer = reply
            if reply.code != but:
                break
        if answer is None:
            raise UnreachableError("no name server answers: " + "; ".join(reasons))
        return answer
