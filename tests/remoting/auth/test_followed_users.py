"""Users and policies that follow a broker's file: what is read, what is left as it was, and what refuses the start."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from tests.remoting.auth.stores import made_super
from tests.remoting.auth.user_files import following, grant, key_file, writer
from trimq.namesrv.config import load_namesrv
from trimq.protocol.auth.auth_file import AUTH_FILE, encode
from trimq.protocol.auth.model import User, UserChange, UserType
from trimq.protocol.errors import RemotingError
from trimq.remoting.auth.followed_config import auth_settings_of
from trimq.remoting.auth.followed_users import FollowedUsers, follow_users
from trimq.remoting.auth.secrets import add_key, read_key_file
from trimq.remoting.auth.users import AccessError
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.properties import ConfigError
from trimq.remoting.runtime.clock import ManualClock

ROOT = User("root", "root canary-19", UserType.SUPER)
A = User("a", "a canary-19")


def settings(keys: dict[str, str]) -> Configuration:
    return load_namesrv(flags={key: (value, "test") for key, value in keys.items()})


def opened(directory: Path, keys: Path, **more: str) -> FollowedUsers:
    found = follow_users(settings(following(directory, keys) | more), ManualClock())
    assert found is not None
    return found


def names(followed: FollowedUsers) -> list[str]:
    return sorted(followed.users.store.users)


async def test_off_by_default() -> None:
    assert follow_users(settings({}), ManualClock()) is None


async def test_changes_of_the_broker_arrive(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT)
    followed = opened(tmp_path / "config", keys)
    assert names(followed) == ["root"]
    before = followed.users.store.generation
    await followed.refresh()
    assert followed.users.store.generation == before  # unchanged: what was decided stays known
    await store.create_user("a", UserChange("a canary-19"))
    await grant(store, "a", "Topic:T", "Sub")
    await followed.refresh()
    assert followed.users.store.user("a") == A
    assert followed.users.store.acl("a") == store.acl("a")
    assert followed.users.store.acl("a") is not None
    assert followed.users.store.generation > before
    await store.delete_user("a")
    await followed.refresh()
    assert names(followed) == ["root"]


async def test_the_task_looks_in_each_interval(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT)
    clock = ManualClock()
    followed = follow_users(settings(following(tmp_path / "config", keys)), clock)
    assert followed is not None
    await store.create_user("a", UserChange("p"))
    async with trio.open_nursery() as tasks:
        tasks.start_soon(followed.run)
        await trio.testing.wait_all_tasks_blocked()
        assert names(followed) == ["root"]
        clock.advance(1)
        while names(followed) != ["a", "root"]:
            await trio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


def _damaged(path: Path, _keys: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path, _keys: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _open_to_others(path: Path, _keys: Path) -> None:
    path.chmod(0o640)


def _in_an_open_directory(path: Path, _keys: Path) -> None:
    path.parent.chmod(0o777)
    os.utime(path)


def _gone(path: Path, _keys: Path) -> None:
    path.unlink()


def _pipe(path: Path, _keys: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _huge(path: Path, _keys: Path) -> None:
    os.truncate(path, 17 * 1024 * 1024)


def _unsealed(path: Path, _keys: Path) -> None:
    record = b'{"username":"evil","userType":"Super","userStatus":"enable","secret":{"clear":"x"}}'
    path.write_bytes(encode(99, [record], [], None))


def _super_behind_the_seal(path: Path, _keys: Path) -> None:
    path.write_bytes(made_super(path.read_bytes(), "a"))


def _without_users(path: Path, keys: Path) -> None:
    path.write_bytes(encode(99, [], [], read_key_file(keys)))


def _without_the_key(_path: Path, keys: Path) -> None:
    keys.write_text("00" * 32)


def _keys_open_to_others(_path: Path, keys: Path) -> None:
    keys.chmod(0o644)


HARM = {
    _damaged: "seal is wrong|damaged",
    _cut: "damaged",
    _open_to_others: "others may read it .mode 0640.: chmod 600",
    _in_an_open_directory: "others may replace it .mode 0777 of its directory.",
    _gone: "cannot be read: No such file",
    _pipe: "it is no file",
    _huge: "it has more than",
    _unsealed: "its secrets are in clear, and there is an authKeyFile",
    _super_behind_the_seal: "it is damaged: it has no seal",
    _without_users: "there are no users in it",
    _without_the_key: "which is not in authKeyFile",
    _keys_open_to_others: "may be read by others",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
async def test_what_cannot_be_used_refuses_a_start_and_leaves_a_running_server(
    tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, A)
    path = tmp_path / "config" / AUTH_FILE
    followed = opened(tmp_path / "config", keys)
    kept, key_text = path.read_bytes(), keys.read_bytes()
    harm(path, keys)
    with capture_logs() as logs:
        await followed.refresh()
        if path.exists():
            os.utime(path)
        await followed.refresh()  # the same again: not logged twice
    assert [(line["event"], line["log_level"]) for line in logs] == [("access_users_not_read", "warning")]
    assert "canary" not in str(logs)
    assert names(followed) == ["a", "root"]
    assert followed.users.store.user("root") == ROOT
    with pytest.raises(AccessError, match=f"there are no users: .*({HARM[harm]})"):
        opened(tmp_path / "config", keys)
    # Restored, it is followed again.
    path.unlink(missing_ok=True)
    path.parent.chmod(0o755)
    path.write_bytes(kept)
    path.chmod(0o600)
    keys.write_bytes(key_text)
    keys.chmod(0o600)
    await store.load()
    await store.delete_user("a")
    with capture_logs() as logs:
        await followed.refresh()
    assert (followed.failure, names(followed)) == ("", ["root"])
    assert [line["event"] for line in logs] == ["access_users_read"]


async def test_a_failure_whose_end_is_not_seen_in_the_files_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = key_file(tmp_path)
    store = await writer(tmp_path / "config", keys, ROOT, A)
    followed = opened(tmp_path / "config", keys)
    (tmp_path / "config").chmod(0o777)
    await store.delete_user("a")
    await followed.refresh()
    assert "chmod go-w" in followed.failure
    (tmp_path / "config").chmod(0o755)  # as it was advised; the file stays as it is
    await followed.refresh()
    assert (followed.failure, names(followed)) == ("", ["root"])

    def no_descriptor(_path: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    await store.create_user("b", UserChange("p"))
    with monkeypatch.context() as patched:
        patched.setattr("trimq.remoting.auth.followed_users.os.open", no_descriptor)
        await followed.refresh()
    assert "Too many open files" in followed.failure
    await followed.refresh()
    assert (followed.failure, names(followed)) == ("", ["b", "root"])


async def test_a_rotated_key_needs_no_restart(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    followed = opened(tmp_path / "config", keys)
    add_key(keys)
    await writer(tmp_path / "config", keys)  # the broker's next start encrypts anew
    await followed.refresh()
    assert (followed.failure, followed.users.store.user("root")) == ("", ROOT)


async def test_nothing_is_written_where_users_are_followed(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    await writer(tmp_path / "config", keys, ROOT)
    followed = opened(tmp_path / "config", keys)
    with pytest.raises(RemotingError, match="users and policies are changed at a broker"):
        await followed.users.store.create_user("b", UserChange("p"))
    assert names(followed) == ["root"]
    await followed.users.store.load()
    (tmp_path / "config" / AUTH_FILE).unlink()
    assert await followed.users.store.load() == 0


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"authenticationEnabled": "true", "authKeyFile": "k"}, "authConfigPath"),
        ({"authenticationEnabled": "true", "authConfigPath": "c"}, "authKeyFile"),
        ({"authorizationEnabled": "true"}, "authorizationEnabled"),
    ],
)
def test_what_is_missing_in_a_configuration(keys: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(keys)
    assert caught.value.key == problem


def test_keys_of_servers_that_write_users_are_noted() -> None:
    found = settings({"initAuthenticationUser": '{"username":"u","password":"canary"}'})
    assert [note for note in found.notes if "initAuthenticationUser has no effect" in note]
    assert "canary" not in str(found.notes)


def test_what_a_server_in_the_same_process_gets(tmp_path: Path) -> None:
    keys = following(tmp_path, tmp_path / "k") | {
        "authClusterName": "c2",
        "initAuthenticationUser": '{"username":"u","password":"canary"}',
    }
    found = auth_settings_of(settings(keys))
    assert {key: value for key, (value, _) in found.items()} == {
        key: value for key, value in keys.items() if key != "initAuthenticationUser"
    }


async def test_credentials_of_servers_that_are_gone_refuse_the_start(tmp_path: Path) -> None:
    """They were there when the configuration was read."""
    keys, inner = key_file(tmp_path), tmp_path / "inner.json"
    await writer(tmp_path / "config", keys, ROOT)
    inner.touch(mode=0o600)
    inner.write_text('{"accessKey":"a","secretKey":"s canary"}')
    given = {"innerClientAuthenticationCredentialsFile": str(inner)}
    found = settings(following(tmp_path / "config", keys) | given)
    assert follow_users(found, ManualClock()) is not None
    inner.unlink()
    with pytest.raises(AccessError, match="innerClientAuthenticationCredentialsFile: expected a file that can be read"):
        follow_users(found, ManualClock())
