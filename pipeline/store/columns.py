"""Makes rows of records: the columns of trimq.pipeline.schema, only those that are requested."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from trimq.pipeline.schema import ARROW_SCHEMA
from trimq.pipeline.store.gather import HEX_DIGITS, as_text, gather, matrix_as_text
from trimq.pipeline.store.heads import Array, Heads
from trimq.pipeline.store.properties import Properties, split_properties
from trimq.pipeline.store.uniform_texts import UniformTexts, uniform_texts
from trimq.protocol import sysflag
from trimq.protocol.message_id import encode_offset_id
from trimq.protocol.record import unpack_host

_V4: Final = 8
"""Bytes of an IPv4 address with its port."""
_TIMESTAMP: Final = ARROW_SCHEMA.field("storeTimestamp").type
_FAR: Final = 9_200_000_000_000_000
"""Times in ms are clamped to this, the largest that fits in microseconds: a producer may write any number."""


class Rows:
    """Records of one window as columns. Each column is made on request."""

    def __init__(self, view: memoryview, heads: Heads, broker_name: str | None) -> None:
        self.view = view
        self.heads = heads
        self._broker_name = broker_name
        self._properties: Properties | None = None

    @cached_property
    def _uniform(self) -> UniformTexts | None:
        """The fast path to topics and properties, for records of one layout; None if their layouts differ."""
        return uniform_texts(self.view, self.heads)

    @property
    def properties(self) -> Properties:
        """The properties of the records, split once."""
        if self._properties is None:
            self._properties = split_properties(self.range(self.heads.properties_at, self.heads.properties_end))
        return self._properties

    def range(self, begins: Array, ends: Array) -> pa.BinaryArray:
        """The bytes [begin, end) of the window for each record."""
        return gather(self.view, begins, ends)

    def topics(self) -> pa.StringArray:
        """The topic of each record."""
        if self._uniform is not None:
            return self._uniform.topics()
        return as_text(self.range(self.heads.topic_at, self.heads.topic_end))

    def texts(self, name: str) -> pa.StringArray:
        """The value of a property for each record, null if it has none."""
        return self._uniform.column(name) if self._uniform is not None else self.properties.column(name.encode())

    def word_lists(self, name: str) -> pa.ListArray:
        """The words of a property for each record."""
        if self._uniform is not None and not self._uniform.has_words(name):
            return self._uniform.word_lists(name)
        return self.properties.word_lists(name.encode())

    def maps(self) -> pa.MapArray:
        """All properties of each record."""
        return self._uniform.maps() if self._uniform is not None else self.properties.maps()

    def hosts(self, words: Array, begins: Array, ends: Array) -> pa.StringArray:
        """``address:port`` for each record, an IPv6 address in brackets; ``words`` are the packed IPv4 hosts."""
        if (ends - begins == _V4).all() and len(words) and (words == words[0]).all():
            # The usual case: all records of a window are from one host.
            return pa.repeat(pa.scalar(host_text(words[0].tobytes()), pa.string()), len(words))
        packed = self.range(begins, ends).dictionary_encode()
        return pa.array([host_text(host) for host in packed.dictionary.to_pylist()], pa.string()).take(packed.indices)

    def message_ids(self) -> pa.StringArray:
        """RocketMQ's offsetMsgId of each record: the broker's address and port and the log offset, in hexadecimal."""
        heads = self.heads
        if (heads.store_end - heads.store_at == _V4).all():
            digits = np.empty((len(heads), 4 * _V4), dtype=np.uint8)
            for at, words in ((0, heads.store_host), (2 * _V4, heads.phy.astype(">i8"))):
                digits[:, at : at + 2 * _V4] = HEX_DIGITS[words.view(np.uint8)].view(np.uint8).reshape(-1, 2 * _V4)
            return matrix_as_text(digits, is_ascii=True)
        places = zip(heads.store_at.tolist(), heads.store_end.tolist(), heads.phy.tolist(), strict=True)
        return pa.array([encode_offset_id(bytes(self.view[at:end]), phy) for at, end, phy in places], pa.string())

    def bodies(self) -> tuple[pa.BinaryArray, list[tuple[int, str]]]:
        """The decompressed bodies, and (record, reason) for bodies that cannot be decompressed, which stay as stored.

        Raises UsageError if the library of a compression is not installed.
        """
        heads = self.heads
        stored = self.range(heads.body_at, heads.body_end)
        packed = (heads.sys_flag & sysflag.COMPRESSED) != 0
        if not packed.any():
            return stored, []
        from trimq.client.compression import decompress  # noqa: PLC0415 - imports the whole SDK, which few stores need
        from trimq.client.errors import UsageError  # noqa: PLC0415 - as above

        bad = []
        bodies = []
        for number in np.flatnonzero(packed).tolist():
            body = bytes(self.view[int(heads.body_at[number]) : int(heads.body_end[number])])
            try:
                body = decompress(body, int(heads.sys_flag[number]))
            except UsageError:  # the library is not installed, which is not damage of the record
                raise
            except Exception as error:  # noqa: BLE001 - each library has its own errors; one bad body is one damaged row
                bad.append((number, f"the body cannot be decompressed: {error}"))
            bodies.append(body)
        return pa.compute.replace_with_mask(stored, pa.array(packed), pa.array(bodies, pa.binary())), bad

    def column(self, name: str) -> Any:
        """One column as an Arrow array."""
        heads = self.heads
        if name == "brokerName":
            value = pa.scalar(self._broker_name, pa.string())
            return pa.repeat(value, len(heads)) if self._broker_name is not None else pa.nulls(len(heads), pa.string())
        return _COLUMNS[name](self, heads)

    def batch(
        self, names: Sequence[str], nullable: Collection[str] = ()
    ) -> tuple[pa.RecordBatch, list[tuple[int, str]]]:
        """A batch with the columns ``names``, and the records left out because their body cannot be decompressed."""
        bad: list[tuple[int, str]] = []
        arrays = []
        for name in names:
            if name == "body":
                array, bad = self.bodies()
            else:
                array = self.column(name)
            arrays.append(array)
        batch = pa.RecordBatch.from_arrays(arrays, schema=_schema(tuple(names), frozenset(nullable)))
        if bad:
            good = np.ones(len(self.heads), dtype=bool)
            good[[number for number, _ in bad]] = False
            batch = batch.filter(pa.array(good))
        return batch, bad


@lru_cache(maxsize=8)
def _schema(names: tuple[str, ...], nullable: frozenset[str]) -> pa.Schema:
    """The schema of some columns. ``nullable`` are those that a user's schema allows to be null."""
    fields = [ARROW_SCHEMA.field(name) for name in names]
    return pa.schema([field.with_nullable(field.nullable or field.name in nullable) for field in fields])


