"""Files with secrets: pipes are refused and not waited for, and files of other users are refused."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from trimq.protocol.auth.auth_file import AuthFileError
from trimq.remoting.auth.config import read_private_file
from trimq.remoting.auth.followed_users import FollowedFile
from trimq.remoting.auth.secrets import SecretsError, read_key_file
from trimq.remoting.tls.key_files import KeyFileError, _read_password


def written(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text("secret\n")
    return path


def owned_by(uid: int, monkeypatch: pytest.MonkeyPatch, call: str = "fstat") -> None:
    """Have all files that are open, or with "stat" all paths, belong to a user; only root could give one away."""
    real = getattr(os, call)

    def other(file: Any, **options: Any) -> os.stat_result:
        found = list(real(file, **options))
        found[stat.ST_UID] = uid
        return os.stat_result(found)

    monkeypatch.setattr(os, call, other)


def test_the_owner_is_this_user_or_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(written(tmp_path / "file"))
    for uid in (os.geteuid(), 0):
        with monkeypatch.context() as patch:
            owned_by(uid, patch)
            assert read_private_file(path) == "secret\n"
            assert _read_password(path) == "secret"
    owned_by(4242, monkeypatch)
    expected = f"a file of this user or of root, not of the user 4242 (chown {path})"
    with pytest.raises(ValueError, match="4242") as caught:
        read_private_file(path)
    assert str(caught.value) == expected
    with pytest.raises(KeyFileError) as refused:
        _read_password(path)
    assert refused.value.expected == expected


def test_users_that_are_followed_belong_to_this_user_or_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    written(tmp_path / "auth.json")
    file = FollowedFile(str(tmp_path))
    assert file.read_now() == b"secret\n"
    with monkeypatch.context() as patch:
        owned_by(4242, patch)
        with pytest.raises(AuthFileError, match=r"it belongs to another user \(uid 4242\), who may change it: chown /"):
            file.read_now()
    for uid in (os.geteuid(), 0):
        with monkeypatch.context() as patch:
            owned_by(uid, patch, "stat")
            assert file.read_now() == b"secret\n"
    owned_by(4242, monkeypatch, "stat")
    with pytest.raises(AuthFileError, match=r"its directory belongs to another user \(uid 4242\), .*: chown /"):
        file.read_now()


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match="a regular file"):
        read_private_file(str(path))
    with pytest.raises(KeyFileError, match="a regular file"):
        _read_password(str(path))
    with pytest.raises(SecretsError, match="is no file"):
        read_key_file(path)
    with pytest.raises(ValueError, match="Is a directory"):
        read_private_file(str(tmp_path))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_others_may_not_read_or_write_it(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "file")
    path.chmod(mode)
    with pytest.raises(ValueError, match="only its owner can read"):
        read_private_file(str(path))
