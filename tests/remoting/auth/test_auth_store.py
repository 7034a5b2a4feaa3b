"""The store of users and policies: its rules, and that a change is on disk before it counts."""

import errno
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from tests.remoting.auth.stores import (
    CANARY,
    KEY_1,
    KEY_2,
    MemoryFile,
    encrypted,
    filled,
    in_clear,
    made_super,
    reloaded,
    rules,
)
from trimq.protocol.auth import auth_file
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    PolicyEntry,
    PolicyType,
    Resource,
    User,
    UserChange,
    UserStatus,
    UserType,
)
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth import auth_store
from trimq.remoting.auth.auth_store import AuthStore, AuthStoreError
from trimq.remoting.auth.secrets import KeyRing, Secrets

SUPER, NORMAL = UserType.SUPER, UserType.NORMAL
DISABLED = UserChange(user_status=UserStatus.DISABLE)
PUB = PolicyEntry(Resource.parse("Topic:a"), (Action.PUB,), Decision.ALLOW)
SUB = PolicyEntry(Resource.parse("Group:g*"), (Action.SUB,), Decision.DENY)


async def refused(call: Any) -> tuple[int, str]:
    with pytest.raises(RemotingError) as caught:
        await call
    assert CANARY not in repr(caught.value)
    return caught.value.code, caught.value.remark


@pytest.mark.parametrize("secrets", [in_clear, encrypted])
async def test_what_was_changed_is_there_after_a_restart(secrets: Callable[[], Secrets]) -> None:
    store, file = await filled(secrets())
    await store.create_user("gone", UserChange("x"))
    await store.update_user("me", UserChange("new", user_status=UserStatus.DISABLE))
    await store.write_acl(rules("me", PUB, SUB))
    await store.write_acl(rules("gone", PUB))
    await store.delete_acl("User:me", resource=PUB.resource)
    await store.delete_user("gone")
    for again in (store, await reloaded(file, secrets())):
        assert dict(again.users) == {
            "root": User("root", "root-" + CANARY, SUPER),
            "me": User("me", "new", NORMAL, UserStatus.DISABLE),
        }
        assert again.list_acls() == [rules("me", SUB)]
        assert again.secrets_are_encrypted is (secrets is encrypted)
    # Also after a change of the reloaded store: records that are not changed are written as they were.
    again = await reloaded(file, secrets())
    await again.create_user("third", UserChange("3"))
    assert (await reloaded(file, secrets())).list_users() == again.list_users()


async def test_a_secret_is_in_no_text_and_in_no_file() -> None:
    store, file = await filled(encrypted())
    await store.write_acl(rules("me", PUB))
    assert file.data is not None
    assert b'"username":"me"' in file.data
    assert CANARY.encode() not in file.data
    assert CANARY not in f"{store!r} {store.users!r} {store.user('me')!r} {store.list_users()!r}"


# -- users


async def test_create_user() -> None:
    store, file = await filled()
    before = file.writes
    assert await refused(store.create_user("me", UserChange("x"))) == (16, "The user is existed")
    assert await refused(store.create_user("x", UserChange())) == (16, "password can not be blank")
    assert await refused(store.create_user("", UserChange("x"))) == (29, "The username is blank")
    assert file.writes == before
    await store.create_user("x", UserChange("x", user_status=UserStatus.DISABLE))
    assert store.user("x") == User("x", "x", NORMAL, UserStatus.DISABLE)


async def test_update_user() -> None:
    store, file = await filled()
    assert await refused(store.update_user("x", UserChange("x"))) == (16, "The user is not exist")
    assert await refused(store.update_user("", UserChange("x"))) == (29, "The username is blank")
    assert await refused(store.update_user("me", UserChange(" "))) == (16, "password can not be blank")
    await store.write_acl(rules("me", PUB))
    await store.update_user("me", UserChange(user_type=SUPER))
    assert (await reloaded(file)).user("me") == User("me", CANARY, SUPER)
    assert store.acl("me") == rules("me", PUB)


async def test_delete_user() -> None:
    store, file = await filled()
    await store.write_acl(rules("me", PUB))
    await store.delete_user("me")
    before = file.writes
    await store.delete_user("me")
    assert file.writes == before
    assert (await reloaded(file)).acl("me") is None
    # A new user of the name has nothing of the old one's.
    await store.create_user("me", UserChange("x"))
    assert store.acl("me") is None


async def test_list_users() -> None:
    store, _ = await filled()
    await store.create_user("mel", UserChange("x"))
    assert [user.username for user in store.list_users()] == ["me", "mel", "root"]
    assert [user.username for user in store.list_users("el")] == ["mel"]


