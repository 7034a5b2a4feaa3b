"""Passwords at rest, and key files."""

import base64
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from tests.canary import permit
from tests.remoting.auth.stores import CANARY, KEY_1, KEY_2
from trimq.remoting.auth import secrets as secrets_module
from trimq.remoting.auth.secrets import KeyRing, Secrets, SecretsError, add_key, make_key_file, read_key_file

RING_1, RING_2 = KeyRing([KEY_1]), KeyRing([KEY_2])


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="ascii")
    path.chmod(mode)
    return path


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=1))
def test_what_was_encrypted_is_decrypted_for_its_user_only(username: str, password: str) -> None:
    record = RING_1.encrypt(username, password)
    assert RING_1.decrypt(username, record) == password
    assert KeyRing([KEY_2, KEY_1]).decrypt(username, record) == password
    with pytest.raises(SecretsError, match="is damaged, or of another user"):
        RING_1.decrypt(username + "x", record)


def test_the_same_password_is_encrypted_differently_each_time() -> None:
    records = [RING_1.encrypt("me", "p") for _ in range(100)]
    assert len({record["nonce"] for record in records}) == len({record["data"] for record in records}) == 100
    assert {len(base64.b64decode(record["nonce"])) for record in records} == {12}
    # The documented form: AES-256-GCM, the user's name as associated data.
    nonce, data = (base64.b64decode(records[0][name]) for name in ("nonce", "data"))
    assert AESGCM(KEY_1).decrypt(nonce, data, b"me") == b"p"


def test_every_changed_bit_is_found() -> None:
    record = RING_1.encrypt("me", CANARY)
    for name in ("nonce", "data"):
        data = bytearray(base64.b64decode(record[name]))
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(SecretsError, match="is damaged") as caught:
                RING_1.decrypt("me", record | {name: base64.b64encode(data).decode()})
            assert CANARY not in repr(caught.value)
            data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "record",
    [
        None,
        5,
        "x",
        {},
        {"key": RING_1.first_id},
        RING_1.encrypt("me", "p") | {"nonce": "ä"},
        RING_1.encrypt("me", "p") | {"nonce": 5},
        RING_1.encrypt("me", "p") | {"nonce": ""},
    ],
)
def test_damaged_records(record: Any) -> None:
    with pytest.raises(SecretsError, match="the password of me is damaged"):
        RING_1.decrypt("me", record)


@pytest.mark.parametrize("key_id", [RING_2.first_id, 5, None])
def test_a_record_of_another_key(key_id: Any) -> None:
    with pytest.raises(SecretsError, match="which is not in authKeyFile"):
        RING_1.decrypt("me", RING_1.encrypt("me", "p") | {"key": key_id})


def test_no_key_is_in_a_text() -> None:
    ring = KeyRing([KEY_1, KEY_2])
    assert ring.ids == (RING_1.first_id, RING_2.first_id)
    assert repr(ring) == f"KeyRing({RING_1.first_id}, {RING_2.first_id})"
    assert RING_1.first_id not in KEY_1.hex()
    assert ring.seal(RING_2.first_id, b"x") == RING_2.seal(RING_2.first_id, b"x") != RING_1.seal(RING_1.first_id, b"x")
    assert RING_1.seal(RING_2.first_id, b"x") is None


def test_how_passwords_are_stored() -> None:
    none, clear, sealed = Secrets(), Secrets(allow_clear=True), Secrets(RING_1)
    assert [one.can_store for one in (none, clear, sealed)] == [False, True, True]
    with pytest.raises(SecretsError, match="set authKeyFile to a key file"):
        none.record("me", "p")
    assert clear.record("me", "p") == {"clear": "p"}
    assert clear.password("me", {"clear": "p"}) == "p"
    assert clear.is_current({"clear": "p"})
    record = sealed.record("me", "p")
    assert sealed.password("me", record) == "p"
    assert sealed.is_current(record)
    assert not Secrets(RING_2).is_current(record)
    assert not sealed.is_current({"clear": "p"})
    for secrets in (none, sealed):
        with pytest.raises(SecretsError, match="the password of me is stored in clear"):
            secrets.password("me", {"clear": "p"})
    with pytest.raises(SecretsError, match="the password of me is encrypted: set authKeyFile"):
        clear.password("me", record)


