"""mqadmin: commands for users."""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from trimq.client.admin import Admin
from trimq.client.admin.users import usable
from trimq.client.errors import NoPermissionError, UsageError
from trimq.client.mqadmin.shell import Commands, Output, one_of
from trimq.protocol.auth.auth_file import AUTH_FILE, AuthFileError, decode, version_of
from trimq.protocol.auth.model import User, UserChange, UserStatus, UserType, checked_secret
from trimq.remoting.auth.secrets import KeyRing, SecretsError, read_key_file

commands: Commands = Commands()

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_COLUMNS = ("UserName", "Password", "UserType", "UserStatus")


def on_brokers(function: F) -> F:
    """The options -b and -c: a broker, or all of a cluster."""
    cluster = click.option("-c", "--clusterName", "cluster", help="A cluster's name: each of its brokers.")
    return click.option("-b", "--brokerAddr", "broker", help="A broker's address.")(cluster(function))


async def to_change(admin: Admin, broker: str | None, cluster: str | None) -> list[str]:
    """The brokers that a change goes to: of a cluster its masters and slaves, each of which has its own users."""
    one_of(broker, cluster)
    return await admin.addresses(broker=broker, cluster=cluster, masters_only=False)


async def to_ask(admin: Admin, broker: str | None, cluster: str | None) -> list[str]:
    """The brokers to ask in turn: of a cluster its masters."""
    one_of(broker, cluster)
    return await admin.addresses(broker=broker, cluster=cluster)


async def first_found(addresses: list[str], ask: Callable[[str], Awaitable[T | None]]) -> T | None:
    """What the first broker has that has any. Raises the NoPermissionError of the first one if all refuse.

    A broker refuses to show what belongs to a user that it does not have; another one of the cluster may have it.
    """
    refusals: list[NoPermissionError] = []
    for address in addresses:
        try:
            found = await ask(address)
        except NoPermissionError as error:
            refusals.append(error)
        else:
            if found:
                return found
    if refusals and len(refusals) == len(addresses):
        raise refusals[0]
    return None


def done(out: Output, brokers: list[str]) -> None:
    """Prints the brokers that a change went to, in JSON; a line for each was printed otherwise."""
    if out.as_json:
        out.lines(brokers)


def words(text: str | None) -> list[str]:
    """The words between the commas of an option."""
    return [word for part in (text or "").split(",") if (word := part.strip())]


def at_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin.isatty()


