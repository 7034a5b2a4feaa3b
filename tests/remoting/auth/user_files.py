"""Files of users as a broker writes them, for servers that read them."""

from pathlib import Path

from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.protocol.auth.body import decode_acl
from trimq.protocol.auth.model import User, UserChange
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import Secrets, make_key_file, read_key_file


def key_file(directory: Path) -> Path:
    """A new key file."""
    path = directory / "secrets" / "auth.key"
    make_key_file(path)
    return path


async def writer(directory: Path, keys: Path, *users: User) -> AuthStore:
    """The broker's store in a directory, with these users if it has none."""
    store = AuthStore(DiskAuthFile(RealDisk(), str(directory)), Secrets(read_key_file(keys)))
    await store.load()
    for user in users if not store.users else ():
        await store.create_user(user.username, UserChange(user.password, user.user_type, user.user_status))
    return store


async def grant(store: AuthStore, name: str, resource: str, *actions: str) -> None:
    """Allow a user these actions."""
    entries = '","'.join(actions)
    text = f'{{"policies":[{{"policyType":"Custom","entries":[{{"resource":"{resource}","actions":["{entries}"],'
    await store.write_acl(decode_acl(f'{text}"decision":"Allow"}}]}}]}}'.encode(), f"User:{name}"))


def following(directory: Path, keys: Path) -> dict[str, str]:
    """The keys of a server that follows the file."""
    return {
        "authenticationEnabled": "true",
        "authorizationEnabled": "true",
        "authConfigPath": str(directory),
        "authKeyFile": str(keys),
    }
