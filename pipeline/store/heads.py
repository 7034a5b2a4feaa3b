"""Decodes the headers of many records together: a window of the log into numpy arrays.

A window is any bytes that contain whole records. ``at`` are the records' positions in it, ``phy`` their log offsets.
Only the checksum is computed record by record, and only on request. Layout: trimq.protocol.record.
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
    """The header fields of many records: each array has one value for each. ``*_at``, ``*_end``: window positions.

    ``born_host`` and ``store_host`` are the raw bytes of an IPv4 address with its port; undefined for IPv6. ``ok`` is
    False if there is no whole record, or its header has another log offset; the other values are undefined then.
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
        """Some of the records, selected by a mask or by ascending indices."""
        return Heads(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def values_at(window: Any, at: Array, kind: np.dtype[Any]) -> Array:
    """A value of type ``kind`` at each position of a window, all of which must lie inside it."""
    width = kind.itemsize
    # As opaque bytes (V): numpy then copies each value in one piece instead of field by field.
    everywhere = np.ndarray((max(len(window) - width + 1, 0),), f"V{width}", window, strides=(1,))
    found: Array = everywhere[at].view(kind)
    return found


def read_heads(window: Array, at: Array, phy: Array) -> Heads:
    """Decode the headers of the records at ``at`` and check their lengths against each other and against the window.

    ``at`` must ascend. Checksums are not verified, see ``check_bodies``.
    """
    inside = at + record.OVERHEAD_V1 <= len(window)
    if not inside.all():
        heads = read_heads(window, at[inside], phy[inside])
        return _spread(heads, inside, at, phy)
    head = values_at(window, at, _HEAD_V4)
    values = {name: head[name].astype(head.dtype[name].newbyteorder("=")) for name in _HEAD_V4.names or ()}
    # Decoded with the layout of IPv4 so far. The flag stands before the hosts, so that it is right for any record;
    # fields behind the hosts are read again for records with IPv6 addresses.
    sys_flag = values["sys_flag"]
    born = np.full(len(at), 8, dtype=np.int64)
    store = born.copy()
    fits = np.ones(len(at), dtype=bool)
    if (sys_flag & _V6).any():
        for bits, kind in _HEADS.items():
            which = np.flatnonzero((sys_flag & _V6) == bits)
            whole = at[which] + kind.itemsize <= len(window)
            fits[which[~whole]] = False
            which = which[whole]
            wider = values_at(window, at[which], kind)
            for name in ("store_timestamp", "store_host", "reconsume_times", "prepared_offset", "body_length"):
                values[name][which] = wider[name]
            born[which] = 20 if bits & sysflag.BORN_HOST_V6 else 8
            store[which] = 20 if bits & sysflag.STORE_HOST_V6 else 8
    stored_phy = values.pop("phy")
    size = values["size"].astype(np.int64)
    values["size"] = size
    end = at + size
    store_at = at + 48 + born + 8
    body_at = store_at + store + 16
    body_end = body_at + values["body_length"]
    magic = values["magic"]
    version2 = magic == record.MAGIC_V2
    ok = fits & (version2 | (magic == record.MAGIC_V1)) & (size >= record.OVERHEAD_V1) & (end <= len(window))
    # The topic's length field must lie inside the record too: _length reads it without a check of its own.
    ok &= (stored_phy == phy) & (values["body_length"] >= 0) & (body_end + np.where(version2, 2, 1) <= end)
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
    """A length field of two bytes (``wide``) or one, and the position behind it. Not read where ``ok`` is False."""
    if ok.all() and (wide.all() or not wide.any()):
        kind = _SHORT if wide.all() else _BYTE
        return values_at(window, at, kind).astype(np.int64), at + kind.itemsize
    last = len(window) - 1
    place = np.where(ok, at, 0)
    first = window[np.minimum(place, last)].astype(np.int64)
    second = window[np.minimum(place + 1, last)].astype(np.int64)
    return np.where(wide, first << 8 | second, first), at + np.where(wide, 2, 1)


def _spread(heads: Heads, inside: Array, at: Array, phy: Array) -> Heads:
    """``heads`` of the records marked by ``inside``, and rows that are not ok for the others."""
    out = {}
    for field in fields(heads):
        values: Array = getattr(heads, field.name)
        spread = np.zeros(len(at), dtype=values.dtype)
        spread[inside] = values
        out[field.name] = spread
    out["at"], out["phy"] = at, phy
    return Heads(**out)


def check_bodies(view: memoryview, heads: Heads) -> Array:
    """A mask of the records whose body matches the checksum in the header. An empty body has no checksum."""
    places = map(slice, heads.body_at.tolist(), heads.body_end.tolist())
    actual = np.array(crc32_of_each(map(view.__getitem__, places)), dtype=np.uint32)
    good: Array = actual & 0x7FFFFFFF == heads.crc
    good |= heads.body_at == heads.body_end
    return good


def has_hole(view: memoryview, begin: int, end: int, to_file: int) -> bool:
    """Whether the part of [begin, end) in some disk sector is all zeros, as a power cut leaves unwritten sectors.

    ``to_file`` plus a position in ``view`` is the position in the log file.
    """
    first = begin
    while first < end:
        stop = min(end, (first + to_file) // _SECTOR * _SECTOR + _SECTOR - to_file)
        if not any(view[first:stop]):
            return True
        first = stop
    return False
