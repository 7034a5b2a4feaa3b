"""Access: the feature of the gate that lets a request through only if its user may do what it asks for.

It sees every request, codes without a handler too; fast paths serve only what FastAccess lets through. Each request
stands for itself: its signature is checked, whatever the connection has sent before. The order is authentication,
recorded requests, administration on plain connections, authorization; only then is a body read.

Source: RocketMQ's AuthenticationPipeline and AuthorizationPipeline.
"""

from collections import Counter
from typing import Any, Final

import structlog

from trimq.protocol.auth.model import Action, User
from trimq.protocol.auth.permissions import ADMINISTRATION, is_calling_election, needs
from trimq.protocol.auth.rules import on_group, on_topic
from trimq.protocol.auth.signature import ACCESS_KEY, content
from trimq.protocol.auth.stamp import is_stamped
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.record import RecordError
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import NO_USERNAME, Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.fast_access import FastAccess
from trimq.remoting.auth.permit import ASKED_LATER, topic_of
from trimq.remoting.auth.replay_guard import ReplayError
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature, Sees

_log = structlog.get_logger("access")

PLAIN: Final = (
    "requests of administrators are served on TLS connections only: connect with TLS, or set allowAdminOverPlain=true"
)

MOST_FIELDS_BYTES: Final = 256 * 1024
MOST_FIELDS: Final = 1024
"""Of the ext fields of a request, in JSON. The properties of a message, the longest field, take 192 KiB at most."""

LARGE: Final = (
    f"the ext fields of a request may take {MOST_FIELDS_BYTES} bytes, and be {MOST_FIELDS}, while authentication is on"
)

_KEEPS_FIELDS: Final = ASKED_LATER | {RequestCode.HEART_BEAT}
"""Their handlers may ask for the user after the receive buffer, of which a raw header is a view, holds the requests of
others: so they keep the decoded fields."""


