"""ControllerClient: requests to the controllers. It finds the leader, which with TriMQ's controllers is any of them.

Source: the part of RocketMQ's BrokerOuterAPI that is about controllers.
"""

from collections.abc import Sequence
from typing import Final

import structlog

from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.controller import GetMetaDataResponseHeader
from trimq.remoting.client.remoting_client import RemotingClient, split_address
from trimq.remoting.errors import RemotingTransportError

_log = structlog.get_logger(__name__)

TIMEOUT: Final = 3.0
_METADATA_TIMEOUT: Final = 1.0


class ControllersError(Exception):
    """No controller has answered, or none can decide. ``unsent``: certainly no controller got the request."""

    def __init__(self, text: str, *, unsent: bool) -> None:
        super().__init__(text)
        self.unsent = unsent


class ControllerClient:
    """Asks the controllers at ``addresses``."""

    def __init__(self, client: RemotingClient, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.leader = ""
        """Where decisions are asked for; empty while it is not known."""
        self._client = client

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """Send a request to the leader, and return its reply, of any code but CONTROLLER_NOT_LEADER.

        Raises ControllersError. A request that may have arrived is not repeated.
        """
        failure = "no controller says which one is the leader"
        for _ in range(2):  # with the leader that is known, then with the one that is found
            address = self.leader or await self.find_leader()
            if not address:
                break
            try:
                reply = await self._client.invoke(address, command, TIMEOUT)
            except RemotingTransportError as error:
                self.leader = ""
                failure = error.lasting
                if error.written:
                    raise ControllersError(failure, unsent=False) from error
                continue
            if reply.code != ResponseCode.CONTROLLER_NOT_LEADER:
                return reply
            self.leader = ""
            failure = f"the controller {address} cannot decide now: {reply.remark or 'it is not the leader'}"
        raise ControllersError(failure, unsent=True)

    async def find_leader(self) -> str:
        """Ask the controllers in turn which one is the leader. Returns its address; empty if none says so."""
        for address in self.addresses:
            try:
                reply = await self._client.invoke(
                    address, RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO), _METADATA_TIMEOUT
                )
                if reply.code != ResponseCode.SUCCESS:
                    continue
                leader = reply.header(GetMetaDataResponseHeader).controller_leader_address
                split_address(leader)
            except (RemotingTransportError, RemotingError, ValueError):
                continue
            if leader != self.leader:
                _log.info("controller_found", leader=leader)
            self.leader = leader
            return leader
        return ""

    async def heartbeat(self, address: str, command: RemotingCommand, timeout: float) -> RemotingCommand:
        """Send a heartbeat to one controller. Raises RemotingTransportError."""
        return await self._client.invoke(address, command, timeout)
