"""Credentials: who sends a request. Servers recognize a user by an access key and a signature in each request.

The signature is a keyed hash of the values of the ext fields and of the body (``trimq.protocol.auth.signature``). It
proves that the sender knows the secret key, which itself is never sent.
"""

import hmac
import itertools
import secrets
from binascii import b2a_base64
from dataclasses import dataclass, field
from typing import Final

from trimq.protocol.auth.signature import ACCESS_KEY, SECURITY_TOKEN, SIGNATURE, content
from trimq.protocol.auth.stamp import STAMP, stamp_text
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import encode
from trimq.remoting.runtime.clock import Clock, SystemClock

_SENDER_BYTES: Final = 12
"""16 characters of base64."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's name (RocketMQ: access key) and password (secret key), as for ``mqadmin createUser``.

    ``security_token`` is sent and signed too, if given; brokers ignore it, services in front of them may want it.
    With ``replay_protection`` each request has a stamp (``trimq.protocol.auth.stamp``): TriMQ's servers serve it once,
    and only for some minutes, so the clock must be right; RocketMQ's ignore it.
    Neither the secret nor the token is in the ``repr``. Raises ValueError for a name or secret that is blank.

    >>> Credentials("orders-service", "a secret")
    Credentials(access_key='orders-service')
    """

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)
    replay_protection: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("access_key", "secret_key"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():  # the value is not shown: it may be the secret
                raise ValueError(f"{name} must be a text that is not blank")
        if self.security_token is not None and not isinstance(self.security_token, str):
            raise ValueError("security_token must be a text, or None")


class Signer:
    """Signs requests with ``credentials``. The connections of a RemotingClient share one.

    Every call makes another stamp, so what is sent again has to be signed anew. A server refuses requests that more
    than 1023 later ones of their signer have overtaken.

    >>> request = RemotingCommand.request(10, {"topic": "T"}, b"hello")
    >>> Signer(Credentials("me", "secret", replay_protection=False)).signed(request).ext
    {'topic': 'T', 'AccessKey': 'me', 'Signature': '3SaDmsF2LXN6CHc0EYq9ZbO6jQQ='}
    >>> request.ext
    {'topic': 'T'}
    """

    __slots__ = ("_clock", "_mac", "_numbers", "_own", "_sender", "credentials")

    def __init__(self, credentials: Credentials, clock: Clock | None = None) -> None:
        self.credentials: Final = credentials
        self._mac = hmac.new(credentials.secret_key.encode("utf-8", "replace"), digestmod="sha1")
        self._clock = clock or SystemClock()
        self._sender = secrets.token_urlsafe(_SENDER_BYTES)
        self._numbers = itertools.count(1)
        self._own = {ACCESS_KEY: credentials.access_key}
        if credentials.security_token is not None:
            self._own[SECURITY_TOKEN] = credentials.security_token

    def __repr__(self) -> str:
        return f"<Signer of {self.credentials.access_key}>"

    def fields(self, command: RemotingCommand) -> dict[str, str]:
        """The ext fields of a request that are signed: as text, with the access key, without a signature."""
        fields = command.ext_fields() | self._own
        fields.pop(SIGNATURE, None)  # of a request that was signed before, perhaps for another body
        if self.credentials.replay_protection:
            fields[STAMP] = self.stamp(command.code)
        return fields

    def stamp(self, code: int) -> str:
        """A new stamp for a request of ``code``."""
        return stamp_text(code, self._clock.wall_ms(), self._sender, next(self._numbers))

    def signed(self, command: RemotingCommand) -> RemotingCommand:
        """A signed copy of a request, which itself is not changed: a caller may change it, and send it again."""
        fields = self.fields(command)
        mac = self._mac.copy()
        mac.update(content(fields, command.body, command.version))
        fields[SIGNATURE] = signature_of(mac).decode()
        return RemotingCommand(
            command.code,
            command.opaque,
            command.flag,
            command.version,
            command.language,
            command.remark,
            ext=fields,
            body=command.body,
            encoding=command.encoding,
        )

    def encode(self, command: RemotingCommand) -> bytes:
        """The frame of a request, signed. Raises FrameError if it is too long."""
        return encode(self.signed(command))

    def begin(self, text: bytes) -> hmac.HMAC:
        """The hash of everything whose signed content begins with ``text``: to be copied and updated with the rest."""
        mac = self._mac.copy()
        mac.update(text)
        return mac


def signature_of(mac: hmac.HMAC) -> bytes:
    """The text of a signature: 28 characters of base64."""
    return b2a_base64(mac.digest(), newline=False)
