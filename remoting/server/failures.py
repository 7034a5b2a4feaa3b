"""Failures: exceptions of handlers and hooks are counted, logged within a budget, and turned into replies."""

from collections.abc import Callable
from typing import Final

import structlog

from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode
from trimq.remoting.runtime.log_budget import LogBudget
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.limits import ReactorStats

_log = structlog.get_logger("remoting")

_MOST: Final = 500
"""Characters of an error that a reply repeats."""


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

    def not_encoded(self, conn: Connection, reply: RemotingCommand, error: Exception) -> RemotingCommand:
        """Count and log that a command cannot be encoded. Returns the error reply to be sent instead of a reply."""
        self._stats.failures += 1
        if self._log_budget.allows():
            _log.error("reply_not_encoded", peer=conn.peer_text, code=reply.code, exc_info=error)
        # Whatever the error repeats of the reply, this can be encoded.
        why = str(error)[:_MOST].encode("ascii", "backslashreplace").decode()
        return reply.reply(ResponseCode.SYSTEM_ERROR, f"the reply cannot be sent: {type(error).__name__}: {why}")

    def frame(self, conn: Connection, command: RemotingCommand, error: Exception) -> bytes:
        """As ``reply``, encoded."""
        reply = self.reply(conn, command, error)
        try:
            return encode(reply)
        except Exception as failure:  # noqa: BLE001 - the other requests of the round have to be answered
            return encode(self.not_encoded(conn, reply, failure))

    def of_outcome(self, conn: Connection, command: RemotingCommand, error: Exception) -> None:
        """Count and log that the outcome of a request could not be acted on. The connection is closed."""
        self._stats.failures += 1
        if self._log_budget.allows():
            _log.error("outcome_failed", peer=conn.peer_text, code=command.code, exc_info=error)
        conn.close(f"server error: {type(error).__name__}")

    def of_hook(self, hook: Callable[..., object], error: Exception) -> None:
        """Count and log an exception of a function that was not called for a single request."""
        self._stats.failures += 1
        if self._log_budget.allows():
            _log.error("round_end_failed", hook=repr(hook), exc_info=error)
