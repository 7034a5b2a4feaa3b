"""OutBuffer: what a connection still has to send, and who wants to know when it has gone."""

import socket
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import structlog

_log = structlog.get_logger("remoting")

Buffer: TypeAlias = bytes | memoryview

MAX_BUFFERS: Final = 1024
"""Buffers in one sendmsg (IOV_MAX)."""

SMALL: Final = 8 * 1024
"""Neighbours shorter than this are joined: copying them costs less than one more entry for the kernel."""

JOINED: Final = 32 * 1024
"""Up to this much goes out as one joined buffer by a plain send."""


class OutBuffer:
    """Buffers in the order they are to be sent. Hot paths of the reactor read and write its attributes themselves.

    ``queued`` and ``sent`` count all bytes since the connection began; their difference waits.
    """

    __slots__ = ("chunks", "queued", "sent", "to_release")

    def __init__(self) -> None:
        self.chunks: list[Buffer] = []
        self.queued = 0
        self.sent = 0
        self.to_release: deque[tuple[int, Callable[[], None]]] = deque()

    def on_sent(self, release: Callable[[], None]) -> None:
        """Call ``release`` once all that is queued now has been sent, or at ``discard``.

        By then no view of the buffers is left here, so that their owner may unmap them.
        """
        self.to_release.append((self.queued, release))

    def releases(self) -> list[Callable[[], None]]:
        """Those that have not been called yet."""
        return [release for _, release in self.to_release]

    def flush(self, sock: socket.socket) -> bool:
        """Send as much as the socket takes; True when nothing is left. Raises OSError where the connection is gone."""
        chunks = self.chunks
        try:
            if len(chunks) == 1 and not self.to_release:  # the usual case: all replies of a round, joined already
                data = chunks[0]
                count = sock.send(data)
                self.sent += count
                if count == len(data):
                    chunks.clear()
                    return True
                chunks[0] = memoryview(data)[count:]
            while chunks:
                if len(chunks) == 1 or self.queued - self.sent <= JOINED:
                    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                    count = sock.send(data)
                    self.sent += count
                    if count == len(data):
                        chunks.clear()
                    else:
                        chunks[:] = (memoryview(data)[count:],)
                    del data  # whoever hears of the release finds no view here
                else:
                    self._advance(sock.sendmsg(self._gather()))
        except BlockingIOError:
            pass
        if self.to_release:
            self._release(self.sent)
        return not chunks

    def discard(self) -> None:
        """Forget what was not sent; release everything."""
        self.chunks.clear()
        self._release(self.queued)

    def _gather(self) -> list[Buffer]:
        """The next buffers for one sendmsg; runs of small ones are joined, in ``chunks`` as well."""
        vector: list[Buffer] = []
        small: list[Buffer] = []
        taken = 0
        for chunk in self.chunks:
            if len(chunk) < SMALL:
                small.append(chunk)
            else:
                if small:
                    vector.append(b"".join(small))
                    small.clear()
                vector.append(chunk)
            taken += 1
            if len(vector) >= MAX_BUFFERS - 1 or len(small) >= 2 * MAX_BUFFERS:
                break
        if small:
            vector.append(b"".join(small))
        self.chunks[:taken] = vector
        return vector

    def _advance(self, count: int) -> None:
        self.sent += count
        whole = 0
        for chunk in self.chunks:
            if count < len(chunk):
                break
            count -= len(chunk)
            whole += 1
        del self.chunks[:whole]
        if count:
            self.chunks[0] = memoryview(self.chunks[0])[count:]

    def _release(self, end: int) -> None:
        while self.to_release and self.to_release[0][0] <= end:
            release = self.to_release.popleft()[1]
            try:
                release()
            except Exception:  # noqa: BLE001 - a fault of the owner must not end the connection, let alone the others
                _log.exception("release_failed")
