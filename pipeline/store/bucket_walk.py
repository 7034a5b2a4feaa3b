"""Reads parts of a bucket: the blocks of the planned stretches, by ranges that have blocks near each other.

Directories and blocks are read ahead in a thread. Each is checked: a damaged block has no row, and is a damaged place.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from trimq.pipeline.store.bucket import BucketError, BucketReader, ObjectGoneError
from trimq.pipeline.store.bucket_plan import BucketPart, BucketPiece
from trimq.pipeline.store.heads import Array, Heads, check_bodies, read_heads, values_at
from trimq.pipeline.store.history import read_history
from trimq.pipeline.store.options import StoreOptions
from trimq.pipeline.store.walk import Chunk, Damage
from trimq.protocol.bucket_object import ROW, BucketFormatError, Directory, block_crc, decode_end
from trimq.protocol.queue_unit import UNIT_SIZE
from trimq.protocol.queue_unit_columns import UNIT_TYPE

_BLOCKS: Final = ROW.newbyteorder("=")
_MOST: Final = 8 << 20
"""Bytes of one request, unless a block has more."""
_NEAR: Final = 64 << 10
"""Blocks with a smaller gap are read by one request, together with the bytes between them."""


class _Blocks(NamedTuple):
    """Blocks of an object (rows of its directory), and for each the limits of queue offsets of its stretch."""

    topics: tuple[str, ...]
    rows: Array
    begins: Array
    ends: Array

    def take(self, which: Any) -> "_Blocks":
        return _Blocks(self.topics, self.rows[which], self.begins[which], self.ends[which])

    @property
    def lengths(self) -> Array:
        """Bytes of each block in the object."""
        lengths: Array = self.rows["messages"].astype(np.int64) * UNIT_SIZE + self.rows["size"]
        return lengths


class _Read(NamedTuple):
    """Blocks in the order of their positions, and bytes of the object that contain them; or what is wrong with it."""

    name: str
    blocks: _Blocks
    data: memoryview
    damage: Damage | None = None


class BucketWalk:
    """One pass over a part. Iteration raises BucketError, ObjectGoneError."""

    def __init__(self, reader: BucketReader, part: BucketPart, options: StoreOptions) -> None:
        self._reader = reader
        self._part = part
        self._options = options

    def __iter__(self) -> Iterator[Chunk | Damage]:
        """The messages of the part in windows, and damaged places."""
        reads = self._reads()
        pool = ThreadPoolExecutor(1)
        try:
            ahead = pool.submit(next, reads, None)
            while (found := ahead.result()) is not None:
                ahead = pool.submit(next, reads, None)
                if found.damage is not None:
                    yield found.damage
                else:
                    yield from self._decode(found)
        finally:
            pool.shutdown(cancel_futures=True)

    # -- what is read

    def _reads(self) -> Iterator[_Read]:
        for piece in self._part.pieces:
            name, stored = self._part.prefix + piece.stored.name, piece.stored
            try:
                data = self._reader.read_range(name, stored.directory, stored.length - stored.directory)
                blocks = self._wanted(piece, _blocks(piece, decode_end(data, stored.length)))
            except BucketFormatError as error:
                yield self._damaged(name, piece, str(error))
                continue
            except ObjectGoneError:
                if not self._is_named(piece):
                    raise
                yield self._damaged(name, piece, "it is missing, although the manifest names it")
                continue
            for begin, end in _requests(blocks):
                some = blocks.take(slice(begin, end))
                at = int(some.rows["position"][0])
                length = int(some.rows["position"][-1]) + int(some.lengths[-1]) - at
                yield _Read(name, some, self._reader.read_range(name, at, length))

    def _is_named(self, piece: BucketPiece) -> bool:
        """Whether the manifest names the object at present: then nothing may have deleted it."""
        history = read_history(self._reader, self._part.broker, self._options)
        return piece.stored in history.objects

    def _damaged(self, name: str, piece: BucketPiece, why: str) -> _Read:
        """A whole object as a damaged place. Raises BucketError unless the table is that of damage."""
        if not self._options.damage:
            raise BucketError(
                f"{name} in the bucket is damaged: {why}. Restore it from a backup of the bucket; with damage=true all "
                "that is damaged is a table"
            )
        damage = Damage(name, piece.stored.begin, piece.stored.end - piece.stored.begin, why)
        return _Read(name, _Blocks((), np.empty(0, _BLOCKS), np.empty(0), np.empty(0)), memoryview(b""), damage)

    def _wanted(self, piece: BucketPiece, blocks: _Blocks) -> _Blocks:
        """The blocks that belong to the piece and may have selected messages."""
        rows, options = blocks.rows, self._options
        offset, end = rows["offset"], rows["offset"] + rows["messages"]
        wanted = (offset >= piece.low) & (offset < piece.high) & (offset < blocks.ends) & (end > blocks.begins)
        wanted &= (rows["end_ms"] >= options.starting_time) & (rows["begin_ms"] <= options.ending_time)
        wanted &= rows["last_physical"] >= options.starting_position
        wanted &= rows["first_physical"] < options.ending_position
        return blocks.take(wanted)

    # -- what is in it

    def _decode(self, found: _Read) -> Iterator[Chunk | Damage]:
        base = int(found.blocks.rows["position"][0])
        buffer = np.frombuffer(found.data, np.uint8)
        sound = np.ones(len(found.blocks.rows), dtype=bool)
        units: list[Array] = []
        starts: list[Array] = []
        places = (found.blocks.rows["position"].astype(np.int64) - base).tolist()
        sizes = zip(found.blocks.rows["messages"].tolist(), found.blocks.lengths.tolist(), strict=True)
        crcs = found.blocks.rows["crc"].tolist()
        for number, (at, (messages, length)) in enumerate(zip(places, sizes, strict=True)):
            table = np.frombuffer(found.data, UNIT_TYPE, messages, at)
            size = table["size"].astype(np.int64)
            begin = at + messages * UNIT_SIZE
            if self._options.check_crc and block_crc(found.data[at : at + length], ()) != crcs[number]:
                why = "the checksum of the block is wrong"
            elif int(size.sum()) != length - messages * UNIT_SIZE or int(size.min(initial=0)) < 0:
                why = "the units of the block do not fit its records"
            else:
                units.append(table)
                starts.append(begin + np.cumsum(size) - size)
                continue
            sound[number] = False
            yield _damage(found, number, why)
        if units:
            yield from self._records(found, found.blocks.take(sound), buffer, np.concatenate(units), starts)

    def _records(
        self, found: _Read, blocks: _Blocks, buffer: Array, units: Array, starts: list[Array]
    ) -> Iterator[Chunk | Damage]:
        counts = blocks.rows["messages"]
        offset = np.concatenate(
            [
                np.arange(first, first + len(at))
                for first, at in zip(blocks.rows["offset"].tolist(), starts, strict=True)
            ]
        )
        limits = (offset >= np.repeat(blocks.begins, counts)) & (offset < np.repeat(blocks.ends, counts))
        which = slice(None) if limits.all() else np.flatnonzero(limits)
        phy, size = units["phy"].astype(np.int64)[which], units["size"].astype(np.int64)[which]
        heads = read_heads(buffer, np.concatenate(starts)[which], phy)
        good = heads.ok & (heads.size == size)
        good &= heads.queue_id == np.repeat(blocks.rows["queue_id"], counts)[which]
        good &= heads.queue_offset == offset[which]
        good[good] = _are_of_topics(
            buffer, _some(heads, good), np.repeat(blocks.rows["topic"], counts)[which][good], blocks
        )
        if self._options.check_crc:
            good[good] = check_bodies(found.data, _some(heads, good))
        for number in np.flatnonzero(~good).tolist():
            yield Damage(found.name, int(phy[number]), int(size[number]), "the unit does not lead to a valid record")
        yield Chunk(found.data, _some(heads, good))


def _some(heads: Heads, which: Array) -> Heads:
    return heads if which.all() else heads.take(np.flatnonzero(which))


def _are_of_topics(buffer: Array, heads: Heads, number: Array, blocks: _Blocks) -> Array:
    """A mask of the records that have the topic of their block."""
    good = np.zeros(len(heads), dtype=bool)
    for topic in np.unique(number).tolist():
        name = np.frombuffer(blocks.topics[topic].encode(), np.uint8)
        mine = np.flatnonzero((number == topic) & (heads.topic_end - heads.topic_at == len(name)))
        texts = values_at(buffer, heads.topic_at[mine], np.dtype(("V", len(name))))
        good[mine] = (texts.view(np.uint8).reshape(len(mine), len(name)) == name).all(axis=1)
    return good


def _damage(found: _Read, number: int, why: str) -> Damage:
    row = found.blocks.rows[number]
    first = int(row["offset"])
    place = f"{found.blocks.topics[int(row['topic'])]}/{int(row['queue_id'])}"
    text = f"{place}, offsets {first} to {first + int(row['messages']) - 1}: {why}"
    return Damage(found.name, int(row["first_physical"]), int(row["size"]), text)


def _blocks(piece: BucketPiece, directory: Directory) -> _Blocks:
    """The blocks of the piece's stretches, in the order of their positions. Raises BucketFormatError."""
    rows = directory.rows.astype(_BLOCKS)
    stretches = piece.stretches.rows
    order = np.argsort(rows["position"])
    at = np.searchsorted(rows["position"], stretches["position"].astype(np.uint64), sorter=order)
    # Blocks of a stretch follow each other in the directory.
    first = order[np.minimum(at, len(rows) - 1)] if len(rows) else at
    counts = stretches["blocks"].astype(np.int64)
    if not len(rows) or (first + counts > len(rows)).any():
        raise BucketFormatError("it has fewer blocks than the manifest says")
    starts = np.cumsum(counts) - counts
    numbers = np.repeat(first - starts, counts) + np.arange(int(counts.sum()))
    owner = np.repeat(np.arange(len(counts)), counts)
    names = {topic: number for number, topic in enumerate(piece.topics)}
    topic = np.array([names.get(topic, -1) for topic in directory.topics])[rows["topic"]]
    chosen = rows[numbers]
    if (
        (chosen["position"][starts] != stretches["position"]).any()
        or (topic[numbers] != stretches["topic"][owner]).any()
        or (chosen["queue_id"] != stretches["queue_id"][owner]).any()
        or (chosen["offset"][starts] != stretches["offset"]).any()
        or (np.add.reduceat(chosen["messages"].astype(np.int64), starts) != stretches["messages"]).any()
    ):
        raise BucketFormatError("it has other messages than the manifest says")
    chosen["topic"] = stretches["topic"][owner]
    blocks = _Blocks(piece.topics, chosen, piece.stretches.begins[owner], piece.stretches.ends[owner])
    return blocks.take(np.argsort(chosen["position"], kind="stable"))


def _requests(blocks: _Blocks) -> Iterator[tuple[int, int]]:
    """Numbers [first, last) of the blocks of each request."""
    begins = blocks.rows["position"].astype(np.int64).tolist()
    ends = [begin + length for begin, length in zip(begins, blocks.lengths.tolist(), strict=True)]
    first = 0
    for number in range(1, len(begins) + 1):
        if (
            number == len(begins)
            or begins[number] - ends[number - 1] > _NEAR
            or begins[number] < ends[number - 1]
            or ends[number] - begins[first] > _MOST
        ):
            yield first, number
            first = number