class Access:
    """Checks requests. ``refused`` counts refusals by reason: authentication, replay, plain, authorization."""

    def __init__(
        self,
        *,
        config: AuthConfig,
        cluster: str,
        store: AuthStore,
        authenticator: Authenticator,
        authorizer: Authorizer,
        log_budget: LogBudget,
        inner_user: str = "",
    ) -> None:
        """``cluster`` is the name of the own cluster, which policies of clusters are compared with.

        ``inner_user``: the user of the servers' own requests; with it brokers hand over on plain connections too.
        """
        self.authorizes = config.authorization_enabled
        self.refused: Counter[str] = Counter(authentication=0, replay=0, plain=0, authorization=0)
        self._cluster = cluster
        self._inner_user = inner_user
        self._store = store
        self._authenticator = authenticator
        self.replay_guard = authenticator.replay_guard
        self._authorizer = authorizer
        self._log_budget = log_budget
        self._unsigned = config.whitelisted
        self._needless = config.needless
        self._administration = frozenset() if config.allow_admin_over_plain else ADMINISTRATION
        self._fast = FastAccess(
            store=store,
            authenticator=authenticator,
            authorizer=authorizer if self.authorizes else None,
            unsigned=self._unsigned,
            needless=self._needless,
            administration=self._administration,
        )
        self.feature = Feature("access", self.check, sees=Sees.FRAME, verifier=self._fast)

    def check(self, connection: Connection, command: RemotingCommand) -> None:
        """Let a request through, or raise RemotingError(NO_PERMISSION); SYSTEM_BUSY as ReplayGuard does."""
        code = command.code
        if code in self._unsigned:
            return
        try:
            fields = _fields(command)
            user = self._authenticator.verify(fields, command.body, command.version, connection.peer[0], code)
        except ReplayError as error:
            raise self._refused(connection, command, "replay", error) from None
        except RemotingError as error:
            raise self._refused(connection, command, "authentication", error) from None
        self._fast.known(user)
        if code in _KEEPS_FIELDS:
            command.ext = fields
        if (
            code in self._administration
            and not is_encrypted(connection)
            and not is_calling_election(command)
            and not self._is_handing_over(user, command, fields)
        ):
            raise self._refused(connection, command, "plain", RemotingError(ResponseCode.NO_PERMISSION, PLAIN))
        # A Super may do everything: codes without an entry, and requests whose resources cannot be read, too.
        if not self.authorizes or user.is_super or code in self._needless:
            return
        try:
            self._authorizer.check(user.username, needs(command, self._cluster), connection.peer[0])
        except RemotingError as error:
            raise self._refused(connection, command, "authorization", error) from None

    def _is_handing_over(self, user: User, command: RemotingCommand, fields: dict[str, str]) -> bool:
        """Whether a master that stops hands over: 1002 of the brokers' own user, with a stamp.

        So it cannot be sent again; and what it does, another member as the master, who can hold requests back can do
        without it, by cutting the master off from the controllers.
        """
        return (
            command.code == RequestCode.CONTROLLER_ELECT_MASTER
            and bool(self._inner_user)
            and user.username == self._inner_user
            and is_stamped(content(fields, command.body, command.version))
        )

    def require_topic(
        self, connection: Connection, command: RemotingCommand, topic: str, actions: tuple[Action, ...]
    ) -> None:
        """The same for a topic that only the handler knows: that of a record, or one in which a group has offsets.

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
            self._authorizer.check(user.username, [on_topic(topic, actions)], connection.peer[0])
        except RemotingError as error:
            raise self._refused(connection, command, "authorization", error) from None

    def require_record(
        self, connection: Connection, command: RemotingCommand, record: Any, actions: tuple[Action, ...]
    ) -> None:
        """The same for the topic of a record. Raises RemotingError(NO_PERMISSION) also for one that is damaged."""
        if not self.authorizes:
            return
        try:
            topic = topic_of(record)
        except RecordError:
            topic = ""
        self.require_topic(connection, command, topic, actions)

    def may_on_group(
        self, connection: Connection, command: RemotingCommand, group: str, actions: tuple[Action, ...]
    ) -> bool:
        """Whether the user of a request that was let through may do one of ``actions`` to a consumer group."""
        if not self.checks_records(command):
            return True
        user = self.user(command)
        if user is None or not user.is_enabled:
            return False
        resource, needed = on_group(group, actions)
        return self._authorizer.verdict(user.username, resource, needed, connection.peer[0]).allowed

    def checks_records(self, command: RemotingCommand) -> bool:
        """Whether ``require_record`` may refuse a record: false for a Super, and for codes that need no permission."""
        if not self.authorizes or command.code in self._needless or command.code in self._unsigned:
            return False
        user = self.user(command)
        return user is None or not user.is_super

    def user(self, command: RemotingCommand) -> User | None:
        """The user who has signed a request that was let through; None if the user does not exist any more.

        None also for the codes that need no signature: the name in such a request is a mere claim.
        """
        name = self.user_name(command)
        return self._store.user(name) if name else None

    def user_name(self, command: RemotingCommand) -> str:
        """The name of the user who has signed a request that was let through; empty if the code needs no signature."""
        return "" if command.code in self._unsigned else _named(command)

    def may(self, connection: Connection, user_name: str, topic: str, actions: tuple[Action, ...]) -> bool:
        """Whether this user, who has signed a heartbeat, may now do one of ``actions`` to ``topic``.

        Without a name, which is so while heartbeats need no signature: whatever a heartbeat asks for.
        """
        if not user_name:
            return RequestCode.HEART_BEAT in self._unsigned
        user = self._store.user(user_name)
        if user is None or not user.is_enabled:
            return False
        if user.is_super or not self.authorizes or RequestCode.HEART_BEAT in self._needless:
            return True
        resource, needed = on_topic(topic, actions)
        return self._authorizer.verdict(user_name, resource, needed, connection.peer[0]).allowed

    def _refused(
        self, connection: Connection, command: RemotingCommand, reason: str, error: RemotingError
    ) -> RemotingError:
        """Count and log a refusal. The line has none of the header's other fields: a signature is among them."""
        self.refused[reason] += 1
        if self._log_budget.allows():
            name = _named(command)
            _log.info(
                "access_refused",
                user=name if self._store.user(name) else "unknown",  # what is no name may be a misplaced secret
                code=command.code,
                peer=connection.peer_text,
                reason=reason,
                text=error.remark[:1024],
            )
        return error


def is_encrypted(connection: Connection) -> bool:
    """Whether the connection is over TLS."""
    return connection.tls is not None


def _named(command: RemotingCommand) -> str:
    """The name that a request gives itself; empty if there is none."""
    try:
        return _decoded(command).get(ACCESS_KEY, "")
    except RemotingError:
        return ""


def _fields(command: RemotingCommand) -> dict[str, str]:
    fields = _decoded(command)
    if not fields.get(ACCESS_KEY):
        raise RemotingError(ResponseCode.NO_PERMISSION, NO_USERNAME)
    return fields


def _decoded(command: RemotingCommand) -> dict[str, str]:
    """The ext fields; empty if they are unreadable. Raises RemotingError(NO_PERMISSION) if there are too many.

    The sender is not known yet: a header as long as a frame would take seconds, in which nothing is served.
    """
    if command.ext_size > MOST_FIELDS_BYTES or len(command.ext or ()) > MOST_FIELDS:
        raise RemotingError(ResponseCode.NO_PERMISSION, LARGE)
    try:
        fields = command.ext_fields()
    except RemotingError:
        return {}
    if len(fields) > MOST_FIELDS:
        raise RemotingError(ResponseCode.NO_PERMISSION, LARGE)
    return fields