async def test_the_number_of_users_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_store, "MOST_USERS", 2)
    store, _ = await filled()
    assert await refused(store.create_user("x", UserChange("x"))) == (
        16,
        "there are 2 users already, as many as are allowed",
    )


async def test_the_size_of_the_file_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = await filled()
    monkeypatch.setattr(auth_file, "MOST_AUTH_BYTES", 500)
    code, text = await refused(store.create_user("x" * 250, UserChange("x")))
    assert code == 16
    assert text == (
        "users and policies would take 606 bytes, and slaves can take 500: delete users or policies that are not "
        "needed any more"
    )
    assert store.user("x" * 250) is None
    assert file.writes == 2


# -- who may do it


async def test_only_a_super_makes_and_changes_supers() -> None:
    store, file = await filled()
    me = store.user("me")
    before = file.writes
    create, update = (f"The super user can only be {word} by super user" for word in ("create", "update"))
    assert await refused(store.create_user("x", UserChange("x", SUPER), me)) == (1, create)
    assert await refused(store.update_user("me", UserChange(user_type=SUPER), me)) == (1, update)
    assert await refused(store.update_user("root", UserChange("x"), me)) == (16, update)
    assert await refused(store.delete_user("root", me)) == (16, update)
    assert file.writes == before
    root = store.user("root")
    await store.create_user("x", UserChange("x", SUPER), root)
    await store.update_user("x", UserChange(user_type=NORMAL), root)
    await store.delete_user("x", root)


async def test_only_a_super_takes_over_a_user_or_gives_permissions() -> None:
    store, file = await filled()
    await store.create_user("you", UserChange("x"))
    await store.write_acl(rules("you", PUB))
    me = store.user("me")
    before = file.writes
    password = (16, "The password of another user can only be update by super user")
    assert await refused(store.update_user("you", UserChange("mine"), me)) == password
    policies = (16, "The policies can only be update by super user")
    assert await refused(store.write_acl(rules("me", PUB), me)) == policies
    assert await refused(store.delete_acl("User:you", by=me)) == policies
    assert file.writes == before
    # What gives no permission is as in RocketMQ.
    await store.create_user("new", UserChange("x"), me)
    await store.update_user("me", UserChange("own"), me)
    await store.update_user("you", DISABLED, me)
    await store.delete_user("you", me)
    root = store.user("root")
    await store.update_user("me", UserChange("x"), root)
    await store.write_acl(rules("me", PUB), root)
    await store.delete_acl("User:me", by=root)


async def test_one_enabled_super_remains() -> None:
    store, _ = await filled()
    last = (
        16,
        (
            "User:root is the last super user that is enabled: create another one before this one is deleted, disabled "
            "or made Normal"
        ),
    )
    await store.create_user("off", UserChange("x", SUPER, UserStatus.DISABLE))
    for by in (None, store.user("root")):
        assert await refused(store.delete_user("root", by)) == last
        assert await refused(store.update_user("root", DISABLED, by)) == last
        assert await refused(store.update_user("root", UserChange(user_type=NORMAL), by)) == last
    await store.update_user("root", UserChange("new"))
    await store.delete_user("off")  # was not enabled
    await store.create_user("second", UserChange("x", SUPER))
    await store.delete_user("root", store.user("root"))
    assert set(store.users) == {"me", "second"}


async def test_rights_count_as_they_are_when_the_change_is_made() -> None:
    """A Super who is made Normal, or deleted, while his request waits for another one's write."""
    store, file = await filled()
    await store.create_user("second", UserChange("x", SUPER))
    second = store.user("second")
    entered, free = trio.Event(), trio.Event()
    replace = file.replace

    async def slow(data: bytes) -> None:
        entered.set()
        await free.wait()
        await replace(data)

    results: list[tuple[int, str]] = []

    async def grant() -> None:
        results.append(await refused(store.write_acl(rules("me", PUB), second)))

    for change, expected in [
        (UserChange(user_type=NORMAL), "The policies can only be update by super user"),
        (DISABLED, "User:second is disabled."),
        (None, "User:second is not found."),
    ]:
        entered, free = trio.Event(), trio.Event()
        file.replace = slow  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            if change is None:
                nursery.start_soon(store.delete_user, "second")
            else:
                nursery.start_soon(store.update_user, "second", change)
            await entered.wait()
            nursery.start_soon(grant)
            await trio.testing.wait_all_tasks_blocked()
            file.replace = replace  # type: ignore[method-assign]
            free.set()
        assert results.pop() == (16, expected)
    assert store.acl("me") is None


# -- policies


