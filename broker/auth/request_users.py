"""RequestUsers: the feature of the gate that remembers which user has sent a request of request-reply messaging.

Its reply names a client id, which every client chooses for itself. So the user decides which connection with that id
gets the reply. Fast paths leave requests to the full path; all other messages stay with them.

The broker that a request was sent to knows its user. Where it does not (after a restart or a failover, after SECONDS,
or because the reply was sent to another broker), see ProducerManager.find_of_user.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

from trimq.protocol.batch import BatchError, split_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.property_names import PROPERTY_CORRELATION_ID, PROPERTY_REPLY_TO_CLIENT
from trimq.protocol.property_text import VALUE_END, decode_properties
from trimq.protocol.record import MAX_PROPERTIES
from trimq.protocol.topic_rules import RETRY_PREFIX
from trimq.remoting.auth.permit import Permit
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Sees

SECONDS: Final = 300.0
"""How long a request is remembered, whatever its TTL: a reply that comes too late is not for others either."""
MOST: Final = 1 << 16
"""Requests that are remembered. Over it the user who has most loses the oldest."""
MOST_OF_USER: Final = 1 << 14
"""Those of one user. Over it the user loses the oldest one."""

_IDS: Final = (PROPERTY_REPLY_TO_CLIENT, PROPERTY_CORRELATION_ID)
_NAME: Final = PROPERTY_REPLY_TO_CLIENT.encode()
_SENDS: Final = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})


class RequestUsers:
    """Users by client id and correlation id of their requests, with the feature for the gate.

    The first user of a correlation id keeps it: who reads a request cannot take its reply. Clients use random ids, so
    other users do not know them before.
    """

    def __init__(self, permit: Permit, clock: Clock) -> None:
        """``permit`` names the users of requests that were let through: the feature has to come behind it."""
        self._permit = permit
        self._clock = clock
        self._users: dict[bytes, str] = {}
        self._of: dict[str, OrderedDict[bytes, float]] = {}
        """The requests of each user, the oldest first, with the time at which they end."""
        # The ends of transactions carry no properties. They are served together with sends only if the same features
        # have to see both.
        codes = _SENDS | {RequestCode.END_TRANSACTION}
        self.feature = Feature(
            "request_users", self.check, Sees.PROPERTIES, codes, properties=frozenset({PROPERTY_REPLY_TO_CLIENT})
        )

    def __len__(self) -> int:
        """How many requests are remembered, those included that have ended since the last change."""
        return len(self._users)

    def check(self, _connection: Connection, command: RemotingCommand) -> None:
        """Remember the requests in a send. Raises RemotingError if its header cannot be read."""
        if command.code not in _SENDS:
            return
        user = ""
        for client_id, correlation_id in _requests(command):
            user = user or self._permit.user_name(command)
            if not user:  # sends need no signature
                return
            self.remember(client_id, correlation_id, user)

    def remember(self, client_id: str, correlation_id: str, user: str) -> None:
        """``user`` has sent a request, unless a user is known already who has sent one with these two ids."""
        key, now = _key(client_id, correlation_id), self._clock.monotonic()
        if self._current(key, now) is not None:
            return
        self._end(user, now)
        own = self._of.get(user)
        if own is not None and len(own) >= MOST_OF_USER:
            self._forget_oldest(user)
        elif len(self._users) >= MOST:
            for other in list(self._of):
                self._end(other, now)
            if len(self._users) >= MOST:
                self._forget_oldest(max(self._of, key=lambda name: len(self._of[name])))
        self._users[key] = user
        self._of.setdefault(user, OrderedDict())[key] = now + SECONDS

    def user_of(self, client_id: str, correlation_id: str) -> str | None:
        """The user who has sent this request; None if it is not known."""
        return self._current(_key(client_id, correlation_id), self._clock.monotonic())

    def _current(self, key: bytes, now: float) -> str | None:
        user = self._users.get(key)
        if user is not None:
            self._end(user, now)
        return self._users.get(key)

    def _end(self, user: str, now: float) -> None:
        """Forget the requests of a user whose time has ended."""
        own = self._of.get(user)
        while own and next(iter(own.values())) <= now:
            self._forget_oldest(user)

    def _forget_oldest(self, user: str) -> None:
        own = self._of[user]
        key, _ = own.popitem(last=False)
        del self._users[key]
        if not own:
            del self._of[user]


def _key(client_id: str, correlation_id: str) -> bytes:
    """Of one length: ids may have 32 KiB. No value of a property contains the separator."""
    text = f"{client_id}{VALUE_END}{correlation_id}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _requests(command: RemotingCommand) -> Iterator[tuple[str, str]]:
    """The client id and correlation id of each request in a send; none of some sends that the handler will refuse."""
    if command.code == RequestCode.SEND_MESSAGE:
        header: SendMessageRequestHeader | SendMessageRequestHeaderV2 = command.header(SendMessageRequestHeader)
    else:
        header = command.header(SendMessageRequestHeaderV2)
    if header.topic.startswith(RETRY_PREFIX):
        return  # a consumer sends the request of another user again
    if header.batch:
        texts = _texts_in(command)
    elif header.properties and len(header.properties) <= MAX_PROPERTIES:
        texts = iter((header.properties,))
    else:
        return
    for text in texts:
        if PROPERTY_REPLY_TO_CLIENT in text:
            properties = decode_properties(text)
            client_id, correlation_id = (properties.get(name, "") for name in _IDS)
            if client_id and correlation_id:
                yield client_id, correlation_id


def _texts_in(command: RemotingCommand) -> Iterator[str]:
    """The properties of the messages of a batch: no client makes requests in batches, but a consumer would reply."""
    if _NAME not in bytes(command.body):
        return
    try:
        columns = split_batch(command.body)
    except BatchError:
        return
    for raw in columns.properties:
        yield raw.decode("utf-8", "replace")
