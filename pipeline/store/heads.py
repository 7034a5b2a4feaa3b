"""Headers of many records at once: numpy arrays out of a window of the log.

A window is any bytes that hold whole records; ``at`` tells where each begins in it, ``phy`` where it lies in the log.
Nothing here is done record by record but the checksum, and that only where it is asked for.
Layout: trimq.protocol.record.
"""

from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias

import numpy as np

from trimq.protocol import record, sysflag
from trimq.protocol.hashing import crc32_of_each

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_V6: Final = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6
_SECTOR: Final = 512
_SHORT: Final = np.dtype(">u2")
_BYTE: Final = np.dtype(np.uint8)


def _head_type(born: int, store: int) -> np.dtype[Any]:
    names = ["size", "magic", "crc", "queue_id", "flag", "queue_offset", "phy", "sys_flag", "born_timestamp"]
    names += ["store_timestamp", "reconsume_times", "prepared_offset", "body_length"]
    formats = [">i4", ">u4", ">u4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i8", ">i8", ">i4", ">i8", ">i4"]
    after = 48 + born
    last = after + 8 + store
    offsets = [0, 4, 8, 12, 16, 20, 28, 36, 40, after, last, last + 4, last + 12]
    names += ["born_host", "store_host"]
    formats += ["u8", "u8"]
    offsets += [48, after + 8]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": last + 16})


_HEAD_V4: Final = _head_type(8, 8)
_HEADS: Final = {
    sysflag.BORN_HOST_V6: _head_type(20, 8),
    sysflag.STORE_HOST_V6: _head_type(8, 20),
    _V6: _head_type(20, 20),
}


