"""Requests of brokers to a consumer: changed members, offset resets, its state, and messages to consume immediately."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from trimq.client.core import Push
from trimq.client.decode import split_messages
from trimq.client.delivery import ConsumerMessage
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.process_queue import Counts, ProcessQueue
from trimq.protocol import lenient_json
from trimq.protocol.body import encode_json
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers.client import (
    ConsumeMessageDirectlyRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetConsumerStatusRequestHeader,
    NotifyConsumerIdsChangedRequestHeader,
    ResetOffsetRequestHeader,
)
from trimq.remoting.client.client_log import StandardLog

if TYPE_CHECKING:
    from trimq.client.consumer import Consumer

_log = StandardLog("trimq.client.consumer_requests")

DIRECT_TIMEOUT: Final = 9.0
"""Seconds for which a message that an administrator sends is waited for. Brokers wait for ten."""


class ConsumerRequests:
    """Handlers for the requests of brokers to a consumer. Each returns None for a request to another group."""

    def __init__(self, consumer: "Consumer") -> None:
        self._consumer = consumer
        self._started = time.time()
        self._counts: dict[str, Counts] = {}
        self.table: dict[int, Push] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._members_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._status,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
        }

    def counts(self, topic: str) -> Counts:
        """The counters of a topic, which its process queues update."""
        counts = self._counts.get(topic)
        if counts is None:
            counts = self._counts[topic] = Counts()
        return counts

    async def _members_changed(self, command: RemotingCommand) -> RemotingCommand | None:
        if command.header(NotifyConsumerIdsChangedRequestHeader).consumer_group == self._consumer.group:
            self._consumer.rebalancer.now()
        return None

    async def _reset(self, command: RemotingCommand) -> RemotingCommand | None:
        header = command.header(ResetOffsetRequestHeader)
        if header.group != self._consumer.group:
            return None
        for queue, offset in parse_offset_table(bytes(command.body)).items():
            try:
                await self._consumer.reset(queue, offset)
            except UsageError:  # not assigned to this member: the broker sends all queues to all members
                continue
            except RocketMQError as error:
                self._consumer.client.outages.note("an offset was reset but not committed", error, queue=queue)
        return command.reply()

    async def _status(self, command: RemotingCommand) -> RemotingCommand | None:
        header = command.header(GetConsumerStatusRequestHeader)
        if header.group != self._consumer.group:
            return None
        entries = [
            (queue, process_queue.committable)
            for queue, process_queue in self._consumer.rebalancer.process_queues.items()
            if queue.topic == header.topic
        ]
        return command.reply(body=b'{"messageQueueTable":' + lenient_json.dumps_object_keys(entries) + b"}")

    async def _running_info(self, command: RemotingCommand) -> RemotingCommand | None:
        if command.header(GetConsumerRunningInfoRequestHeader).consumer_group != self._consumer.group:
            return None
        consumer = self._consumer
        now = time.time()
        span = max(now - self._started, 1.0)
        properties = {
            "consumerGroup": consumer.group,
            "messageModel": consumer.model.upper(),
            "consumeOrderly": "true" if consumer.orderly else "false",
            "PROP_CONSUMEORDERLY": "true" if consumer.orderly else "false",
            "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
            "PROP_CLIENT_VERSION": "V5_3_3",
            "PROP_CONSUMER_START_TIMESTAMP": str(int(self._started * 1000)),
            "PROP_NAMESERVER_ADDR": ";".join(consumer.client.name_servers.addresses) + ";",
            "PROP_THREADPOOL_CORE_SIZE": "0",
        }
        statuses = {
            topic: {
                "pullRT": 0.0,
                "pullTPS": 0.0,
                "consumeRT": counts.seconds * 1000 / max(counts.timed, 1),
                "consumeOKTPS": counts.good / span,
                "consumeFailedTPS": counts.bad / span,
                "consumeFailedMsgs": counts.bad,
            }
            for topic, counts in self._counts.items()
        }
        fields = {
            "properties": encode_json(properties),
            "subscriptionSet": encode_json([one.data for one in consumer.subscriptions.values()]),
            "statusTable": encode_json(statuses),
            "userConsumerInfo": b"{}",
            "mqTable": lenient_json.dumps_object_keys(
                (queue, _queue_info(process_queue))
                for queue, process_queue in consumer.rebalancer.process_queues.items()
            ),
        }
        body = b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items())
        return command.reply(body=b"{" + body + b"}")

    async def _consume_directly(self, command: RemotingCommand) -> RemotingCommand | None:
        """Delivers a message from an administrator to the program like any other, and replies with the result."""
        header = command.header(ConsumeMessageDirectlyRequestHeader)
        consumer = self._consumer
        if header.consumer_group != consumer.group:
            return None
        messages = split_messages(bytes(command.body), header.broker_name or "", ConsumerMessage)
        if len(messages) != 1:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"one message is expected, here are {len(messages)}")
        # The message belongs to no queue of this consumer: its offset must not be committed, and a failure must not
        # send it to the retry topic. So it gets a process queue and an owner of its own.
        outcome = _DirectConsumption(consumer)
        began = time.monotonic()
        result = "CR_THROW_EXCEPTION"
        with anyio.move_on_after(DIRECT_TIMEOUT):
            process_queue = consumer.offer(messages[0], outcome, partial(_DirectProcessQueue, outcome))
            try:
                result = await outcome.wait()
            finally:
                process_queue.drop()
        return command.reply(
            body=encode_json(
                {
                    "order": consumer.orderly,
                    "autoCommit": True,
                    "consumeResult": result,
                    "remark": "" if result == "CR_SUCCESS" else "the program did not acknowledge it",
                    "spentTimeMills": int((time.monotonic() - began) * 1000),
                }
            )
        )


class _DirectConsumption:
    """The owner of a message that an administrator sends, in place of the consumer: receives its result only."""

    def __init__(self, consumer: "Consumer") -> None:
        self.group = consumer.group
        self.before_process = consumer.before_process
        self.after_process = consumer.after_process
        self._done = anyio.Event()
        self._result = "CR_LATER"

    def acknowledged(self) -> None:
        """The program has acknowledged the message."""
        self._result = "CR_SUCCESS"
        self._done.set()

    async def hand_back(self, _process_queue: ProcessQueue, _messages: list[Any], _delay_level: int) -> None:
        """The program has handed the message back."""
        self._done.set()

    async def wait(self) -> str:
        """Waits for the result and returns it as RocketMQ's constant."""
        await self._done.wait()
        return self._result


