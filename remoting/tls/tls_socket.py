"""TlsSocket: stands in for a non-blocking plain socket, and encrypts what passes through it.

An ``ssl.SSLSocket`` cannot do that: it has no ``sendmsg`` and no ``MSG_PEEK``, one ``recv_into`` gives a single record,
and a ``send`` that would block may have sent a part of its bytes, without saying how many. So the records pass through
an ``ssl.SSLObject`` over two memory BIOs, and this class moves the cipher bytes between these and the plain socket.
"""

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol, cast

from trimq.protocol.frame import Buffer
from trimq.remoting.tls.tls_texts import text_of

RECORD: Final = 5 + 16 * 1024 + 2048
"""The most bytes of one record: header, content, and what ciphers of TLS 1.2 may add."""

MOST_ENCRYPTED: Final = 256 * 1024
"""The most plain bytes encrypted in one call: little memory is taken for a peer that does not read."""

MOST_HANDSHAKE: Final = 64 * 1024
"""The most bytes that wait for a handshake step."""

_MOST_UNASKED: Final = 64 * 1024
"""The most bytes of answers to the peer's own TLS messages (key updates) that wait until it reads."""

_MOST_EMPTY: Final = 64 * 1024
"""The most bytes of records that bring no content, such as key updates, which cost far more than they are long."""
_WORTH: Final = 64
"""Bytes of such records that one byte of content makes up for: a record of one byte has 23, and may be padded."""
_CAREFUL: Final = 4 * 1024
"""Bytes decrypted in one call while the peer may be sending such records only."""

_PIECE: Final = 32 * 1024
"""The most bytes that are put into a memory BIO at once: it never gives memory back, and each connection has two."""

_SCRATCH: Final = 64 * 1024
_LARGE: Final = 16 * 1024
"""A buffer that fills a record is encrypted where it is; smaller ones are joined, for fewer records."""


class ByteSocket(Protocol):
    """The methods of a connected non-blocking socket that both ends of a connection use."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read into ``buffer``; 0 at end of file. Raises BlockingIOError if nothing has arrived, and OSError."""
        ...

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As socket.recv; used with MSG_PEEK, to see whether the connection is lost."""
        ...

    def send(self, data: Buffer, /) -> int:
        """Send and return how many bytes were taken. Raises BlockingIOError if none, and OSError."""
        ...

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        """As ``send``, for several buffers."""
        ...

    def fileno(self) -> int:
        """The descriptor."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...

    def getpeername(self) -> Any:
        """The address of the other end."""
        ...

    def getsockname(self) -> Any:
        """The address of this end."""
        ...

    def getsockopt(self, level: int, name: int, /) -> int:
        """An option of the socket."""
        ...

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """Set an option of the socket."""
        ...


