"""AutoSwitchHAClient: a slave's side of replication when controllers assign the roles.

It compares the epochs of its log with the master's before it follows. What the master does not have was never
acknowledged: the log is cut there, by opening the store again. Source: RocketMQ's AutoSwitchHAClient. There the log is
cut in memory only, and any master is followed.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from trimq.broker.store.replication.epochs import EpochFileCache
from trimq.broker.store.replication.ha_client import (
    DivergedError,
    Follower,
    HAClient,
    MasterView,
    TruncationNeededError,
)
from trimq.broker.store.replication.ha_connection import HAConfig
from trimq.broker.store.replication.leadership import Leadership
from trimq.broker.store.replication.slave_log import BadTransferError, SlaveLog
from trimq.protocol.auto_switch_frames import (
    EpochPiece,
    Hello,
    MasterDecoder,
    MasterEpochs,
    encode_hello,
    encode_report,
)
from trimq.protocol.epoch_file import Epoch, entry_at
from trimq.protocol.ha_frames import HAFrameError

_EMPTY = "empty this store: then it copies its master's log"


class EpochFollower(Follower, Protocol):
    """The part of a slave's store that the client uses."""

    @property
    def confirmed_offset(self) -> int:
        """What is known to be acknowledged, so that it must not be cut."""
        ...

    @property
    def nothing_confirmed(self) -> bool:
        """Whether it is known that no message of this log was ever confirmed."""
        ...

    def confirm(self, offset: int) -> None:
        """Every member of the set has everything below: it may be dispatched."""
        ...


