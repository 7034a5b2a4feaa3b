"""The file of users and policies on the broker's disk."""

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.canary import permit
from tests.remoting.auth.stores import CANARY, encrypted, in_clear, rules
from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.broker.store.disk.disk import FileInfo
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.protocol.auth.model import Action, Decision, PolicyEntry, Resource, UserChange, UserType
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError
from trimq.remoting.auth.secrets import Secrets

PUB = PolicyEntry(Resource.parse("Topic:a"), (Action.PUB,), Decision.ALLOW)


def store_on(disk: SimDisk | RealDisk, directory: str = "/store/config", secrets: Secrets | None = None) -> AuthStore:
    return AuthStore(DiskAuthFile(disk, directory), secrets or in_clear())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def set_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def names_in(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()]


async def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "store" / "config"
    old = os.umask(0)
    try:
        store = store_on(RealDisk(), str(directory), encrypted())
        await store.create_user("me", UserChange(CANARY))
        await store.create_user("you", UserChange(CANARY))  # the replaced file too
    finally:
        os.umask(old)
    path = directory / "auth.json"
    assert mode_of(path) == 0o600
    # The broker has made the directories, so it must not refuse them: many systems have the umask 0002.
    assert [mode_of(each) for each in (directory, directory.parent)] == [0o755, 0o755]
    again = store_on(RealDisk(), f"{directory}/", encrypted())
    await again.load()
    assert again.list_users() == store.list_users()
    assert names_in(directory) == ["auth.json"]
    assert CANARY.encode() not in (await DiskAuthFile(RealDisk(), str(directory)).read() or b"")


async def test_a_file_that_others_may_read_or_replace_is_refused(tmp_path: Path) -> None:
    permit(tmp_path / "auth.json*")  # of a store in clear
    await store_on(RealDisk(), str(tmp_path)).create_user("me", UserChange(CANARY))
    path = tmp_path / "auth.json"
    for mode in (0o644, 0o640, 0o620, 0o604):
        set_mode(path, mode)
        with pytest.raises(AuthStoreError, match=rf"others may read it \(mode {mode:04o}\): chmod 600 /"):
            await store_on(RealDisk(), str(tmp_path)).load()
    set_mode(path, 0o600)
    set_mode(tmp_path, 0o775)
    with pytest.raises(AuthStoreError, match=r"others may replace it \(mode 0775 of its directory\): chmod go-w /"):
        await store_on(RealDisk(), str(tmp_path)).load()
    path.rename(tmp_path / "moved")  # without a file too: one that is made then would refuse the next start
    with pytest.raises(AuthStoreError, match=r"others may replace it \(mode 0775 of its directory\): chmod go-w /"):
        await store_on(RealDisk(), str(tmp_path)).load()
    (tmp_path / "moved").rename(path)
    set_mode(tmp_path, 0o755)
    assert await store_on(RealDisk(), str(tmp_path)).load() == 0


class OwnedDisk(SimDisk):
    """Some paths belong to a user."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[str, int] = {}

    def stat(self, path: str) -> FileInfo | None:
        found = super().stat(path)
        return None if found is None else found._replace(owner=self.owners.get(path, os.geteuid()))


async def test_the_file_and_its_directory_belong_to_this_user_or_root() -> None:
    disk = OwnedDisk()
    await store_on(disk).create_user("me", UserChange(CANARY))
    path = "/store/config/auth.json"
    for owners, text in (
        ({path: 4242}, rf"it belongs to another user \(uid 4242\), who may change it: chown {path}"),
        ({"/store/config": 4242}, r"its directory belongs to another user \(uid 4242\), .*: chown /store/config"),
    ):
        disk.owners = owners
        with pytest.raises(AuthStoreError, match=text):
            await store_on(disk).load()
    # A file that root has put there, such as one of a volume that is mounted for reading only.
    disk.owners = {path: 0, "/store/config": 0}
    again = store_on(disk)
    await again.load()
    assert set(again.users) == {"me"}


def test_the_owner_comes_from_the_disk(tmp_path: Path) -> None:
    found = RealDisk().stat(str(tmp_path))
    assert found is not None
    assert found.owner == tmp_path.stat().st_uid


async def changed(disk: SimDisk) -> list[str]:
    """Changes one after another, until one fails; returns the names of the users after each that was confirmed."""
    confirmed = [""]
    store = store_on(disk)
    calls: list[Callable[[], Awaitable[None]]] = [
        lambda: store.create_user("root", UserChange("x", UserType.SUPER)),
        lambda: store.create_user("me", UserChange(CANARY)),
        lambda: store.write_acl(rules("me", PUB)),
        lambda: store.delete_user("me"),
    ]
    for call in calls:
        try:
            await call()
        except (PowerCut, RemotingError):
            break
        confirmed.append(state_of(store))
    return confirmed


def state_of(store: AuthStore) -> str:
    return ",".join(f"{name}{'+' if store.acl(name) else ''}" for name in sorted(store.users))


STATES = ["", "root", "me,root", "me+,root", "root"]


async def test_a_power_cut_at_any_call_leaves_the_state_before_or_after_a_change() -> None:
    """What was confirmed is there, a user that was deleted does not come back, and the file is never damaged."""
    whole = SimDisk()
    assert await changed(whole) == STATES
    calls = whole.calls
    assert calls > 20
    for at in range(1, calls + 1):
        for loss in Loss:
            disk = SimDisk()
            disk.cut_at, disk.loss = at, loss
            confirmed = await changed(disk)
            after = disk.power_cut()
            store = store_on(after)
            await store.load()
            done = len(confirmed) - 1
            assert state_of(store) in STATES[done : done + 2], (at, loss, confirmed)
            # The store goes on.
            await store.create_user("next", UserChange("x"))
            assert "next" in store.users


@pytest.mark.parametrize(
    ("method", "code"),
    [("create", errno.EACCES), ("pwrite", errno.ENOSPC), ("data_sync", errno.EIO), ("rename", errno.EIO)],
)
async def test_a_failed_write_is_answered_and_changes_nothing(method: str, code: int) -> None:
    disk = SimDisk()
    store = store_on(disk)
    await store.create_user("root", UserChange("x", UserType.SUPER))
    disk.fail(method, code)
    with pytest.raises(RemotingError, match=r"/store/config/auth\.json cannot be written, the change has no effect"):
        await store.create_user("me", UserChange(CANARY))
    assert set(store.users) == {"root"}
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert set(again.users) == {"root"}
    await store.create_user("me", UserChange(CANARY))
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert set(again.users) == {"root", "me"}


async def test_a_failed_sync_of_the_directory_is_answered_too() -> None:
    """The new file has the name then, and may lose it by a power cut: the server goes on without the change."""
    disk = SimDisk()
    store = store_on(disk)
    await store.create_user("root", UserChange("x", UserType.SUPER))
    disk.fail("sync_directory", errno.EIO)
    with pytest.raises(RemotingError, match="the change has no effect"):
        await store.create_user("me", UserChange(CANARY))
    assert set(store.users) == {"root"}
    await store.create_user("you", UserChange(CANARY))
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert set(again.users) == {"root", "you"}


async def test_a_bit_flip_refuses_the_start() -> None:
    disk = SimDisk()
    await changed(disk)
    content = disk.content("/store/config/auth.json")
    damaged = bytes(content).replace(b'"root"', b'"rood"')
    await DiskAuthFile(disk, "/store/config").replace(damaged)
    with pytest.raises(AuthStoreError, match=r"/store/config/auth\.json cannot be used: it is damaged"):
        await store_on(disk).load()
