"""Which expired halves were resumed: of each record in TRANS_CHECK_MAX_TIME_TOPIC, a new half is made once.

The new half names that record in its property TRAN_RESUMED_OFFSET, and comes behind it in the log. So the half queue
says which records were resumed, also after a restart, and when the new half was ended long ago. It is read from the
record on when an administrator resumes it, and each part of it once.
"""

from typing import Final

import trio

from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.record import RecordError, decode_head
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC
from trimq.protocol.transaction import QUEUE, resumed_from

_UNITS: Final = 64
_FEW: Final = 1024


class ResumedHalves:
    """The halves that were made of expired ones. ``lock``: the caller has it from ``find`` until ``note``."""

    def __init__(self, store: MessageStore, halves: HeldHalves) -> None:
        self._store = store
        self._halves = halves
        self.lock = trio.Lock()
        self._known: dict[int, int] = {}  # log offset of an expired half -> the new half
        self._read_from = -1  # all halves from there on are in _known; -1: none has been read
        self._most = _FEW

    async def find(self, place: int) -> int:
        """The half that was made of the record at a log offset; -1 if there is none. Raises OSError."""
        self._forget_deleted()
        end = self._read_from if self._read_from >= 0 else self._store.max_offset(TRANS_HALF_TOPIC, QUEUE)
        first = await self._halves.behind(place)
        offset = first
        while offset < end:
            units = await self._store.queue_units(TRANS_HALF_TOPIC, QUEUE, offset, min(_UNITS, end - offset))
            if not units:
                break
            for physical_offset, _, _ in units:
                await self._read(physical_offset, offset)
                offset += 1
            await trio.lowlevel.checkpoint()
        self._read_from = min(first, end)
        return self._known.get(place, -1)

    async def _read(self, physical_offset: int, offset: int) -> None:
        data = self._store.look_message(physical_offset)
        if data is None:
            data = await self._store.look_message_cold(physical_offset)
        try:
            head = decode_head(data)
        except RecordError:
            return  # it is damaged
        place = resumed_from(bytes(data[head.properties_at : head.properties_end]))
        if place >= 0:
            self._known.setdefault(place, offset)

    def note(self, place: int, offset: int) -> None:
        """A half was made of the record at a log offset."""
        self._known[place] = offset

    def _forget_deleted(self) -> None:
        """What was deleted with its log file cannot be resumed."""
        if len(self._known) >= self._most:
            begin = self._store.min_phy_offset
            self._known = {place: offset for place, offset in self._known.items() if place >= begin}
            self._most = max(_FEW, 2 * len(self._known))
