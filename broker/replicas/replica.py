"""Replica: what controller mode adds to a broker while it has one role."""

from typing import TYPE_CHECKING, Final

import structlog
import trio

from trimq.broker.replicas.heartbeats import LogState
from trimq.broker.replicas.replicas_manager import ReplicasManager
from trimq.broker.services.slave_master import SlaveMaster
from trimq.broker.store.message_store import Leadership, MessageStore
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.admin import ExchangeHAInfoResponseHeader

if TYPE_CHECKING:
    from trimq.broker.security_files import SecurityFiles
    from trimq.remoting.http.web import WebApp

_log = structlog.get_logger(__name__)

_AGAIN: Final = 0.2
_LONGEST: Final = 5.0
_JAVA: Final = "JAVA"
"""The language in replies of RocketMQ's broker."""


class Replica:
    """The role of one life of a broker: master in one epoch, or slave of whichever master there is.

    ``truncate_at``: where the log ends at the latest, since the master does not have what follows. ``web``: the
    process's, which outlives the roles, as ``files`` do.
    """

    def __init__(
        self,
        manager: ReplicasManager,
        files: "SecurityFiles",
        *,
        truncate_at: int | None = None,
        web: "WebApp | None" = None,
    ) -> None:
        self.manager = manager
        self.is_master = manager.is_master
        self.epoch = manager.master.epoch if manager.master is not None and self.is_master else 0
        self.leadership: Leadership = manager.lead()
        self.truncate_at = None if self.is_master else truncate_at
        self.web = web
        self.files = files
        self.must_truncate = trio.Event()
        """Set when the store has to be opened again with less, up to ``truncate_to``."""
        self.truncate_to = 0
        self.leadership.on_truncate = self._truncate

    def _truncate(self, offset: int) -> None:
        self.truncate_to = offset
        self.must_truncate.set()

    @property
    def is_current(self) -> bool:
        """Whether the controllers still want this role."""
        manager = self.manager
        if manager.is_master != self.is_master:
            return False
        return not self.is_master or (manager.master is not None and manager.master.epoch == self.epoch)

    async def outdated(self) -> None:
        """Return when the store has to be closed: for another role, or for a shorter log."""
        async with trio.open_nursery() as nursery:

            async def role() -> None:
                while self.is_current:
                    await self.manager.changed()
                nursery.cancel_scope.cancel()

            nursery.start_soon(role)
            await self.must_truncate.wait()
            nursery.cancel_scope.cancel()

    def opened(self, store: MessageStore) -> None:
        """The store is open: heartbeats say what its log has."""
        epochs, replication = store.replication.epochs, store.replication

        def state() -> LogState:
            end = store.appended_offset
            last = epochs.last_epoch if epochs is not None else 0
            confirmed = replication.ha.confirmed_offset if replication.ha is not None else store.readable_offset
            return LogState(max(last, 0), end, min(confirmed, end))

        self.manager.heartbeats.log_state = state
        self.manager.heartbeats.healthy = lambda: not store.flags.is_broken

    async def follow(self, slave: SlaveMaster) -> None:
        """Let a slave know its master, and where that sends its log, until cancelled."""
        manager = self.manager
        while True:
            master, changed = manager.master, manager.changed
            if master is None or master.broker_id == manager.broker_id:
                await changed()
                continue
            self.leadership.epoch = master.epoch
            pause, reason = _AGAIN, ""
            while manager.master == master:
                try:
                    ha_address, slave.is_rocketmq = await _ha_address(slave, master.address)
                    slave.note(master.address, ha_address)
                except (OSError, RemotingError, ValueError) as error:
                    if str(error) != reason:
                        _log.warning("ha_address_not_known", master=master.address, reason=str(error))
                    reason = str(error)
                    with trio.move_on_after(pause):
                        await changed()
                    pause = min(2 * pause, _LONGEST)
                else:
                    # Again and again: it may have been started with another port.
                    with trio.move_on_after(_LONGEST):
                        await changed()


async def _ha_address(slave: SlaveMaster, address: str) -> tuple[str, bool]:
    """Where the master at ``address`` sends its log, and whether it is RocketMQ's. Raises OSError, RemotingError."""
    reply = await slave.ask_at(address, RequestCode.EXCHANGE_BROKER_HA_INFO)
    if reply.code != ResponseCode.SUCCESS:
        raise OSError(f"{address} answers {reply.code}: {reply.remark}")
    found = reply.header(ExchangeHAInfoResponseHeader).master_ha_address
    if not found:
        raise OSError(f"{address} is not a master yet")
    return found, reply.language == _JAVA
