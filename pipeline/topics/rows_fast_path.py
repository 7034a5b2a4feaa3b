"""The fast path of the sink's encoding, for rows with only a body and perhaps a tag: encoded as columns.

Most rows are of this kind, and a Python object for each would dominate the sink's time.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trimq.client.core import wall_ms
from trimq.client.sending import BATCH_OVERHEAD, Prepared
from trimq.pipeline.store.gather import HEX_DIGITS, equal_parts
from trimq.pipeline.store.heads import Array
from trimq.pipeline.topics.sink_rows import BODY_MISSING, RowError, property_text
from trimq.protocol.codes import RequestCode
from trimq.protocol.message_id import UniqueIdGenerator

_COLUMNS: Final = frozenset({"topic", "body", "tags"})
_LEAST: Final = 100
"""Fewer rows take the full path, which combines them with rows of other batches into one request."""
_MOST: Final = 16_384
"""The most rows that are encoded together: a generator has 65,536 ids for each millisecond."""
_JOINED: Final = 8 << 20
"""Bytes of requests that are encoded together."""
_HEAD: Final = 20
_ID: Final = 32
_KEY: Final = b"UNIQ_KEY\x01"
_AROUND: Final = BATCH_OVERHEAD + len(_KEY) + _ID + 1
"""Bytes of a message in addition to its body and its tag."""


class Request(NamedTuple):
    """Rows ready to be sent. ``body`` is a batch (trimq.protocol.batch), ``first_id`` the id of its first message."""

    topic: str
    body: memoryview
    rows: int
    first_id: str
    born: int

    def prepared(self, body: bytes = b"") -> Prepared:
        """The request as the SDK takes it; a caller that sends the body itself leaves ``body`` out."""
        code, properties = RequestCode.SEND_BATCH_MESSAGE, "WAIT\x01true\x02"
        return Prepared(code, self.topic, body, properties, 0, 0, self.born, (self.first_id,))


def fits_fast_path(batch: pa.RecordBatch) -> bool:
    """Whether the rows of a batch can be encoded as columns."""
    return (
        batch.num_rows >= _LEAST
        and _COLUMNS.issuperset(batch.schema.names)
        and batch.column("body").type in (pa.binary(), pa.string())
    )


def requests_of(batch: pa.RecordBatch, topic: str, batch_bytes: int, ids: UniqueIdGenerator) -> Iterator[Request]:
    """The rows of a batch that ``fits_fast_path``, in requests of about ``batch_bytes``. Raises RowError."""
    bodies = batch.column("body")
    _, places, _ = bodies.buffers()
    lengths = np.diff(np.frombuffer(places, dtype=np.int32, count=len(bodies) + 1, offset=4 * bodies.offset))
    if bodies.null_count or not lengths.all():
        raise RowError(BODY_MISSING)
    texts, which = _tags(batch)
    sizes = (_AROUND + np.array(list(map(len, texts))))[which] + lengths
    ends = np.cumsum(sizes)
    begin = 0
    # Some requests are encoded together, and then cut: numpy and Arrow have a cost for each call.
    while begin < len(sizes):
        end = _end(ends, begin, max(batch_bytes, _JOINED), begin + _MOST)
        rows = slice(begin, end)
        joined = _encoded(bodies[rows].cast(pa.binary()), lengths[rows], sizes[rows], texts, which[rows], ids)
        front = int(ends[begin] - sizes[begin])
        while begin < end:
            stop = _end(ends[:end], begin, batch_bytes, end)
            at = int(ends[begin] - sizes[begin]) - front
            id_at = at + _HEAD + int(lengths[begin]) + 2 + len(_KEY)
            first_id = bytes(joined[id_at : id_at + _ID]).decode()
            yield Request(topic, joined[at : int(ends[stop - 1]) - front], stop - begin, first_id, wall_ms())
            begin = stop


def _end(ends: Array, begin: int, size: int, most: int) -> int:
    """The end of the rows from ``begin`` on that reach ``size`` bytes together; the last one may exceed it."""
    before = int(ends[begin - 1]) if begin else 0
    return min(int(np.searchsorted(ends, before + size)) + 1, most, len(ends))


def _tags(batch: pa.RecordBatch) -> tuple[list[bytes], Array]:
    """The distinct property texts of the rows, and the index of each row's text."""
    if "tags" not in batch.schema.names:
        return [b""], np.zeros(batch.num_rows, dtype=np.int64)
    found = batch.column("tags").dictionary_encode()
    texts = [property_text(tag, None, None, None).encode() for tag in [*found.dictionary.to_pylist(), None]]
    return texts, found.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False).astype(np.int64)


def _encoded(
    bodies: pa.BinaryArray, lengths: Array, sizes: Array, texts: list[bytes], which: Array, ids: UniqueIdGenerator
) -> memoryview:
    """The bodies of several requests, one behind the other. Layout: trimq.protocol.batch.

    Each field of the messages is one array, and Arrow joins these row by row.
    """
    count = len(sizes)
    heads = np.zeros((count, 5), dtype=">i4")
    heads[:, 0] = sizes
    heads[:, 4] = lengths
    prefix, numbers = ids.several(count)
    fronts = [(len(_KEY) + _ID + 1 + len(text)).to_bytes(2, "big") + _KEY + prefix for text in texts]
    counters = np.arange(numbers.start, numbers.stop).astype(">u2").view(np.uint8).reshape(count, 2)
    parts = (
        equal_parts(heads),
        bodies,
        pa.array(fronts, pa.binary()).take(pa.array(which)),
        equal_parts(HEX_DIGITS[counters]),
        pa.array([b"\x02" + text for text in texts], pa.binary()).take(pa.array(which)),
    )
    joined = pa.compute.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))
    return memoryview(joined.buffers()[2])[: int(sizes.sum())]
