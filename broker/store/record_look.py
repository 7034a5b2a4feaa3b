"""Whether bytes of the log are the records that a queue's units tell of."""

import struct
from typing import Any, Final

from broker.store.mapped_file import MappedFile
from protocol.record import AT_PHYSICAL_OFFSET, MAGIC_V1, MAGIC_V2, SIZE_MAGIC

_SIZE_MAGIC: Final = SIZE_MAGIC.unpack_from
_FRONT: Final = struct.Struct(">II20xQ").unpack_from
"""Size, magic and physical offset of a record."""

_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})


def is_run(file: MappedFile, begin: int, last: int, end: int) -> bool:
    """True where the map has the bytes, and records stand where the first and the last one should."""
    start = file.start
    if begin - start < file.hot_from or end - start > file.wrote:
        return False
    size, magic, phy = _FRONT(file.view, last - start)
    if phy != last or last + size != end or magic not in _MAGICS:
        return False
    if last != begin:
        size, magic, phy = _FRONT(file.view, begin - start)
    return phy == begin and magic in _MAGICS


def begins_record(data: Any, phy: int, length: int) -> bool:
    """True where ``length`` bytes are there and a record that says it lies at ``phy`` begins in front of them."""
    if len(data) != length or length < AT_PHYSICAL_OFFSET + 8:
        return False
    size, magic = _SIZE_MAGIC(data)
    return (
        size <= length
        and magic in _MAGICS
        and int.from_bytes(data[AT_PHYSICAL_OFFSET : AT_PHYSICAL_OFFSET + 8], "big") == phy
    )


def is_record(data: Any, phy: int) -> bool:
    """True where ``data`` has just the size that the record in it, which says it lies at ``phy``, tells."""
    return begins_record(data, phy, len(data)) and _SIZE_MAGIC(data)[0] == len(data)
