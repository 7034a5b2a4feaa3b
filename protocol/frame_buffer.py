"""FrameBuffer: the receive buffer of a client connection, which decodes the received bytes into commands.

The same buffer is used for all reads: its memory stays in the CPU's cache, and one system call reads many frames. A
complete frame is copied once, so the command decoded from it stays valid.
"""

import struct
from typing import Final

from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import MAX_FRAME, check_length, decode_at

_SIZE: Final = 256 * 1024
_MIN_SPACE: Final = 64 * 1024
"""With less free space than this, the held bytes are moved to the front. That is rare: only incomplete frames move."""

_WORD = struct.Struct(">I")


class FrameBuffer:
    """Receive into ``space``, then pass the number of bytes to ``received``, which returns the completed commands."""

    __slots__ = ("_begin", "_buffer", "_end", "_max_frame", "_view")

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray(_SIZE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._max_frame = max_frame

    @property
    def pending(self) -> int:
        """Buffered bytes of an incomplete frame."""
        return self._end - self._begin

    def space(self) -> memoryview:
        """The free part of the buffer, for the next read; never empty."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._buffer) > _SIZE:
                self._move_to(bytearray(_SIZE))
        elif len(self._buffer) - self._end < _MIN_SPACE:
            self._free_space()
        return self._view[self._end :]

    def _free_space(self) -> None:
        held = self._end - self._begin
        if held + _MIN_SPACE <= len(self._buffer):
            self._move_to(self._buffer)
        else:  # a long frame: the buffer grows with the bytes received, an announced length allocates nothing
            self._move_to(bytearray(2 * held))

    def _move_to(self, buffer: bytearray) -> None:
        held, view = self._end - self._begin, memoryview(buffer)
        view[:held] = self._view[self._begin : self._end]
        self._buffer, self._view = buffer, view
        self._begin, self._end = 0, held

    def received(self, count: int) -> list[RemotingCommand]:
        """The commands completed by ``count`` more bytes. Their bodies are copies.

        Raises FrameError for a malformed frame; the stream is unusable afterwards.
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
