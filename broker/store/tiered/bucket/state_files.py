"""The state files of the broker, as they go to the bucket with the messages."""

import zlib
from collections.abc import Callable
from typing import Final

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole
from trimq.protocol.bucket_state import STATE_FILES, encode_state

_INTERVAL: Final = 30.0
"""Seconds between two objects with a state: it can be large, and consumer offsets change all the time."""


class StateFiles:
    """Reads the files of ``config/`` as they are on the disk, where each is durable and whole."""

    def __init__(self, disk: Disk, root: str, monotonic: Callable[[], float]) -> None:
        """``root``: the directory of the store."""
        self._disk = disk
        self._directory = f"{root}/config"
        self._monotonic = monotonic
        self._not_before = 0.0
        self._found: tuple[bytes, int] = b"", 0
        self._sent = 0
        self._in_root = 0

    async def changed(self) -> bytes:
        """The packed state; empty if it is the one of the last object, or if that was sent just now. Raises OSError."""
        if self._monotonic() < self._not_before:
            return b""
        state = await self._read()
        return b"" if self._found[1] == self._sent else state

    def sent(self, state: bytes) -> None:
        """An object with what ``changed`` has returned is in the bucket."""
        if state:
            self._sent = self._found[1]
            self._not_before = self._monotonic() + _INTERVAL

    async def changed_since_root(self) -> bytes | None:
        """The packed state; None if it is the one that the root names. Raises OSError."""
        state = await self._read()
        return None if self._found[1] == self._in_root else state

    def named(self) -> None:
        """The root names what ``changed_since_root`` has returned."""
        self._in_root = self._sent = self._found[1]

    async def _read(self) -> bytes:
        files: dict[str, bytes] = {}
        for name in STATE_FILES:
            data = await self._disk.run(read_whole, self._disk, f"{self._directory}/{name}")
            if data is not None:
                files[name] = data
        mark = zlib.crc32(repr([(name, len(data), zlib.crc32(data)) for name, data in files.items()]).encode()) + 1
        if mark != self._found[1]:
            self._found = await self._disk.run(encode_state, files), mark
        return self._found[0]
