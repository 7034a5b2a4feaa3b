"""ReadAhead: the messages that a process queue has pulled and the program has not taken yet, in order."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock

M = TypeVar("M", bound=ReceivedMessage)


class ReadAhead(Generic[M]):
    """Blocks as they were pulled, and in ``front`` of them single messages.

    These are the rest of a block that is being taken one by one, or messages that were put back. All messages in
    ``front`` precede those in the blocks.
    """

    __slots__ = ("_blocks", "front")

    def __init__(self) -> None:
        self.front: deque[M] = deque()
        self._blocks: deque[MessageBlock[M]] = deque()

    def __bool__(self) -> bool:
        return bool(self._blocks or self.front)

    def add(self, block: MessageBlock[M]) -> None:
        """Appends a block, which must not be empty."""
        self._blocks.append(block)

    def take_one(self) -> M | None:
        """Takes the first message; None if there is none."""
        front = self.front
        if not front:
            if not self._blocks:
                return None
            front.extend(self._blocks.popleft())
        return front.popleft()

    def take(self, count: int) -> MessageBlock[M]:
        """Takes the first ``count`` messages, or all if there are fewer; there must be at least one."""
        blocks, front = self._blocks, self.front
        # Whole blocks are handed out as they are, without creating their messages.
        if not front and len(blocks[0].offsets) == count:
            return blocks.popleft()
        if count == 1 and not front:
            front.extend(blocks.popleft())
        if len(front) >= count:
            return MessageBlock.of([front.popleft() for _ in range(count)])
        taken: list[MessageBlock[M]] = []
        if front:
            taken.append(MessageBlock.of(list(front)))
            front.clear()
            count -= len(taken[0])
        while blocks and len(blocks[0]) <= count:
            taken.append(blocks.popleft())
            count -= len(taken[-1])
        if blocks and count:
            first, rest = blocks.popleft().cut(count)
            taken.append(first)
            blocks.appendleft(rest)
        return taken[0].joined(taken[1:])

    def put_back(self, messages: Iterable[M]) -> None:
        """Puts taken messages back into the order of offsets."""
        front = sorted([*messages, *self.front], key=_offset)
        blocks = self._blocks
        # A message from the middle of a block that was handed out whole may belong behind one that is still in a block.
        if front and blocks and front[-1].queue_offset > blocks[0].offsets[0]:
            front = sorted([*front, *(message for block in blocks for message in block)], key=_offset)
            blocks.clear()
        self.front = deque(front)

    def clear(self) -> None:
        """Discards all messages."""
        self.front.clear()
        self._blocks.clear()


def _offset(message: ReceivedMessage) -> int:
    return message.queue_offset
