"""The file with users and policies: JSON, one record a line, with a seal over all bytes in front of it.

The seal is an HMAC-SHA256 with a key of the key file, else a CRC-32. So a file whose secrets are encrypted cannot be
changed without the key either: no Normal user becomes a Super, no Deny an Allow. For this, all that is used of a file
comes from the bytes in front of the seal, and the bytes behind them are those that ``encode`` writes, to the last one:
in JSON a later member replaces an earlier one of the same name. See docs/formats/auth.md.
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
_NO_SEAL: Final = "it is damaged: it has no seal"
_NO_JSON: Final = "it is damaged: not the JSON of users and policies"
_NOT_DECODED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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


class _Mac(msgspec.Struct):
    """The seal of an encrypted file: the name of the key, and the HMAC."""

    key: str
    mac: str


class _Crc(msgspec.Struct):
    """The seal of a file in clear."""

    crc: int


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
        return front + _tail(_Crc(checksum(front)))
    mac = keys.seal(keys.first_id, front)
    assert mac is not None
    return front + _tail(_Mac(keys.first_id, mac))


def decode(data: bytes, keys: Sealing | None) -> AuthTables:
    """The records of a file, whose seal is right. Raises AuthFileError."""
    if len(data) > MOST_READ_BYTES:
        raise AuthFileError(f"it has {len(data)} bytes; {MOST_READ_BYTES} are allowed")
    front, seal = _split(data)
    if isinstance(seal, _Mac):
        _check_mac(front, seal, keys)
    elif seal.crc != checksum(front):
        raise AuthFileError("it is damaged: its checksum is another")
    value = _sealed(front)
    version, users, acls = value.get("version"), value.get("users"), value.get("acls")
    if type(version) is not int or not isinstance(users, list) or not isinstance(acls, list):
        raise AuthFileError("it is damaged: it has no tables")
    return AuthTables(version, isinstance(seal, _Mac), users, acls, seal.key if isinstance(seal, _Mac) else None)


def is_encrypted(data: bytes) -> bool:
    """Whether all secrets in a file are encrypted; its seal is not checked. Only such a file may leave the machine."""
    return bool(seal_of(data))


def seal_of(data: bytes) -> str:
    """The seal of an encrypted file, unchecked, which is another one after each change; empty if there is none."""
    try:
        front, seal = _split(data)
    except AuthFileError:
        return ""
    return data[len(front) + len(_SEAL) :].decode().rstrip("}\n") if isinstance(seal, _Mac) else ""


def version_of(data: bytes) -> int:
    """The version of a file whose seal cannot be checked here. Raises AuthFileError if it is no encrypted file."""
    front, seal = _split(data)
    if not isinstance(seal, _Mac):
        raise AuthFileError("its secrets are not encrypted")
    version = _sealed(front).get("version")
    if type(version) is not int:
        raise AuthFileError("it is damaged: it has no version")
    return version


def _tail(seal: _Mac | _Crc) -> bytes:
    """All that stands behind the sealed bytes."""
    return _SEAL + msgspec.json.encode(seal) + b"}\n"


def _split(data: bytes) -> tuple[bytes, _Mac | _Crc]:
    """The sealed bytes of a file, and its seal, unchecked. Raises AuthFileError.

    The separator is in no record, since line breaks in JSON text are escaped: the first one is the only one.
    """
    front, separator, rest = data.partition(_SEAL)
    encrypted = front.startswith(_ENCRYPTED)
    if not encrypted and not front.startswith(_CLEAR):
        raise AuthFileError(_reason(data))
    kind: type[_Mac | _Crc] = _Mac if encrypted else _Crc
    try:
        seal = msgspec.json.decode(rest[:-2], type=kind)
    except _NOT_DECODED:
        raise AuthFileError(_NO_SEAL) from None
    # Nothing else, not even other spaces: what the seal does not cover must not count.
    if separator + rest != _tail(seal):
        raise AuthFileError(_NO_SEAL)
    return front, seal


def _sealed(front: bytes) -> dict[str, Any]:
    """The members in front of the seal. Raises AuthFileError."""
    try:
        return msgspec.json.decode(front + b"}", type=dict[str, Any])
    except _NOT_DECODED:
        raise AuthFileError(_NO_JSON) from None


def _reason(data: bytes) -> str:
    """Why a file does not begin as those of this format."""
    try:
        version_of_format = msgspec.json.decode(data)["format"]
    except (*_NOT_DECODED, KeyError, TypeError):
        return _NO_JSON
    if version_of_format == FORMAT:
        return _NO_SEAL
    return f"it has format {str(version_of_format)[:20]}; this version of TriMQ reads format {FORMAT}"


def _check_mac(front: bytes, seal: _Mac, keys: Sealing | None) -> None:
    shown = ascii(seal.key[:16])
    if keys is None:
        raise MissingKeyError(
            f"its secrets are encrypted with key {shown}: set authKeyFile to the file that has this key"
        )
    expected = keys.seal(seal.key, front)
    if expected is None:
        raise MissingKeyError(
            f"its secrets are encrypted with key {shown}, which is not in authKeyFile: add that key there"
        )
    if not hmac.compare_digest(seal.mac.encode("utf-8", "replace"), expected.encode()):
        raise AuthFileError(
            "its seal is wrong: it is damaged, or was changed without the key. Restore it from a backup"
        )
