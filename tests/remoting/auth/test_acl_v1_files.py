"""Reading the files of RocketMQ 4's access control."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from tests.canary import permit
from trimq.remoting.auth import acl_v1_files
from trimq.remoting.auth.acl_v1_files import AclFilesError, files_in, files_of, read_files

SECRET = "canary-7f3a91"


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(autouse=True)
def _accounts_are_in_clear(tmp_path: Path) -> None:
    permit(tmp_path / "*")  # as RocketMQ 4 has them


def account(name: str, secret: str = SECRET) -> str:
    return f"accounts:\n- accessKey: {name}\n  secretKey: {secret}\n"


def refusal(*paths: Path) -> str:
    with pytest.raises(AclFilesError) as caught:
        read_files(list(paths))
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_plain_acl_comes_first_then_the_files_of_conf_acl(tmp_path: Path) -> None:
    plain = write(tmp_path / "conf" / "plain_acl.yml", account("first"))
    acl = tmp_path / "conf" / "acl"
    second, third = write(acl / "b.yml", account("second")), write(acl / "c" / "d.yaml", account("third"))
    write(acl / "notes.txt", "no accounts")
    assert files_of(tmp_path) == [plain, second, third]
    assert list(read_files(files_of(tmp_path)).users) == ["first", "second", "third"]
    assert files_of(tmp_path / "none") == files_in(tmp_path / "none") == []


@pytest.mark.parametrize("secret", ["12345678", "012345678", "1e10", "true", "2024-01-01", "'a: b'"])
def test_secrets_stay_as_they_are_written(tmp_path: Path, secret: str) -> None:
    found = read_files([write(tmp_path / "a.yml", account("name", secret))])
    assert found.users["name"].user.password == secret.strip("'")


def test_an_empty_file_has_no_accounts(tmp_path: Path) -> None:
    assert read_files([write(tmp_path / "a.yml", "")]).users == {}


def test_no_objects_are_made(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yml", "accounts: !!python/object/apply:os.system ['false']\n")
    assert read_files([path]).users == {}


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = write(tmp_path / "a.yml", f"accounts:\n- accessKey: [{SECRET}\n  secretKey: {SECRET}: x\n")
    assert refusal(bad) == f"{bad}, line 3: not YAML"
    assert refusal(write(bad, "[" * 5000)) == f"{bad}: not YAML"
    assert refusal(write(bad, b"\xff")) == f"{bad} is not UTF-8 text"
    assert refusal(tmp_path / "none") == f"{tmp_path}/none cannot be read: No such file or directory"
    assert refusal(*[bad] * 1001) == "there are 1001 files of accounts; 1000 are read"
    monkeypatch.setattr(acl_v1_files, "MOST_BYTES", 10)
    assert refusal(write(bad, account("name"))) == f"{bad} has more than 10 bytes"


def test_without_pyyaml_the_text_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    text = "files of RocketMQ 4's access control need PyYAML: pip install trimq[security]"
    assert refusal(write(tmp_path / "a.yml", account("name"))) == text
