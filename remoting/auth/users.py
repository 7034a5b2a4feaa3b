"""Users and policies of a server, with what checks its requests; and the user that signs what it sends itself."""

from dataclasses import dataclass
from pathlib import Path

from trimq.protocol.auth.model import User
from trimq.remoting.auth.access import Access
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.authenticator import Authenticator
from trimq.remoting.auth.authorizer import Authorizer
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.replay_guard import ReplayGuard
from trimq.remoting.auth.secrets import Secrets, read_key_file
from trimq.remoting.client.credentials import Credentials
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.runtime.log_budget import LogBudget


class AccessError(Exception):
    """A server cannot start with this configuration of users. The text has no secret in it, and says what to do."""


@dataclass(frozen=True, slots=True)
class Users:
    """Users and policies of a server that asks for them, and what checks requests."""

    store: AuthStore
    access: Access


def users_of(config: AuthConfig, cluster: str, store: AuthStore, clock: Clock, inner_user: str = "") -> Users:
    """``store`` with what checks requests. Policies of clusters are compared with ``cluster``.

    ``inner_user``: see Access.
    """
    guard = ReplayGuard(clock, window_seconds=config.auth_replay_window_seconds, required=config.replay_protected)
    access = Access(
        config=config,
        cluster=cluster,
        store=store,
        authenticator=Authenticator(store, clock, replay_guard=guard),
        authorizer=Authorizer(store),
        log_budget=LogBudget(clock),
        inner_user=inner_user,
    )
    return Users(store, access)


def secrets_of(config: AuthConfig) -> Secrets:
    """How passwords are stored, with the keys of authKeyFile. Blocks. Raises SecretsError."""
    keys = None if config.auth_key_file is None else read_key_file(Path(config.auth_key_file))
    return Secrets(keys, allow_clear=config.allow_secrets_in_clear)


def inner_user_of(config: AuthConfig) -> User | None:
    """The user that signs the server's own requests; None: they are not signed. Blocks. Raises AccessError."""
    try:
        return config.inner_user()
    except ValueError as error:
        raise AccessError(f"innerClientAuthenticationCredentialsFile: expected {error}") from None


def credentials_of(user: User | None) -> Credentials | None:
    """What signs the requests of ``user``; None: they are not signed."""
    return None if user is None else Credentials(user.username, user.password)
