"""HAClient: a slave's side of replication. It follows the log of its master.

Source: RocketMQ's DefaultHAClient. There what comes is appended unchecked, and acknowledged before it is on disk.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import structlog
import trio

from trimq.broker.store.replication.ha_connection import HAConfig
from trimq.broker.store.replication.offset_times import OffsetTimes
from trimq.broker.store.replication.slave_log import BadTransferError, SlaveLog
from trimq.protocol.ha_frames import HAFrameError, TransferDecoder, encode_report

_log = structlog.get_logger(__name__)

_FIRST_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 5.0
_RECEIVE: Final = 256 * 1024


class DivergedError(Exception):
    """The log of this slave is not the beginning of its master's; the text says where."""


class TruncationNeededError(Exception):
    """The log of this slave has to be cut first; the text says where."""


class UnprovenMasterError(OSError):
    """The master has not proved itself, or this slave cannot; the text says why."""


class Begin(NamedTuple):
    """Where an empty slave begins: the first offset of the master's log, and its first record, if that can be read."""

    offset: int
    record: bytes


class MasterView(Protocol):
    """What a slave asks its master for, besides the log.

    ``is_rocketmq``: the master is RocketMQ's broker. Known only if controllers assign the roles.
    """

    is_rocketmq: bool

    @property
    def address(self) -> str:
        """Where it is asked; empty if that is not known."""
        ...

    @property
    def ha_address(self) -> tuple[str, int] | None:
        """Where the master sends its log; None if it is not known."""
        ...

    async def changed(self) -> None:
        """Return when the address has changed."""
        ...

    async def begin(self) -> Begin | None:
        """For an empty slave; None if the master's log is empty. Raises OSError if the master does not answer."""
        ...

    async def has_record(self, offset: int, record: bytes) -> bool:
        """Whether the master's log has ``record`` at ``offset``. Raises OSError if the master does not answer."""
        ...


class Follower(Protocol):
    """The part of a slave's store that the client uses."""

    @property
    def acknowledged_offset(self) -> int:
        """What the slave may acknowledge: under SYNC_FLUSH what is on disk."""
        ...

    async def make_acknowledgeable(self) -> bool:
        """Sync, if that is needed for an acknowledgement. Returns False if the device refused."""
        ...

    def dispatch_soon(self) -> None:
        """The log has grown."""
        ...

    async def last_record(self, *, dispatched: bool = False) -> tuple[int, bytes] | None:
        """The newest record with its offset; None if there is none. Raises OSError if it is not known yet.

        ``dispatched``: the newest one that is dispatched.
        """
        ...

    async def begin_at(self, offset: int) -> None:
        """Let the log, which is empty, begin at ``offset``."""
        ...


class SlaveState(NamedTuple):
    """A slave's replication. Times are seconds of trio's clock, 0 if there was none.

    ``master``: where it gets the log. ``master_offset``: the end of the master's log, when it was last known. ``lag``:
    the bytes of it that this slave does not have, ``lag_seconds``: since when it knows that the master has the oldest
    of them. ``silent``: seconds since the master has sent something that was right, or since the start.
    ``bytes_per_second``: received in the last second. ``error`` is the last one, empty while all is well.
    """

    master: str
    connected: bool
    max_offset: int
    acknowledged_offset: int
    master_offset: int
    lag: int
    lag_seconds: float
    silent: float
    last_read_at: float
    last_write_at: float
    received_bytes: int
    bytes_per_second: int
    bad_transfers: int
    error: str


