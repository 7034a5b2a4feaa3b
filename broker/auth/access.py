"""Access: the feature of the gate that lets a request through only if its user may do what it asks for.

It sees every request with all header fields, so while it is registered no fast path serves, and codes without a handler
are checked too. Each request stands for itself: its signature is checked, whatever the connection has sent before. The
order is authentication, administration on plain connections, authorization; only then is a body read.

Source: RocketMQ's AuthenticationPipeline and AuthorizationPipeline.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import structlog

from trimq.broker.auth.config import AuthConfig
from trimq.protocol.auth.model import Action, Resource, User
from trimq.protocol.auth.permissions import ADMINISTRATION, needs
from trimq.protocol.auth.rules import Need, on_topic
from trimq.protocol.auth.signature import ACCESS_KEY
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature

_log = structlog.get_logger("broker.auth")

NO_USERNAME: Final = "username cannot be null."
PLAIN: Final = (
    "requests of administrators are served on TLS connections only: connect with TLS, or set allowAdminOverPlain=true"
)


class Verifies(Protocol):
    """The part of the authenticator that is needed here."""

    def verify(self, fields: Mapping[str, str], body: bytes | memoryview, version: int, peer: str) -> User:
        """The user who has signed a request. Raises RemotingError(NO_PERMISSION)."""
        ...

    def user(self, username: str) -> User | None:
        """A user by name."""
        ...


class Authorizes(Protocol):
    """The part of the authorizer that is needed here."""

    def check(self, user: User, resource: Resource, actions: Sequence[Action], source_ip: str) -> None:
        """Raises RemotingError(NO_PERMISSION) unless the user's policies allow one of the actions."""
        ...


class Access:
    """Checks requests. ``refused`` counts refusals by reason: authentication, plain, authorization."""

    def __init__(
        self,
        *,
        config: AuthConfig,
        cluster: str,
        authenticator: Verifies,
        authorizer: Authorizes,
        log_budget: LogBudget,
    ) -> None:
        """``cluster`` is the name of the own cluster, which policies of clusters are compared with."""
        self.is_on = config.authentication_enabled
        self.authorizes = config.authorization_enabled
        self.refused: Counter[str] = Counter(authentication=0, plain=0, authorization=0)
        self._cluster = cluster
        self._authenticator = authenticator
        self._authorizer = authorizer
        self._log_budget = log_budget
        self._unsigned = config.whitelisted
        self._needless = config.needless
        self._administration = frozenset() if config.allow_admin_over_plain else ADMINISTRATION
        self.feature = Feature("access", self.check)

    def check(self, connection: Connection, command: RemotingCommand) -> None:
        """Let a request through, or raise RemotingError(NO_PERMISSION)."""
        code = command.code
        if code in self._unsigned:
            return
        try:
            fields = _fields(command)
            user = self._authenticator.verify(fields, command.body, command.version, connection.peer[0])
        except RemotingError as error:
            raise self._refused(connection, command, "authentication", error) from None
        if code in self._administration and not is_encrypted(connection):
            raise self._refused(connection, command, "plain", RemotingError(ResponseCode.NO_PERMISSION, PLAIN))
        # A Super may do everything: codes without an entry, and requests whose resources cannot be read, too.
        if not self.authorizes or user.is_super or code in self._needless:
            return
        try:
            self._require(connection, user, needs(command, self._cluster))
        except RemotingError as error:
            raise self._refused(connection, command, "authorization", error) from None

    def require_topic(
        self, connection: Connection, command: RemotingCommand, topic: str, actions: tuple[Action, ...]
    ) -> None:
        """The same for a topic that is known only after something was read: the record that an offset leads to.

        ``command`` has been let through, so its user is who he says. Raises RemotingError(NO_PERMISSION).
        """
        if not self.authorizes or command.code in self._needless or command.code in self._unsigned:
            return
        user = self.user(command)
        if user is None:
            deleted = RemotingError(ResponseCode.NO_PERMISSION, NO_USERNAME)
            raise self._refused(connection, command, "authorization", deleted)
        if user.is_super:
            return
        try:
            self._require(connection, user, [on_topic(topic, actions)])
        except RemotingError as error:
            raise self._refused(connection, command, "authorization", error) from None

    def user(self, command: RemotingCommand) -> User | None:
        """The user of a request that has been let through; None if it needed none, or the user does not exist now."""
        name = command.ext_fields().get(ACCESS_KEY)
        return self._authenticator.user(name) if self.is_on and name else None

    def _require(self, connection: Connection, user: User, needed: list[Need]) -> None:
        for resource, actions in needed:
            self._authorizer.check(user, resource, actions, connection.peer[0])

    def _refused(
        self, connection: Connection, command: RemotingCommand, reason: str, error: RemotingError
    ) -> RemotingError:
        """Count and log a refusal. The line has none of the header's other fields: a signature is among them."""
        self.refused[reason] += 1
        if self._log_budget.allows():
            _log.info(
                "access_refused",
                user=_named(command)[:255],
                code=command.code,
                peer=connection.peer_text,
                reason=reason,
                text=error.remark[:1024],
            )
        return error


def is_encrypted(connection: Connection) -> bool:
    """Whether the connection is over TLS."""
    return getattr(connection, "tls", None) is not None


def _named(command: RemotingCommand) -> str:
    """The name that a request gives itself; empty if there is none."""
    try:
        return command.ext_fields().get(ACCESS_KEY, "")
    except RemotingError:
        return ""


def _fields(command: RemotingCommand) -> dict[str, str]:
    try:
        fields = command.ext_fields()
    except RemotingError:
        fields = {}
    if not fields.get(ACCESS_KEY):
        raise RemotingError(ResponseCode.NO_PERMISSION, NO_USERNAME)
    return fields
