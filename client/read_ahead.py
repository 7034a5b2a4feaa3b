"""ReadAhead: what a process queue has pulled and nobody has taken yet, in order."""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from trimq.client.message import ReceivedMessage
from trimq.client.message_run import MessageRun

M = TypeVar("M", bound=ReceivedMessage)


class ReadAhead(Generic[M]):
    """Runs as they came; in front of them single messages, of a run that is taken one by one or that was put back."""

    __slots__ = ("_runs", "front")

    def __init__(self) -> None:
        self.front: deque[M] = deque()
        self._runs: deque[MessageRun[M]] = deque()

    def __bool__(self) -> bool:
        return bool(self._runs or self.front)

    def add(self, run: MessageRun[M]) -> None:
        """A run has come, behind all others; it is not empty."""
        self._runs.append(run)

    def take_one(self) -> M | None:
        """The first message; None where there is none."""
        front = self.front
        if not front:
            if not self._runs:
                return None
            front.extend(self._runs.popleft())
        return front.popleft()

    def take(self, count: int) -> MessageRun[M]:
        """The first ``count`` messages, or as many as there are; at least one has to be there."""
        runs, front = self._runs, self.front
        if not front and len(runs[0].offsets) == count:
            return runs.popleft()
        if count == 1 and not front:
            front.extend(runs.popleft())
        if len(front) >= count:
            return MessageRun.of([front.popleft() for _ in range(count)])
        parts: list[MessageRun[M]] = []
        if front:
            parts.append(MessageRun.of(list(front)))
            front.clear()
            count -= len(parts[0])
        while runs and len(runs[0]) <= count:
            parts.append(runs.popleft())
            count -= len(parts[-1])
        if runs and count:
            first, rest = runs.popleft().cut(count)
            parts.append(first)
            runs.appendleft(rest)
        return parts[0].joined(parts[1:])

    def put_back(self, messages: Iterable[M]) -> None:
        """Messages that were taken: they are the first again."""
        front = sorted([*messages, *self.front], key=_offset)
        runs = self._runs
        if front and runs and front[-1].queue_offset > runs[0].offsets[0]:
            front = sorted([*front, *(message for run in runs for message in run)], key=_offset)
            runs.clear()
        self.front = deque(front)

    def clear(self) -> None:
        """Forgets all."""
        self.front.clear()
        self._runs.clear()


def _offset(message: ReceivedMessage) -> int:
    return message.queue_offset