def host_text(host: bytes) -> str:
    """``10.0.0.1:10911`` or ``[fe80::1]:10911`` from a packed host."""
    address, port = unpack_host(host)
    return f"[{address}]:{port}" if len(host) == 20 else f"{address}:{port}"


def _number(values: Array, kind: Any) -> Any:
    return pa.array(values, kind)


def _time(values: Array) -> Any:
    micros = np.minimum(np.maximum(values, -_FAR), _FAR) * 1000
    return pa.Array.from_buffers(_TIMESTAMP, len(micros), [None, pa.py_buffer(micros)])


_COLUMNS: Final[dict[str, Callable[[Rows, Heads], Any]]] = {
    "topic": lambda rows, _: rows.topics(),
    "queueId": lambda _, heads: _number(heads.queue_id, pa.int32()),
    "queueOffset": lambda _, heads: _number(heads.queue_offset, pa.int64()),
    "tags": lambda rows, _: rows.texts("TAGS"),
    "keys": lambda rows, _: rows.word_lists("KEYS"),
    "msgId": lambda rows, _: rows.message_ids(),
    "uniqId": lambda rows, _: rows.texts("UNIQ_KEY"),
    "bornTimestamp": lambda _, heads: _time(heads.born_timestamp),
    "storeTimestamp": lambda _, heads: _time(heads.store_timestamp),
    "bornHost": lambda rows, heads: rows.hosts(heads.born_host, heads.born_at, heads.store_at - 8),
    "storeHost": lambda rows, heads: rows.hosts(heads.store_host, heads.store_at, heads.store_end),
    "commitLogOffset": lambda _, heads: _number(heads.phy, pa.int64()),
    "reconsumeTimes": lambda _, heads: _number(heads.reconsume_times, pa.int32()),
    "flag": lambda _, heads: _number(heads.flag, pa.int32()),
    "sysFlag": lambda _, heads: _number(heads.sys_flag, pa.int32()),
    "properties": lambda rows, _: rows.maps(),
}
