"""JSON objects of a bucket: with a format number, and as last member the CRC-32 of all bytes in front of it."""

import json
from typing import Any, Final

from trimq.protocol.bucket_object import BucketFormatError
from trimq.protocol.hashing import checksum

VERSION: Final = 1

_CRC: Final = b',"crc":'


def encode_json(members: dict[str, Any], kind: str, most: int) -> bytes:
    """The bytes of an object. ``kind``: what it is, in words. Raises BucketFormatError if they are more than ``most``.

    >>> encode_json({"names": []}, "list", 100)
    b'{"format":1,"names":[],"crc":938791547}'
    """
    data = json.dumps({"format": VERSION, **members}, separators=(",", ":")).encode()[:-1]
    data += b"%s%d}" % (_CRC, checksum(data))
    _check_size(data, kind, most)
    return data


def decode_json(data: Any, kind: str, most: int) -> Any:
    """The members, whose types are not checked. Raises BucketFormatError."""
    data = bytes(data)
    _check_size(data, kind, most)
    try:
        value = json.loads(data)
        version = as_number(value["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise is_damaged(kind) from error
    # Before all else: a later format may have other members, and another checksum.
    if version != VERSION:
        raise BucketFormatError(f"a {kind} of format {version}; this version of TriMQ reads format {VERSION}")
    front, _, rest = data.rpartition(_CRC)
    if rest != b"%d}" % checksum(front):
        raise is_damaged(kind)
    return value


def is_damaged(kind: str) -> BucketFormatError:
    """The error to raise for an object with other members than it should have."""
    return BucketFormatError(f"the {kind} is damaged")


def as_number(value: Any) -> int:
    """The value, if it is an integer from 0 on. Raises TypeError."""
    if type(value) is not int or value < 0:
        raise TypeError("a number is expected")
    return value


def as_text(value: Any) -> str:
    """The value, if it is a text. Raises TypeError, UnicodeEncodeError."""
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    value.encode()  # a lone half of a pair of UTF-16 is no text
    return value


def as_texts(value: Any) -> tuple[str, ...]:
    """The values of a list, if they are texts. Raises TypeError, UnicodeEncodeError."""
    if not isinstance(value, list):
        raise TypeError("a list is expected")
    return tuple(map(as_text, value))


def _check_size(data: bytes, kind: str, most: int) -> None:
    if len(data) > most:
        raise BucketFormatError(f"a {kind} of {len(data)} bytes; the limit is {most}")
