"""Queue locks of orderly consumers: LOCK_BATCH_MQ (41), UNLOCK_BATCH_MQ (42)."""

from trimq.broker.services.rebalance_lock import RebalanceLockManager
from trimq.protocol.body import LockBatchBody, decode_json, encode_json
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import RemotingCommand
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable


class LockProcessor:
    """Grants and releases queue locks."""

    def __init__(self, *, locks: RebalanceLockManager) -> None:
        self._locks = locks

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.LOCK_BATCH_MQ, self.lock)
        table.register(RequestCode.UNLOCK_BATCH_MQ, self.unlock)

    def lock(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """LOCK_BATCH_MQ (41): locks queues, and returns those that the client holds now."""
        body = decode_json(command.body, LockBatchBody)
        held = self._locks.lock_batch(body.consumer_group, body.client_id, body.mq_set)
        return command.reply(body=encode_json({"lockOKMQSet": held}))

    def unlock(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """UNLOCK_BATCH_MQ (42): releases queues. Clients often send it one-way."""
        body = decode_json(command.body, LockBatchBody)
        self._locks.unlock_batch(body.consumer_group, body.client_id, body.mq_set)
        return command.reply()
