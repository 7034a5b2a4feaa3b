"""SlaveTimers: what a slave knows of its master's timed messages, for its own start as a master, and for the cleaner.

A slave has no wheel. It stores its master's checkpoint in config/timercheck, and makes the wheel from the timer's queue
when it starts as a master: from the first message on that was pending at the checkpoint, without those that the master
had delivered. RocketMQ's slaves fill a wheel of their own all the time, and forget what was rolled meanwhile.
"""

from collections.abc import Iterator

from trimq.broker.services.queued_messages import QueuePosition
from trimq.broker.store.message_store import MessageStore
from trimq.protocol import record
from trimq.protocol.timer_handover import NOT_KNOWN, NOTHING_PENDING, TimerHandover
from trimq.protocol.topic_rules import TIMER_TOPIC


class SlaveTimers:
    """Belongs to a slave's SlaveSynchronize. ``follow`` is called when the log has what the master has delivered."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._held_from = store.timer_data.checkpoint.queue_offset

    def positions(self) -> Iterator[QueuePosition]:
        """The first timed message that may be pending on the master. Of RocketMQ's the first that it has not read.

        RocketMQ does not say which messages are pending, and does not keep the log for them either.
        """
        yield TIMER_TOPIC, 0, self._held_from

    async def follow(self, handover: TimerHandover) -> None:
        """Take the checkpoint of the master. Raises OSError."""
        checkpoint, lowest = handover.checkpoint, handover.lowest
        if not checkpoint.read_time:
            return  # there was no timed message yet
        begin = 0
        if lowest == NOTHING_PENDING:
            begin = checkpoint.queue_offset
        elif lowest != NOT_KNOWN:
            begin = min(await self._queue_offset(lowest), checkpoint.queue_offset)
        await self._store.timer_data.follow(handover, begin)
        self._held_from = checkpoint.queue_offset if lowest == NOT_KNOWN else begin

    async def _queue_offset(self, log_offset: int) -> int:
        """The queue offset of the timed message at a log offset; 0 if another record, or none, is there."""
        data = await self._store.look_message_cold(log_offset)
        if not len(data):
            return 0
        head = record.decode_head(data)
        is_timed = bytes(data[head.topic_at : head.topic_end]) == TIMER_TOPIC.encode()
        return head.queue_offset if is_timed else 0
