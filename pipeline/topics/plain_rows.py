"""Rows of a sink that have a body and perhaps a tag, and nothing else: encoded a request at a time.

Such rows are most, and an object for each of them and for each of its parts is what a sink's time would go to.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from client.core import wall_ms
from client.sending import BATCH_OVERHEAD, Prepared
from pipeline.topics.sink_rows import BODY_MISSING, RowError, property_text
from protocol.codes import RequestCode
from protocol.message_id import UniqueIdGenerator

_COLUMNS: Final = frozenset({"topic", "body", "tags"})
_LEAST: Final = 100
"""Fewer rows are better put together with those of other batches."""
_MOST: Final = 16_384
"""Rows of one request: ids of one millisecond are 65,536."""
_ID: Final = 32
_KEY: Final = b"UNIQ_KEY\x01"


class Request(NamedTuple):
    """A batch that is ready to travel, and how many rows it has."""

    prepared: Prepared
    rows: int


def is_plain(batch: pa.RecordBatch) -> bool:
    """Whether the rows have nothing that needs a look at each of them."""
    return (
        batch.num_rows >= _LEAST
        and _COLUMNS.issuperset(batch.schema.names)
        and batch.column("body").type in (pa.binary(), pa.string())
    )


def requests_of(batch: pa.RecordBatch, topic: str, batch_bytes: int, ids: UniqueIdGenerator) -> Iterator[Request]:
    """The rows of a batch for which ``is_plain``, in requests of about ``batch_bytes``. Raises RowError."""
    bodies = batch.column("body")
    _, places, data = bodies.buffers()
    offsets = np.frombuffer(places, dtype=np.int32, count=len(bodies) + 1, offset=4 * bodies.offset).astype(np.int64)
    lengths = np.diff(offsets)
    if bodies.null_count or not lengths.all():
        raise RowError(BODY_MISSING)
    texts, which = _tags(batch)
    sizes = BATCH_OVERHEAD + lengths + np.array([len(_KEY) + _ID + 1 + len(text) for text in texts])[which]
    begin = 0
    ends = np.cumsum(sizes)
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = min(int(np.searchsorted(ends, before + batch_bytes)) + 1, begin + _MOST, len(sizes))
        rows = slice(begin, end)
        body = _encoded(memoryview(data), offsets[begin : end + 1], sizes[rows], which[rows], texts, ids)
        first_id = body[20 + int(lengths[begin]) + 2 + len(_KEY) :][:_ID].decode()
        yield Request(
            Prepared(RequestCode.SEND_BATCH_MESSAGE, topic, body, "WAIT\x01true\x02", 0, 0, wall_ms(), (first_id,)),
            end - begin,
        )
        begin = end


def _tags(batch: pa.RecordBatch) -> tuple[list[bytes], "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    """The property texts that there are, and which of them each row has."""
    if "tags" not in batch.schema.names:
        return [b""], np.zeros(batch.num_rows, dtype=np.int64)
    found = batch.column("tags").dictionary_encode()
    texts = [property_text(tag, None, None, None).encode() for tag in [*found.dictionary.to_pylist(), None]]
    return texts, found.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False).astype(np.int64)


def _encoded(
    data: memoryview,
    offsets: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    sizes: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    which: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    texts: list[bytes],
    ids: UniqueIdGenerator,
) -> bytes:
    """A batch's body; the layout is protocol.batch's."""
    count = len(sizes)
    heads = np.zeros((count, 5), dtype=">i4")
    heads[:, 0] = sizes
    heads[:, 4] = np.diff(offsets)
    head = heads.tobytes()
    prefix, numbers = ids.several(count)
    fronts = [(len(_KEY) + _ID + 1 + len(text)).to_bytes(2, "big") + _KEY + prefix for text in texts]
    backs = [b"\x02" + text for text in texts]
    parts: list[bytes | memoryview] = []
    places = offsets.tolist()
    for at, (number, kind) in enumerate(zip(numbers, which.tolist(), strict=True)):
        parts += (
            head[20 * at : 20 * at + 20],
            data[places[at] : places[at + 1]],
            b"%b%04X%b" % (fronts[kind], number & 0xFFFF, backs[kind]),
        )
    return b"".join(parts)