# -- key files


def test_a_new_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "auth.key"
    old = os.umask(0)
    try:
        first = make_key_file(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_key_file(path).ids == (first,)
        with pytest.raises(SecretsError, match=r"exists already: `mqstore authkey --add"):
            make_key_file(path)
        second = add_key(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(path).ids == (second, first)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["auth.key"]


def test_a_key_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(SecretsError):
        make_key_file(tmp_path / "link")
    assert not (tmp_path / "target").exists()


def test_the_forms_of_keys(tmp_path: Path) -> None:
    text = f"# a comment\n\n{KEY_1.hex()}\n  {base64.b64encode(KEY_2).decode()}  \n{KEY_1.hex().upper()}\n"
    assert read_key_file(key_file(tmp_path / "k", text)).ids == (RING_1.first_id, RING_2.first_id)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no key: `mqstore authkey FILE` makes a key file"),
        ("# nothing\n", "has no key"),
        ("abc\n", "line 1: expected base64 or hexadecimal text of 32 bytes"),
        (f"{KEY_1.hex()}\n{CANARY}\n", "line 2: expected base64"),
        ("x" * 64, "line 1: expected base64"),
        (base64.b64encode(b"x" * 16).decode(), "line 1: expected base64"),
        ("\n".join(bytes([number] * 32).hex() for number in range(17)), "has 17 keys; 16 are allowed"),
        ("#" * 70_000, "is no key file"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SecretsError) as caught:
        read_key_file(key_file(tmp_path / "k", text))
    permit(tmp_path / "k")  # which is no key file
    assert expected in str(caught.value)
    assert CANARY not in repr(caught.value)


def test_a_key_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_bytes(b"\xff" * 32)
    path.chmod(0o600)
    with pytest.raises(SecretsError, match="is no key file"):
        read_key_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path / "k", KEY_1.hex(), mode)
    for call in (read_key_file, add_key):
        with pytest.raises(SecretsError, match=rf"may be read by others \(mode {mode:04o}\): chmod 600"):
            call(path)


def test_a_key_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path / "k", KEY_1.hex())
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:  # a file of root may be read
        with pytest.raises(SecretsError, match="belongs to another user"):
            read_key_file(path)
        return
    assert read_key_file(path).ids
    found = list(path.stat())
    found[4] = 4242
    with pytest.raises(SecretsError, match=r"belongs to another user \(uid 4242\)"):
        secrets_module._check_access(path, os.stat_result(found))


def test_a_key_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SecretsError, match=r"is no file|Is a directory"):
        read_key_file(tmp_path)
    with pytest.raises(SecretsError, match="cannot be read: No such file or directory"):
        read_key_file(tmp_path / "none")
    with pytest.raises(SecretsError, match="is no file"):
        read_key_file(Path("/dev/null"))


def test_a_key_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    with pytest.raises(SecretsError, match="cannot be written"):
        make_key_file(tmp_path / "file" / "key")
    path = key_file(tmp_path / "k", KEY_1.hex())

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SecretsError, match="cannot be written: Input/output error"):
        add_key(path)
    assert read_key_file(path).ids == (RING_1.first_id,)


def test_a_key_file_has_room_for_some_keys_only(tmp_path: Path) -> None:
    text = "\n".join(bytes([number] * 32).hex() for number in range(16))
    with pytest.raises(SecretsError, match="has 16 keys: remove those"):
        add_key(key_file(tmp_path / "k", text))


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    path = tmp_path / "k"
    make_key_file(path)  # a key needs no library
    with pytest.raises(SecretsError, match=r"needs the extra security: pip install trimq\[security\]"):
        read_key_file(path)
    assert Secrets(allow_clear=True).record("me", "p") == {"clear": "p"}
