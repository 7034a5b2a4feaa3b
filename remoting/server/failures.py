"""Failures: exceptions of handlers and hooks are counted, logged within a budget, and turned into replies."""

from collections.abc import Callable

import structlog

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorStats

_log = structlog.get_logger("remoting")


class Failures:
    """Error handling of one server."""

    def __init__(self, stats: ReactorStats, log_budget: LogBudget) -> None:
        self._stats = stats
        self._log_budget = log_budget

    def reply(self, conn: Connection, command: RemotingCommand, error: Exception) -> RemotingCommand:
        """The error reply to a request whose handler raised: the code of a RemotingError, else SYSTEM_ERROR.

        A RemotingError is an expected refusal; only other exceptions are counted and logged.
        """
        if isinstance(error, RemotingError):
            return command.reply(error.code, error.remark)
        self._stats.failures += 1
        if self._log_budget.allows():
            _log.error("request_failed", peer=conn.peer_text, code=command.code, exc_info=error)
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")

    def of_hook(self, hook: Callable[..., object], error: Exception) -> None:
        """Count and log an exception of a function that was not called for a single request."""
        self._stats.failures += 1
        if self._log_budget.allows():
            _log.error("round_end_failed", hook=repr(hook), exc_info=error)