class _Scratch(threading.local):
    """Where cipher bytes arrive. One per thread: a read into it lets other threads run."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_SCRATCH))


_scratch = _Scratch()


class OverRaw:
    """What stands in for a plain socket, ``raw``, has of it: all but sending, receiving and closing."""

    __slots__ = ("raw",)

    def __init__(self, raw: socket.socket) -> None:
        self.raw: socket.socket = raw

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Of the plain socket, to see with MSG_PEEK whether the connection is lost: these are not decrypted."""
        return self.raw.recv(size, flags)

    def fileno(self) -> int:
        """The descriptor of the plain socket."""
        return self.raw.fileno()

    def getpeername(self) -> Any:
        """The address of the other end."""
        return self.raw.getpeername()

    def getsockname(self) -> Any:
        """The address of this end."""
        return self.raw.getsockname()

    def getsockopt(self, level: int, name: int) -> int:
        """An option of the plain socket."""
        return self.raw.getsockopt(level, name)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Set an option of the plain socket."""
        self.raw.setsockopt(level, name, value)


class TlsSocket(OverRaw):
    """One end of a TLS connection over ``raw``, a connected non-blocking socket. Used in one thread.

    The handshake comes first: ``do_handshake``, and ``fill`` when bytes have arrived, until ``established``. Until then
    nothing can be sent or received.

    ``send`` and ``sendmsg`` count a plain byte as taken when the kernel has its cipher text. If they raise
    BlockingIOError, bytes may be encrypted already (``encrypted`` says how many): the next call has to be for the same
    bytes, with or without more behind them. Both users do that, since they send from a queue. Views are not kept.

    ``recv_into`` gives what a few reads bring; what these leave in the socket is reported as usual. Bytes that do not
    fit into the caller's buffer stay inside, and no event of the socket reports these: ``has_bytes`` does, and
    ``on_left`` is called. A view of two records (RECORD) or more leaves nothing inside.

    ``first`` holds bytes that were read from ``raw`` before. The context must have OP_NO_RENEGOTIATION.
    """

    __slots__ = (
        "_empty",
        "_encrypted",
        "_ended",
        "_incoming",
        "_left",
        "_object",
        "_outgoing",
        "_read",
        "_scratch",
        "_unsent",
        "established",
        "on_left",
    )

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None = None,
        first: Buffer = b"",
    ) -> None:
        super().__init__(raw)
        self.established: bool = False
        self.on_left: Callable[[], object] | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side, server_hostname)
        # typeshed knows it without a buffer only
        self._read = cast("Callable[[int, memoryview], int]", self._object.read)
        self._scratch = _scratch.view
        self._unsent: Buffer = b""  # cipher bytes taken out of ``_outgoing``
        self._encrypted = 0  # plain bytes of the caller's next call that are encrypted already
        self._left = False  # bytes may be inside that the last ``recv_into`` had no space for
        self._ended = False  # the peer sends nothing more
        self._empty = RECORD + 1  # bytes of records without content; at first the peer has to show some
        if first:
            self._incoming.write(first)

    # the handshake

    def fill(self) -> bool:
        """Take what has arrived for the next handshake step, and return whether there is enough for one.

        At most MOST_HANDSHAKE bytes wait. Raises OSError if the connection is lost, or was closed.
        """
        space = MOST_HANDSHAKE - self._incoming.pending
        if space > 0:
            try:
                count = self.raw.recv_into(self._scratch[:space])
            except BlockingIOError:
                return bool(self._incoming.pending)
            if not count:
                raise ConnectionResetError("the connection was closed within the TLS handshake")
            self._incoming.write(self._scratch[:count])
        return True

    def do_handshake(self) -> bool:
        """Take a step of the handshake with the bytes that ``fill`` took, and send what it gives. True: established.

        ``unsent`` bytes have to be sent by ``flush`` when the socket takes more. Raises OSError with a text that says
        what is wrong, after the peer was sent an alert, as far as its socket took that.
        """
        if not self.established:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._send_alert()
                raise ConnectionAbortedError(f"the TLS handshake failed: {text_of(error)}") from error
            else:
                self.established = True
                self._left = bool(self._incoming.pending)  # they may have arrived with the handshake's last bytes
        self.flushed()
        return self.established

    @property
    def unsent(self) -> int:
        """Cipher bytes that the kernel has not taken yet."""
        return len(self._unsent) + self._outgoing.pending

    @property
    def arrived(self) -> int:
        """Cipher bytes that have arrived and are not decrypted."""
        return self._incoming.pending

    def flush(self) -> None:
        """Send the unsent cipher bytes. Raises BlockingIOError if the kernel does not take all, and OSError."""
        while True:
            unsent = self._unsent
            if unsent:
                count = self.raw.send(unsent)
                if count < len(unsent):
                    self._unsent = memoryview(unsent)[count:]
                    raise BlockingIOError
                self._unsent = b""
            if not self._outgoing.pending:
                return
            self._unsent = self._outgoing.read()

    def flushed(self) -> bool:
        """Send the unsent cipher bytes; whether the kernel has taken all. Raises OSError."""
        try:
            self.flush()
        except BlockingIOError:
            return False
        return True

    def _send_alert(self) -> None:
        with suppress(OSError):
            self.flush()

    # receiving

    @property
    def has_bytes(self) -> bool:
        """Whether ``recv_into`` has something to give, or to report, without anything arriving."""
        return self._left

    def recv_into(self, view: memoryview) -> int:
        """As socket.recv_into, for plain bytes. 0 also after the peer has said that it sends no more (close_notify).

        Raises BlockingIOError if no plain byte was found, and OSError if the connection is lost or a record broken.
        """
        if not self.established:
            raise BlockingIOError
        if self._left or self._ended:
            count = self._decrypt(view)
            if count or self._ended:
                return count
        filled = self._receive(view)
        if filled or self._ended:
            return filled
        raise BlockingIOError

    def _receive(self, view: memoryview) -> int:
        """Read and decrypt piece by piece, as long as the pieces are whole and have content."""
        size = len(view)
        filled = 0
        while True:
            # Plain bytes are fewer than cipher bytes, and OpenSSL itself may hold the start of one record.
            most = min(_PIECE if self._empty <= RECORD else _CAREFUL, max(size - filled - RECORD, RECORD))
            try:
                count = self.raw.recv_into(self._scratch[:most])
            except OSError:
                if filled:
                    return filled  # the socket reports it again
                raise
            if not count:
                # Also without a close_notify: frames have a length, so one that was cut is noticed.
                self._ended = not filled
                return filled
            self._incoming.write(self._scratch[:count])
            got = self._decrypt(view[filled:] if filled else view)
            filled += got
            if count < most or got < count // 4 or self._left or self._ended or size - filled < 2 * RECORD:
                return filled

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt as much as fits into ``view``; notes whether there is more."""
        incoming, read = self._incoming, self._read
        before = incoming.pending
        size = len(view)
        filled = 0
        self._left = False
        try:
            while not self._ended:
                count = read(size - filled, view[filled:] if filled else view)
                if not count:
                    self._ended = True
                    break
                filled += count
                if filled == size:
                    self._left = bool(incoming.pending or self._object.pending())
                    break
                if not incoming.pending:
                    break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._send_alert()
            raise ConnectionAbortedError(f"the TLS connection failed: {text_of(error)}") from error
        if filled and self._ended:
            self._left = True  # the next call reports the end
        self._empty = max(0, self._empty + before - incoming.pending - _WORTH * filled)
        if self._empty > _MOST_EMPTY:
            raise ConnectionAbortedError("the peer sends TLS messages without content")
        if self._outgoing.pending:  # answers to key updates
            self.flushed()
            if self._outgoing.pending > _MOST_UNASKED:
                raise ConnectionAbortedError("the peer sends TLS messages and does not read the answers")
        if self._left and self.on_left is not None:
            self.on_left()
        return filled

    # sending

    @property
    def encrypted(self) -> int:
        """Plain bytes of a call that raised BlockingIOError that are encrypted: they can not be taken back."""
        return self._encrypted

    def send(self, data: Buffer) -> int:
        """As socket.send: the plain bytes whose cipher text the kernel has taken, at most MOST_ENCRYPTED."""
        return self._sent_before(len(data)) or self._send((memoryview(data)[:MOST_ENCRYPTED],))

    def sendmsg(self, buffers: Iterable[Buffer]) -> int:
        """As ``send``, for several buffers. Short ones are joined: every record costs 22 bytes and a microsecond."""
        buffers = tuple(buffers)
        count = self._sent_before(sum(map(len, buffers)))
        if count:
            return count
        pieces: list[Buffer] = []
        joined: list[Buffer] = []
        space = MOST_ENCRYPTED
        for buffer in buffers:
            if not space:
                break
            view = memoryview(buffer)[:space]
            space -= len(view)
            if len(view) < _LARGE:
                joined.append(view)
                continue
            if joined:
                pieces.append(b"".join(joined))
                joined.clear()
            pieces.append(view)
        if joined:
            pieces.append(b"".join(joined))
        return self._send(pieces)

    def _sent_before(self, size: int) -> int:
        """Send what earlier calls have encrypted; how many of the caller's ``size`` bytes were among that."""
        if not self.established:
            raise BlockingIOError
        if self._unsent or self._outgoing.pending:
            self.flush()
        count = min(self._encrypted, size)
        self._encrypted -= count
        return count

    def _send(self, pieces: Iterable[Buffer]) -> int:
        encrypted: list[bytes] = []
        for piece in pieces:
            view = memoryview(piece)
            for at in range(0, len(view), _PIECE):
                self._encrypted += self._object.write(view[at : at + _PIECE])
                encrypted.append(self._outgoing.read())
        self._unsent = b"".join(encrypted)
        self.flush()
        count, self._encrypted = self._encrypted, 0
        return count

    # the socket

    def close(self) -> None:
        """Say that no more is sent (close_notify), as far as the kernel takes it at once, and close the socket."""
        if self.established and self.raw.fileno() >= 0:
            with suppress(OSError, ValueError):
                self._object.unwrap()
            self._send_alert()
        self.on_left = None
        self.raw.close()

    # who is at the other end

    def version(self) -> str | None:
        """The TLS version, as "TLSv1.3"; None before the handshake."""
        return self._object.version()

    def cipher(self) -> tuple[str, str, int] | None:
        """Name of the cipher, TLS version that defines it, secret bits; None before the handshake."""
        return self._object.cipher()

    def peer_certificate(self) -> dict[str, Any] | None:
        """The other end's certificate as ``ssl.SSLObject.getpeercert`` gives it; {} if it was not verified."""
        return self._object.getpeercert()
