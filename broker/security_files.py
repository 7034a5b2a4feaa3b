"""SecurityFiles: certificates, keys, users and secrets of a broker, which outlive its roles in controller mode."""

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog
import trio

from trimq.broker.auth.open_access import open_store, read_inner_user
from trimq.broker.config import AuthConfig, BrokerConfig, ReplicationConfig
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.auth.model import User
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import SecretsError, read_keys
from trimq.remoting.auth.users import Users, users_of
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.http.access_health import USERS_NOT_READ
from trimq.remoting.http.health import Reason
from trimq.remoting.http.tls_health import certificate_notes
from trimq.remoting.runtime.clock import Clock
from trimq.remoting.tls.config import TlsConfig
from trimq.remoting.tls.contexts import TlsContexts, client_of
from trimq.remoting.tls.key_files import KeyFileError

_log = structlog.get_logger(__name__)

HA_SECRET_NOT_READ: Final = "ha_secret_not_read"  # noqa: S105 - the name of an event
INNER_USER_NOT_READ: Final = "inner_user_not_read"

_T = TypeVar("_T")


class SecurityFiles:
    """What a broker reads from files of keys and users. Of a process, whatever role its broker has.

    The certificate is read once, and then whenever it changes (``run``); users and secrets are read for each role. A
    broker that is given another role must not end because a file cannot be used at that moment, and must not go on
    without what was in it either: it has what was read before. ``notes`` and the log say so.

    ``client_tls`` is for connections to other servers; None: they are plain.
    """

    def __init__(self, configuration: Configuration, disk: Disk, clock: Clock) -> None:
        self._configuration = configuration
        self._disk = disk
        self._clock = clock
        self._contexts: TlsContexts | None = None
        self.client_tls = client_of(self._tls)
        self._secret = _Kept[dict[bytes, bytes]](
            HA_SECRET_NOT_READ,
            "slaves and masters are proved with the keys of before",
            lambda reason: _log.warning("ha_secret_not_read", reason=reason),
        )
        self._inner_user = _Kept[User](
            INNER_USER_NOT_READ,
            "requests to other servers are signed as before",
            lambda reason: _log.warning("inner_user_not_read", reason=reason),
        )
        self._store = _Kept[AuthStore](
            USERS_NOT_READ,
            "users and policies are as they were before",
            lambda reason: _log.warning("access_users_not_read", reason=reason),
        )

    @property
    def contexts(self) -> TlsContexts:
        """The TLS of the ports. Valid after ``open``."""
        assert self._contexts is not None
        return self._contexts

    async def open(self) -> None:
        """Read the certificate. Raises StartError."""
        try:
            self._contexts = await trio.to_thread.run_sync(TlsContexts, self._tls, _log)
        except KeyFileError as error:
            raise StartError(f"tls.server.{error.part}: {error}") from error

    async def run(self) -> None:
        """Follow changes of the certificate until cancelled."""
        await self.contexts.run(self._clock)

    async def ha_keys(self) -> dict[bytes, bytes]:
        """The keys of haSecretFile; none if it is not configured. Raises StartError."""
        file = self._configuration.section(ReplicationConfig).ha_secret_file
        return {} if file is None else await self._secret.read(partial(_read_ha_keys, Path(file)))

    async def inner_user(self) -> User | None:
        """The user that signs the broker's own requests; None: they are not signed. Raises StartError."""
        config = self._configuration.section(AuthConfig)
        return await self._inner_user.read(partial(read_inner_user, config)) if config.has_inner_user else None

    async def users(self, inner: User | None) -> Users | None:
        """Users and policies, ``inner`` among them; None if authentication is off. Raises StartError."""
        config = self._configuration.section(AuthConfig)
        if not config.authentication_enabled:
            if config.migrate_auth_from_v1_enabled:
                _log.warning("auth_migration_off", text="migrateAuthFromV1Enabled needs authenticationEnabled=true")
            return None
        read = partial(open_store, self._configuration, self._disk, inner, had_users=self._store.is_known)
        store = await self._store.read(read)
        cluster = self._configuration.section(BrokerConfig).broker_cluster_name
        return users_of(config, cluster, store, self._clock)

    def notes(self) -> Iterator[Reason]:
        """For the health: a certificate that ends, and what is not what the files have."""
        if self._contexts is not None:
            yield from certificate_notes(self._contexts, self._clock, self._tls.tls_certificate_warning_days)
        for kept in (self._secret, self._inner_user, self._store):
            yield from kept.notes()

    @property
    def _tls(self) -> TlsConfig:
        return self._configuration.section(TlsConfig)


class _Kept(Generic[_T]):
    """What was read for a role, for the next one."""

    def __init__(self, code: str, effect: str, warn: Callable[[str], None]) -> None:
        """``code`` and ``effect``: of the note, if something cannot be read. ``warn`` logs the reason."""
        self._code = code
        self._effect = effect
        self._warn = warn
        self._value: _T | None = None
        self._failure = ""

    @property
    def is_known(self) -> bool:
        """Whether it has been read."""
        return self._value is not None

    async def read(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """What ``read`` returns, or has returned before if it fails now. Raises StartError if it has not yet."""
        try:
            self._value = await read()
            self._failure = ""
        except StartError as error:
            if self._value is None:
                raise
            self._failure = str(error)
            self._warn(self._failure)
        return self._value

    def notes(self) -> Iterator[Reason]:
        if self._failure:
            yield Reason(self._code, f"{self._effect}; a restart would fail while this is so: {self._failure}")


async def _read_ha_keys(path: Path) -> dict[bytes, bytes]:
    try:
        return await trio.to_thread.run_sync(read_keys, path, b"ha", "haSecretFile")
    except SecretsError as error:
        raise StartError(str(error)) from None
