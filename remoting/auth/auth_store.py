"""Users and policies of a server: in memory for each request, in one file for the next start.

A change is written before it counts and before its caller continues: one that fails has changed nothing. Changes come
one after another. ``generation`` counts them, so that everything that was derived from users and policies can be seen
to be old. There is no second copy of the file (as ``.bak`` of other state): one that is read in place of a damaged file
would bring back users that were deleted. A damaged file refuses the start.

Texts and codes of errors are RocketMQ's (AuthenticationMetadataManagerImpl, AuthorizationMetadataManagerImpl). Rules
that RocketMQ does not have: one enabled Super remains; only a Super changes policies, Supers and the passwords of
others. Otherwise a user could give himself what he may not do.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import trio

from trimq.protocol.auth import auth_file
from trimq.protocol.auth.auth_file import AuthFileError, MissingKeyError
from trimq.protocol.auth.body import decode_acl, encode_acl
from trimq.protocol.auth.model import (
    Acl,
    PolicyType,
    Resource,
    User,
    UserChange,
    UserStatus,
    UserType,
    checked_policies,
    checked_secret,
    checked_username,
    refused,
    subject_of,
    username_of,
)
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.secrets import Secrets, SecretsError

MOST_USERS: Final = 10_000

_CREATED_BY: Final = "The super user can only be create by super user"
_MASTERS: Final = "the master's file of users"
_UPDATED_BY: Final = "The super user can only be update by super user"


class AuthStoreError(Exception):
    """Users and policies cannot be read or written. The text has no secret in it, and says what to do."""


class UnusableFileError(AuthStoreError):
    """A file that is as it was written cannot be used with this configuration: nor can it the next time."""


class AuthFile(Protocol):
    """Where the bytes are: a file that is replaced as a whole, and that only its owner may read."""

    @property
    def path(self) -> str:
        """Its name, for messages."""
        ...

    async def read(self) -> bytes | None:
        """All bytes; None if there is no file. Raises OSError, and AuthFileError if others may read or replace it."""
        ...

    async def replace(self, data: bytes) -> None:
        """Return when ``data`` is durable in place of the old bytes. Raises OSError: the old or the new are there."""
        ...


class Followed(NamedTuple):
    """Users and policies in a file, with their records. The keys of all tables are users' names."""

    secrets: Secrets
    version: int
    users: dict[str, User]
    acls: dict[str, Acl]
    user_records: dict[str, bytes]
    acl_records: dict[str, bytes]


