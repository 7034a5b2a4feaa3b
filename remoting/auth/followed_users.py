"""FollowedUsers: users and policies from a file that a broker writes, for name servers and controllers.

The file is read again when it or the key file has changed. One that cannot be used leaves what was read before, and is
read again at each look: a server must not refuse everything because a copy was interrupted. Nothing is written here.
"""

import os
import stat
from pathlib import Path

import structlog
import trio

from trimq.protocol.auth.auth_file import AUTH_FILE, MOST_READ_BYTES, AuthFileError
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError, Followed
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.followed_config import FollowedUsersConfig
from trimq.remoting.auth.secrets import Secrets, SecretsError
from trimq.remoting.auth.users import AccessError, Users, inner_user_of, secrets_of, users_of
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.private_file import problem_of_directory, problem_of_file
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger("access")

Sight = tuple[int, ...]
"""What differs when a file was replaced or changed."""


class FollowedFile:
    """An AuthFile (auth_store.py) that another server writes."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    @property
    def path(self) -> str:
        """Its name."""
        return str(self._directory / AUTH_FILE)

    async def read(self) -> bytes | None:
        """All bytes; None if there is no file. Raises OSError, AuthFileError."""
        try:
            return await trio.to_thread.run_sync(self.read_now)
        except FileNotFoundError:
            return None

    async def replace(self, _data: bytes) -> None:
        """Raise AuthFileError: it is written elsewhere."""
        raise AuthFileError("users and policies are changed at a broker")

    def read_now(self) -> bytes:
        """All bytes. Blocks. Raises OSError, and AuthFileError if others may read the file, or put another in place."""
        with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise AuthFileError("it is no file")
            directory = self._directory.stat()
            problem = problem_of_file(self.path, stat.S_IMODE(found.st_mode), found.st_uid) or problem_of_directory(
                str(self._directory), stat.S_IMODE(directory.st_mode), directory.st_uid
            )
            if problem:
                raise AuthFileError(problem)
            data = file.read(MOST_READ_BYTES + 1)
        if len(data) > MOST_READ_BYTES:
            raise AuthFileError(f"it has more than {MOST_READ_BYTES} bytes")
        return data


class FollowedUsers:
    """Users that follow a file. ``failure``: why the file of now is not used; empty if it is."""

    def __init__(self, config: AuthConfig, followed: FollowedUsersConfig, clock: Clock) -> None:
        """Read the file. Blocks. Raises AccessError: the server must not start without its users."""
        assert config.auth_config_path is not None  # see check_followed_users
        self._config = config
        self._clock = clock
        self._interval = followed.auth_reload_interval_millis / 1000
        self._file = FollowedFile(config.auth_config_path)
        self._store = AuthStore(self._file, Secrets())
        self.failure = ""
        self._seen = self._look()
        try:
            self._store.follow(self._read())
        except AuthStoreError as error:
            raise AccessError(f"authenticationEnabled=true, and there are no users: {error}") from None
        self.users: Users = users_of(config, followed.auth_cluster_name, self._store, clock, _inner_user(config))

    async def run(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await self._clock.sleep(self._interval)
            await self.refresh()

    async def refresh(self) -> None:
        """Look now, and read the file if it has changed, or could not be used when it was read last."""
        seen = await trio.to_thread.run_sync(self._look)
        # What was wrong may not be seen in the files: the mode of the directory, no file descriptor that was left.
        if seen == self._seen and not self.failure:
            return
        # Before it is read: a change in between is seen by the next look.
        self._seen = seen
        try:
            self._store.follow(await trio.to_thread.run_sync(self._read))
        except AuthStoreError as error:
            if self.failure != str(error):
                _log.warning("access_users_not_read", reason=str(error))
            self.failure = str(error)
        else:
            self.failure = ""
            _log.info("access_users_read", path=self._file.path, users=len(self._store.users))

    def _look(self) -> tuple[Sight, Sight]:
        return _sight(self._file.path), _sight(self._config.auth_key_file)

    def _read(self) -> Followed:
        """The file of now, with the keys of now. Blocks. Raises AuthStoreError."""
        try:
            return self._store.read_of(self._file.read_now(), secrets_of(self._config))
        except SecretsError as error:
            raise AuthStoreError(str(error)) from None
        except AuthFileError as error:
            raise AuthStoreError(f"{self._file.path} cannot be used: {error}") from None
        except OSError as error:
            raise AuthStoreError(f"{self._file.path} cannot be read: {error.strerror}") from None


def follow_users(configuration: Configuration, clock: Clock) -> FollowedUsers | None:
    """The users of a name server or controller; None if authentication is off. Blocks. Raises AccessError."""
    config = configuration.section(AuthConfig)
    if not config.authentication_enabled:
        return None
    return FollowedUsers(config, configuration.section(FollowedUsersConfig), clock)


def _inner_user(config: AuthConfig) -> str:
    """The name of the user of the servers' own requests; empty if there is none. Blocks. Raises AccessError."""
    user = inner_user_of(config)
    return "" if user is None else user.username


def _sight(path: str | None) -> Sight:
    """Of a file; empty if it cannot be seen. Blocks."""
    try:
        found = Path(path).stat() if path is not None else None
    except OSError:
        return ()
    return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev)
