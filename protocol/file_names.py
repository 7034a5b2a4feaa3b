"""Names of store files: a mapped file by the byte offset it begins at (20 digits), an index file by its birth."""

from datetime import datetime
from typing import Final

OFFSET_DIGITS: Final = 20


def offset_name(offset: int) -> str:
    """``00000000001073741824`` for 1 GiB."""
    return f"{offset:0{OFFSET_DIGITS}d}"


def parse_offset_name(name: str) -> int | None:
    """The offset that a file's name tells; None for a name of another form."""
    return int(name) if len(name) == OFFSET_DIGITS and name.isascii() and name.isdigit() else None


def index_name(wall_ms: int) -> str:
    """``yyyyMMddHHmmssSSS`` in local time."""
    return datetime.fromtimestamp(wall_ms / 1000).strftime("%Y%m%d%H%M%S") + f"{wall_ms % 1000:03d}"  # noqa: DTZ006 - local time it is


def is_index_name(name: str) -> bool:
    """True for a name made of digits alone, as RocketMQ's loader asks."""
    return name.isascii() and name.isdigit()
