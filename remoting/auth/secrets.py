"""Passwords at rest: AES-256-GCM with keys from a file outside the store.

Signatures are HMACs, so a server must know the password itself: a hash of it is not enough. The key file has one key a
line; the first one encrypts, all decrypt. So keys are changed by putting a new one in front, and removing the old one
when nothing is encrypted with it any more. Without a key file, passwords are only stored if the configuration says so.

``cryptography`` (the extra ``security``) is imported when a key file is read, not before.
"""

import base64
import binascii
import hashlib
import hmac
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from trimq.remoting.config.private_file import belongs_to_another

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
MOST_KEYS: Final = 16
_MOST_FILE_BYTES: Final = 64 * 1024

HOW_TO: Final = (
    "set authKeyFile to a key file made with `mqstore authkey FILE`, or allowSecretsInClear=true to store passwords in "
    "clear"
)


class SecretsError(Exception):
    """Secrets cannot be encrypted or decrypted. The text has no secret in it, and says what to do."""


class KeyRing:
    """The keys of a key file. In no text of this object is any of them."""

    __slots__ = ("_ciphers", "_seals", "first_id")

    def __init__(self, keys: Iterable[bytes]) -> None:
        """``keys``: 32 bytes each, the one that encrypts first. Raises SecretsError without the extra security."""
        cipher = _cipher()
        self._ciphers: dict[str, Any] = {}
        self._seals: dict[str, bytes] = {}
        for key in keys:
            key_id = _derived(key, b"id")[:4].hex()
            self._ciphers[key_id] = cipher(key)
            self._seals[key_id] = _derived(key, b"seal")
        self.first_id = next(iter(self._ciphers))

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._ciphers)})"

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the keys, which say nothing about them. The first one encrypts."""
        return tuple(self._ciphers)

    def encrypt(self, username: str, password: str) -> dict[str, str]:
        """The record of a password. It can only be decrypted for the same user."""
        nonce = os.urandom(NONCE_BYTES)
        data = self._ciphers[self.first_id].encrypt(nonce, password.encode(), username.encode())
        return {"key": self.first_id, "nonce": _text(nonce), "data": _text(data)}

    def decrypt(self, username: str, record: Any) -> str:
        """The password in a record. Raises SecretsError."""
        try:
            key_id, nonce, data = record["key"], _bytes(record["nonce"]), _bytes(record["data"])
        except (TypeError, KeyError, ValueError):
            raise SecretsError(f"the password of {username} is damaged") from None
        cipher = self._ciphers.get(key_id) if isinstance(key_id, str) else None
        if cipher is None:
            raise SecretsError(
                f"the password of {username} is encrypted with key {ascii(key_id)[:20]}, which is not in authKeyFile"
            )
        try:
            return str(cipher.decrypt(nonce, data, username.encode()), "utf-8")
        except Exception:  # noqa: BLE001 - InvalidTag is a class of the extra; ValueError for a wrong length
            raise SecretsError(f"the password of {username} is damaged, or of another user") from None

    def seal(self, key_id: str, data: bytes) -> str | None:
        """HMAC-SHA256 of a whole file, as text; None if there is no such key."""
        key = self._seals.get(key_id)
        return None if key is None else _text(hmac.digest(key, data, hashlib.sha256))


class Secrets:
    """How passwords are stored: encrypted, in clear, or not at all."""

    def __init__(self, keys: KeyRing | None = None, *, allow_clear: bool = False) -> None:
        self.keys = keys
        self._allow_clear = allow_clear

    @property
    def can_store(self) -> bool:
        """Whether a password may be stored."""
        return self.keys is not None or self._allow_clear

    @property
    def may_be_clear(self) -> bool:
        """Whether passwords in clear are read: they become encrypted at the next change if there is a key."""
        return self._allow_clear

    def record(self, username: str, password: str) -> dict[str, str]:
        """The record of a password. Raises SecretsError if it may not be stored."""
        if self.keys is not None:
            return self.keys.encrypt(username, password)
        if not self._allow_clear:
            raise SecretsError(f"passwords cannot be stored: {HOW_TO}")
        return {"clear": password}

    def password(self, username: str, record: Any) -> str:
        """The password in a record. Raises SecretsError."""
        if isinstance(record, dict) and isinstance(record.get("clear"), str):
            if not self._allow_clear:
                raise SecretsError(
                    f"the password of {username} is stored in clear: set allowSecretsInClear=true; with an authKeyFile "
                    "too, the next start encrypts it"
                )
            return str(record["clear"])
        if self.keys is None:
            raise SecretsError(f"the password of {username} is encrypted: set authKeyFile")
        return self.keys.decrypt(username, record)

    def is_current(self, record: dict[str, str]) -> bool:
        """Whether a new record of the same password would be encrypted in the same way."""
        return record.get("key") == (None if self.keys is None else self.keys.first_id)


def read_key_file(path: Path) -> KeyRing:
    """The keys of a file: base64 or hexadecimal text of 32 bytes a line; empty lines and # lines are passed over.

    Blocks. Raises SecretsError: if the extra is missing, if it cannot be read, if others than the owner may read it.
    """
    _cipher()
    return KeyRing(_keys_of(_read(path), path))


def read_keys(path: Path, purpose: bytes, name: str) -> dict[bytes, bytes]:
    """Keys for another purpose, derived from those of a key file, by 4 bytes that name them; the first one comes first.

    ``name``: the option, for messages. Needs no extra. Blocks. Raises SecretsError.
    """
    keys = _keys_of(_read(path, name), path, name)
    return {_derived(key, purpose + b" id")[:4]: _derived(key, purpose) for key in keys}


def make_key_file(path: Path) -> str:
    """A new key file with one key, for its owner only; returns the key's name. Blocks. Raises SecretsError."""
    key = os.urandom(KEY_BYTES)
    text = f"# TriMQ: encrypts the passwords of users. Keep it secret, and keep a copy.\n{_text(key)}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SecretsError(f"{path} cannot be written: {error.strerror}") from None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(path)
    except FileExistsError:
        raise SecretsError(f"{path} exists already: `mqstore authkey --add {path}` puts a new key in front") from None
    except OSError as error:
        raise SecretsError(f"{path} cannot be written: {error.strerror}") from None
    return _derived(key, b"id")[:4].hex()


