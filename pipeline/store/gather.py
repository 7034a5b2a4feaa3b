"""Ranges of a window as Arrow arrays, without an object for each of them."""

from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.store.heads import Array


def gather(window: Any, begins: Array, ends: Array) -> pa.BinaryArray:
    """The bytes of each range [begin, end); ranges are in ascending order and do not overlap.

    The window is looked at as an array of ranges and gaps in turns, of which Arrow copies the ranges.
    """
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    first = int(begins[0])
    span = int(ends[-1]) - first
    if span > 0x7FFFFFFF:
        raise ValueError(f"ranges over {span} bytes at once are more than an Arrow array of 32-bit offsets can have")
    offsets = np.empty(2 * count, dtype=np.int32)
    offsets[0::2] = begins - first
    offsets[1::2] = ends - first
    data = pa.py_buffer(window).slice(first, span)
    turns = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), data])
    return turns.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int64)))


def as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Bytes as text; what is no UTF-8 gets replacement characters, as RocketMQ's reader does it."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if item is None else item.decode("utf-8", "replace") for item in array.to_pylist()]
        return pa.array(texts, pa.string())


def parts(array: pa.BinaryArray) -> tuple[Array, Array]:
    """An array's bytes and the offsets of its items in them, as numpy arrays that share its memory; no nulls."""
    count = len(array)
    _, offsets, data = array.buffers()
    ends: Array = np.frombuffer(offsets, dtype=np.int32, count=count + 1, offset=4 * array.offset)
    if data is None:
        return np.empty(0, dtype=np.uint8), ends
    return np.frombuffer(data, dtype=np.uint8), ends


def place(values: Any, rows: Array, count: int) -> Any:
    """``values`` at ``rows`` (ascending) of an array of ``count``, null elsewhere."""
    if len(rows) == count:
        return values
    index = np.zeros(count, dtype=np.int64)
    index[rows] = np.arange(len(rows))
    missing = np.ones(count, dtype=bool)
    missing[rows] = False
    if not len(rows):
        return pa.nulls(count, values.type)
    return values.take(pa.array(index, mask=missing))