class _DirectProcessQueue(ProcessQueue):
    """The process queue of a message that an administrator sends; reports its acknowledgement to ``outcome``."""

    def __init__(self, outcome: _DirectConsumption, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._outcome = outcome

    def finished(self, messages: Sequence[ReceivedMessage]) -> None:
        super().finished(messages)
        self._outcome.acknowledged()

    def finished_one(self, message: ReceivedMessage) -> None:
        super().finished_one(message)
        self._outcome.acknowledged()


def _queue_info(process_queue: ProcessQueue) -> dict[str, Any]:
    return {
        "commitOffset": process_queue.committable,
        "cachedMsgMinOffset": process_queue.committable,
        "cachedMsgMaxOffset": process_queue.window.next_offset,
        "cachedMsgCount": process_queue.window.unfinished,
        "cachedMsgSizeInMiB": process_queue.held_bytes >> 20,
        "transactionMsgMinOffset": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgCount": 0,
        "locked": process_queue.orderly,
        "tryUnlockTimes": 0,
        "lastLockTimestamp": 0,
        "droped": process_queue.dropped,
        "lastPullTimestamp": 0,
        "lastConsumeTimestamp": 0,
    }


def parse_offset_table(body: bytes) -> dict[MessageQueue, int]:
    """Offsets by queue from ``{"offsetTable":{{"topic":...}:7}}``, or from the list of pairs that Go clients receive.

    >>> body = b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"T"}:7}}'
    >>> parse_offset_table(body)
    {MessageQueue(topic='T', broker_name='b', queue_id=1): 7}
    """
    table = lenient_json.loads(body).get("offsetTable") or {}
    pairs = table.items() if isinstance(table, dict) else table
    found = {}
    for key, offset in pairs:
        fields = lenient_json.loads(key) if isinstance(key, str) else key
        queue = MessageQueue(topic=fields["topic"], broker_name=fields["brokerName"], queue_id=int(fields["queueId"]))
        found[queue] = int(offset)
    return found