def add_key(path: Path) -> str:
    """Put a new key in front of those of a key file; returns its name. Blocks. Raises SecretsError."""
    old = _read(path)
    if len(_keys_of(old, path)) >= MOST_KEYS:
        raise SecretsError(f"{path} has {MOST_KEYS} keys: remove those that nothing is encrypted with any more")
    key = os.urandom(KEY_BYTES)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{_text(key)}\n{old}")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path)
    except OSError as error:
        raise SecretsError(f"{path} cannot be written: {error.strerror}") from None
    return _derived(key, b"id")[:4].hex()


def _read(path: Path, name: str = "authKeyFile") -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is refused, not waited for
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            _check_access(path, found, name)
            data = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise SecretsError(f"{name} {path} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_FILE_BYTES or not data.isascii():
        raise SecretsError(f"{name} {path} is no key file: it has other text than keys")
    return data.decode("ascii")


def _check_access(path: Path, found: os.stat_result, name: str = "authKeyFile") -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecretsError(f"{name} {path} is no file")
    if found.st_mode & 0o077:
        raise SecretsError(
            f"{name} {path} may be read by others (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 {path}"
        )
    if belongs_to_another(found.st_uid):
        raise SecretsError(f"{name} {path} belongs to another user (uid {found.st_uid}): chown it")


def _keys_of(text: str, path: Path, name: str = "authKeyFile") -> list[bytes]:
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()  # noqa: PLW2901 - the same line
        if not line or line.startswith("#"):
            continue
        try:
            key = bytes.fromhex(line) if len(line) == 2 * KEY_BYTES else _bytes(line)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            # Without the line: it is a secret, even if it has a typing error in it.
            raise SecretsError(f"{name} {path}, line {number}: expected base64 or hexadecimal text of 32 bytes")
        if key not in keys:
            keys.append(key)
    if not keys:
        raise SecretsError(f"{name} {path} has no key: `mqstore authkey FILE` makes a key file")
    if len(keys) > MOST_KEYS:
        raise SecretsError(f"{name} {path} has {len(keys)} keys; {MOST_KEYS} are allowed")
    return keys


def _cipher() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - only with a key file
    except ImportError:
        raise SecretsError(
            "authKeyFile needs the extra security: pip install trimq[security]; without it, allowSecretsInClear=true "
            "stores passwords in clear"
        ) from None
    return AESGCM


def _derived(key: bytes, purpose: bytes) -> bytes:
    """32 bytes for one purpose, from which neither the key nor those for another purpose follow (HKDF's expansion)."""
    return hmac.digest(key, b"trimq auth " + purpose + b"\x01", hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    """Raises ValueError, TypeError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _sync_directory(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
