"""Names of store files: a mapped file is named by its start offset (20 digits), an index file by its creation time."""

from datetime import datetime
from typing import Final

OFFSET_DIGITS: Final = 20


def offset_name(offset: int) -> str:
    """``00000000001073741824`` for 1 GiB."""
    return f"{offset:0{OFFSET_DIGITS}d}"


def parse_offset_name(name: str) -> int | None:
    """The start offset in a file's name; None for a name of another form."""
    return int(name) if len(name) == OFFSET_DIGITS and name.isascii() and name.isdigit() else None


def index_name(wall_ms: int) -> str:
    """``yyyyMMddHHmmssSSS`` in local time."""
    return datetime.fromtimestamp(wall_ms / 1000).strftime("%Y%m%d%H%M%S") + f"{wall_ms % 1000:03d}"  # noqa: DTZ006 - local time, as in RocketMQ


def is_index_name(name: str) -> bool:
    """True for a name of digits only, the condition of RocketMQ's loader."""
    return name.isascii() and name.isdigit()
