"""MessageBlock: consecutive messages of one queue, whose message objects are created on first access.

A consumer that takes a batch and acknowledges it as a whole needs only the number, offsets and size of the messages.
The message objects are created when the batch is iterated over or indexed.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, overload

from trimq.client.message import ReceivedMessage
from trimq.protocol.record import MAGIC_V1, MAGIC_V2, RecordError

_MIN_UNIFORM: Final = 4
_MAX_UNIFORM: Final = 256
"""How many messages of a reply are unpacked with one call: fewer are cheaper one by one, and each count of messages has
a compiled struct of its own."""

_MAGICS: Final = frozenset({MAGIC_V1, MAGIC_V2})

M = TypeVar("M", bound=ReceivedMessage)

_START = struct.Struct(">II12xQ")
"""Size, magic and queue offset: the fields that a consumer needs to hold a message without decoding it."""


@lru_cache(maxsize=256)
def _rows(size: int, count: int) -> struct.Struct:
    """The layout of ``count`` messages of ``size`` bytes each: size and magic as one number, and the queue offset."""
    return struct.Struct(">" + f"Q12xQ{size - _START.size}x" * count)


def _uniform(view: memoryview) -> tuple[Sequence[int], Sequence[int]] | None:
    """The queue offsets, and where each message starts and the last one ends, if all have the first one's size.

    Producers often send bodies of one size, and one ``unpack`` for all of them costs much less than a loop. None if the
    sizes differ, or if there are too few or too many messages; the caller then reads them one by one.
    """
    end = len(view)
    if end < _START.size:
        return None
    size, magic, _ = _START.unpack_from(view)
    if size < _START.size or not _MIN_UNIFORM * size <= end <= _MAX_UNIFORM * size or end % size:
        return None
    count = end // size
    found = _rows(size, count).unpack(view)
    heads = found[::2]
    if heads.count(size << 32 | magic) != count or magic not in _MAGICS:
        return None
    return found[1::2], range(0, end + 1, size)


class MessageBlock(Sequence[M], Generic[M]):
    """Messages in the order of their ``offsets``; ``size`` is the size of all their records in bytes.

    Created by ``split`` from a reply's body, or by ``of`` from existing messages.
    """

    __slots__ = ("_make", "_messages", "_pieces", "offsets", "size")

    def __init__(
        self,
        offsets: Sequence[int],
        size: int,
        pieces: "list[tuple[memoryview, Sequence[int]]]",
        make: "tuple[type[M], str, Any] | None",
        messages: list[M] | None = None,
    ) -> None:
        """``pieces``: buffers, each with the positions where its records start and the last one ends.

        ``make``: the class, broker name and receiver of the messages to create; None if ``messages`` is given.
        """
        self.offsets: Sequence[int] = offsets
        self.size: int = size
        self._pieces = pieces
        self._make = make
        self._messages = messages

    @classmethod
    def split(
        cls, data: bytes | memoryview, broker_name: str, kind: type[M], receiver: Any = None
    ) -> "MessageBlock[M]":
        """The messages in ``data``, as instances of ``kind``; ``receiver`` takes their acknowledgements.

        Raises RecordError if the records do not fill ``data`` exactly.

        >>> len(MessageBlock.split(b"", "broker-a", ReceivedMessage))
        0
        """
        view = memoryview(data)
        uniform = _uniform(view)
        if uniform is not None:
            return cls(uniform[0], len(view), [(view, uniform[1])], (kind, broker_name, receiver))
        offsets: list[int] = []
        starts: list[int] = []
        unpack, add_start, add_offset = _START.unpack_from, starts.append, offsets.append
        at, end = 0, len(view)
        try:
            while at < end:
                size, magic, offset = unpack(view, at)
                if (magic != MAGIC_V1 and magic != MAGIC_V2) or not size:  # noqa: PLR1714 - the hot path
                    raise RecordError(f"no message at {at} of the reply's body")
                add_start(at)
                add_offset(offset)
                at += size
        except struct.error:
            raise RecordError(f"a message is cut off at {at} of the reply's body") from None
        if at != end:
            raise RecordError(f"the last message of the reply's body ends at {at}, not at {end}")
        starts.append(end)
        return cls(offsets, end, [(view, starts)], (kind, broker_name, receiver))

    @classmethod
    def of(cls, messages: list[M]) -> "MessageBlock[M]":
        """A block of existing messages, which are in order."""
        offsets = [message.queue_offset for message in messages]
        return cls(offsets, sum([message.size for message in messages]), [], None, messages)

    def cut(self, count: int) -> "tuple[MessageBlock[M], MessageBlock[M]]":
        """The first ``count`` messages and the rest, as two blocks."""
        messages = self.messages()
        return self.of(messages[:count]), self.of(messages[count:])

    def joined(self, others: "Sequence[MessageBlock[M]]") -> "MessageBlock[M]":
        """One block of these messages followed by those of ``others``."""
        if not others:
            return self
        blocks = [self, *others]
        offsets = [offset for block in blocks for offset in block.offsets]
        size = sum([block.size for block in blocks])
        # A block whose messages exist already must keep these objects: a program may hold them, with their state.
        if all(block._messages is None and block._make == self._make for block in blocks):  # noqa: SLF001 - its own kind
            return MessageBlock(offsets, size, [piece for block in blocks for piece in block._pieces], self._make)  # noqa: SLF001
        return MessageBlock(offsets, size, [], None, [message for block in blocks for message in block.messages()])

    def messages(self) -> list[M]:
        """The messages. Every call returns the same objects."""
        found = self._messages
        if found is None:
            found = self._messages = self._made()
        return found

    def _made(self) -> list[M]:
        assert self._make is not None
        kind, broker_name, receiver = self._make
        if len(self._pieces) == 1:
            ((data, starts),) = self._pieces
            if type(starts) is range:  # from _uniform: all records have the same size
                size = starts.step
                return [
                    kind(data, at, size, offset, broker_name, receiver)
                    for at, offset in zip(starts, self.offsets, strict=False)
                ]
        offsets = iter(self.offsets)
        return [
            kind(data, at, end - at, offset, broker_name, receiver)
            for data, starts in self._pieces
            for at, end, offset in zip(starts, starts[1:], offsets, strict=False)
        ]

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[M]:
        return iter(self.messages())

    @overload
    def __getitem__(self, index: int) -> M: ...
    @overload
    def __getitem__(self, index: slice) -> list[M]: ...
    def __getitem__(self, index: int | slice) -> M | list[M]:
        return self.messages()[index]

    def __repr__(self) -> str:
        return f"MessageBlock(<{len(self)} messages>)"
