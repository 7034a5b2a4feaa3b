"""The state of the timer: GET_TIMER_CHECK_POINT (60), GET_TIMER_METRICS (61)."""

from trimq.broker.services.timer import TimerMessageService
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable


class TimerAdminProcessor:
    """Serves requests about timed messages."""

    def __init__(self, *, timer: TimerMessageService) -> None:
        self._timer = timer

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.GET_TIMER_CHECK_POINT, self.check_point)
        table.register(RequestCode.GET_TIMER_METRICS, self.metrics)

    def check_point(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_TIMER_CHECK_POINT (60): the last checkpoint, 56 bytes. SYSTEM_ERROR without a timer."""
        handover = self._timer.handover()
        if handover is None:
            raise _off()
        return command.reply(header=handover.ext(), body=handover.body())

    def metrics(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """GET_TIMER_METRICS (61): pending messages by topic, the content of timermetrics. SYSTEM_ERROR without one."""
        if not self._timer.enabled:
            raise _off()
        return command.reply(body=self._timer.metrics.encode())


def _off() -> RemotingError:
    return RemotingError(ResponseCode.SYSTEM_ERROR, "timed messages are off on this broker (timerWheelEnable=false)")
