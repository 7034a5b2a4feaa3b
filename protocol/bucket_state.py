"""The state of a broker as it stands in a bucket: its small files (topics, groups, consumer offsets), packed.

zlib over a msgpack map of file names to their bytes.
"""

import zlib
from collections.abc import Mapping
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from trimq.protocol.auth.auth_file import AUTH_FILE, is_encrypted
from trimq.protocol.bucket_object import BucketFormatError

STATE_FILES: Final = (
    "topics.json",
    "subscriptionGroup.json",
    "consumerOffset.json",
    "consumerFilter.json",
    "messageRequestMode.json",
    AUTH_FILE,
)
"""The files of ``config/`` that are uploaded. Not those of delayed, timed and half messages: these stay local."""
PRIVATE_FILES: Final = frozenset({AUTH_FILE})
"""Those that only their owner may read."""
MOST_STATE_BYTES: Final = 1024 * 1024 * 1024


def may_leave(name: str, data: bytes) -> bool:
    """Whether a file may be uploaded: users and policies only if the passwords are encrypted."""
    return name != AUTH_FILE or is_encrypted(data)


def encode_state(files: Mapping[str, bytes]) -> bytes:
    """The files, packed."""
    return zlib.compress(msgpack.packb(dict(files), use_bin_type=True), 1)


def decode_state(data: Any) -> dict[str, bytes]:
    """The files of a state; those with other names than STATE_FILES are left out. Raises BucketFormatError."""
    unpacker = zlib.decompressobj()
    try:
        packed = unpacker.decompress(bytes(data), MOST_STATE_BYTES)
        if not unpacker.eof:
            raise BucketFormatError("the state of the broker is cut off or too large")
        files = msgpack.unpackb(packed, raw=False, max_map_len=1024)
    except (zlib.error, ValueError, msgpack.exceptions.UnpackException) as error:
        raise BucketFormatError("the state of the broker is damaged") from error
    if not isinstance(files, dict) or not all(isinstance(value, bytes) for value in files.values()):
        raise BucketFormatError("the state of the broker is damaged")
    return {name: files[name] for name in STATE_FILES if name in files}