class AutoSwitchHAClient(HAClient):
    """Follows the master until cancelled. Belongs to the event loop."""

    def __init__(
        self,
        log: SlaveLog,
        follower: EpochFollower,
        master: MasterView,
        config: HAConfig,
        open_stream: Callable[[str, int], Awaitable[trio.abc.Stream]],
        leadership: Leadership,
        epochs: EpochFileCache,
    ) -> None:
        super().__init__(log, follower, master, config, open_stream)
        self._leadership = leadership
        self._epochs = epochs
        self._epoch_follower = follower
        self._messages = MasterDecoder()
        self._entry: Epoch | None = None
        """The epoch of what the master sends now."""
        self._their_entries: list[Epoch] = []
        """The master's epochs, when it was connected."""

    async def _prepare(self) -> None:
        """Make all of the log acknowledgeable. Raises OSError."""
        if not await self._follower.make_acknowledgeable():
            raise OSError("the log could not be synced")
        self._follower.dispatch_soon()

    async def _handshake(self, stream: trio.abc.Stream) -> None:
        """Compare the epochs. Raises DivergedError, TruncationNeededError, HAFrameError, OSError."""
        self._entry = None
        self._messages = MasterDecoder()
        await stream.send_all(encode_hello(Hello(self._leadership.broker_id, self._leadership.learner)))
        theirs = await self._receive_epochs(stream)
        self._their_entries = theirs.entries
        log_end, entries = self._log.end_offset, self._epochs.entries
        known = max([self._leadership.epoch, *(entry.number for entry in entries if entry.start < log_end)])
        if theirs.last_epoch < known and not self._lenient:
            raise HAFrameError(f"the last epoch of this master is {theirs.last_epoch}, the present one is {known}")
        if log_end:
            await self._compare(theirs, log_end)
        # Those without records: the master has written other ones there, or none.
        await self._epochs.truncate_suffix(log_end)

    async def _receive_epochs(self, stream: trio.abc.Stream) -> MasterEpochs:
        while True:
            data = await self._receive_some(stream)
            if not data:
                raise OSError("the master has disconnected")
            found = list(self._messages.feed(data))
            if found:
                if len(found) > 1 or not isinstance(found[0], MasterEpochs):
                    raise HAFrameError("the master sends its log before this slave has said where to begin")
                return found[0]

    async def _compare(self, theirs: MasterEpochs, log_end: int) -> None:
        point = self._epochs.consistent_point(log_end, theirs.entries, theirs.log_end)
        if point is None and self._began_for_nothing(theirs):
            point = 0
        if point is None or point < self._log.begin_offset:
            raise DivergedError(f"this log, up to {log_end}, has no epoch in common with its master's; {_EMPTY}")
        confirmed = self._epoch_follower.confirmed_offset
        if point < confirmed and not self._lenient:
            raise DivergedError(
                f"this log is its master's up to {point}, but messages up to {confirmed} are acknowledged: the master "
                f"has lost them; let this broker be elected (electMaster), or give them up and {_EMPTY}"
            )
        if point < log_end:
            self._leadership.on_truncate(point)
            raise TruncationNeededError(f"this log is its master's up to {point} only: what follows is cut off")
        # The checksum of an epoch is not known: one record at least is compared.
        last = await self._follower.last_record(dispatched=True)
        if last is not None and not await self._master.has_record(*last):
            raise DivergedError(f"the master's log does not have the record that this one has at {last[0]}; {_EMPTY}")

    def _began_for_nothing(self, theirs: MasterEpochs) -> bool:
        """Whether the master's group began anew with a later epoch, while it had none of this log.

        So it is if its first master is lost before another member has anything. A log of which something was confirmed
        is another matter: it may be a foreign one, and is left to the administrator.
        """
        mine, first = self._epochs.entries, next(iter(theirs.entries), None)
        if first is None or not mine or not self._epoch_follower.nothing_confirmed:
            return False
        return mine[0].start == first.start == self._log.begin_offset == 0 and mine[-1].number < first.number

    async def _take(self, data: bytes) -> None:
        for found in self._messages.feed(data):
            if isinstance(found, MasterEpochs):
                raise HAFrameError("the master sends its epochs again")
            if found.offset < 0:
                continue  # a sign of life of a master without a log
            await self._enter(found)
            await self._append(found.offset, found.data)
            self._epoch_follower.confirm(min(found.confirm_offset, self._log.end_offset))

    async def _enter(self, piece: EpochPiece) -> None:
        """Note the epoch of what comes, durably, before it is appended. Raises BadTransferError, OSError."""
        entry = self._epoch_of(piece)
        if entry != self._entry:
            last = self._epochs.entries[-1] if self._epochs.entries else None
            if entry != last:
                self._check_epoch(entry, last, piece)
                await self._epochs.append(*entry)
            self._entry = entry
        if piece.offset and not self._log.next_offset:
            if piece.offset % self._log.file_size:
                raise BadTransferError(f"the master begins at {piece.offset}, which is no start of a file")
            # After the epoch: a log that begins there without one would be taken for a foreign one.
            await self._follower.begin_at(piece.offset)

    def _epoch_of(self, piece: EpochPiece) -> Epoch:
        entry = Epoch(piece.epoch, piece.epoch_start)
        if entry.start <= piece.offset or entry.start != piece.frame_end:
            return entry
        # The last transfer of an epoch by RocketMQ's master, which names the next one already.
        known = entry_at(self._their_entries, piece.offset)
        return known[0] if known is not None else entry

    def _check_epoch(self, entry: Epoch, last: Epoch | None, piece: EpochPiece) -> None:
        text = f"the master sends epoch {entry.number} from {entry.start} on, at {piece.offset}"
        if last is not None and entry.number <= last.number:
            raise BadTransferError(f"{text}: this log is in epoch {last.number} from {last.start} on")
        if entry.start > piece.offset or (entry.start < piece.offset and self._log.next_offset):
            raise BadTransferError(f"{text}, where none can begin")

    @property
    def _lenient(self) -> bool:
        """Whether the last epoch of the master may have an older number, and what it has confirmed may be lost.

        RocketMQ's broker notes no epoch that begins where the one before does.
        """
        return self._master.is_rocketmq

    def _encode_report(self, offset: int) -> bytes:
        return encode_report(offset)