@dataclass
class Heads:
    """One value a record in each array. ``*_at`` and ``*_end`` are positions in the window.

    ``born_host`` and ``store_host`` are the eight bytes of an IPv4 address and its port as they are, and mean nothing
    for an IPv6 address.
    ``ok`` is False for what is no whole record that says it lies at its place; its other values mean nothing.
    """

    at: Array
    size: Array
    magic: Array
    crc: Array
    queue_id: Array
    flag: Array
    queue_offset: Array
    phy: Array
    sys_flag: Array
    born_timestamp: Array
    store_timestamp: Array
    reconsume_times: Array
    prepared_offset: Array
    body_length: Array
    born_host: Array
    store_host: Array
    born_at: Array
    store_at: Array
    store_end: Array
    body_at: Array
    body_end: Array
    topic_at: Array
    topic_end: Array
    properties_at: Array
    properties_end: Array
    ok: Array

    def __len__(self) -> int:
        return len(self.at)

    def take(self, which: Array) -> "Heads":
        """Some of the records, by mask or by index in their order."""
        return Heads(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def values_at(window: Any, at: Array, kind: np.dtype[Any]) -> Array:
    """What begins at each place of a window of bytes, as ``kind``; every place has to leave room for it."""
    width = kind.itemsize
    # numpy moves values of no kind as they are, each by one copy
    everywhere = np.ndarray((max(len(window) - width + 1, 0),), f"V{width}", window, strides=(1,))
    found: Array = everywhere[at].view(kind)
    return found


def read_heads(window: Array, at: Array, phy: Array) -> Heads:
    """The headers of the records at ``at``, their lengths checked against each other and against the window.

    ``at`` has to be in ascending order. The checksum is ``check_bodies``' business.
    """
    room = at + record.OVERHEAD_V1 <= len(window)
    if not room.all():
        heads = read_heads(window, at[room], phy[room])
        return _spread(heads, room, at, phy)
    head = values_at(window, at, _HEAD_V4)
    values = {name: head[name].astype(head.dtype[name].newbyteorder("=")) for name in _HEAD_V4.names or ()}
    sys_flag = values["sys_flag"]
    born = np.full(len(at), 8, dtype=np.int64)
    store = born.copy()
    fits = np.ones(len(at), dtype=bool)
    if (sys_flag & _V6).any():
        for bits, kind in _HEADS.items():
            which = np.flatnonzero((sys_flag & _V6) == bits)
            inside = at[which] + kind.itemsize <= len(window)
            fits[which[~inside]] = False
            which = which[inside]
            wider = values_at(window, at[which], kind)
            for name in ("store_timestamp", "store_host", "reconsume_times", "prepared_offset", "body_length"):
                values[name][which] = wider[name]
            born[which] = 20 if bits & sysflag.BORN_HOST_V6 else 8
            store[which] = 20 if bits & sysflag.STORE_HOST_V6 else 8
    said = values.pop("phy")
    size = values["size"].astype(np.int64)
    values["size"] = size
    end = at + size
    store_at = at + 48 + born + 8
    body_at = store_at + store + 16
    body_end = body_at + values["body_length"]
    magic = values["magic"]
    version2 = magic == record.MAGIC_V2
    ok = fits & (version2 | (magic == record.MAGIC_V1)) & (size >= record.OVERHEAD_V1) & (end <= len(window))
    # the length of the topic has to lie inside as well: it is read unchecked from here on
    ok &= (said == phy) & (values["body_length"] >= 0) & (body_end + np.where(version2, 2, 1) <= end)
    topic_length, topic_at = _length(window, body_end, version2, ok)
    topic_end = topic_at + topic_length
    ok &= topic_end + 2 <= end
    properties_length, properties_at = _length(window, topic_end, np.ones(len(at), dtype=bool), ok)
    ok &= properties_at + properties_length == end
    return Heads(
        at=at,
        phy=phy,
        born_at=at + 48,
        store_at=store_at,
        store_end=store_at + store,
        body_at=body_at,
        body_end=body_end,
        topic_at=topic_at,
        topic_end=topic_end,
        properties_at=properties_at,
        properties_end=end,
        ok=ok,
        **values,
    )


def _length(window: Array, at: Array, wide: Array, ok: Array) -> tuple[Array, Array]:
    """A length of two bytes (``wide``) or one, and where what it counts begins; 0 where not ``ok``."""
    if ok.all() and (wide.all() or not wide.any()):
        kind = _SHORT if wide.all() else _BYTE
        return values_at(window, at, kind).astype(np.int64), at + kind.itemsize
    last = len(window) - 1
    place = np.where(ok, at, 0)
    first = window[np.minimum(place, last)].astype(np.int64)
    second = window[np.minimum(place + 1, last)].astype(np.int64)
    return np.where(wide, first << 8 | second, first), at + np.where(wide, 2, 1)


def _spread(heads: Heads, room: Array, at: Array, phy: Array) -> Heads:
    """Heads of those with room, and rows that are not ok for the others."""
    out = {}
    for field in fields(heads):
        values: Array = getattr(heads, field.name)
        spread = np.zeros(len(at), dtype=values.dtype)
        spread[room] = values
        out[field.name] = spread
    out["at"], out["phy"] = at, phy
    return Heads(**out)


def check_bodies(view: memoryview, heads: Heads) -> Array:
    """True for each record whose body has the checksum that its header tells; an empty body has none."""
    places = map(slice, heads.body_at.tolist(), heads.body_end.tolist())
    actual = np.array(crc32_of_each(map(view.__getitem__, places)), dtype=np.uint32)
    good: Array = actual & 0x7FFFFFFF == heads.crc
    good |= heads.body_at == heads.body_end
    return good


def has_hole(view: memoryview, begin: int, end: int, to_file: int) -> bool:
    """True where a whole sector's part of [begin, end) is zeros: what a power cut leaves of a sector never written.

    ``to_file`` is what has to be added to a position in ``view`` to get one in the log file.
    """
    first = begin
    while first < end:
        stop = min(end, (first + to_file) // _SECTOR * _SECTOR + _SECTOR - to_file)
        if not any(view[first:stop]):
            return True
        first = stop
    return False
