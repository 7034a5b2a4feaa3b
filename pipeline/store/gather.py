"""Byte ranges of a window as Arrow arrays, without a Python object for each range."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from trimq.pipeline.store.heads import Array, values_at

_ASCII_END: Final = 0x80
HEX_DIGITS: Final = np.frombuffer(b"".join([b"%02X" % byte for byte in range(256)]), dtype="V2")
"""The two hexadecimal digits of each byte."""


def gather(window: Any, begins: Array, ends: Array) -> pa.BinaryArray:
    """The bytes of each range [begin, end). Ranges must be in ascending order and must not overlap.

    The window is declared as an array whose items are ranges and gaps alternately; Arrow's ``take`` copies the ranges.
    Raises ValueError if the ranges span 2 GiB or more.
    """
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    first = int(begins[0])
    span = int(ends[-1]) - first
    if span > 0x7FFFFFFF:
        raise ValueError(f"the ranges span {span} bytes, more than an Arrow array with 32-bit offsets can hold")
    length = int(ends[0]) - first
    if length and (ends - begins == length).all():  # for ranges of one length numpy takes half the time
        return _equal(values_at(window, begins, np.dtype(f"V{length}")), length)
    offsets = np.empty(2 * count, dtype=np.int32)
    offsets[0::2] = begins - first
    offsets[1::2] = ends - first
    data = pa.py_buffer(window).slice(first, span)
    turns = pa.Array.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(offsets), data])
    return turns.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int64)))


def equal_parts(matrix: Array) -> pa.BinaryArray:
    """The bytes of each row of a matrix."""
    return _equal(np.ascontiguousarray(matrix), matrix.nbytes // len(matrix))


def _equal(values: Array, length: int) -> pa.BinaryArray:
    """Contiguous values of one length."""
    count = values.nbytes // length
    offsets = np.arange(0, count * length + 1, length, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(values)])


def matrix_as_text(matrix: Array, widths: Array | None = None, *, is_ascii: bool = False) -> pa.StringArray:
    """A text for each row of a matrix of bytes; with ``widths``, one for each piece of a row. No row may be empty.

    ``is_ascii``: the caller knows that all bytes are ASCII, and they need not be validated.
    """
    matrix = np.ascontiguousarray(matrix)
    count, length = matrix.shape
    if widths is None:
        texts = _equal(matrix, length)
    else:
        offsets = np.zeros(count * len(widths) + 1, dtype=np.int32)
        stops = offsets[1:].reshape(count, len(widths))
        np.add(np.arange(0, count * length, max(1, length), dtype=np.int32)[:, None], np.cumsum(widths), out=stops)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(matrix)]
        texts = pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
    return _of_ascii(texts) if is_ascii else as_text(texts)


def _of_ascii(array: pa.BinaryArray) -> pa.StringArray:
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers(), array.null_count)


def as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Bytes as text. Bytes that are not UTF-8 become replacement characters, as in RocketMQ's decoder."""
    data = array.buffers()[2]
    if data is not None and not array.offset and np.frombuffer(data, dtype=np.uint8).max(initial=0) < _ASCII_END:
        return _of_ascii(array)
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [None if item is None else item.decode("utf-8", "replace") for item in array.to_pylist()]
        return pa.array(texts, pa.string())


def parts(array: pa.BinaryArray) -> tuple[Array, Array]:
    """The bytes of an array without nulls and the offsets of its items, as numpy arrays that share its memory."""
    count = len(array)
    _, offsets, data = array.buffers()
    ends: Array = np.frombuffer(offsets, dtype=np.int32, count=count + 1, offset=4 * array.offset)
    if data is None:
        return np.empty(0, dtype=np.uint8), ends
    return np.frombuffer(data, dtype=np.uint8), ends


def place(values: Any, rows: Array, count: int) -> Any:
    """An array of ``count`` items with ``values`` at ``rows`` (ascending), and null elsewhere."""
    if len(rows) == count:
        return values
    index = np.zeros(count, dtype=np.int64)
    index[rows] = np.arange(len(rows))
    missing = np.ones(count, dtype=bool)
    missing[rows] = False
    if not len(rows):
        return pa.nulls(count, values.type)
    return values.take(pa.array(index, mask=missing))
