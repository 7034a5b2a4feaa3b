"""FrameBuffer: where a connection's bytes are received, and taken out of again as commands.

One buffer is used again and again: memory that is warm in the cache, and as many frames as have come with one system
call. A frame is copied once, when it is whole; what it brings may then be kept for as long as anybody likes.
"""

import struct
from typing import Final

from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import MAX_FRAME, check_length, decode_at

_SIZE: Final = 256 * 1024
_ROOM: Final = 64 * 1024
"""With less room than this behind what is held, that is moved to the front: seldom, and never for a whole frame."""

_WORD = struct.Struct(">I")


class FrameBuffer:
    """Receive into ``space``, then say how much came: ``received`` has the commands that are complete now."""

    __slots__ = ("_begin", "_buffer", "_end", "_max_frame", "_view")

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray(_SIZE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._max_frame = max_frame

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not complete yet."""
        return self._end - self._begin

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _SIZE:
                self._move_to(bytearray(_SIZE))
        elif len(self._buffer) - self._end < _ROOM:
            self._make_room()
        return self._view[self._end :]

    def _make_room(self) -> None:
        held = self._end - self._begin
        if held + _ROOM <= len(self._buffer):
            self._move_to(self._buffer)
        else:  # a long frame: the buffer grows with what really comes, an announced length costs nothing
            self._move_to(bytearray(2 * held))

    def _move_to(self, buffer: bytearray) -> None:
        held, view = self._end - self._begin, memoryview(buffer)
        view[:held] = self._view[self._begin : self._end]
        self._buffer, self._view = buffer, view
        self._begin, self._end = 0, held

    def received(self, count: int) -> list[RemotingCommand]:
        """The commands that ``count`` more bytes complete; bodies are bytes of their own.

        Raises FrameError; the stream is unusable afterwards.
        """
        view, at, most = self._view, self._begin, self._max_frame - 4
        end = self._end = self._end + count
        commands = []
        while end - at >= 4:
            total = _WORD.unpack_from(view, at)[0]
            if not 4 <= total <= most:
                check_length(total, self._max_frame)
            stop = at + 4 + total
            if stop > end:
                break
            frame = memoryview(bytes(view[at:stop]))
            commands.append(decode_at(frame, _WORD.unpack_from(frame, 4)[0], 8, 4 + total))
            at = stop
        self._begin = at
        return commands
