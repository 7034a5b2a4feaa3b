"""AdminPort: the feature of the gate that refuses requests of administrators on the ports for clients."""

from typing import Final

from trimq.protocol.auth.admin_port import ON_ADMIN_PORT
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.gate import Feature
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.limits import ReactorStats

ADMIN_KEY: Final = "adminListenAddress"


class AdminPort:
    """Lets requests of administrators through only on connections to ``address`` (HOST:PORT)."""

    def __init__(self, address: str, stats: ReactorStats) -> None:
        self._stats = stats
        self._remark = f"requests with this code are served only at {address} ({ADMIN_KEY}): connect to that address"
        self._table: HandlerTable | None = None
        self.feature = Feature("admin_port", self.check, codes=ON_ADMIN_PORT)

    def table(self, table: HandlerTable) -> HandlerTable:
        """The handlers of the admin port, which are all those of ``table``."""
        self._table = table.without()
        return self._table

    def check(self, connection: Connection, _command: RemotingCommand) -> None:
        """Raise RemotingError(NO_PERMISSION) on another port."""
        if connection.table is not self._table:
            self._stats.admin_refused += 1
            raise RemotingError(ResponseCode.NO_PERMISSION, self._remark)
