"""A slave's answer to pulls that it does not serve: the consumer pulls from the master again, at the same offset.

Source: RocketMQ's DefaultPullMessageResultHandler. A slave there answers at once; a client that finds no master in its
route then asks the slave without a pause. Pulls that are not allowed at all get SYSTEM_BUSY there, and clients stay.
"""

from typing import Final

import trio

from trimq.broker.store.message_store import MessageStore
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome

_PAUSE: Final = 0.1
_PAUSE_ALONE: Final = 1.0
"""Seconds before the answer, ``_PAUSE_ALONE`` while this slave has no master. Clients ask again as soon as they have
it: this slave, as long as their route has no master."""
_BEHIND: Final = "this broker is a slave, and does not have this offset: use the master"
_REFUSED: Final = "this broker is a slave and serves no pulls (slaveReadEnable=false): use the master"
_PULLS: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)


async def back_to_master(
    store: MessageStore, command: RemotingCommand, header: PullMessageRequestHeader, remark: str = _BEHIND
) -> RemotingCommand:
    """Wait a moment, and answer PULL_RETRY_IMMEDIATELY, with the master as the broker for the next pull."""
    client = store.replication.client
    await trio.sleep(_PAUSE if client is not None and client.state().connected else _PAUSE_ALONE)
    queue = header.topic, header.queue_id
    ext = {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": str(header.queue_offset),
        "minOffset": str(store.min_offset(*queue)),
        "maxOffset": str(store.max_offset(*queue)),
        "topicSysFlag": "0",
        "groupSysFlag": "0",
    }
    return command.reply(ResponseCode.PULL_RETRY_IMMEDIATELY, remark, ext)


def refuse_pulls(table: HandlerTable, store: MessageStore) -> None:
    """Let a slave serve no pulls (slaveReadEnable=false)."""

    async def refused(command: RemotingCommand, header: PullMessageRequestHeader) -> RemotingCommand:
        return await back_to_master(store, command, header, _REFUSED)

    def refuse(_connection: Connection, command: RemotingCommand) -> Outcome:
        return refused(command, command.header(PullMessageRequestHeader))

    for code in _PULLS:
        table.register(code, refuse)
