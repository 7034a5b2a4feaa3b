"""The state files of the broker, as they go to the bucket with the messages."""

from collections.abc import Callable
from typing import Final, NamedTuple

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import read_whole
from trimq.protocol.bucket_state import STATE_FILES, encode_state, may_leave
from trimq.protocol.hashing import checksum

_INTERVAL: Final = 30.0
"""Seconds between two objects with a state: it can be large, and consumer offsets change all the time."""


class State(NamedTuple):
    """The packed state of the broker, and a mark that another state does not have."""

    data: bytes
    mark: int


class StateFiles:
    """Reads the files of ``config/`` as they are on the disk, where each is durable and whole."""

    def __init__(self, disk: Disk, root: str, monotonic: Callable[[], float]) -> None:
        """``root``: the directory of the store."""
        self._disk = disk
        self._directory = f"{root}/config"
        self._monotonic = monotonic
        self._not_before = 0.0
        self._last = State(b"", 0)
        self._sent = 0
        self._named = 0

    async def changed(self) -> State | None:
        """The state; None if it is the one of the last object, or if that was sent just now. Raises OSError."""
        if self._monotonic() < self._not_before:
            return None
        state = await self._read()
        return None if state.mark == self._sent else state

    def sent(self, state: State) -> None:
        """An object with this state is in the bucket."""
        self._sent = state.mark
        self._not_before = self._monotonic() + _INTERVAL

    async def changed_since_root(self) -> State | None:
        """The state; None if it is the one that the root names. Raises OSError."""
        state = await self._read()
        return None if state.mark == self._named else state

    def named(self, state: State) -> None:
        """The root names this state."""
        self._named = self._sent = state.mark

    async def _read(self) -> State:
        files: dict[str, bytes] = {}
        for name in STATE_FILES:
            data = await self._disk.run(read_whole, self._disk, f"{self._directory}/{name}")
            if data is not None and may_leave(name, data):
                files[name] = data
        mark = checksum(repr([(name, len(data), checksum(data)) for name, data in files.items()]).encode()) + 1
        if mark != self._last.mark:
            self._last = State(await self._disk.run(encode_state, files), mark)
        return self._last
