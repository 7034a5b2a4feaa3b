"""Keeps uploads below tieredStoreMaxUploadBytesPerSecond."""

import trio


class UploadRate:
    """What is uploaded waits for the time of what went before. ``stopped`` ends all waiting."""

    def __init__(self, stopped: trio.Event) -> None:
        self._stopped = stopped
        self._next = 0.0

    async def wait(self, size: int, bytes_per_second: int) -> None:
        """Wait until so many bytes may go, or until the uploads are stopped."""
        at = max(self._next, trio.current_time())
        self._next = at + size / bytes_per_second
        with trio.move_on_at(at):
            await self._stopped.wait()
