"""The two ids of a message: the offset id, which is its place in a store, and the producer's unique id (UNIQ_KEY)."""

import os
import struct
import time
from datetime import UTC, datetime

_PORT_OFFSET = struct.Struct(">q")


def encode_offset_id(host: bytes, physical_offset: int) -> str:
    """Upper-case hex of packed host (address 4 or 16, port 4) and commit-log offset (8): 32 or 56 characters."""
    return (host + _PORT_OFFSET.pack(physical_offset)).hex().upper()


def decode_offset_id(text: str) -> tuple[bytes, int]:
    """The packed host and the commit-log offset. Raises ValueError for a text of another form."""
    if len(text) not in (32, 56):
        raise ValueError(f"an offset message id has 32 or 56 hex characters, this has {len(text)}: {text[:64]!r}")
    data = bytes.fromhex(text)
    return data[:-8], _PORT_OFFSET.unpack(data[-8:])[0]


class UniqueIdGenerator:
    """Unique ids: hex of IP (4 or 16), process id (2), generator (4), ms since the start of the month (4), counter (2).

    Source: RocketMQ's MessageClientIDSetter. Readers treat the id as opaque.
    """

    def __init__(self, address: bytes, pid: int | None = None) -> None:
        process = os.getpid() if pid is None else pid
        self._fixed = (address + struct.pack(">H", process & 0xFFFF) + os.urandom(4)).hex().upper()
        self._counter = 0
        self._now = -1
        self._prefix = ""
        self._month_start_ms = 0
        self._next_month_ms = 0

    def next(self, wall_ms: int | None = None) -> str:
        """The next id; the ids of a millisecond are distinct, up to 65,536 of them."""
        now = int(time.time() * 1000) if wall_ms is None else wall_ms
        if now != self._now:
            self._set_now(now)
        self._counter = counter = (self._counter + 1) & 0xFFFF
        return f"{self._prefix}{counter:04X}"

    def several(self, count: int) -> tuple[bytes, range]:
        """The common prefix of ``count`` ids (up to 65,536), and the counters, whose low 16 bits follow it in hex."""
        first = self.next()
        self._counter = (self._counter + count - 1) & 0xFFFF
        counter = int(first[-4:], 16)
        return first[:-4].encode(), range(counter, counter + count)

    def _set_now(self, now: int) -> None:
        if not self._month_start_ms <= now < self._next_month_ms:
            self._set_month(now)
        self._now = now
        self._prefix = f"{self._fixed}{(now - self._month_start_ms) & 0xFFFFFFFF:08X}"

    def _set_month(self, now: int) -> None:
        moment = datetime.fromtimestamp(now / 1000, UTC)
        start = datetime(moment.year, moment.month, 1, tzinfo=UTC)
        following = datetime(moment.year + moment.month // 12, moment.month % 12 + 1, 1, tzinfo=UTC)
        self._month_start_ms = int(start.timestamp() * 1000)
        self._next_month_ms = int(following.timestamp() * 1000)
