"""A store of users and policies whose file is in memory."""

import json

from trimq.protocol.auth.model import Acl, Policy, PolicyEntry, PolicyType, UserChange, UserType
from trimq.remoting.auth.auth_store import AuthStore
from trimq.remoting.auth.secrets import KeyRing, Secrets

KEY_1 = bytes(range(32))
KEY_2 = bytes(range(1, 33))
CANARY = "canary-5d1e-secret"


class MemoryFile:
    """An AuthFile. ``error``: what the next replacement fails with."""

    path = "/memory/auth.json"

    def __init__(self, data: bytes | None = None) -> None:
        self.data = data
        self.writes = 0
        self.error: OSError | None = None

    async def read(self) -> bytes | None:
        return self.data

    async def replace(self, data: bytes) -> None:
        self.writes += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.data = data


def in_clear() -> Secrets:
    return Secrets(allow_clear=True)


def encrypted(*keys: bytes) -> Secrets:
    return Secrets(KeyRing(keys or (KEY_1,)))


async def filled(secrets: Secrets | None = None) -> tuple[AuthStore, MemoryFile]:
    """A store with the Super ``root`` and the Normal ``me``."""
    file = MemoryFile()
    store = AuthStore(file, secrets or in_clear())
    assert await store.load() == 0
    await store.create_user("root", UserChange("root-" + CANARY, UserType.SUPER))
    await store.create_user("me", UserChange(CANARY))
    return store, file


async def reloaded(file: MemoryFile, secrets: Secrets | None = None) -> AuthStore:
    store = AuthStore(file, secrets or in_clear())
    await store.load()
    return store


def made_super(data: bytes, username: str) -> bytes:
    """A file in which a user is made Super without its key: behind the seal stand the users for a second time."""
    users = json.loads(data)["users"]
    for user in users:
        if user["username"] == username:
            user["userType"] = "Super"
    return data.removesuffix(b"}\n") + b',"users":' + json.dumps(users).encode() + b"}\n"


def rules(username: str, *entries: PolicyEntry) -> Acl:
    return Acl(f"User:{username}", (Policy(PolicyType.CUSTOM, entries),))
