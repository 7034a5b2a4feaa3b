"""Intake: decodes received bytes into requests, calls their handlers and queues replies. The reactor's hot path."""

import struct
from collections.abc import Callable
from time import perf_counter
from typing import Final, Literal

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import ONEWAY_FLAG, Encoding, RemotingCommand
from trimq.protocol.errors import FrameError
from trimq.protocol.frame import check_length, decode, decode_at
from trimq.protocol.proxy_preamble import begins
from trimq.protocol.typed_request import NOT_DECODED
from trimq.remoting.runtime.clock import CoarseTime
from trimq.remoting.server.big_frame import SPARE_SIZE, SPARES, BigFrame
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.failures import Failures
from trimq.remoting.server.grouping import FEW, GROUP_BYTES, LONGEST_REST, Grouping
from trimq.remoting.server.handler_table import FRONT, FastPath
from trimq.remoting.server.handlers import DEFERRED, Later, Outcome
from trimq.remoting.server.limits import (
    IN_FLIGHT,
    IN_FLIGHT_HERE,
    RECEIVE_BUFFER,
    ReactorLimits,
    ReactorStats,
    busy_remark,
)
from trimq.remoting.server.outcomes import Outcomes
from trimq.remoting.server.unfinished import UnfinishedFrames

MOST_HEAD: Final = 1024 * 1024
"""Bytes of a header. It is decoded before anything is known of its sender: one of 16 MB could take seconds."""
BIG_FRAME: Final = 32 * 1024
"""An unfinished frame longer than this gets its own buffer; a shorter one is copied in front of the next bytes."""

_WORDS: Final = 8
"""Bytes of a frame's two leading words: its length, and the header word (encoding and length of the header)."""
_KIND: Final = 24
"""Bits of the header word below its encoding."""
_front_at = struct.Struct(f">II{FRONT}s").unpack_from
_JSON: Final = Encoding.JSON
_CHECK_MASK: Final = 15
"""The clock is read after every 16th fast request: even the most requests that fit into the buffer take a few turns."""
_length_at = struct.Struct(">I").unpack_from

_FOREIGN: Final = {
    0x16: "a TLS handshake where a frame has to be: the connection began without TLS, or the port has none "
    "(tls.server.mode, tls.server.certPath)",
    0x0D: "a PROXY protocol preamble from an address that is not one of proxyProtocolNetworks",
    0x47: "an HTTP request on a remoting port",
    0x50: "an HTTP request on a remoting port, or a PROXY protocol preamble from an address that is not one of "
    "proxyProtocolNetworks",
}
"""First bytes of other protocols. As the high byte of a length, each of these would be far above any limit."""


