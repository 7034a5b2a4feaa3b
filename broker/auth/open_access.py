"""Opens users and policies at a start: reads their file, makes the first administrator, or refuses the start."""

import os
from pathlib import Path

import structlog
import trio

from trimq.broker.config import MessageStoreConfig
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.start_error import StartError
from trimq.broker.store.disk.disk import Disk
from trimq.protocol.auth.model import User, UserChange
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.acl_v1_files import AclFilesError, files_of, read_files
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError
from trimq.remoting.auth.config import AuthConfig
from trimq.remoting.auth.secrets import HOW_TO, SecretsError
from trimq.remoting.auth.users import AccessError, inner_user_of, secrets_of
from trimq.remoting.config.configuration import Configuration

_log = structlog.get_logger("access")

NO_USER = (
    "authenticationEnabled=true, and there is no user who could sign a request: set initAuthenticationUser"
    ' ({"username":"...","password":"..."}) or initAuthenticationUserFile for one start'
)


async def open_store(configuration: Configuration, disk: Disk, inner: User | None, *, had_users: bool) -> AuthStore:
    """Read users and policies, and make those of the configuration, and ``inner``: the user of the own requests.

    ``had_users``: this process has read some before, so a file without users, or none, has lost them.

    Raises StartError, with a text that says what to do.
    """
    config = configuration.section(AuthConfig)
    try:
        secrets = await trio.to_thread.run_sync(secrets_of, config)
        if not secrets.can_store:
            raise StartError(f"authenticationEnabled=true, and passwords could not be stored: {HOW_TO}")
        store = AuthStore(DiskAuthFile(disk, auth_directory(configuration)), secrets)
        renewed = await store.load()
    except (SecretsError, AuthStoreError) as error:
        raise StartError(str(error)) from None
    if renewed:
        _log.info("auth_secrets_renewed", users=renewed)
    if had_users and not store.users:
        raise StartError(f"the file of users in {auth_directory(configuration)} is gone, or has no users any more")
    try:
        await _make_users(config, store, inner)
    except (RemotingError, ValueError) as error:
        text = error.remark if isinstance(error, RemotingError) else str(error)
        raise StartError(f"the users of the configuration cannot be made: {text}") from None
    if not store.users:
        raise StartError(NO_USER)
    return store


def auth_directory(configuration: Configuration) -> str:
    """The directory of the broker's file of users and policies."""
    root = configuration.section(MessageStoreConfig).store_path_root_dir
    return configuration.section(AuthConfig).auth_config_path or f"{root}/config"


async def _make_users(config: AuthConfig, store: AuthStore, inner: User | None) -> None:
    """The first administrator, while there are no users; the accounts of RocketMQ 4; the user of the own requests."""
    if not store.users:  # only then, since its file may have been removed afterwards
        initial = await trio.to_thread.run_sync(config.initial_user)
        if initial is not None:
            await _make(store, initial)
    if config.migrate_auth_from_v1_enabled:
        await _migrate(store)
    if inner is not None:
        known = store.user(inner.username)
        if known is None:
            await _make(store, inner)
        elif known.password != inner.password or not known.is_super:
            _log.warning("auth_inner_user_differs", user=inner.username)


async def _make(store: AuthStore, user: User) -> None:
    await store.create_user(user.username, UserChange(password=user.password, user_type=user.user_type))
    _log.info("auth_user_made", user=user.username, type=user.user_type.value)


async def _migrate(store: AuthStore) -> None:
    home = os.environ.get("ROCKETMQ_HOME", "").strip()
    if not home:
        raise StartError(
            "migrateAuthFromV1Enabled=true needs the variable ROCKETMQ_HOME, in which conf/plain_acl.yml is"
        )
    try:
        found = await trio.to_thread.run_sync(lambda: read_files(files_of(Path(home))))
    except AclFilesError as error:
        raise StartError(str(error)) from None
    for text in found.dropped:
        _log.warning("auth_migration_dropped", text=text)
    for username, each in found.users.items():
        if store.user(username) is None:
            await _make(store, each.user)
            if each.acl is not None:
                await store.write_acl(each.acl)


async def read_inner_user(config: AuthConfig) -> User:
    """The user that signs the broker's own requests; the configuration has one. Raises StartError."""
    try:
        user = await trio.to_thread.run_sync(inner_user_of, config)
    except AccessError as error:
        raise StartError(str(error)) from None
    assert user is not None
    return user
