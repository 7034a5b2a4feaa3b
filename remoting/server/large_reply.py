"""LargeReply: a reply with a possibly long body, produced in slices of a millisecond and limited to one frame.

A connection produces one of them at a time, and none while it is over its high-water mark. So a client that sends a
thousand requests and reads nothing costs the memory of its mark and one reply. All connections together get one slice
per turn of the loop, in order: a request of another client waits for one slice, however many clients request lists.
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
"""A body below this size is sent as one buffer with its header."""
_HEADER: Final = 4 * 1024
"""Bytes of a frame reserved for its header."""


class LargeReply:
    """A long reply: ``async with LargeReply(connection, command) as reply``, ``add`` and ``pause``, return ``end()``.

    Raises RemotingError (SYSTEM_ERROR) if the body gets too long for a frame, or the client has disconnected.
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
        # The connection's lock comes first, the lock of all connections last: a client that does not read its replies
        # must not hold up the others while it drains.
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
        """Append ``piece`` to the body."""
        self.size += len(piece)
        if self.size > self._most:
            raise RemotingError(
                ResponseCode.SYSTEM_ERROR,
                f"the reply would be longer than a frame may be ({MAX_FRAME} bytes): ask for less",
            )
        self._parts.append(piece)

    async def pause(self) -> None:
        """Let other tasks run if the slice is over. To be called at least every tenth of a millisecond of work."""
        if perf_counter() < self._slice_end:
            return
        self._join()
        slices = self._connection.slices
        slices.release()
        # ``release`` has passed the lock to the next waiting task. The shield makes sure that this task holds it again
        # after this line, even if it was cancelled: ``__aexit__`` releases it.
        with trio.CancelScope(shield=True):
            await slices.acquire()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_open()
        self._slice_end = perf_counter() + SLICE

    async def add_all(self, pieces: Iterable[bytes]) -> "LargeReply":
        """Add all of ``pieces``. Producing each one has to be quick."""
        for piece in pieces:
            self.add(piece)
            await self.pause()
        return self

    def body(self) -> bytes:
        """The body added so far."""
        return b"".join([*self._pieces, *self._parts])

    def end(self, header: Any = None) -> Outcome:
        """The outcome for the handler to return: a short reply, or None after a long one was queued."""
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
            raise RemotingError(ResponseCode.SYSTEM_ERROR, "the client has disconnected")


async def in_slices(
    connection: Connection, command: RemotingCommand, pieces: Iterable[bytes], header: Any = None
) -> Outcome:
    """A reply with ``pieces`` as its body. Producing each one has to be quick."""
    async with LargeReply(connection, command) as reply:
        await reply.add_all(pieces)
        return reply.end(header)
