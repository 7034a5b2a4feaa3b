"""mqadmin: commands that find and send messages."""

import time
from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import Message, MessageQueue, ReceivedMessage
from trimq.client.mqadmin.shell import Commands, Output, parse_time, show_time
from trimq.client.producer import Producer

commands: Commands = Commands()

TOOLS_PRODUCER = "TOOLS_PRODUCER"

_topic = click.option("-t", "--topic", required=True, help="The topic.")


def message_fields(message: ReceivedMessage, *, body: bool = True) -> dict[str, Any]:
    """The fields of a message that commands show, by name."""
    fields: dict[str, Any] = {
        "MsgId": message.message_id,
        "OffsetID": message.offset_message_id,
        "Topic": message.topic,
        "Tags": message.tags or "",
        "Keys": " ".join(message.keys),
        "Queue ID": message.queue_id,
        "Queue Offset": message.queue_offset,
        "CommitLog Offset": message.commit_log_offset,
        "Reconsume Times": message.reconsume_times,
        "Born Timestamp": show_time(message.head.born_timestamp),
        "Store Timestamp": show_time(message.head.store_timestamp),
        "Born Host": "{}:{}".format(*message.born_host),
        "Store Host": "{}:{}".format(*message.store_host),
        "System Flag": message.head.sys_flag,
        "Properties": message.all_properties,
    }
    if body:
        fields["Message Body"] = message.body.decode("utf-8", "backslashreplace")
    return fields


async def _track(admin: Admin, out: Output, message: ReceivedMessage) -> None:
    """Shows which groups have consumed the message, by their committed offsets."""
    rows = []
    for group in await admin.topic_groups(message.topic):
        try:
            stats = await admin.consume_stats(group, message.topic)
        except RocketMQError:
            continue
        at = stats.offsets.get(message.queue)
        state = (
            "UNKNOWN" if at is None else "CONSUMED" if at.consumer_offset > message.queue_offset else "NOT_CONSUME_YET"
        )
        if at is not None and state == "CONSUMED" and not await admin.is_online(group):
            state = "CONSUMED (NOT_ONLINE)"
        rows.append([group, state])
    if rows:
        out.say("")
        out.table(["Consumer Group", "Track"], rows)


async def _show(admin: Admin, out: Output, messages: list[ReceivedMessage], what: str) -> None:
    if not messages:
        raise UsageError(f"there is no message {what}", code=22)  # QUERY_NOT_FOUND: a refusal, exit status 1
    for message in messages:
        out.record(message_fields(message))
        await _track(admin, out, message)
        out.say("")


async def _consume_directly(
    admin: Admin, out: Output, message: ReceivedMessage, group: str | None, client: str | None
) -> bool:
    """Makes the consumer of -g and -d consume the message immediately; False if they are not given."""
    if group is None or client is None:
        return False
    answer = await admin.consume_directly(
        group, client, message.topic, message.offset_message_id, broker_name=message.broker_name
    )
    out.record(answer)
    return True


@commands.add("queryMsgById")
@click.option("-i", "--msgId", "ids", required=True, help="Offset message ids, separated by commas.")
@click.option("-t", "--topic", help="The topic.")
@click.option("-g", "--consumerGroup", "group", help="With -d: let a client of this group consume the message now.")
@click.option("-d", "--clientId", "client", help="With -g: the client.")
async def by_id(
    admin: Admin, out: Output, *, ids: str, topic: str | None, group: str | None, client: str | None
) -> None:
    """Find a message by its offset message id."""
    for one in ids.split(","):
        message = await admin.message_by_id(one.strip(), topic)
        if not await _consume_directly(admin, out, message, group, client):
            await _show(admin, out, [message], one)


@commands.add("queryMsgByKey")
@_topic
@click.option("-k", "--msgKey", "key", required=True, help="The key.")
@click.option(
    "-b", "--beginTimestamp", "begin", default="0", help="From this time: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
)
@click.option(
    "-e", "--endTimestamp", "end", default="now", help="Until this time: milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS."
)
@click.option("-c", "--maxNum", "most", type=click.IntRange(1), default=64, show_default=True, help="Most messages.")
async def by_key(admin: Admin, out: Output, *, topic: str, key: str, begin: str, end: str, most: int) -> None:
    """Find messages by key."""
    found = await admin.messages_by_key(
        topic, key, begin=parse_time(begin) or 0.0, end=parse_time(end), max_messages=most
    )
    out.table(
        ["Message ID", "QID", "Offset"],
        ([message.message_id, message.queue_id, message.queue_offset] for message in found),
    )


