"""mqadmin: commands that read messages of a topic."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.message import MessageQueue, ReceivedMessage
from trimq.client.mqadmin.messages import message_fields
from trimq.client.mqadmin.shell import Commands, Output, parse_time
from trimq.client.pull_consumer import PullConsumer

commands: Commands = Commands()

TOOLS_CONSUMER = "TOOLS_CONSUMER"

_topic = click.option("-t", "--topic", required=True, help="The topic.")
_charset = click.option(
    "-c", "--charsetName", "charset", default="utf-8", show_default=True, help="The body's charset."
)
_tags = click.option("-s", "--subExpression", "tags", default="*", show_default=True, help="Tags, as a || b.")
_FROM_TIME = "Stored from this time on: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
_UNTIL_TIME = "Stored before this time: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
_begin = click.option("-b", "--beginTimestamp", "begin", help=_FROM_TIME)
_end = click.option("-e", "--endTimestamp", "end", help=_UNTIL_TIME)


async def _spans(
    consumer: PullConsumer, queues: list[MessageQueue], begin: str | None, end: str | None
) -> dict[MessageQueue, tuple[int, int]]:
    """The first offset to read of each queue, and the one after the last."""
    found = {}
    since, until = (parse_time(text) if text else None for text in (begin, end))
    for queue in queues:
        first = await consumer.first_offset(queue) if since is None else await consumer.offset_by_time(queue, since)
        behind = await consumer.end_offset(queue) if until is None else await consumer.offset_by_time(queue, until)
        found[queue] = (first, behind)
    return found


async def _messages(
    consumer: PullConsumer, spans: dict[MessageQueue, tuple[int, int]]
) -> AsyncGenerator[ReceivedMessage, None]:
    """The messages of each queue's span, queue by queue."""
    for queue, (first, behind) in spans.items():
        if first >= behind:
            continue
        await consumer.assign({queue: first})
        at = first
        while at < behind:
            batch = await consumer.poll(32, timeout=3.0)
            if not batch:  # the rest of the span does not match the filter
                break
            for message in batch:
                at = message.queue_offset + 1
                if message.queue_offset < behind:
                    yield message


def _print(out: Output, message: ReceivedMessage, charset: str, *, body: bool = True) -> None:
    fields: dict[str, Any] = message_fields(message, body=False)
    fields["Broker Name"] = message.broker_name
    if body:
        fields["Message Body"] = message.body.decode(charset, "backslashreplace")
    text = f" BODY: {fields['Message Body']}" if body else ""
    out.item(
        fields,
        f"MSGID: {message.message_id} {message.queue.broker_name} {message.queue_id} {message.queue_offset} "
        f"TAGS: {message.tags or ''} KEYS: {' '.join(message.keys)}{text}",
    )


@commands.add("printMsg")
@_topic
@_charset
@_tags
@_begin
@_end
@click.option("-d", "--printBody", "body", type=bool, default=True, show_default=True, help="Print the bodies.")
async def print_messages(
    admin: Admin,
    out: Output,
    *,
    topic: str,
    charset: str,
    tags: str,
    begin: str | None,
    end: str | None,
    body: bool,
) -> None:
    """Print the messages of a topic."""
    async with PullConsumer(TOOLS_CONSUMER, client=admin.client, tags=tags) as consumer:
        spans = await _spans(consumer, await consumer.queues(topic), begin, end)
        async for message in _messages(consumer, spans):
            _print(out, message, charset, body=body)


@commands.add("printMsgByQueue")
@_topic
@click.option("-a", "--brokerName", "broker", required=True, help="The broker's name.")
@click.option("-i", "--queueId", "queue", type=int, required=True, help="The queue's id.")
@_charset
@_tags
@_begin
@_end
@click.option("-p", "--print", "show", type=bool, default=True, show_default=True, help="Print the messages.")
@click.option("-d", "--printBody", "body", type=bool, default=True, show_default=True, help="Print the bodies.")
@click.option("-f", "--calculate", "by_tag", type=bool, default=False, help="Count messages by tag.")
async def print_queue(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    topic: str,
    broker: str,
    queue: int,
    charset: str,
    tags: str,
    begin: str | None,
    end: str | None,
    show: bool,
    body: bool,
    by_tag: bool,
) -> None:
    """Print the messages of one queue."""
    counts: dict[str, int] = {}
    place = MessageQueue(topic=topic, broker_name=broker, queue_id=queue)
    async with PullConsumer(TOOLS_CONSUMER, client=admin.client, tags=tags) as consumer:
        await consumer.queues(topic)  # raises an error for an unknown topic
        async for message in _messages(consumer, await _spans(consumer, [place], begin, end)):
            counts[message.tags or ""] = counts.get(message.tags or "", 0) + 1
            if show:
                _print(out, message, charset, body=body)
    if by_tag:
        out.table(["Tag", "Count"], sorted(counts.items()))


@commands.add("consumeMessage")
@_topic
@click.option("-b", "--brokerName", "broker", help="Only this broker.")
@click.option("-i", "--queueId", "queue", type=int, help="Only this queue; with -b.")
@click.option("-o", "--offset", type=int, help="From this offset; with -b and -i.")
@click.option("-g", "--consumerGroup", "group", help="Accepted; has no effect: nothing is committed.")
@click.option("-s", "--beginTimestamp", "begin", help=_FROM_TIME)
@click.option("-e", "--endTimestamp", "end", help=_UNTIL_TIME)
@click.option(
    "-c", "--MessageNumber", "count", type=click.IntRange(1), default=128, show_default=True, help="Most messages."
)
async def consume(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    topic: str,
    broker: str | None,
    queue: int | None,
    offset: int | None,
    group: str | None,
    begin: str | None,
    end: str | None,
    count: int,
) -> None:
    """Read messages of a topic, a broker, a queue or a period. No offset is committed."""
    _ = group
    if (queue is not None and broker is None) or (offset is not None and queue is None):
        raise click.UsageError("-i needs -b, and -o needs -i")
    async with PullConsumer(TOOLS_CONSUMER, client=admin.client) as consumer:
        queues = [
            place
            for place in await consumer.queues(topic)
            if broker in (None, place.broker_name) and queue in (None, place.queue_id)
        ]
        spans = await _spans(consumer, queues, begin, end)
        if offset is not None:
            spans = {place: (offset, behind) for place, (_, behind) in spans.items()}
        left = count
        async with aclosing(_messages(consumer, spans)) as messages:
            async for message in messages:
                _print(out, message, "utf-8")
                left -= 1
                if not left:
                    break
