"""OutBuffer: the bytes that a connection still has to send, and the callbacks due when they have been sent."""

from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import structlog

from trimq.remoting.tls.tls_socket import ByteSocket

_log = structlog.get_logger("remoting")

Buffer: TypeAlias = bytes | memoryview

MAX_BUFFERS: Final = 1024
"""The most buffers in one sendmsg (IOV_MAX)."""

SMALL: Final = 8 * 1024
"""Adjacent buffers shorter than this are joined: the copy costs less than one more entry for the kernel."""

JOINED: Final = 32 * 1024
"""Up to this many bytes are joined and sent as one buffer: cheaper than sendmsg with several."""


class OutBuffer:
    """Buffers in the order in which they are sent. The reactor's hot paths read and write the attributes directly.

    ``queued`` and ``sent`` count bytes over the life of the connection; the difference is still to be sent.
    """

    __slots__ = ("chunks", "queued", "sent", "to_release")

    def __init__(self) -> None:
        self.chunks: list[Buffer] = []
        self.queued = 0
        self.sent = 0
        self.to_release: deque[tuple[int, Callable[[], None]]] = deque()

    def on_sent(self, release: Callable[[], None]) -> None:
        """Call ``release`` once everything queued so far has been sent, or at ``discard``.

        When it is called, no view of the buffers is left here, so their owner may unmap them.
        """
        self.to_release.append((self.queued, release))

    def releases(self) -> list[Callable[[], None]]:
        """The release callbacks that have not been called yet."""
        return [release for _, release in self.to_release]

    def flush(self, sock: ByteSocket) -> bool:
        """Send as much as the socket takes; True if nothing is left. Raises OSError if the connection is lost."""
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
                    del data  # it may be a view, and none may be left when ``_release`` runs
                else:
                    self._advance(sock.sendmsg(self._gather()))
        except BlockingIOError:
            pass
        # Also after an incomplete send: the pieces sent so far may complete earlier frames.
        if self.to_release:
            self._release(self.sent)
        return not chunks

    def discard(self) -> None:
        """Drop the unsent buffers and call all release callbacks."""
        self.chunks.clear()
        self._release(self.queued)

    def _gather(self) -> list[Buffer]:
        """The buffers for the next sendmsg. Runs of small ones are joined, in ``chunks`` too, for ``_advance``."""
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
            except Exception:  # noqa: BLE001 - a fault of the owner must not end this connection or others
                _log.exception("release_failed")