async def test_create_and_update_merge() -> None:
    store, _ = await filled()
    await store.write_acl(rules("me", PUB, SUB))
    denied = PolicyEntry(PUB.resource, (Action.ALL,), Decision.DENY)
    await store.write_acl(rules("me", denied))
    assert store.get_acl("User:me") == rules("me", denied, SUB)


async def test_policies_that_are_refused() -> None:
    store, file = await filled()
    before = file.writes
    assert await refused(store.write_acl(rules("x", PUB))) == (16, "The subject of User:x is not exist.")
    assert await refused(store.write_acl(rules("me"))) == (16, "The policy entries is empty.")
    assert await refused(store.delete_acl("User:me")) == (16, "The acl is not exist.")
    assert await refused(store.delete_acl("User:x")) == (16, "The acl is not exist.")
    assert await refused(store.delete_acl("Role:x"))
    assert file.writes == before
    with pytest.raises(RemotingError, match=r"The subject is not exist\."):
        store.get_acl("User:x")
    assert store.get_acl("User:me") is None


async def test_delete_acl() -> None:
    store, file = await filled()
    await store.write_acl(rules("me", PUB, SUB))
    await store.delete_acl("User:me", resource=Resource.parse("Topic:other"))
    await store.delete_acl("User:me", PolicyType.DEFAULT, PUB.resource)
    assert store.acl("me") == rules("me", PUB, SUB)
    await store.delete_acl("User:me", PolicyType.CUSTOM, PUB.resource)
    assert store.acl("me") == rules("me", SUB)
    await store.delete_acl("User:me", PolicyType.CUSTOM, SUB.resource)
    assert store.acl("me") is None
    await store.write_acl(rules("me", PUB, SUB))
    await store.delete_acl("User:me")
    assert (await reloaded(file)).acl("me") is None


async def test_list_acls() -> None:
    store, _ = await filled()
    await store.write_acl(rules("root", SUB))
    await store.write_acl(rules("me", PUB, SUB))
    assert store.list_acls() == [rules("me", PUB, SUB), rules("root", SUB)]
    assert store.list_acls("er:me") == [rules("me", PUB, SUB)]
    assert store.list_acls("", "Topic") == [rules("me", PUB)]
    assert store.list_acls("root", "Topic") == []


# -- the file


async def test_a_change_that_cannot_be_written_changes_nothing() -> None:
    store, file = await filled()
    data, generation, users = file.data, store.generation, dict(store.users)
    calls: list[Callable[[], Awaitable[None]]] = [
        lambda: store.create_user("x", UserChange("x")),
        lambda: store.update_user("me", DISABLED),
        lambda: store.delete_user("me"),
        lambda: store.write_acl(rules("me", PUB)),
    ]
    for call in calls:
        file.error = OSError(errno.ENOSPC, "No space left on device")
        assert await refused(call()) == (
            1,
            "/memory/auth.json cannot be written, the change has no effect: No space left on device",
        )
        assert (file.data, store.generation, dict(store.users), store.acl("me")) == (data, generation, users, None)
    await store.update_user("me", DISABLED)  # the next one succeeds
    assert not (await reloaded(file)).users["me"].is_enabled


async def test_a_change_counts_when_it_is_on_disk_and_not_before() -> None:
    store, file = await filled()
    free = trio.Event()
    replace = file.replace

    async def slow(data: bytes) -> None:
        await free.wait()
        await replace(data)

    file.replace = slow  # type: ignore[method-assign]
    generation = store.generation
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.delete_user, "me")
        await trio.testing.wait_all_tasks_blocked()
        assert "me" in store.users
        assert store.generation == generation
        nursery.cancel_scope.cancel()  # a caller that is cancelled leaves no half change
        free.set()
    assert "me" not in store.users
    assert store.generation == generation + 1
    assert "me" not in (await reloaded(file)).users


async def test_without_a_key_a_password_is_only_stored_if_that_is_allowed() -> None:
    file = MemoryFile()
    store = AuthStore(file, Secrets())
    code, text = await refused(store.create_user("x", UserChange("x")))
    assert code == 16
    assert text == (
        "passwords cannot be stored: set authKeyFile to a key file made with `mqstore authkey FILE`, or "
        "allowSecretsInClear=true to store passwords in clear"
    )
    assert file.data is None


async def not_loaded(file: MemoryFile, secrets: Secrets) -> str:
    before, store = file.data, AuthStore(file, secrets)
    with pytest.raises(AuthStoreError) as caught:
        await store.load()
    assert CANARY not in repr(caught.value)
    assert (file.data, file.writes, dict(store.users)) == (before, file.writes, {})
    return str(caught.value)