class AuthStore:
    """The users and policies. Reading costs no wait; each change is one write of the whole file."""

    def __init__(self, file: AuthFile, secrets: Secrets) -> None:
        self.generation = 0
        self._file = file
        self._secrets = secrets
        self._version = 0
        self._users: dict[str, User] = {}
        self._acls: dict[str, Acl] = {}
        # The JSON of each record, so that a change encodes (and encrypts) one of them.
        self._user_records: dict[str, bytes] = {}
        self._acl_records: dict[str, bytes] = {}
        self._sealed: tuple[int, bytes, str] | None = None
        """Of a generation."""
        self.on_adopted: Callable[[], None] = lambda: None
        """Called when the users and policies of the master have been taken."""
        self._lock = trio.Lock()

    def __repr__(self) -> str:
        return f"AuthStore({self._file.path}, {len(self._users)} users)"

    # -- reading

    @property
    def users(self) -> Mapping[str, User]:
        """All users by name."""
        return MappingProxyType(self._users)

    @property
    def secrets_are_encrypted(self) -> bool:
        """Whether passwords are written encrypted."""
        return self._secrets.keys is not None

    def user(self, username: str) -> User | None:
        """The user of this name."""
        return self._users.get(username)

    def acl(self, username: str) -> Acl | None:
        """The policies of the user; None if there are none."""
        return self._acls.get(username)

    def list_users(self, text: str = "") -> list[User]:
        """The users with this text in their name, by name."""
        return [self._users[name] for name in sorted(self._users) if text in name]

    def get_acl(self, subject: str) -> Acl | None:
        """The policies of a subject; None if it has none. Raises RemotingError if there is no such user."""
        username = username_of(subject)
        if username not in self._users:
            raise refused("The subject is not exist.")
        return self._acls.get(username)

    def list_acls(self, subject_text: str = "", resource_text: str = "") -> list[Acl]:
        """Policies whose subject has the first text in it; of them, the entries whose resource has the second one."""
        found = [self._acls[name] for name in sorted(self._acls) if subject_text in subject_of(name)]
        return [kept for acl in found if (kept := acl.about(resource_text) if resource_text else acl) is not None]

    # -- the file

    async def load(self) -> int:
        """Read the file. Returns how many passwords were encrypted anew, with the first key.

        Raises AuthStoreError, and has changed nothing then: neither this object nor the file.
        """
        async with self._lock:
            tables = await self._read()
            if tables is None:
                return 0
            users, acls, user_records = self._decode(tables, self._secrets, self._file.path)
            old = [name for name, record in user_records.items() if not self._secrets.is_current(record["secret"])]
            records = {
                name: self._user_record(users[name]) if name in old else msgspec.json.encode(record)
                for name, record in user_records.items()
            }
            acl_records = {name: encode_acl(acl) for name, acl in acls.items()}
            self._version = tables.version
            keys = self._secrets.keys
            if old or tables.key_id != (None if keys is None else keys.first_id):
                try:
                    await self._write(records, acl_records)
                except (OSError, AuthFileError) as error:
                    raise AuthStoreError(f"{self._file.path} cannot be written: {_reason(error)}") from error
            self._take(users, acls, records, acl_records)
            return len(old)

    def sealed(self) -> tuple[bytes, str]:
        """The file as it is now, and its seal, if all secrets in it are encrypted. Raises AuthStoreError if not."""
        keys = self._secrets.keys
        if keys is None:
            raise AuthStoreError(
                "users leave this broker encrypted only: set authKeyFile to a file made with `mqstore authkey FILE`"
            )
        if self._sealed is None or self._sealed[0] != self.generation:
            try:
                data = auth_file.encode(self._version, self._user_records.values(), self._acl_records.values(), keys)
            except AuthFileError as error:  # the file of an earlier version
                raise AuthStoreError(str(error)) from None
            self._sealed = self.generation, data, auth_file.seal_of(data)
        return self._sealed[1:]

    def read_of(self, data: bytes, secrets: Secrets, origin: str = "", encrypted_only: bool = False) -> Followed:
        """What a file has that another server has written, for ``follow``. May be called in a thread: it takes time.

        ``origin``: for messages, if it is not this store's file. ``encrypted_only``: one in clear is refused, also if
        ``secrets`` may be in clear. Raises AuthStoreError: also for a file without users, which would refuse
        everything. UnusableFileError if its key is missing, or what it has cannot be used.
        """
        origin = origin or self._file.path
        try:
            tables = auth_file.decode(data, secrets.keys)
        except MissingKeyError as error:
            raise UnusableFileError(f"{origin} cannot be used: {error}") from None
        except AuthFileError as error:
            raise AuthStoreError(f"{origin} cannot be used: {error}") from None
        if encrypted_only and not tables.encrypted:
            raise AuthStoreError(f"{origin} cannot be used: its secrets are not encrypted")
        users, acls, records = self._decode(tables, secrets, origin)
        if not users:
            raise UnusableFileError(f"{origin} cannot be used: there are no users in it")
        user_records = {name: msgspec.json.encode(record) for name, record in records.items()}
        acl_records = {name: encode_acl(acl) for name, acl in acls.items()}
        return Followed(secrets, tables.version, users, acls, user_records, acl_records)

    def follow(self, followed: Followed) -> None:
        """Take these users and policies in place of all others. Nothing is written here."""
        self._secrets, self._version = followed.secrets, followed.version
        self._take(followed.users, followed.acls, followed.user_records, followed.acl_records)

    async def adopt(self, data: bytes) -> None:
        """Take the file of this broker's master in place of all users and policies, once it is on disk here.

        Only an encrypted one, which cannot be made without a key of this broker's key file. Raises AuthStoreError, and
        has changed nothing then; UnusableFileError if the same file can never be taken while this broker runs.
        """
        followed = await trio.to_thread.run_sync(self.read_of, data, self._secrets, _MASTERS, True)
        async with self._lock:
            try:
                # Shielded as in _write.
                with trio.CancelScope(shield=True):
                    await self._file.replace(data)
                    self.follow(followed)
            except OSError as error:
                raise AuthStoreError(f"{self._file.path} cannot be written: {_reason(error)}") from error
        self.on_adopted()

    async def _read(self) -> auth_file.AuthTables | None:
        try:
            data = await self._file.read()
            return None if data is None else auth_file.decode(data, self._secrets.keys)
        except AuthFileError as error:
            raise AuthStoreError(f"{self._file.path} cannot be used: {error}") from None
        except OSError as error:
            raise AuthStoreError(f"{self._file.path} cannot be read: {_reason(error)}") from error

    def _decode(
        self, tables: auth_file.AuthTables, secrets: Secrets, origin: str
    ) -> tuple[dict[str, User], dict[str, Acl], dict[str, dict[str, Any]]]:
        users: dict[str, User] = {}
        records: dict[str, dict[str, Any]] = {}
        # With a key, a file without its seal may come from an attacker.
        if secrets.keys is not None and not tables.encrypted and not secrets.may_be_clear:
            raise UnusableFileError(
                f"{origin} cannot be used: its secrets are in clear, and there is an authKeyFile: "
                "allowSecretsInClear=true for one start encrypts them"
            )
        try:
            for record in tables.users:
                user = _user_of(record, tables.encrypted, secrets)
                users[user.username], records[user.username] = user, record
            acls = {acl.username: acl for acl in map(_acl_of, tables.acls)}
        except SecretsError as error:
            raise UnusableFileError(f"{origin} cannot be used: {error}") from None
        except (RemotingError, KeyError, TypeError):
            raise UnusableFileError(f"{origin} cannot be used: a record in it is damaged") from None
        return users, acls, records

    def _user_record(self, user: User) -> bytes:
        return msgspec.json.encode(
            {
                "username": user.username,
                "userType": user.user_type.value,
                "userStatus": user.user_status.value,
                "secret": self._secrets.record(user.username, user.password),
            }
        )

    async def _write(self, user_records: dict[str, bytes], acl_records: dict[str, bytes]) -> None:
        data = auth_file.encode(self._version + 1, user_records.values(), acl_records.values(), self._secrets.keys)
        # Shielded: a caller that is cancelled must not leave a change that is on disk and not in memory.
        with trio.CancelScope(shield=True):
            await self._file.replace(data)
        self._version += 1

    def _take(
        self,
        users: dict[str, User],
        acls: dict[str, Acl],
        user_records: dict[str, bytes],
        acl_records: dict[str, bytes],
    ) -> None:
        self._users, self._acls = users, acls
        self._user_records, self._acl_records = user_records, acl_records
        self.generation += 1

    async def _commit(self, username: str, user: User | None, acl: Acl | None) -> None:
        """Write, then take, one user and his policies; None: there are none. Raises RemotingError."""
        users, acls = dict(self._users), dict(self._acls)
        user_records, acl_records = dict(self._user_records), dict(self._acl_records)
        try:
            if user is None:
                users.pop(username, None)
                user_records.pop(username, None)
            elif users.get(username) != user:
                users[username], user_records[username] = user, self._user_record(user)
            if acl is None:
                acls.pop(username, None)
                acl_records.pop(username, None)
            elif acls.get(username) != acl:
                acls[username], acl_records[username] = acl, encode_acl(acl)
            await self._write(user_records, acl_records)
        except SecretsError as error:
            raise refused(str(error)) from None
        except AuthFileError as error:
            raise refused(str(error)) from None
        except OSError as error:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"{self._file.path} cannot be written, the change has no effect: {_reason(error)}",
            ) from error
        self._take(users, acls, user_records, acl_records)

    # -- changes. ``by``: the user who asks; None: the server itself, or a server without authentication.

    async def create_user(self, username: str, change: UserChange, by: User | None = None) -> None:
        """Make a user, Normal and enabled if the request says nothing else. Raises RemotingError."""
        checked_username(username)
        async with self._lock:
            by = self._as_of_now(by)
            if change.user_type is UserType.SUPER and not _is_super(by):
                raise RemotingError(ResponseCode.SYSTEM_ERROR, _CREATED_BY)
            if username in self._users:
                raise refused("The user is existed")
            password = checked_secret(change.password)
            if len(self._users) >= MOST_USERS:
                raise refused(f"there are {MOST_USERS} users already, as many as are allowed")
            await self._commit(username, change.applied_to(User(username, password)), None)

    async def update_user(self, username: str, change: UserChange, by: User | None = None) -> None:
        """Change the fields of a user that are given. Raises RemotingError."""
        checked_username(username)
        async with self._lock:
            by = self._as_of_now(by)
            user = self._users.get(username)
            if user is None:
                raise refused("The user is not exist")
            if not _is_super(by):
                if user.is_super:
                    raise refused(_UPDATED_BY)
                if change.user_type is UserType.SUPER:
                    raise RemotingError(ResponseCode.SYSTEM_ERROR, _UPDATED_BY)
                if change.password is not None and (by is None or by.username != username):
                    raise refused("The password of another user can only be update by super user")
            if change.password is not None:
                checked_secret(change.password)
            changed = change.applied_to(user)
            self._check_super_remains(username, changed)
            await self._commit(username, changed, self._acls.get(username))

    async def delete_user(self, username: str, by: User | None = None) -> None:
        """Delete a user and the policies. No error if there is no such user. Raises RemotingError."""
        checked_username(username)
        async with self._lock:
            by = self._as_of_now(by)
            user = self._users.get(username)
            if user is None:
                return
            if user.is_super and not _is_super(by):
                raise refused(_UPDATED_BY)
            self._check_super_remains(username, None)
            await self._commit(username, None, None)

    async def write_acl(self, acl: Acl, by: User | None = None) -> None:
        """Add entries to a subject's policies, or replace those of the same resource. Raises RemotingError.

        This is both the creation and the update: they do the same.
        """
        policies = checked_policies(acl.policies)
        username = acl.username
        async with self._lock:
            self._check_may_grant(by)
            user = self._users.get(username)
            if user is None:
                raise refused(f"The subject of {acl.subject} is not exist.")
            old = self._acls.get(username) or Acl(subject_of(username))
            await self._commit(username, user, old.merged(policies))

    async def delete_acl(
        self,
        subject: str,
        policy_type: PolicyType = PolicyType.CUSTOM,
        resource: Resource | None = None,
        by: User | None = None,
    ) -> None:
        """Delete an entry of a subject's policies, or all of them without ``resource``. Raises RemotingError."""
        username = username_of(subject)
        async with self._lock:
            self._check_may_grant(by)
            acl = self._acls.get(username)
            if acl is None:
                raise refused("The acl is not exist.")
            kept = None if resource is None else acl.without(policy_type, resource)
            await self._commit(username, self._users[username], kept)

    def _as_of_now(self, by: User | None) -> User | None:
        """The user who asks, as others have changed him while the request waited. Raises RemotingError."""
        if by is None:
            return None
        now = self._users.get(by.username)
        if now is None or not now.is_enabled:
            raise refused(f"User:{by.username} is {'not found' if now is None else 'disabled'}.")
        return now

    def _check_may_grant(self, by: User | None) -> None:
        if not _is_super(self._as_of_now(by)):
            raise refused("The policies can only be update by super user")

    def _check_super_remains(self, username: str, changed: User | None) -> None:
        user = self._users[username]
        if not (user.is_super and user.is_enabled) or (changed and changed.is_super and changed.is_enabled):
            return
        if not any(one.is_super and one.is_enabled for name, one in self._users.items() if name != username):
            raise refused(
                f"User:{username} is the last super user that is enabled: create another one before this one is "
                "deleted, disabled or made Normal"
            )


def _is_super(by: User | None) -> bool:
    return by is None or by.is_super


def _user_of(record: dict[str, Any], encrypted: bool, secrets: Secrets) -> User:
    username = checked_username(record["username"])
    user_type, status = UserType.of(record["userType"]), UserStatus.of(record["userStatus"])
    # The last: a record of a sealed file in one without a seal.
    if user_type is None or status is None or ("clear" in record["secret"]) is encrypted:
        raise KeyError
    return User(username, checked_secret(secrets.password(username, record["secret"])), user_type, status)


def _acl_of(record: Any) -> Acl:
    acl = decode_acl(msgspec.json.encode(record))
    return replace(acl, policies=checked_policies(acl.policies))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
