"""NameServers: requests to the name servers, always to the same one until it does not answer, then to the next."""

import os
import random
from collections.abc import Awaitable, Callable, Iterable

from trimq.client.errors import PerhapsStoredError, RocketMQError, UnreachableError, UsageError
from trimq.protocol.command import RemotingCommand

NO_NAME_SERVER = "no name server: give namesrv='host:port', or set NAMESRV_ADDR"

Invoke = Callable[[str, RemotingCommand], Awaitable[RemotingCommand]]
"""Sends a request to an address and returns the reply; raises RocketMQError if none comes."""


def parse_addresses(namesrv: str | Iterable[str] | None, *, needed: bool = True) -> list[str]:
    """``host:port`` of each name server; None takes the environment variable NAMESRV_ADDR. The default port is 9876.

    Raises UsageError for an invalid address, and if there is none although one is ``needed``.

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
    """The name servers of a client. Starts with a random one, so that the clients are spread over them.

    ``note`` is called with the error of each name server that does not answer.
    """

    def __init__(self, addresses: list[str], invoke: Invoke, note: Callable[[str, RocketMQError], None]) -> None:
        self.addresses = addresses
        self._invoke = invoke
        self._note = note
        self._at = random.randrange(max(1, len(addresses)))  # noqa: S311 - spreads load

    async def ask(self, command: RemotingCommand, *, but: int | None = None) -> RemotingCommand:
        """Sends a request to the name servers in turn and returns the first reply, whatever its code.

        A reply with the code ``but`` is returned only if no other name server gives a different one: a name server that
        has just started does not know yet what the others know. Raises UnreachableError, with the reason of each, if
        none answers, and UsageError if there are no name servers.
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
