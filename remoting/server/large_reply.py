"""LargeReply: a reply whose body may be long is made in slices of a millisecond, and never longer than a frame.

One connection has one of them in the making at a time, and none while it has its high-water mark to send: so a client
that asks a thousand times and reads nothing costs one reply more than its mark. All connections together get one slice
in a round of the loop, in turn: a good client waits for one slice, however many others ask for lists.
"""

from collections.abc import Iterable
from time import perf_counter
from types import TracebackType
from typing import Any, Final, Self

import trio

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import MAX_FRAME, encode_head
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handlers import Outcome

SLICE: Final = 0.001
"""Seconds of work at a stretch."""
_ONE_BUFFER: Final = 16 * 1024
"""Up to this size the body is one buffer."""
_HEADER: Final = 4 * 1024
"""Bytes of a frame that are left to its header."""


class LargeReply:
    """Use: ``async with LargeReply(connection, command) as reply``, then ``add`` and ``pause``, and return ``end()``.

    Raises RemotingError (SYSTEM_ERROR) where the body gets too long for a frame, and where the client has gone.
    """

    def __init__(self, connection: Connection, command: RemotingCommand) -> None:
        self._connection = connection
        self._command = command
        self._most = MAX_FRAME - _HEADER
        self._pieces: list[bytes] = []
        self._parts: list[bytes] = []
        self._slice_end = 0.0
        self.size = 0

    async def __aenter__(self) -> Self:
        await self._connection.put_off.large_replies.acquire()
        try:
            await self._connection.drained()
            self._check_open()
            await self._connection.slices.acquire()
        except BaseException:
            self._connection.put_off.large_replies.release()
            raise
        self._slice_end = perf_counter() + SLICE
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._connection.slices.release()
        self._connection.put_off.large_replies.release()

    def add(self, piece: bytes) -> None:
        """More of the body."""
        self.size += len(piece)
        if self.size > self._most:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"the reply would be longer than a frame may be ({MAX_FRAME} bytes): ask for less",
            )
        self._parts.append(piece)

    async def pause(self) -> None:
        """Let others work where the slice is over. To be called at least every tenth of a millisecond."""
        if perf_counter() < self._slice_end:
            return
        self._join()
        slices = self._connection.slices
        slices.release()
        # whoever waits has the lock now; cancelled or not, this task has it again behind this line
        with trio.CancelScope(shield=True):
            await slices.acquire()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        self._slice_end = perf_counter() + SLICE

    async def add_all(self, pieces: Iterable[bytes]) -> "LargeReply":
        """Take all of ``pieces``, each of them quick to make."""
        for piece in pieces:
            self.add(piece)
            await self.pause()
        return self

    def body(self) -> bytes:
        """All that was added until now."""
        return b"".join([*self._pieces, *self._parts])

    def end(self, header: Any = None) -> Outcome:
        """What the handler gives back."""
        command = self._command
        self._join()
        if self.size < _ONE_BUFFER:
            return command.reply(header=header, body=b"".join(self._pieces))
        if not command.is_oneway:
            self._connection.reply_with([encode_head(command.reply(header=header), self.size), *self._pieces])
        return None

    def _join(self) -> None:
        if self._parts:
            self._pieces.append(b"".join(self._parts))
            self._parts.clear()

    def _check_open(self) -> None:
        if self._connection.closed:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, "the client has gone")


async def in_slices(
    connection: Connection, command: RemotingCommand, pieces: Iterable[bytes], header: Any = None
) -> Outcome:
    """The reply whose body is ``pieces``, each of them quick to make."""
    async with LargeReply(connection, command) as reply:
        await reply.add_all(pieces)
        return reply.end(header)