async def test_a_wrong_key_refuses_and_overwrites_nothing() -> None:
    _, file = await filled(encrypted())
    assert "is not in authKeyFile: add that key there" in await not_loaded(file, encrypted(KEY_2))
    assert "set authKeyFile" in await not_loaded(file, in_clear())
    assert "set authKeyFile" in await not_loaded(file, Secrets())


async def test_passwords_in_clear_are_only_read_if_that_is_allowed() -> None:
    _, file = await filled()
    assert "is stored in clear: set allowSecretsInClear=true" in await not_loaded(file, Secrets())
    assert "its secrets are in clear, and there is an authKeyFile" in await not_loaded(file, encrypted())


async def test_a_start_with_a_key_encrypts_what_was_in_clear() -> None:
    store, file = await filled()
    await store.write_acl(rules("me", PUB))
    both = Secrets(encrypted().keys, allow_clear=True)
    assert await AuthStore(file, both).load() == 2
    assert file.data is not None
    assert CANARY.encode() not in file.data
    again = await reloaded(file, encrypted())
    assert (dict(again.users), again.acl("me")) == (dict(store.users), store.acl("me"))


async def test_keys_rotate() -> None:
    store, file = await filled(encrypted(KEY_1))
    assert await AuthStore(file, encrypted(KEY_2, KEY_1)).load() == 2
    writes = file.writes
    again = AuthStore(file, encrypted(KEY_2, KEY_1))
    assert await again.load() == 0
    assert file.writes == writes
    # The old key is not needed any more, and the store goes on with the new one.
    again = await reloaded(file, encrypted(KEY_2))
    assert dict(again.users) == dict(store.users)
    await again.create_user("x", UserChange("x"))
    assert "x" in (await reloaded(file, encrypted(KEY_2))).users


async def test_the_seal_of_a_file_without_users_rotates_too() -> None:
    _, file = await filled(encrypted(KEY_1))
    file.data = auth_file.encode(3, [], [], encrypted(KEY_1).keys)
    assert await AuthStore(file, encrypted(KEY_2, KEY_1)).load() == 0
    assert (await reloaded(file, encrypted(KEY_2))).list_users() == []


async def test_a_rotation_that_cannot_be_written_refuses_the_start() -> None:
    _, file = await filled(encrypted(KEY_1))
    file.error = OSError(errno.EACCES, "Permission denied")
    with pytest.raises(AuthStoreError, match=r"/memory/auth\.json cannot be written: Permission denied"):
        await AuthStore(file, encrypted(KEY_2, KEY_1)).load()


async def test_a_file_that_cannot_be_read_refuses_the_start() -> None:
    class Unreadable(MemoryFile):
        async def read(self) -> bytes | None:
            raise OSError(errno.EIO, "Input/output error")

    assert await not_loaded(Unreadable(), in_clear()) == "/memory/auth.json cannot be read: Input/output error"
    damaged = MemoryFile(b"{}")
    assert await not_loaded(damaged, in_clear()) == (
        "/memory/auth.json cannot be used: it is damaged: not the JSON of users and policies"
    )


async def test_who_is_made_super_behind_the_seal_refuses_the_start() -> None:
    for secrets in (encrypted(), in_clear()):
        _, file = await filled(secrets)
        file.data = made_super(file.data or b"", "me")
        assert await not_loaded(file, secrets) == "/memory/auth.json cannot be used: it is damaged: it has no seal"


GOOD = {"username": "a", "userType": "Super", "userStatus": "enable", "secret": {"clear": "x"}}


@pytest.mark.parametrize(
    ("user", "acl"),
    [
        (GOOD | {"username": ""}, None),
        (GOOD | {"userType": "root"}, None),
        (GOOD | {"userStatus": None}, None),
        (GOOD | {"secret": {"clear": ""}}, None),
        ({"username": "a"}, None),
        (5, None),
        (GOOD | {"secret": 5}, None),
        (GOOD, {"subject": "User:a", "policies": []}),
        (GOOD, {"subject": "Role:a"}),
        (GOOD, 5),
    ],
)
async def test_a_damaged_record_refuses_the_start(user: Any, acl: Any) -> None:
    records = [json.dumps(user).encode()], [] if acl is None else [json.dumps(acl).encode()]
    file = MemoryFile(auth_file.encode(1, *records, None))
    assert await not_loaded(file, in_clear()) == "/memory/auth.json cannot be used: a record in it is damaged"


