"""Administration of message traces: what producers and consumers have reported about a message."""

from typing import NamedTuple

from trimq.client.admin.messages import MessageAdmin
from trimq.protocol.message_trace import MessageTrace, SubAfterTrace, decode_traces
from trimq.protocol.topic_rules import TRACE_TOPIC


class TraceView(NamedTuple):
    """A trace, and what is known from the message that it was sent in (RocketMQ's TraceView).

    ``client_host`` is the IP address of the client that sent it, ``store_time`` when the broker stored it, in seconds
    since the epoch.
    """

    trace: MessageTrace
    client_host: str
    store_time: float

    @property
    def time(self) -> float:
        """When it happened, by the client's clock, in seconds since the epoch.

        The ``store_time`` for the end of a processing that an old client reported without a time.
        """
        trace = self.trace
        if isinstance(trace, SubAfterTrace) and trace.timestamp is None:
            return self.store_time
        return (trace.timestamp or 0) / 1000


class TraceViews(NamedTuple):
    """The traces of a message, by time, and the number of traces that could not be decoded."""

    views: list[TraceView]
    skipped: int


class TraceAdmin(MessageAdmin):
    """Message traces by the message's id."""

    async def message_traces(
        self,
        message_id: str,
        *,
        trace_topic: str = TRACE_TOPIC,
        begin: float = 0.0,
        end: float | None = None,
        max_messages: int = 64,
    ) -> TraceViews:
        """The traces of the message with a producer's id, by the time at which they happened.

        ``max_messages`` bounds the messages of ``trace_topic`` that are read, ``begin`` and ``end`` (seconds since the
        epoch) bound when they were stored. Clients report with a delay of some seconds. Raises TopicNotFoundError.

        >>> async def example(admin: "Admin", receipt: SendReceipt) -> list[str]:
        ...     found = await admin.message_traces(receipt.message_id)
        ...     return [f"{view.trace.type} {view.client_host}" for view in found.views]
        """
        messages = await self.messages_by_key(trace_topic, message_id, begin=begin, end=end, max_messages=max_messages)
        views: list[TraceView] = []
        skipped = 0
        for message in messages:
            host, _ = message.born_host
            text = decode_traces(message.body.decode("utf-8", "replace"))
            skipped += text.skipped
            views += [
                TraceView(trace, host, message.store_time) for trace in text.traces if _is_about(trace, message_id)
            ]
        return TraceViews(sorted(views, key=lambda view: view.time), skipped)


def _is_about(trace: MessageTrace, message_id: str) -> bool:
    """Whether a trace is about a message. Java clients trace a batch once, with the ids of all messages in it."""
    return trace.message_id == message_id or message_id in trace.message_id.split(",")