class HAClient:
    """Follows the master until cancelled. Belongs to the event loop."""

    def __init__(
        self,
        log: SlaveLog,
        follower: Follower,
        master: MasterView,
        config: HAConfig,
        open_stream: Callable[[str, int], Awaitable[trio.abc.Stream]],
    ) -> None:
        self._log = log
        self._follower = follower
        self._master = master
        self._config = config
        self._open_stream = open_stream
        self._appended = trio.Event()
        self._connected_to = ""
        self._checked_with = ""
        """The address of the master whose log has been compared with this one."""
        self._master_offset = 0
        self._last_read_at = self._last_write_at = 0.0
        self._followed_at = trio.current_time()
        self._failed_at = 0.0
        self._received = 0
        self._sampled_bytes = 0
        self._bytes_per_second = 0
        self._bad = 0
        self._error = ""
        self._is_lost = False
        """Whether the master has sent nothing since it was lost."""
        self._times = OffsetTimes()
        self._decoder = TransferDecoder()

    def master_ends_at(self, offset: int) -> None:
        """The master has said where its log ends: its transfers show only what they bring."""
        self._master_offset = offset
        self._times.note(offset, trio.current_time())

    def sample(self, seconds: float) -> None:
        """Once in ``seconds``: note what was received since the last call."""
        self._bytes_per_second = int((self._received - self._sampled_bytes) / seconds)
        self._sampled_bytes = self._received

    def state(self) -> SlaveState:
        """What there is to know of it."""
        end, now = self._log.end_offset, trio.current_time()
        lag = max(0, self._master_offset - end)
        address = self._master.ha_address
        return SlaveState(
            self._connected_to or (f"{address[0]}:{address[1]}" if address else ""),
            bool(self._connected_to),
            end,
            self._follower.acknowledged_offset,
            self._master_offset,
            lag,
            self._times.age(end, now) if lag else 0.0,
            now - self._followed_at,
            self._last_read_at,
            self._last_write_at,
            self._received,
            self._bytes_per_second,
            self._bad,
            self._error if self._failed_at >= self._followed_at else "",
        )

    async def run(self) -> None:
        """Connect, follow, and connect again after a pause that grows to five seconds."""
        pause = _FIRST_PAUSE
        while True:
            address = self._master.ha_address
            if address is None:
                await self._master.changed()
                continue
            received, stays = self._received, False
            try:
                await self._follow(*address)
            except TruncationNeededError as error:
                self._failed("slave_truncates", address, str(error))
                pause, stays = _LONGEST_PAUSE, True
            except DivergedError as error:
                self._failed("slave_diverged", address, str(error))
                pause, stays = _LONGEST_PAUSE, True
            except (BadTransferError, HAFrameError) as error:
                self._bad += 1
                self._failed("bad_transfer", address, str(error))
                pause = _LONGEST_PAUSE
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                is_refusal = isinstance(error, UnprovenMasterError)
                self._failed("master_lost", address, str(error) or type(error).__name__, is_outage=not is_refusal)
            except Exception as error:  # noqa: BLE001 - an odd answer of the master must not end the broker
                _log.exception("replication_failed", master=f"{address[0]}:{address[1]}")
                self._error, self._failed_at = repr(error), trio.current_time()
                pause = _LONGEST_PAUSE
            if self._received > received and not stays:
                pause = _FIRST_PAUSE
            with trio.move_on_after(pause):
                await self._master.changed()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _failed(self, event: str, address: tuple[str, int], reason: str, *, is_outage: bool = False) -> None:
        was_lost = self._is_lost
        self._is_lost = event == "master_lost"
        # Once for each reason: it is tried again and again. While a master is down there is one reason after another.
        if not was_lost if is_outage else reason != self._error:
            log = _log.warning if event in {"master_lost", "slave_truncates"} else _log.error
            log(event, master=f"{address[0]}:{address[1]}", reason=reason, log_end=self._log.end_offset)
        self._error, self._failed_at = reason, trio.current_time()

    @property
    def follows(self) -> bool:
        """Whether the master is connected, and its log has been found to begin with this one."""
        return bool(self._connected_to) and self._checked_with == self._master.address

    async def still_follows(self) -> bool:
        """Compare this log with the master's again. Raises OSError if the master does not answer."""
        if not self.follows:
            return False
        last = await self._follower.last_record(dispatched=True)
        return (last is None or await self._master.has_record(*last)) and self.follows

    async def _follow(self, host: str, port: int) -> None:
        self._checked_with = ""
        address = self._master.address
        await self._prepare()
        with trio.move_on_after(self._config.silence) as opening:
            stream = await self._open_stream(host, port)
        if opening.cancelled_caught:
            raise OSError(f"no connection in {self._config.silence:g} s")
        self._log.forget_rest()
        self._decoder = TransferDecoder()
        failures: list[Exception] = []

        async def side(work: Callable[[trio.abc.Stream], Awaitable[None]]) -> None:
            # Not left to the nursery: at a shutdown it would join them with Cancelled in a group.
            try:
                await work(stream)
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
            nursery.cancel_scope.cancel()

        try:
            await self._handshake(stream)
            self._checked_with = address
            self._connected_to = f"{host}:{port}"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(side, self._report)
                nursery.start_soon(side, partial(self._watch, (host, port)))
                await side(self._receive)
        finally:
            self._connected_to = ""
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await trio.aclose_forcefully(stream)
        raise failures[0] if failures else OSError("the master has disconnected")

    async def _watch(self, connected: tuple[str, int], _stream: trio.abc.Stream) -> None:
        """End the connection when there is another master."""
        while self._master.ha_address == connected and self._checked_with == self._master.address:
            await self._master.changed()
        raise OSError("there is another master")

    async def _prepare(self) -> None:
        """Make sure that the records of this log are the first of the master's. Raises DivergedError, OSError."""
        # What came just before the last connection ended has neither been synced nor dispatched.
        if not await self._follower.make_acknowledgeable():
            raise OSError("the log could not be synced")
        self._follower.dispatch_soon()
        if self._log.end_offset:
            last = await self._follower.last_record()
            if last is not None and not await self._master.has_record(*last):
                raise DivergedError(
                    f"the master's log does not have the record that this one has at {last[0]}: this slave was a "
                    "master, or follows another one; empty its store, and it copies the master's"
                )

    async def _receive(self, stream: trio.abc.Stream) -> None:
        """Take what comes until the master disconnects. Raises as ``take`` and the decoder do, and OSError."""
        while True:
            data = await self._receive_some(stream)
            if not data:
                return
            await self._take(data)
            self._is_lost = False
            self._followed_at = trio.current_time()

    async def _receive_some(self, stream: trio.abc.Stream) -> bytes:
        """Some bytes of the master; none if it has disconnected. Raises OSError if it is silent for too long."""
        data: bytes | bytearray = b""
        with trio.move_on_after(self._config.silence) as silence:
            data = await stream.receive_some(_RECEIVE)
        if silence.cancelled_caught:
            raise OSError(f"the master was silent for {self._config.silence:g} s")
        if data:
            self._last_read_at = trio.current_time()
            self._received += len(data)
        return bytes(data)

    async def _take(self, data: bytes) -> None:
        """Take what the master has sent."""
        for piece in self._decoder.feed(data):
            await self._append(piece.offset, piece.data)

    async def _append(self, offset: int, data: Any) -> None:
        """Append bytes of the master's log from ``offset`` on; without any it is a sign of life."""
        if offset != self._log.next_offset:
            raise BadTransferError(f"the master sends {offset}, this log ends at {self._log.next_offset}")
        # A sign of life, without data, is sent when there is nothing left to send.
        sent = offset + len(data)
        self._master_offset = max(self._master_offset, sent) if len(data) else sent
        if len(data) and await self._log.take(data):
            self._appended.set()

    async def _handshake(self, _stream: trio.abc.Stream) -> None:
        """What precedes the first report: an empty log begins where the master's does, and gets its first record.

        Not before the master has proved itself. Raises OSError, BadTransferError.
        """
        if self._log.end_offset:
            return
        begin = await self._master.begin()
        if begin is None:
            return
        if begin.offset:
            await self._follower.begin_at(begin.offset)
        # A report of 0 means the last file of the master, so this slave has to have the first record to get the first.
        if begin.record and await self._log.take(begin.record):
            await self._follower.make_acknowledgeable()
            self._follower.dispatch_soon()

    def _encode_report(self, offset: int) -> bytes:
        return encode_report(offset)

    async def _report(self, stream: trio.abc.Stream) -> None:
        """Tell the master what this slave has: at once, after each append, and as a sign of life."""
        while True:
            self._appended = trio.Event()
            if not await self._follower.make_acknowledgeable():
                raise OSError("the log could not be synced")
            offset = self._follower.acknowledged_offset
            await stream.send_all(self._encode_report(offset))
            self._last_write_at = trio.current_time()
            self._follower.dispatch_soon()
            with trio.move_on_after(self._config.heartbeat):
                await self._appended.wait()