class Intake:
    """Receives into one shared buffer, decodes every complete frame in it, calls handlers and queues replies."""

    def __init__(
        self,
        limits: ReactorLimits,
        stats: ReactorStats,
        *,
        time: CoarseTime,
        unfinished: UnfinishedFrames,
        outcomes: Outcomes,
        failures: Failures,
        send_now: Callable[[Connection], bool],
        continue_later: Callable[[Connection], None],
    ) -> None:
        """Creates the receive buffer and the grouping.

        ``send_now`` sends the queued bytes of a connection that is over its mark, and returns True if it then still is,
        or is closed. ``continue_later`` gives a connection with complete frames left another turn.
        """
        self._stats = stats
        self._time = time
        self._unfinished = unfinished
        self._outcomes = outcomes
        self._failures = failures
        self._send_now = send_now
        self._continue_later = continue_later
        self._max_total = limits.max_frame - 4
        self._groups = limits.max_frame >= RECEIVE_BUFFER  # only then no frame in the buffer can be too long
        self._max_frame = limits.max_frame
        self._high_water = limits.high_water
        self._max_inflight = limits.max_inflight
        self._max_inflight_here = limits.max_inflight_per_connection
        # With space for one front more: _front_at may read past the received bytes, but not past the buffer.
        self._buffer = bytearray(RECEIVE_BUFFER + _WORDS + FRONT)
        self.view = memoryview(self._buffer)[:RECEIVE_BUFFER]
        self.grouping = Grouping(self.view, limits, stats, failures, one_by_one=self.serve_received, send_now=send_now)
        self._spares: list[bytearray] = []
        self.turn_end = 0.0
        """The time (perf_counter) at which the current turn has to stop."""

    def serve(self, conn: Connection) -> None:  # noqa: C901, PLR0912, PLR0915 - every turn: no call for a usual frame
        """One turn of a connection: serve what one read brings, or the complete frames left from the last turn.

        The buffer holds, in this order: frames held for the round in [0, ``begin``), the rest of the connection's last
        turn, and the bytes received now.
        """
        grouping = self.grouping
        begin = grouping.end
        # The held frames are served first if too little of the buffer would remain behind them, if this connection has
        # a span already (a group has one per connection), and before a long frame, which is not held.
        if begin and (begin >= GROUP_BYTES or conn.in_group or len(conn.rest) > LONGEST_REST or conn.big is not None):
            grouping.serve()
            begin = 0
        if conn.big is not None:
            self._serve_big(conn, conn.big)
            return
        view = self.view
        end = start = begin
        continues = False  # the start of the first frame was received in an earlier turn
        if conn.rest:
            end = start = begin + len(conn.rest)
            view[begin:start] = self._unfinished.take(conn)
            continues = True
        if conn.ready:
            conn.ready = False  # ``rest`` starts with a complete frame: serve it before reading more
        else:
            try:
                end += conn.sock.recv_into(view[start:] if start else view)
            except OSError as error:
                self._not_received(conn, begin, start, error)
                return
            if end == start:
                cut = start > begin
                conn.close("the client closed the connection" + (" within a frame" if cut else ""), quiet=not cut)
                return
            self._stats.bytes_in += end - start
            conn.active_at = self._time.now
        # With fewer bytes than a front received, old bytes of the buffer are read behind them. That is harmless: the
        # lengths are compared with ``end`` before anything is served.
        total, word, front = _front_at(self._buffer, begin)
        length = total + 4
        server = conn.table.grouped.get(front)
        if server is None and word >> _KIND == Encoding.ROCKETMQ:
            server = conn.table.grouped.get(front[:2])
        # Held: all frames while rounds are large, and those of a connection that pipelines.
        if server is not None and self._groups and (grouping.many or length * FEW <= end - begin):
            grouping.take(conn, server, begin, end, continues=continues)
            return
        if begin:
            grouping.serve()
            if conn.closed:
                return
            server = conn.table.grouped.get(front)  # a request just served may have changed the gate
        path = conn.table.fast.get(front)
        body_at = begin + _WORDS + word
        stats = self._stats
        if (
            (path is None and server is None)
            or length != end - begin
            or body_at > end
            or conn.inflight >= self._max_inflight_here
            or stats.inflight >= self._max_inflight
            or total > self._max_total
        ):
            self.serve_received(conn, begin, end, continues=continues)
            return
        # Exactly one request, as most clients send at a time: the loop of ``_frames`` without the loop.
        answer: bytes | Literal[Later.DEFERRED] | RemotingCommand | None = None
        if server is not None:
            try:
                answer = server.serve_one(conn, view[begin:end])
            except Exception as error:  # noqa: BLE001 - as for any other handler
                self._failed(conn, view[begin + 4 : end], error)
                return
        if answer is None and path is not None:
            answer = self._fast(conn, path, view, begin + _WORDS, body_at, end)
        if answer is None:
            self.serve_received(conn, begin, end, continues=continues)
            return
        stats.frames += 1
        conn.encoding = _JSON
        if type(answer) is bytes:
            if answer:
                conn.reply(answer)
        elif answer is DEFERRED:
            conn.begin()
        elif isinstance(answer, RemotingCommand):
            self._full(conn, answer)
        out = conn.out
        if out.queued - out.sent >= self._high_water and not conn.closed:
            self._send_now(conn)

    def _not_received(self, conn: Connection, begin: int, start: int, error: OSError) -> None:
        """Handle a failed read. If it only would have blocked, the rest in [begin, start) is stored again."""
        if not isinstance(error, BlockingIOError):
            conn.close(f"the connection was lost: {error}")
        elif start > begin:
            self._unfinished.keep(conn, bytes(self.view[begin:start]))

    def _fast(
        self, conn: Connection, path: FastPath, view: memoryview, head_at: int, body_at: int, stop: int
    ) -> bytes | Literal[Later.DEFERRED] | RemotingCommand | None:
        """Decode a request in one pass, and serve it if it is an ordinary one.

        Returns bytes, the reply (b"" for none); or a command, which the full handler of its code has to serve; or None
        if the frame has to be decoded by ``decode_at``. In the last two cases there are no side effects.
        """
        code, decode, serve = path
        try:
            request = decode(view[head_at:body_at])
        except NOT_DECODED:
            return None
        # Repeated keys in the JSON may give another code than the front; with other flags it is, for example, a reply.
        if request.code != code or request.flag & ~ONEWAY_FLAG:
            return None
        request.body = view[body_at:stop]
        try:
            answer = serve(conn, request)
        except Exception as error:  # noqa: BLE001 - as for any other handler
            command = request.command(view[head_at:body_at])
            self._outcomes.conclude(conn, command, self._failures.reply(conn, command, error))
            return b""
        return request.command(view[head_at:body_at]) if answer is None else answer

    def _failed(self, conn: Connection, frame: memoryview, error: Exception) -> None:
        """Answer a frame for which ``serve_one`` raised: whether it was served is unknown, so it is not tried again."""
        self._stats.frames += 1
        try:
            command = decode(frame)
        except FrameError as broken:
            conn.close(f"broken frame: {broken}", broken=True)
            return
        conn.encoding = command.encoding
        self._outcomes.conclude(conn, command, self._failures.reply(conn, command, error))

    def _full(self, conn: Connection, command: RemotingCommand) -> None:
        """Call the full handler of a command, or deliver a client's reply."""
        conn.encoding = command.encoding
        if command.flag & 1:
            conn.reply_arrived(command)
            return
        table = conn.table
        handler = table.handlers.get(command.code, table.unknown)
        try:
            if (
                conn.inflight >= self._max_inflight_here or self._stats.inflight >= self._max_inflight
            ) and not command.flag & ONEWAY_FLAG:
                outcome: Outcome = self._busy(conn, command)
            else:
                outcome = handler(conn, command)
        except Exception as error:  # noqa: BLE001 - an exception of a handler ends one request, not the broker
            outcome = self._failures.reply(conn, command, error)
        self._outcomes.conclude(conn, command, outcome)

    def serve_received(self, conn: Connection, begin: int, end: int, *, continues: bool) -> None:
        """Serve the frames in [begin, end) of the receive buffer, and store the bytes left over.

        ``continues``: the start of the first frame was received in an earlier turn.
        """
        at = self._frames(conn, self._buffer, self.view, begin, end)
        if at != end and not conn.closed:
            self._keep(conn, at, end, first=at == begin, continues=continues)

    def _serve_big(self, conn: Connection, big: BigFrame) -> None:
        if big.filled == len(big.buffer) and not self._unfinished.grow(conn, big):
            return
        try:
            count = big.receive(conn.sock)
        except BlockingIOError:
            return
        except OSError as error:
            conn.close(f"the connection was lost: {error}")
            return
        if not count:
            conn.close("the client closed the connection within a frame")
            return
        self._stats.bytes_in += count
        conn.active_at = self._time.now
        if big.filled == big.size:
            self._unfinished.ended(conn, big)  # before the handler runs, which may close the connection
            head = int.from_bytes(big.buffer[5:_WORDS], "big")
            if head > MOST_HEAD:
                conn.close(f"broken frame: a header of {head} bytes, {MOST_HEAD} are allowed", broken=True)
                return
            self._frames(conn, big.buffer, memoryview(big.buffer), 0, big.size)
            if len(self._spares) < SPARES and big.size <= SPARE_SIZE:
                self._spares.append(big.buffer if len(big.buffer) == SPARE_SIZE else bytearray(SPARE_SIZE))

    def _frames(  # noqa: PLR0912, PLR0915 - every pipelined request passes here: one more call costs all of them
        self, conn: Connection, buffer: bytearray, view: memoryview, at: int, end: int
    ) -> int:
        """Serve complete frames until none is left, the turn is over, or the connection closed. Returns the offset."""
        fast = conn.table.fast
        out = conn.out
        max_total, max_inflight, max_here = self._max_total, self._max_inflight, self._max_inflight_here
        stats = self._stats
        replies: list[bytes] = []  # queued as one buffer at the end: fewer and larger sends
        count = size = counted = 0
        while end - at >= _WORDS:
            total, word, front = _front_at(buffer, at)
            stop = at + 4 + total
            if stop > end or total > max_total:
                break  # ``_keep`` distinguishes an incomplete frame from one that is too long
            path = fast.get(front)
            body_at = at + _WORDS + word
            answer: bytes | Literal[Later.DEFERRED] | RemotingCommand | None = None
            if path is not None and conn.inflight < max_here and stats.inflight < max_inflight and body_at <= stop:
                answer = self._fast(conn, path, view, at + _WORDS, body_at, stop)
            if type(answer) is bytes or answer is DEFERRED:
                at = stop
                count += 1
                conn.encoding = _JSON
                if answer is DEFERRED:
                    conn.begin()
                else:
                    replies.append(answer)
                # Reading the clock for each request would cost more than the check is worth.
                if not count & _CHECK_MASK:
                    size += sum(map(len, replies[counted:]))
                    counted = len(replies)
                    if perf_counter() >= self.turn_end or out.queued - out.sent + size >= self._high_water:
                        break
                continue
            try:
                command = answer if isinstance(answer, RemotingCommand) else decode_at(view, word, at + _WORDS, stop)
            except Exception as error:  # noqa: BLE001 - no malformed frame may end the broker
                conn.close(f"broken frame: {error}", broken=True)
                break
            at = stop
            count += 1
            self._full(conn, command)
            if conn.closed:
                break
            if out.queued - out.sent >= self._high_water and self._send_now(conn):
                break
            if perf_counter() >= self.turn_end:
                break
        stats.frames += count
        # After the replies of full handlers, which were queued in the loop: clients match replies by ``opaque``.
        if replies and not conn.closed:
            joined = replies[0] if len(replies) == 1 else b"".join(replies)
            if joined:
                conn.reply(joined)
                if out.queued - out.sent >= self._high_water:
                    self._send_now(conn)
        return at

    def _keep(self, conn: Connection, at: int, end: int, *, first: bool, continues: bool) -> None:
        """Store the unserved bytes: the start of a frame, or complete frames that have to wait for another turn.

        ``first``: nothing was served in this turn. ``continues``: the start of the first frame was received before.
        """
        left = end - at
        unfinished = self._unfinished
        # A new number for a new unfinished frame: by it UnfinishedFrames notices that it no longer is the same one.
        if not first or not continues:
            conn.frame += 1
        if left < 4:
            unfinished.keep(conn, bytes(self.view[at:end]))
            return
        # The length is checked as soon as it is known, before any memory is reserved for the frame.
        (total,) = _length_at(self._buffer, at)
        try:
            check_length(total, self._max_frame)
        except FrameError as error:
            known = _FOREIGN.get(self._buffer[at]) if first else None
            if known is not None and begins(bytes(self.view[at : min(end, at + _WORDS)])):
                self._stats.preambles_refused += 1
            conn.close(known or f"broken frame: {error}", broken=True)
            return
        if total + 4 <= left:
            unfinished.keep(conn, bytes(self.view[at:end]))
            if not conn.closed:
                conn.ready = True
                self._continue_later(conn)
        elif total + 4 > BIG_FRAME:
            spare = self._spares.pop() if self._spares and total + 4 <= SPARE_SIZE else None
            if not unfinished.begin(conn, total + 4, self.view[at:end], spare):
                if spare is not None:
                    self._spares.append(spare)
                if not conn.closed:
                    unfinished.keep(conn, bytes(self.view[at:end]))
                    unfinished.set_aside(conn)
        else:
            unfinished.keep(conn, bytes(self.view[at:end]))

    def _busy(self, conn: Connection, command: RemotingCommand) -> RemotingCommand | None:
        if conn.inflight >= self._max_inflight_here:
            key, limit = IN_FLIGHT_HERE, self._max_inflight_here
            state = f"{conn.inflight} requests are in flight on this connection; wait for their replies"
        else:
            key, limit = IN_FLIGHT, self._max_inflight
            state = f"{self._stats.inflight} requests are in flight on this server; try again in a moment"
        self._stats.count_busy(key)
        return command.reply(ResponseCode.SYSTEM_BUSY, busy_remark(key, limit, state))
