"""SetChanges: what the store of a master wants changed in the SyncStateSet, asked of the controllers.

Source: RocketMQ's ReplicasManager. There a change that is not answered is taken for refused.
"""

from typing import Final, Protocol

import structlog
import trio

from trimq.broker.config import BrokerConfig
from trimq.broker.replicas.controller_client import ControllersError
from trimq.broker.store.message_store import Leadership
from trimq.protocol.body import SyncStateSet, decode_json, encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.controller import FENCE, AlterSyncStateSetRequestHeader
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.runtime.clock import Clock

_log = structlog.get_logger(__name__)

_SOON: Final = 0.2
_REFUSALS: Final = frozenset({*range(2000, 2017), ResponseCode.SYSTEM_BUSY})
"""With these codes a request has certainly changed nothing."""
_NOT_THESE: Final = (ResponseCode.CONTROLLER_BROKER_NOT_ALIVE, ResponseCode.CONTROLLER_INVALID_REPLICAS)


class Conversation(Protocol):
    """The part of ReplicasManager that is used."""

    broker_id: int

    @property
    def is_master(self) -> bool:
        """See ReplicasManager."""
        ...

    @property
    def leadership(self) -> Leadership | None:
        """That of the present life of the store; None before the first one."""
        ...

    def is_present(self, leadership: Leadership) -> bool:
        """Whether it is of the epoch of the present master."""
        ...

    @property
    def gives_leases(self) -> bool:
        """Whether the controllers are TriMQ's, as far as it is known."""
        ...

    async def changed(self) -> None:
        """See ReplicasManager."""
        ...

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The reply of the leading controller. Raises ControllersError."""
        ...

    def ask_master_again(self) -> None:
        """Ask for the master and the set soon."""
        ...

    def note_set(self, epoch: int, found: SyncStateSet) -> None:
        """The set of this master's epoch has changed."""
        ...

    def note_failure(self, reason: str) -> None:
        """The controllers do not answer as they should."""
        ...


class SetChanges:
    """Asks for the changes, one at a time. Belongs to the event loop."""

    def __init__(self, manager: Conversation, configuration: Configuration, clock: Clock) -> None:
        self._manager = manager
        self._configuration = configuration
        self._clock = clock
        self._refused = ""
        """The last refusal that was logged: the same change is asked for again and again."""

    async def run(self) -> None:
        """Ask the controllers for what the store of a master wants, until cancelled."""
        manager = self._manager
        while True:
            leadership = manager.leadership
            if leadership is None or not manager.is_master:
                await manager.changed()
                continue
            members: frozenset[int] | None = None
            async with trio.open_nursery() as nursery:

                async def wish(waits: Leadership, scope: trio.CancelScope) -> None:
                    nonlocal members
                    members = await waits.wanted()
                    scope.cancel()

                async def other(scope: trio.CancelScope) -> None:
                    await manager.changed()
                    scope.cancel()

                nursery.start_soon(wish, leadership, nursery.cancel_scope)
                nursery.start_soon(other, nursery.cancel_scope)
            if members is None:
                continue
            # The store of an older epoch, which is being closed, may have a wish too: it is not asked for.
            present = leadership is manager.leadership and manager.is_present(leadership)
            if not present or not await self.alter(leadership, members):
                await self._clock.sleep(_SOON)

    async def alter(self, leadership: Leadership, members: frozenset[int], *, kept: bool = False) -> bool:
        """Ask for one change. Returns whether it was made, or is not wanted any more.

        ``kept``: only the part of a wish that makes the set smaller.

        While its outcome is not known the members of both sets have to acknowledge: the controllers may elect from the
        new one already. It is found out first. The present set is asked for with ``trimqFence``: with the new epoch
        that this gives it the older request must fail, wherever it is; and if it was granted, this one is refused.
        Apache's controllers know no fence: they get the same request again, which its epoch lets succeed once. They
        refuse it while a new member is dead, so sends are not acknowledged until it is back, or another master elected.
        """
        asked = leadership.proposed
        fence = asked is not None and self._manager.gives_leases
        if asked is not None:
            members = leadership.members if fence else asked
        if asked is None and not kept and leadership.wish != members:
            # Withdrawn meanwhile: the store may have confirmed more without a member that it had wished for.
            return True
        name = self._configuration.section(BrokerConfig).broker_name
        header = AlterSyncStateSetRequestHeader(
            broker_name=name,
            master_broker_id=self._manager.broker_id,
            master_epoch=leadership.epoch,
            invoke_time=self._clock.wall_ms(),
        )
        body = SyncStateSet(sync_state_set=sorted(members), sync_state_set_epoch=leadership.set_epoch)
        command = RemotingCommand.request(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, header, encode_json(body))
        if fence:
            command.ext = {**command.ext_fields(), FENCE: "1"}
        else:
            leadership.propose(members)
        try:
            reply = await self._manager.ask(command)
        except ControllersError as error:
            if error.unsent and asked is None:
                leadership.propose(None)
            self._manager.note_failure(str(error))
            return False
        if reply.code == ResponseCode.SUCCESS:
            try:
                found = decode_json(reply.body, SyncStateSet)
            except RemotingError as error:
                self._manager.note_failure(str(error))
                self._manager.ask_master_again()
                return False
            _log.info(
                "sync_state_set_changed", members=sorted(found.sync_state_set), set_epoch=found.sync_state_set_epoch
            )
            self._refused = ""
            self._manager.note_set(leadership.epoch, found)
            return leadership.proposed is None
        if asked is None and reply.code in _REFUSALS:
            leadership.propose(None)
        self._note_refusal(members, reply)
        self._manager.ask_master_again()
        left = members & leadership.members
        if reply.code in _NOT_THESE and asked is None and not kept and left not in (members, leadership.members):
            # A broker that may not join must not keep one in the set that is lost.
            return await self.alter(leadership, left, kept=True)
        return False

    def _note_refusal(self, members: frozenset[int], reply: RemotingCommand) -> None:
        """Log it once. A member that has just started may not be known as alive yet, and is asked for again."""
        text = f"{sorted(members)} {reply.code} {reply.remark}"
        if text != self._refused:
            log = _log.info if reply.code in _NOT_THESE else _log.warning
            log("sync_state_set_refused", members=sorted(members), code=reply.code, reason=reply.remark)
        self._refused = text
