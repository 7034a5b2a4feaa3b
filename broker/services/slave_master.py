"""SlaveMaster: a slave's view of its master: where it is, and what it says about its log.

Source: RocketMQ's SlaveSynchronize and BrokerOuterAPI; there a slave compares nothing with its master.
"""

from hashlib import sha256
from typing import Final

import structlog
import trio

from trimq.broker.config import ReplicationConfig
from trimq.broker.store.message_store import Begin
from trimq.protocol.body import KVTable, decode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.client.remoting_client import RemotingClient, split_address
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.errors import RemotingTransportError

_log = structlog.get_logger(__name__)

_TIMEOUT: Final = 3.0


class SlaveMaster:
    """Implements the store's MasterView. ``address`` is the master's for requests; empty while it is not known."""

    def __init__(self, configuration: Configuration, client: RemotingClient) -> None:
        self._configuration = configuration
        self._client = client
        self._changed = trio.Event()
        self._learned: str = ""
        self._refused: str = ""
        self.address = ""
        self.is_rocketmq = False
        """See MasterView."""
        self.settings: dict[str, str] = {}
        """What the master has said last of its options (REPLICATION_SETTINGS)."""

    def note(self, address: str, ha_address: str) -> None:
        """A name server has said where the master is."""
        if not address or (address, ha_address) == (self.address, self._learned):
            return
        try:
            split_address(address)
            split_address(ha_address)
        except ValueError as error:
            if ha_address != self._refused:
                _log.warning("master_address_invalid", address=address, ha_address=ha_address, reason=str(error))
            self._refused = ha_address
            return
        _log.info("master_found", address=address, ha_address=ha_address)
        self.address, self._learned = address, ha_address
        self._changed.set()
        self._changed = trio.Event()

    @property
    def ha_address(self) -> tuple[str, int] | None:
        """See MasterView: haMasterAddress, or what the name server says."""
        text = self._configuration.section(ReplicationConfig).ha_master_address or self._learned
        return split_address(text) if text and self.address else None

    async def changed(self) -> None:
        """See MasterView."""
        await self._changed.wait()

    async def ask(self, code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        """Send the master a request, and return its reply, of any code. Raises OSError if there is none."""
        return await self.ask_at(self.address, code, ext)

    async def ask_at(self, address: str, code: int, ext: dict[str, str] | None = None) -> RemotingCommand:
        """The same for a broker that may not be known as the master yet."""
        try:
            return await self._client.invoke(address, RemotingCommand(int(code), ext=ext or {}), _TIMEOUT)
        except RemotingTransportError as error:
            # Callers log each reason once.
            raise OSError(f"the master does not answer: {error.lasting}") from error

    async def begin(self) -> Begin | None:
        """See MasterView."""
        low, high = await self._bounds()
        if high <= low:
            return None
        record = await self._record(low)
        if not record:
            raise OSError(f"the master's first record, at {low}, cannot be read yet")
        return Begin(low, record)

    async def has_record(self, offset: int, record: bytes) -> bool:
        """See MasterView. True also if it cannot be known: if that part of the master's log has expired."""
        reply = await self.ask(
            RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset), "trimqSha256": sha256(record).hexdigest()}
        )
        same = reply.ext_fields().get("trimqSame") if reply.code == ResponseCode.SUCCESS else None
        if same in {"true", "false"}:
            return same == "true"
        if reply.code == ResponseCode.SUCCESS and len(reply.body):
            return bytes(reply.body) == record
        low, _ = await self._bounds()
        end = offset + len(record)
        if end < low:
            raise OSError(f"this log ends at {end}, the master's begins at {low}: empty the store of this slave")
        return offset < low

    async def log_end(self) -> int:
        """Where the master's log ends now, readable or not. Raises OSError."""
        return (await self._runtime())[2]

    async def _record(self, offset: int) -> bytes:
        reply = await self.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
        return bytes(reply.body) if reply.code == ResponseCode.SUCCESS else b""

    async def _bounds(self) -> tuple[int, int]:
        """First offset of the master's log, and the end of what can be read there."""
        return (await self._runtime())[:2]

    async def _runtime(self) -> tuple[int, int, int]:
        """First offset of the master's log, the end of what can be read there, and its end. Raises OSError."""
        reply = await self.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        try:
            table = decode_json(reply.body, KVTable).table
            end = table["commitLogMaxOffset"]
            readable = table.get("commitLogReadableOffset") or end
            # Apache's broker says -1 while its log has no file.
            return max(0, int(table["commitLogMinOffset"])), int(readable), int(end)
        except (RemotingError, KeyError, ValueError) as error:
            raise OSError(f"the master does not say what its log has: {error!r}") from error