def _secret(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """The password that an option means: with ``-`` the first line of the standard input."""
    if value == "-":
        value = sys.stdin.readline().rstrip("\r\n")
        if not value:
            raise click.UsageError("-p -: the standard input has no password in its first line")
    return value


def _asked_secret(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """As ``_secret``; without the option a person is asked for it, without showing it."""
    if value is None and at_terminal():
        entered: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return entered
    if value is None:
        raise click.UsageError("give -p: a password, or - to read it from the standard input")
    return _secret(context, option, value)


def _change(password: str | None, user_type: str | None, user_status: str | None) -> UserChange:
    return UserChange(
        password=None if password is None else usable(lambda: checked_secret(password)),
        user_type=None if user_type is None else UserType.of(user_type),
        user_status=None if user_status is None else UserStatus.of(user_status),
    )


_username = click.option("-u", "--username", "username", required=True, help="The user's name.")
_type = click.option(
    "-t", "--userType", "user_type", type=click.Choice([kind.value for kind in UserType], case_sensitive=False)
)
_PASSWORD_HELP = "The password. Other users of this machine see it: - reads it from the standard input."  # noqa: S105


@commands.add("createUser")
@on_brokers
@_username
@click.option("-p", "--password", "password", callback=_asked_secret, help=f"{_PASSWORD_HELP} Default: you are asked.")
@_type
async def create_user(
    admin: Admin,
    out: Output,
    *,
    broker: str | None,
    cluster: str | None,
    username: str,
    password: str,
    user_type: str | None,
) -> None:
    """Create a user, on a broker or on each of a cluster. A Super may do everything, others what policies allow."""
    change = _change(password, user_type, None)
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.create_user(address, username, change)
        out.say(f"create user to {address} success.")
    done(out, changed)


@commands.add("updateUser")
@on_brokers
@_username
@click.option("-p", "--password", "password", callback=_secret, help=_PASSWORD_HELP)
@_type
@click.option(
    "-s",
    "--userStatus",
    "user_status",
    type=click.Choice([status.value for status in UserStatus], case_sensitive=False),
    help="Requests of a disabled user are refused.",
)
async def update_user(
    admin: Admin,
    out: Output,
    *,
    broker: str | None,
    cluster: str | None,
    username: str,
    password: str | None,
    user_type: str | None,
    user_status: str | None,
) -> None:
    """Change a user's password, type or status: those that are given."""
    change = _change(password, user_type, user_status)
    if change == UserChange():
        raise click.UsageError("give at least one of -p, -t and -s")
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.update_user(address, username, change)
        out.say(f"update user to {address} success.")
    done(out, changed)


@commands.add("deleteUser")
@on_brokers
@_username
async def delete_user(admin: Admin, out: Output, *, broker: str | None, cluster: str | None, username: str) -> None:
    """Delete a user and its policies. There is no error if there is no such user."""
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.delete_user(address, username)
        out.say(f"delete user to {address} success.")
    done(out, changed)


@commands.add("getUser")
@on_brokers
@_username
async def get_user(admin: Admin, out: Output, *, broker: str | None, cluster: str | None, username: str) -> None:
    """Show a user: of a cluster as the first master has it that knows it. A password that comes is not shown."""
    found = await first_found(await to_ask(admin, broker, cluster), lambda address: admin.user(address, username))
    _print(out, [found] if found is not None else [])


@commands.add("listUser")
@on_brokers
@click.option("-f", "--filter", "part", help="Only users with this in their names.")
async def list_user(admin: Admin, out: Output, *, broker: str | None, cluster: str | None, part: str | None) -> None:
    """List users: of a cluster those of the first master that has any. A password that comes is not shown."""
    found = await first_found(await to_ask(admin, broker, cluster), lambda address: admin.users(address, part))
    _print(out, found or [])


def _print(out: Output, users: list[User]) -> None:
    out.table(
        _COLUMNS,
        (
            [user.username, "***" if user.password else "", user.user_type.value, user.user_status.value]
            for user in users
        ),
    )


@commands.add("copyUser")
@click.option("-f", "--fromBroker", "source", required=True, help="The address of the broker to copy from.")
@click.option("-t", "--toBroker", "target", required=True, help="The address of the broker to copy to.")
@click.option("-u", "--usernames", "names", help="Only these users, separated by commas.")
async def copy_user(admin: Admin, out: Output, *, source: str, target: str, names: str | None) -> None:
    """Copy users with their passwords to another broker: those that it does not have, and what is different in others.

    The broker to copy from must return passwords: authReturnPasswords=superOverTls, asked by a Super over TLS.
    """
    if names:
        found = [user for name in words(names) if (user := await admin.user(source, name)) is not None]
    else:
        found = await admin.users(source)
    # Before the first is written: half a copy would be the drift that this command is for.
    without = [user.username for user in found if not user.password]
    if without:
        raise UsageError(
            f"{source} returns no password of {', '.join(without)}, so nothing is copied: set "
            "authReturnPasswords=superOverTls there and ask with --tls, as a Super; or make them with createUser -p"
        )
    for user in found:
        change = UserChange(user.password, user.user_type, user.user_status)
        if await admin.user(target, user.username) is None:
            await admin.create_user(target, user.username, change)
        else:
            await admin.update_user(target, user.username, change)
        out.say(f"copy user of {user.username} from {source} to {target} success.")


@commands.add("copyAuth")
@click.option("-b", "--brokerAddr", "broker", required=True, help="The address of the broker to copy from.")
@click.option(
    "-o",
    "--output",
    "directory",
    required=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The directory for the file: the authConfigPath of a name server or controller.",
)
@click.option(
    "--key-file",
    "key_file",
    type=click.Path(path_type=Path),
    help="The broker's authKeyFile: a file that was damaged or changed on its way is not copied.",
)
async def copy_auth(admin: Admin, out: Output, *, broker: str, directory: Path, key_file: Path | None) -> None:
    """Copy a broker's users and policies to auth.json in a directory, for a name server or controller that reads it.

    Their secrets stay encrypted: the reader needs the broker's authKeyFile. This command does not; without --key-file
    it does not check the seal, and readers refuse a wrong one. It asks as a Super. A file that is newer than the
    broker's is not replaced.
    """
    keys = None if key_file is None else _keys(key_file)
    data = await admin.auth_file(broker)
    target = directory / AUTH_FILE
    try:
        new = version_of(data)
        if keys is not None:
            decode(data, keys)
    except AuthFileError as error:
        raise UsageError(f"{broker} has sent a file that cannot be used: {error}") from None
    try:
        old = target.read_bytes()
        if old == data:
            out.say(f"{target} is as {broker} has it, version {new}.")
            return
        if version_of(old) > new:
            raise UsageError(
                f"{target} has version {version_of(old)}, {broker} has {new}, which is older: remove the file first if "
                "you mean that"
            )
    except (FileNotFoundError, AuthFileError):
        pass  # there is none, or nothing that a reader could use
    except OSError as error:
        raise UsageError(f"{target} cannot be read: {error.strerror}") from None
    try:
        _replace(target, data)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    out.say(f"copy users and policies of {broker} to {target} success, version {new}.")


def _keys(path: Path) -> KeyRing:
    try:
        return read_key_file(path)
    except SecretsError as error:
        raise UsageError(str(error).replace("authKeyFile", "--key-file", 1)) from None


def _replace(target: Path, data: bytes) -> None:
    """Replace a file as a whole, for its owner only; return when it is durable."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