@commands.add("queryMsgByUniqueKey")
@_topic
@click.option("-i", "--msgId", "message_id", required=True, help="The id that the producer gave the message.")
@click.option("-g", "--consumerGroup", "group", help="With -d: let a client of this group consume the message now.")
@click.option("-d", "--clientId", "client", help="With -g: the client.")
@click.option("-a", "--showAll", "every", is_flag=True, help="Show all, if it was stored more than once.")
async def by_unique_key(
    admin: Admin, out: Output, *, topic: str, message_id: str, group: str | None, client: str | None, every: bool
) -> None:
    """Find a message by the id that its producer gave it."""
    found = await admin.messages_by_unique_key(topic, message_id)
    if found and await _consume_directly(admin, out, found[0], group, client):
        return
    await _show(admin, out, found if every else found[:1], message_id)


@commands.add("queryMsgByOffset")
@_topic
@click.option("-b", "--brokerName", "broker", required=True, help="The broker's name.")
@click.option("-i", "--queueId", "queue", type=int, required=True, help="The queue's id.")
@click.option("-o", "--offset", type=int, required=True, help="The offset in the queue.")
async def by_offset(admin: Admin, out: Output, *, topic: str, broker: str, queue: int, offset: int) -> None:
    """Find a message by queue and offset."""
    place = MessageQueue(topic=topic, broker_name=broker, queue_id=queue)
    found = await admin.message_by_offset(place, offset)
    await _show(admin, out, [found] if found else [], f"at {offset}")


@commands.add("queryCq")
@_topic
@click.option("-q", "--queue", type=int, required=True, help="The queue's id.")
@click.option("-i", "--index", type=int, required=True, help="The index of the first unit.")
@click.option("-c", "--count", type=int, default=10, show_default=True, help="Units to show.")
@click.option("-b", "--broker", help="The broker's address. Default: the first master of the topic.")
@click.option("-g", "--consumer", "group", help="Try this group's filter on the units.")
async def query_queue(
    admin: Admin, out: Output, *, topic: str, queue: int, index: int, count: int, broker: str | None, group: str | None
) -> None:
    """Show units of a consume queue."""
    address = broker or (await admin.topic_masters(topic))[0]
    place = MessageQueue(topic=topic, broker_name="", queue_id=queue)
    found = await admin.queue_units(address, place, index, count, group=group)
    out.say(f"Queue data: {len(found.queue_data)}, min {found.min_queue_index}, max {found.max_queue_index}")
    out.table(
        ["Index", "PhysicOffset", "PhysicSize", "TagsCode", "Eval"],
        (
            [index + number, unit.physic_offset, unit.physic_size, unit.tags_code, unit.eval]
            for number, unit in enumerate(found.queue_data)
        ),
    )


@commands.add("sendMessage")
@_topic
@click.option("-p", "--body", required=True, help="The body, as text.")
@click.option("-k", "--key", "keys", help="Keys, separated by blanks.")
@click.option("-c", "--tags", help="The tag.")
@click.option("-b", "--broker", help="The broker's name; with -i.")
@click.option("-i", "--qid", "queue", type=int, help="The queue's id; with -b.")
@click.option("-m", "--msgTraceEnable", "trace", type=bool, default=False, help="Whether to trace the message.")
async def send(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    topic: str,
    body: str,
    keys: str | None,
    tags: str | None,
    broker: str | None,
    queue: int | None,
    trace: bool,
) -> None:
    """Send a message."""
    if (broker is None) != (queue is None):
        raise click.UsageError("-b and -i name one queue together")
    place = None
    if broker is not None and queue is not None:
        place = MessageQueue(topic=topic, broker_name=broker, queue_id=queue)
    message = Message(topic, body.encode(), tags=tags, keys=(keys or "").split())
    async with Producer(TOOLS_PRODUCER, client=admin.client, enable_msg_trace=trace) as producer:
        receipt = await producer.send(message, queue=place)
    out.table(
        ["Broker Name", "QID", "Send Result", "MsgId"],
        [[receipt.queue.broker_name, receipt.queue.queue_id, receipt.status.name, receipt.message_id]],
    )


@commands.add("sendMsgStatus")
@click.option("-b", "--brokerName", "broker", required=True, help="The broker's name, which is also a topic on it.")
@click.option(
    "-s", "--messageSize", "size", type=click.IntRange(1), default=128, show_default=True, help="Bytes of a body."
)
@click.option("-c", "--count", type=click.IntRange(1), default=50, show_default=True, help="Messages to send.")
async def send_status(admin: Admin, out: Output, *, broker: str, size: int, count: int) -> None:
    """Send test messages to a broker, one after the other, and show how long each takes."""
    rows = []
    async with Producer(TOOLS_PRODUCER, client=admin.client) as producer:
        for _ in range(count):
            began = time.monotonic()
            receipt = await producer.send(Message(broker, b"a" * size))
            rows.append([round((time.monotonic() - began) * 1000, 2), receipt.status.name, receipt.queue_offset])
    out.table(["rt(ms)", "SendResult", "Queue Offset"], rows)
