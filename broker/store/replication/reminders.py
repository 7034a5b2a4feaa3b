"""Reminders: which refusals are logged. Clients that connect in a loop, from many addresses, must not fill the log."""

from typing import Final

_SECONDS: Final = 60.0
_MOST: Final = 64


class Reminders:
    """Lets a refusal be logged once a minute for each address, and 64 addresses a minute at most."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def is_due(self, address: str, now: float) -> bool:
        """Whether to log a refusal of ``address`` now (seconds). The caller does so if it is."""
        logged = self._logged
        # The oldest are first.
        while logged and now - logged[next(iter(logged))] >= _SECONDS:
            del logged[next(iter(logged))]
        if address in logged or len(logged) >= _MOST:
            return False
        logged[address] = now
        return True
