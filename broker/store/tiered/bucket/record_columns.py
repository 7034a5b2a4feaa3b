"""Looks at many records at once, with numpy: store times, and whether they are the messages of their units."""

from typing import Any, Final

import numpy as np

from trimq.broker.store.read.record_look import HEAD_SIZE, V6, Place
from trimq.protocol.record import OVERHEAD_V1
from trimq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6

_HEAD: Final = np.dtype(
    {
        "names": ["size", "magic", "queue_id", "offset", "physical", "sys_flag", "time", "time_v6", "body"],
        "formats": [">u4", ">u4", ">i4", ">i8", ">i8", ">u4", ">i8", ">i8", ">u4"],
        "offsets": [0, 4, 12, 20, 28, 36, 56, 68, 84],
        "itemsize": HEAD_SIZE,
    }
)
"""The first 88 bytes of a record.

``time_v6``: its store time if the born host has an IPv6 address; ``body``: the length of its body if no host has one.
"""
_BODY: Final = np.dtype(">u4")
_END: Final = np.dtype(">u2")
_V6_MORE: Final = 12
"""Additional bytes of an IPv6 host."""


def _at(buffer: Any, begins: Any, kind: Any) -> Any:
    """What stands at each of these positions, as values of a type."""
    windows = np.lib.stride_tricks.sliding_window_view(buffer, kind.itemsize)
    return np.ascontiguousarray(windows[begins]).view(kind)[:, 0]


def store_times(data: Any, sizes: Any) -> Any:
    """Store times in ms of records that follow each other in ``data``; -1 for one that is too short to have one."""
    times = np.full(len(sizes), -1, np.int64)
    long = sizes >= OVERHEAD_V1
    if long.any():
        heads = _at(np.frombuffer(data, np.uint8), (np.cumsum(sizes) - sizes)[long], _HEAD)
        times[long] = np.where(heads["sys_flag"] & BORN_HOST_V6, heads["time_v6"], heads["time"])
    return times


def are_messages(data: Any, table: Any, offset: int, place: Place) -> Any:
    """Whether each record is the message of its unit: is_message for all of them.

    The records follow each other in ``data``, units (UNIT_TYPE) are in ``table``; ``offset`` is the first's.
    """
    sizes = table["size"].astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    good = sizes >= OVERHEAD_V1
    numbers = np.flatnonzero(good)
    if not len(numbers):
        return good
    buffer = np.frombuffer(data, np.uint8)
    begins, sizes = begins[numbers], sizes[numbers]
    heads = _at(buffer, begins, _HEAD)
    fits = (heads["size"] == sizes) & (heads["queue_id"] == place.queue_id) & (heads["offset"] == offset + numbers)
    fits &= heads["physical"] == table["phy"][numbers]
    more = np.zeros(len(numbers), np.int64)
    bodies = heads["body"].astype(np.int64)
    has_v6 = heads["sys_flag"] & V6 != 0
    if has_v6.any():
        flags = heads["sys_flag"]
        more = _V6_MORE * ((flags & BORN_HOST_V6 != 0).astype(np.int64) + (flags & STORE_HOST_V6 != 0))
        fits &= sizes >= HEAD_SIZE + more
        usable = has_v6 & fits
        bodies[usable] = _at(buffer, begins[usable] + HEAD_SIZE - 4 + more[usable], _BODY)
    is_placed = np.zeros(len(numbers), bool)
    for magic, topic in place.topic_parts.items():
        properties = sizes - HEAD_SIZE - more - bodies - len(topic) - 2
        chosen = np.flatnonzero(fits & (heads["magic"] == magic) & (properties >= 0) & (properties <= 0xFFFF))
        if len(chosen):
            at = begins[chosen] + HEAD_SIZE + more[chosen] + bodies[chosen]
            end = _at(buffer, at, np.dtype([("topic", np.uint8, (len(topic),)), ("properties", _END)]))
            is_topic = (end["topic"] == np.frombuffer(topic, np.uint8)).all(axis=1)
            is_placed[chosen] = is_topic & (end["properties"] == properties[chosen])
    good[numbers] = fits & is_placed
    return good
