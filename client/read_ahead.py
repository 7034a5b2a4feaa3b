"""ReadAhead: what a process queue has pulled and nobody has taken yet, in order."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from trimq.client.message import ReceivedMessage
from trimq.client.message_block import MessageBlock

M = TypeVar("M", bound=ReceivedMessage)


class ReadAhead(Generic[M]):
    """Blocks as they came; in front of them single messages, of one that is taken one by one or that was put back."""

    __slots__ = ("_blocks", "front")

    def __init__(self) -> None:
        self.front: deque[M] = deque()
        self._blocks: deque[MessageBlock[M]] = deque()

    def __bool__(self) -> bool:
        return bool(self._blocks or self.front)

    def add(self, block: MessageBlock[M]) -> None:
        """A block has come, behind all others; it is not empty."""
        self._blocks.append(block)

    def take_one(self) -> M | None:
        """The first message; None where there is none."""
        front = self.front
        if not front:
            if not self._blocks:
                return None
            front.extend(self._blocks.popleft())
        return front.popleft()

    def take(self, count: int) -> MessageBlock[M]:
        """The first ``count`` messages, or as many as there are; at least one has to be there."""
        blocks, front = self._blocks, self.front
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
        """Messages that were taken: they are the first again."""
        front = sorted([*messages, *self.front], key=_offset)
        blocks = self._blocks
        if front and blocks and front[-1].queue_offset > blocks[0].offsets[0]:
            front = sorted([*front, *(message for block in blocks for message in block)], key=_offset)
            blocks.clear()
        self.front = deque(front)

    def clear(self) -> None:
        """Forgets all."""
        self.front.clear()
        self._blocks.clear()


def _offset(message: ReceivedMessage) -> int:
    return message.queue_offset