async def test_a_sealed_record_does_not_count_in_a_file_without_a_seal() -> None:
    """A user who is made Super by an editor: the seal is left out, the encrypted password is retained."""
    secrets = Secrets(encrypted().keys, allow_clear=True)
    record = {"username": "me", "userType": "Super", "userStatus": "enable", "secret": secrets.record("me", "x")}
    file = MemoryFile(auth_file.encode(1, [json.dumps(record).encode()], [], None))
    assert "a record in it is damaged" in await not_loaded(file, secrets)


async def test_a_password_cannot_be_moved_to_another_user() -> None:
    secrets = encrypted()
    record = {"username": "me", "userType": "Normal", "userStatus": "enable", "secret": secrets.record("root", "x")}
    file = MemoryFile(auth_file.encode(1, [json.dumps(record).encode()], [], secrets.keys))
    assert "the password of me is damaged, or of another user" in await not_loaded(file, secrets)


async def test_policies_without_a_user_are_not_given_to_a_new_one() -> None:
    acl = json.dumps(
        {"subject": "User:x", "policies": [{"entries": [{"resource": "*", "actions": ["All"], "decision": "Allow"}]}]}
    )
    store = await reloaded(MemoryFile(auth_file.encode(1, [], [acl.encode()], None)))
    await store.create_user("x", UserChange("x"))
    assert store.acl("x") is None


async def test_the_generation_counts_changes_only() -> None:
    store, _ = await filled()
    generation = store.generation
    await refused(store.create_user("me", UserChange("x")))
    store.list_users()
    assert store.generation == generation
    await store.update_user("me", DISABLED)
    await store.write_acl(Acl("User:me", rules("me", PUB).policies))
    await store.delete_acl("User:me")
    await store.delete_user("me")
    assert store.generation == generation + 4


async def test_the_file_of_the_master_replaces_everything() -> None:
    master, file = await filled(encrypted())
    await master.write_acl(rules("me", PUB))
    store, own = await filled(encrypted(KEY_2, KEY_1))
    await store.create_user("mine", UserChange("p"))
    heard: list[int] = []
    store.on_adopted = lambda: heard.append(store.generation)
    before = store.generation
    assert file.data is not None
    await store.adopt(file.data)
    assert dict(store.users) == dict(master.users)
    assert store.list_acls() == master.list_acls() != []
    assert heard == [before + 1]
    assert own.data == file.data  # as it came, under the master's key
    assert dict((await reloaded(own, encrypted(KEY_2, KEY_1))).users) == dict(master.users)
    # The next change here continues the master's versions.
    await store.create_user("mine", UserChange("p"))
    assert auth_file.version_of(own.data or b"") == auth_file.version_of(file.data) + 1


async def test_a_file_that_is_not_the_masters_changes_nothing() -> None:
    store, own = await filled(encrypted())
    _, other = await filled(encrypted(KEY_2))
    _, clear = await filled()
    good = own.data or b""
    users, before, writes = dict(store.users), store.generation, own.writes
    for data, text in (
        (clear.data or b"", "the master's file of users cannot be used: its secrets are not encrypted"),
        (other.data or b"", "which is not in authKeyFile"),
        (good.replace(b'"me"', b'"be"', 1), "its seal is wrong"),
        (b'{"format":1,"secrets":"encrypted",', "the master's file of users cannot be used: it is damaged"),
        (b"", "the master's file of users cannot be used: it is damaged"),
        (made_super(good, "me"), "the master's file of users cannot be used: it is damaged: it has no seal"),
        (auth_file.encode(9, [], [], KeyRing([KEY_1])), "there are no users in it"),
    ):
        with pytest.raises(AuthStoreError, match=text):
            await store.adopt(data)
    assert (dict(store.users), store.generation, own.writes) == (users, before, writes)
    own.error = OSError(5, "I/O error")
    with pytest.raises(AuthStoreError, match="cannot be written: I/O error"):
        await store.adopt(good)
    assert (dict(store.users), store.generation) == (users, before)


async def test_a_file_of_an_earlier_version_that_is_too_large_for_slaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used here; slaves learn why they do not get it."""
    _, file = await filled(encrypted())
    monkeypatch.setattr(auth_file, "MOST_AUTH_BYTES", 100)
    store = await reloaded(file, encrypted())
    with pytest.raises(AuthStoreError, match="and slaves can take 100: delete users or policies"):
        store.sealed()


async def test_a_broker_that_stores_in_clear_takes_no_file_in_clear() -> None:
    """Without a key anybody on the way could make such a file."""
    store, _ = await filled()
    _, clear = await filled()
    with pytest.raises(AuthStoreError, match="not encrypted"):
        await store.adopt(clear.data or b"")
    with pytest.raises(AuthStoreError, match="set authKeyFile"):
        store.sealed()
