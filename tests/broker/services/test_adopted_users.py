"""A slave takes the file of its master's users: crashes, full disks, and files that were changed on the way."""

import errno

import pytest
import trio
import trio.testing

from tests.remoting.auth.stores import CANARY, KEY_1, MemoryFile, encrypted, made_super, rules
from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.services.auth_file import DiskAuthFile
from trimq.protocol.auth.auth_file import seal_of, version_of
from trimq.protocol.auth.model import Action, Decision, PolicyEntry, Resource, UserChange, UserType
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError

PUB = PolicyEntry(Resource.parse("Topic:a"), (Action.PUB,), Decision.ALLOW)
STATES = ["me,root", "me+,root", "root"]
"""The master's users in each of its files; + has policies."""


def store_on(disk: SimDisk) -> AuthStore:
    return AuthStore(DiskAuthFile(disk, "/store/config"), encrypted(KEY_1))


def state_of(store: AuthStore) -> str:
    return ",".join(f"{name}{'+' if store.acl(name) else ''}" for name in sorted(store.users))


async def files_of_a_master() -> list[bytes]:
    """Its file after each of its changes."""
    store = AuthStore(MemoryFile(), encrypted(KEY_1))
    await store.create_user("root", UserChange("x", UserType.SUPER))
    await store.create_user("me", UserChange(CANARY))
    files = [store.sealed()[0]]
    await store.write_acl(rules("me", PUB))
    files.append(store.sealed()[0])
    await store.delete_user("me")
    return [*files, store.sealed()[0]]


async def slave_on(disk: SimDisk) -> AuthStore:
    """A slave that has a first administrator of its own."""
    store = store_on(disk)
    await store.create_user("own", UserChange("x", UserType.SUPER))
    return store


async def test_a_power_cut_at_any_call_leaves_the_masters_file_or_the_one_before() -> None:
    """The file is whole, what was taken stays, and a user that was deleted does not come back."""
    files = await files_of_a_master()
    whole = SimDisk()
    store = await slave_on(whole)
    first = whole.calls
    for data in files:
        await store.adopt(data)
    assert state_of(store) == STATES[-1]
    assert whole.calls - first > 12
    states = ["own", *STATES]
    for at in range(first + 1, whole.calls + 1):
        for loss in Loss:
            disk = SimDisk()
            store = await slave_on(disk)
            disk.cut_at, disk.loss = at, loss
            taken = 0
            try:
                for data in files:
                    await store.adopt(data)
                    taken += 1
            except PowerCut:
                pass
            after = store_on(disk.power_cut())
            await after.load()
            assert state_of(after) in states[taken : taken + 2], (at, loss, taken)
            await after.adopt(files[-1])
            assert state_of(after) == STATES[-1]


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        ("create", errno.EACCES, "Permission denied"),
        ("pwrite", errno.ENOSPC, "No space left on device"),
        ("data_sync", errno.EIO, "Input/output error"),
        ("rename", errno.EIO, "Input/output error"),
        ("sync_directory", errno.EIO, "Input/output error"),
    ],
)
async def test_a_slave_that_cannot_write_keeps_its_users_until_it_can(method: str, code: int, text: str) -> None:
    files = await files_of_a_master()
    disk = SimDisk()
    store = await slave_on(disk)
    await store.adopt(files[0])
    before = store.generation
    disk.fail(method, code)
    with pytest.raises(AuthStoreError, match=rf"/store/config/auth\.json cannot be written: {text}"):
        await store.adopt(files[2])
    assert (state_of(store), store.generation) == (STATES[0], before)
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert state_of(again) == STATES[0]
    await store.adopt(files[2])
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert state_of(store) == state_of(again) == STATES[2]


async def test_a_file_that_was_changed_on_the_way_is_not_taken() -> None:
    """Whichever byte was changed, wherever it was cut off, and whatever was appended."""
    data = (await files_of_a_master())[1]
    disk = SimDisk()
    store = await slave_on(disk)
    before, calls = store.generation, disk.calls
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for each in (*changed, *(data[:at] for at in range(0, len(data), 7)), made_super(data, "me")):
        with pytest.raises(AuthStoreError, match="the master's file of users cannot be used"):
            await store.adopt(each)
    assert (state_of(store), store.generation, disk.calls) == ("own", before, calls)


async def test_a_former_master_takes_the_file_of_the_new_one_that_has_had_fewer_changes() -> None:
    """What only the former master has was lost with it: it must not come back with a later change of masters."""
    files = await files_of_a_master()
    disk = SimDisk()
    former = store_on(disk)
    await former.adopt(files[0])
    for name in ("a", "b", "c"):
        await former.create_user(name, UserChange("x"))
    await former.adopt(files[1])
    assert state_of(former) == STATES[1]
    again = store_on(disk.copy_after_cut(Loss.ALL))
    await again.load()
    assert state_of(again) == STATES[1]


async def test_no_slave_gets_what_is_not_on_the_masters_disk() -> None:
    """Neither while it is written, nor when it could not be."""
    file = MemoryFile()
    master = AuthStore(file, encrypted(KEY_1))
    await master.create_user("root", UserChange("x", UserType.SUPER))
    before = master.sealed()
    free = trio.Event()
    replace = file.replace

    async def slow(data: bytes) -> None:
        await free.wait()
        await replace(data)

    file.replace = slow  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(master.create_user, "me", UserChange(CANARY))
        await trio.testing.wait_all_tasks_blocked()
        assert master.sealed() == before
        free.set()
    data, seal = master.sealed()
    assert (data, seal) == (file.data, seal_of(data))
    assert seal != before[1]
    file.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RemotingError, match="the change has no effect: No space left on device"):
        await master.delete_user("me")
    assert master.sealed() == (data, seal)
    assert version_of(data) == 2
