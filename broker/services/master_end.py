"""MasterEnd: how far the log of a slave's master goes, and its settings.

Transfers do not say it: they show only what they bring.
"""

from typing import Final, Protocol

from trimq.broker.config import REPLICATION_SETTINGS
from trimq.broker.services.slave_master import SlaveMaster
from trimq.protocol.body import HARuntimeInfo, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.clock import Clock

_SECONDS: Final = 1.0


class Lag(Protocol):
    """The part of HAClient that this task uses."""

    def master_ends_at(self, offset: int) -> None:
        """Note where the master's log ends."""
        ...

    def sample(self, seconds: float) -> None:
        """Note what was received in the last ``seconds``."""
        ...


class MasterEnd:
    """Asks the master each second, by GET_BROKER_HA_STATUS (907), which costs it nothing."""

    def __init__(self, master: SlaveMaster, lag: Lag, clock: Clock) -> None:
        self._master = master
        self._lag = lag
        self._clock = clock

    async def run(self) -> None:
        """Ask until cancelled. A master that does not know the request leaves the lag to what transfers show."""
        sampled = self._clock.monotonic()
        while True:
            if self._master.address:
                await self._ask()
            await self._clock.sleep(_SECONDS)
            # A master that does not answer at once makes a round longer than its pause.
            before, sampled = sampled, self._clock.monotonic()
            self._lag.sample(max(sampled - before, _SECONDS))

    async def _ask(self) -> None:
        try:
            reply = await self._master.ask(RequestCode.GET_BROKER_HA_STATUS)
            if reply.code == ResponseCode.SUCCESS:
                state = decode_json(reply.body, HARuntimeInfo)
                if state.master:
                    self._lag.master_ends_at(state.master_commit_log_max_offset)
                    said = reply.ext_fields()
                    # RocketMQ's master says none. The same dict: the store shows it.
                    self._master.settings.update({key: said[key] for key in REPLICATION_SETTINGS if key in said})
        except (OSError, RemotingError):
            return  # the transfers notice it too, and log it
