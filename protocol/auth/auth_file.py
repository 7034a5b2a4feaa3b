"""The file with users and policies: JSON, one record a line, with a seal over all bytes in front of it.

The seal is an HMAC-SHA256 with a key of the key file, else a CRC-32. So a file whose secrets are encrypted cannot be
changed without the key either: no Normal user becomes a Super, no Deny an Allow. See docs/formats/auth.md.
"""

import hmac
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from trimq.protocol.hashing import checksum

AUTH_FILE: Final = "auth.json"
MOST_AUTH_BYTES: Final = 16 * 1024 * 1024 - 64 * 1024
"""Bytes of a file that is written, without its seal: it has to fit into the reply to request 13010, a single frame."""
MOST_READ_BYTES: Final = 16 * 1024 * 1024 + 4096
"""Bytes of a file that is read: earlier versions have written somewhat larger ones."""
FORMAT: Final = 1
SEAL: Final = "seal"
"""A field of request 13010: the seal of the file that the sender has."""

_ENCRYPTED: Final = b'{"format":1,"secrets":"encrypted",'
_CLEAR: Final = b'{"format":1,"secrets":"clear",'
_SEAL: Final = b',\n"seal":'


class AuthFileError(Exception):
    """The file cannot be used. The text has no secret in it."""


class MissingKeyError(AuthFileError):
    """Its key is not known here: only a change of the key file makes the same file usable."""


class Sealing(Protocol):
    """The keys for the seal."""

    @property
    def first_id(self) -> str:
        """The key that seals."""
        ...

    def seal(self, key_id: str, data: bytes) -> str | None:
        """The seal of ``data`` as text; None if there is no such key."""
        ...


class AuthTables(NamedTuple):
    """The records of a file as they are in JSON. ``encrypted``: whether the secrets are, so that the seal has a key."""

    version: int
    encrypted: bool
    users: list[Any]
    acls: list[Any]
    key_id: str | None


def encode(version: int, users: Iterable[bytes], acls: Iterable[bytes], keys: Sealing | None) -> bytes:
    """The text of a file. ``users``, ``acls``: the JSON of one record each, without line breaks.

    ``keys``: None if the secrets in the records are not encrypted. Raises AuthFileError if it is too large.
    """
    head = b'%s"version":%d,\n"users":[\n' % (_CLEAR if keys is None else _ENCRYPTED, version)
    front = head + b",\n".join(users) + b'\n],\n"acls":[\n' + b",\n".join(acls) + b"\n]"
    if len(front) > MOST_AUTH_BYTES:
        raise AuthFileError(
            f"users and policies would take {len(front)} bytes, and slaves can take {MOST_AUTH_BYTES}: delete users or "
            "policies that are not needed any more"
        )
    if keys is None:
        seal: dict[str, Any] = {"crc": checksum(front)}
    else:
        seal = {"key": keys.first_id, "mac": keys.seal(keys.first_id, front)}
    return front + _SEAL + msgspec.json.encode(seal) + b"}\n"


def decode(data: bytes, keys: Sealing | None) -> AuthTables:
    """The records of a file, whose seal is right. Raises AuthFileError."""
    if len(data) > MOST_READ_BYTES:
        raise AuthFileError(f"it has {len(data)} bytes; {MOST_READ_BYTES} are allowed")
    try:
        value = msgspec.json.decode(data)
        version_of_format = value["format"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise AuthFileError("it is damaged: not the JSON of users and policies") from None
    # Before all else: a later format may have another seal.
    if version_of_format != FORMAT:
        raise AuthFileError(f"it has format {str(version_of_format)[:20]}; this version of TriMQ reads format {FORMAT}")
    front, separator, _ = data.rpartition(_SEAL)
    encrypted = is_encrypted(data)
    seal = value.get("seal")
    if not separator or not isinstance(seal, dict) or not (encrypted or data.startswith(_CLEAR)):
        raise AuthFileError("it is damaged: it has no seal")
    if encrypted:
        _check_mac(front, seal, keys)
    elif seal.get("crc") != checksum(front):
        raise AuthFileError("it is damaged: its checksum is another")
    version, users, acls = value.get("version"), value.get("users"), value.get("acls")
    if type(version) is not int or not isinstance(users, list) or not isinstance(acls, list):
        raise AuthFileError("it is damaged: it has no tables")
    return AuthTables(version, encrypted, users, acls, seal["key"] if encrypted else None)


def is_encrypted(data: bytes) -> bool:
    """Whether all secrets in a file are encrypted. Only such a file may leave the machine."""
    return data.startswith(_ENCRYPTED)


def seal_of(data: bytes) -> str:
    """The seal of an encrypted file, unchecked, which is another one after each change; empty if there is none."""
    front, separator, text = data.rpartition(_SEAL)
    return text.decode("ascii", "replace").rstrip("}\n") if separator and is_encrypted(front) else ""


def version_of(data: bytes) -> int:
    """The version of a file whose seal cannot be checked here. Raises AuthFileError if it is no encrypted file."""
    try:
        version = msgspec.json.decode(data)["version"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise AuthFileError("it is not the JSON of users and policies") from None
    if not is_encrypted(data) or not seal_of(data) or type(version) is not int:
        raise AuthFileError("its secrets are not encrypted, or it has no seal")
    return version


def _check_mac(front: bytes, seal: dict[str, Any], keys: Sealing | None) -> None:
    key_id, mac = seal.get("key"), seal.get("mac")
    if not isinstance(key_id, str) or not isinstance(mac, str):
        raise AuthFileError("it is damaged: it has no seal")
    shown = ascii(key_id[:16])
    if keys is None:
        raise MissingKeyError(
            f"its secrets are encrypted with key {shown}: set authKeyFile to the file that has this key"
        )
    expected = keys.seal(key_id, front)
    if expected is None:
        raise MissingKeyError(
            f"its secrets are encrypted with key {shown}, which is not in authKeyFile: add that key there"
        )
    if not hmac.compare_digest(mac.encode("utf-8", "replace"), expected.encode()):
        raise AuthFileError(
            "its seal is wrong: it is damaged, or was changed without the key. Restore it from a backup"
        )
