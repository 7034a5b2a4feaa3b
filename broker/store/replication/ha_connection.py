"""HAConnection: a master's connection with one slave. It reads the slave's reports and sends it the log.

Source: RocketMQ's DefaultHAConnection.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import structlog
import trio

from trimq.broker.store.log.commit_log import CommitLog
from trimq.broker.store.replication.offset_times import OffsetTimes
from trimq.protocol.ha_frames import HAFrameError, ReportDecoder, encode_header

_log = structlog.get_logger(__name__)

_JOINED = 32 * 1024
"""Up to this many bytes of the log are copied behind the header: one system call, and one packet."""
_RECEIVE = 4096
_LOOK = 0.2
"""Seconds between two looks at the end of the log."""


class HAConfig(NamedTuple):
    """Settings of both sides; times are seconds, sizes bytes.

    ``batch``: haTransferBatchSize. ``heartbeat``: haSendHeartbeatInterval. ``silence``: haHousekeepingInterval.
    ``max_gap``: haMaxGapNotInSync.
    """

    batch: int = 1 << 20
    heartbeat: float = 5.0
    silence: float = 20.0
    max_gap: int = 256 << 20


class SlaveState(NamedTuple):
    """What a master knows of a slave: its address, the offset it has acknowledged, and the one behind what was sent.

    ``behind`` is in bytes. ``behind_seconds``: how long the master has had the oldest of them, to within a second.
    ``bytes_per_second``: what was sent in the last second. ``broker_id`` is known in controller mode only, else -1.
    """

    address: str
    ack_offset: int
    sent_offset: int
    behind: int
    behind_seconds: float
    in_sync: bool
    bytes_per_second: int
    broker_id: int = -1


class Master(Protocol):
    """The part of HAService that a connection uses."""

    log: CommitLog
    config: HAConfig
    times: OffsetTimes

    @property
    def end_offset(self) -> int:
        """The end of what slaves may get."""
        ...

    def acknowledged(self) -> None:
        """Note that a slave has reported."""
        ...


class HAConnection:
    """One slave. ``ack_offset`` is -1 before its first report."""

    def __init__(self, master: Master, stream: trio.abc.Stream, address: str) -> None:
        self.address = address
        self.ack_offset = -1
        self.sent_offset = 0
        self.sent_bytes = 0
        self.closed = ""
        """Why it has ended; empty while it lives."""
        self._master = master
        self._stream = stream
        self._scope = trio.CancelScope()
        self._first = trio.Event()
        self._grown = trio.Event()
        self._bytes_per_second = 0
        self._sampled_bytes = 0
        self._decoder = ReportDecoder()

    @property
    def behind(self) -> int:
        """Bytes of the log that the slave has not acknowledged."""
        return self._master.log.max_offset - max(0, self.ack_offset)

    @property
    def in_sync(self) -> bool:
        """Whether it has reported, and is not too far behind."""
        return self.ack_offset >= 0 and self.behind < self._master.config.max_gap

    def state(self) -> SlaveState:
        """What there is to know of it."""
        ack = max(0, self.ack_offset)
        return SlaveState(
            self.address,
            ack,
            self.sent_offset,
            self.behind,
            self._master.times.age(ack, trio.current_time()) if self.behind else 0.0,
            self.in_sync,
            self._bytes_per_second,
        )

    def sample(self, seconds: float) -> None:
        """Once in ``seconds``: note what was sent since the last call."""
        self._bytes_per_second = int((self.sent_bytes - self._sampled_bytes) / seconds)
        self._sampled_bytes = self.sent_bytes

    async def run(self) -> None:
        """Serve the slave until it disconnects, breaks the protocol, or ``close``."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._ends, self._read)
                    nursery.start_soon(self._ends, self._transfer)
        finally:
            self.closed = self.closed or "the broker is shutting down"
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await trio.aclose_forcefully(self._stream)

    def close(self, reason: str) -> None:
        """End the connection."""
        self.closed = self.closed or reason
        self._scope.cancel()

    def notify(self) -> None:
        """There may be more to send."""
        self._grown.set()

    async def _ends(self, side: Callable[[], Awaitable[None]]) -> None:
        """Run one side; when it ends, the connection does."""
        try:
            await side()
        except HAFrameError as error:
            self.close(str(error))
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            self.close(f"the connection was lost: {str(error) or type(error).__name__}")

    async def _read(self) -> None:
        while True:
            data: bytes | bytearray = b""
            with trio.move_on_after(self._master.config.silence) as silence:
                data = await self._stream.receive_some(_RECEIVE)
            if silence.cancelled_caught:
                self.close(f"the slave was silent for {self._master.config.silence:g} s")
                return
            if not data:
                self.close("the slave has disconnected")
                return
            self._received(bytes(data))

    def _received(self, data: bytes) -> None:
        """Take what the slave sends. Raises HAFrameError."""
        for offset in self._decoder.feed(data):
            self._reported(offset)

    def _start_of(self, offset: int) -> int:
        """Where to begin for a slave whose first report is ``offset``."""
        # RocketMQ's rule for a slave without a log: it begins with the last file.
        return offset or self._master.log.files.last_start

    def _header(self, size: int) -> bytes:
        """The header of a transfer of ``size`` bytes from ``sent_offset`` on; 0 for a sign of life."""
        return encode_header(self.sent_offset, size)

    def _most(self, count: int) -> int:
        """How many of the ``count`` bytes from ``sent_offset`` on may be in one transfer."""
        return count

    def _sign_due(self) -> bool:
        """Whether a sign of life is due before its time."""
        return False

    def _reported(self, offset: int) -> None:
        master = self._master
        # What it cannot have from here is not believed: it would confirm messages that it does not have.
        limit = self.sent_offset if self._first.is_set() else master.end_offset
        if offset > limit:
            why = "the master's end" if not self._first.is_set() else "what was sent to it"
            _log.error("slave_ahead_of_master", slave=self.address, reported=offset, limit=limit)
            raise HAFrameError(f"the slave reports {offset}, above {why} ({limit})")
        if not self._first.is_set():
            self.sent_offset = self._start_of(offset)
            self._first.set()
        self.ack_offset = max(self.ack_offset, offset)
        master.acknowledged()

    async def _transfer(self) -> None:
        master, stream = self._master, self._stream
        await self._first.wait()
        heartbeat = master.config.heartbeat
        due = trio.current_time() + heartbeat
        while True:
            if self.sent_offset < master.log.min_offset:
                raise HAFrameError(f"the slave wants {self.sent_offset}, the log starts at {master.log.min_offset}")
            self._grown = trio.Event()
            left = master.end_offset - self.sent_offset
            if left > 0:
                await self._send(left)
                due = trio.current_time() + heartbeat
                continue
            # Not all that appends notifies at once: an ASYNC_MASTER's own services do not.
            with trio.move_on_after(min(_LOOK, heartbeat)):
                await self._grown.wait()
            if trio.current_time() >= due or self._sign_due():
                await stream.send_all(self._header(0))
                due = trio.current_time() + heartbeat

    async def _send(self, left: int) -> None:
        """Send what follows, ``left`` bytes at most, and never beyond the end of a file."""
        log, at = self._master.log, self.sent_offset
        file = log.files.find(at)
        if file is None:
            raise HAFrameError(f"the log has no file for the offset {at}")
        count = self._most(min(left, self._master.config.batch, file.end - at))
        file.hold()
        try:
            data: memoryview | bytes | None = log.read(at, count)
            if data is None:
                data = await log.read_cold(at, count)
            count = len(data)
            header = self._header(count)
            # Before the wait: the slave may acknowledge what this call is still sending.
            self.sent_offset = at + count
            if count <= _JOINED:
                await self._stream.send_all(header + data)
            else:
                await self._stream.send_all(header)
                await self._stream.send_all(data)
        finally:
            data = None
            file.release()
        self.sent_bytes += count
