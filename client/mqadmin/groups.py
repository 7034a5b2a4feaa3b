"""mqadmin: commands for consumer groups."""

from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.errors import RocketMQError, UsageError
from trimq.client.message import MessageQueue
from trimq.client.mqadmin.shell import Commands, Output, one_of, parse_time, show_time
from trimq.protocol.body import SubscriptionGroupConfig
from trimq.protocol.topic_rules import RETRY_PREFIX

commands: Commands = Commands()

_broker = click.option("-b", "--brokerAddr", "broker", help="A broker's address.")
_cluster = click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its masters.")
_group = click.option("-g", "--groupName", "group", required=True, help="The consumer group.")
_topic = click.option("-t", "--topic", required=True, help="The topic.")


@commands.add("updateSubGroup")
@_broker
@_cluster
@_group
@click.option("-s", "--consumeEnable", "enable", type=bool, default=True, show_default=True, help="Allow consuming.")
@click.option(
    "-m",
    "--consumeFromMinEnable",
    "from_min",
    type=bool,
    default=False,
    show_default=True,
    help="Allow starting at the first message.",
)
@click.option(
    "-d",
    "--consumeBroadcastEnable",
    "broadcast",
    type=bool,
    default=False,
    show_default=True,
    help="Allow broadcasting.",
)
@click.option(
    "-o",
    "--consumeMessageOrderly",
    "orderly",
    type=bool,
    default=False,
    show_default=True,
    help="The group consumes in order.",
)
@click.option(
    "-q",
    "--retryQueueNums",
    "retry_queues",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Queues of the retry topic.",
)
@click.option(
    "-r",
    "--retryMaxTimes",
    "retries",
    type=click.IntRange(0),
    default=16,
    show_default=True,
    help="Retries before a message becomes a dead letter.",
)
@click.option(
    "-i", "--brokerId", "broker_id", type=int, default=0, show_default=True, help="The id of the broker to read from."
)
@click.option(
    "-w",
    "--whichBrokerWhenConsumeSlowly",
    "slowly",
    type=int,
    default=1,
    show_default=True,
    help="The id of the broker to read old messages from.",
)
@click.option(
    "-a",
    "--notifyConsumerIdsChanged",
    "notify",
    type=bool,
    default=True,
    show_default=True,
    help="Notify the members when one joins or leaves.",
)
async def update_group(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    broker: str | None,
    cluster: str | None,
    group: str,
    enable: bool,
    from_min: bool,
    broadcast: bool,
    orderly: bool,
    retry_queues: int,
    retries: int,
    broker_id: int,
    slowly: int,
    notify: bool,
) -> None:
    """Create or change a consumer group."""
    one_of(broker, cluster)
    config = SubscriptionGroupConfig(
        group_name=group,
        consume_enable=enable,
        consume_from_min_enable=from_min,
        consume_broadcast_enable=broadcast,
        consume_message_orderly=orderly,
        retry_queue_nums=retry_queues,
        retry_max_times=retries,
        broker_id=broker_id,
        which_broker_when_consume_slowly=slowly,
        notify_consumer_ids_changed_enable=notify,
    )
    addresses = await admin.addresses(broker=broker, cluster=cluster)
    for address in addresses:
        await admin.update_group(address, config)
        out.say(f"create subscription group to {address} success.")
    out.record({"groupName": group, "retryMaxTimes": retries, "retryQueueNums": retry_queues, "brokers": addresses})


@commands.add("deleteSubGroup")
@_broker
@_cluster
@_group
@click.option(
    "-r",
    "--removeOffset",
    "offsets",
    type=bool,
    default=True,
    show_default=True,
    help="Delete its committed offsets too.",
)
async def delete_group(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, group: str, offsets: bool
) -> None:
    """Delete a consumer group; with -c also its retry topic and dead-letter topic."""
    one_of(broker, cluster)
    addresses = await admin.addresses(broker=broker, cluster=cluster)
    for address in addresses:
        await admin.delete_group(address, group, clean_offset=offsets)
        out.say(f"delete subscription group [{group}] from broker [{address}] success.")
    if cluster is not None:
        await admin.delete_group_topics(group, addresses)
    if out.as_json:
        out.record({"groupName": group, "brokers": addresses})


@commands.add("getConsumerConfig")
@_group
async def consumer_config(admin: Admin, out: Output, *, group: str) -> None:
    """Show a consumer group's settings on each broker."""
    found = False
    for address in await admin.addresses():
        config = (await admin.groups(address)).get(group)
        if config is not None:
            found = True
            out.record({"broker": address} | {name: getattr(config, name) for name in config.__struct_fields__})
    if not found:
        raise UsageError(f"no broker has the group {group}", code=26)  # a refusal: exit status 1


@commands.add("consumerProgress")
@click.option("-g", "--groupName", "group", help="The consumer group; all groups without it.")
@click.option("-t", "--topicName", "topic", help="Only this topic.")
@click.option("-s", "--showClientIP", "clients", type=bool, default=False, help="Show the client that has each queue.")
@click.option("-c", "--cluster", "cluster", help="Accepted; has no effect.")
async def consumer_progress(
    admin: Admin, out: Output, *, group: str | None, topic: str | None, clients: bool, cluster: str | None
) -> None:
    """Show a group's progress in its queues; without -g, the progress of all groups."""
    _ = cluster
    if group is None:
        await _all_groups(admin, out)
        return
    stats = await admin.consume_stats(group, topic)
    owners = await _owners(admin, group, {queue.topic for queue in stats.offsets}) if clients else {}
    rows: list[list[Any]] = []
    for queue, at in stats.offsets.items():
        rows.append(
            [
                queue.topic,
                queue.broker_name,
                queue.queue_id,
                at.broker_offset,
                at.consumer_offset,
                *([owners.get(queue, "")] if clients else []),
                at.lag,
                max(0, at.pull_offset - at.consumer_offset),
                show_time(at.last_timestamp),
            ]
        )
    columns = ["Topic", "Broker Name", "QID", "Broker Offset", "Consumer Offset"]
    out.table([*columns, *(["Client IP"] if clients else []), "Diff", "Inflight", "LastTime"], rows)
    out.say(f"\nConsume TPS: {stats.consume_tps:.2f}\nConsume Diff Total: {stats.lag}")


async def _owners(admin: Admin, group: str, topics: set[str]) -> dict[MessageQueue, str]:
    owners: dict[MessageQueue, str] = {}
    for topic in topics:
        try:
            for client, queues in (await admin.consumer_offsets(topic, group)).items():
                owners.update(dict.fromkeys(queues, client))
        except RocketMQError:
            continue
    return owners


async def _all_groups(admin: Admin, out: Output) -> None:
    rows: list[list[Any]] = []
    for topic in await admin.topics():
        if not topic.startswith(RETRY_PREFIX):
            continue
        group = topic.removeprefix(RETRY_PREFIX)
        try:
            stats = await admin.consume_stats(group)
        except RocketMQError:  # the group was deleted, or has never consumed
            continue
        count, version, kind, model = 0, "OFFLINE", "", ""
        try:
            members = await admin.consumer_connection(group)
        except RocketMQError:
            pass
        else:
            count = len(members.connection_set)
            version = str(min((one.version for one in members.connection_set), default=0))
            kind = "PULL" if members.consume_type == "CONSUME_ACTIVELY" else "PUSH"
            model = members.message_model or ""
        rows.append([group, count, version, kind, model, round(stats.consume_tps), stats.lag])
    out.table(["Group", "Count", "Version", "Type", "Model", "TPS", "Diff Total"], rows)


@commands.add("resetOffsetByTime")
@_group
@_topic
@click.option("-s", "--timestamp", required=True, help="now, milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS.")
@click.option(
    "-f", "--force", type=bool, default=True, show_default=True, help="Move offsets forward too, not only back."
)
@click.option("-c", "--cplus", is_flag=True, help="Accepted; has no effect.")
@click.option("-b", "--broker", "broker", help="Only this broker (by name).")
@click.option("-q", "--queue", "queue", type=int, help="Only this queue.")
@click.option("-o", "--offset", "offset", type=int, help="To this offset; with -b and -q.")
async def reset_offset(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    group: str,
    topic: str,
    timestamp: str,
    force: bool,
    cplus: bool,
    broker: str | None,
    queue: int | None,
    offset: int | None,
) -> None:
    """Set a group's offsets of a topic to a time. Running consumers continue from there."""
    _ = cplus
    if (broker is None) != (queue is None) or (offset is not None and queue is None):
        raise click.UsageError("-b and -q name one queue together; -o needs both")
    place = None
    if broker is not None and queue is not None:
        place = MessageQueue(topic=topic, broker_name=broker, queue_id=queue)
    table = await admin.reset_offset(topic, group, parse_time(timestamp), force=force, queue=place, offset=offset)
    _show_offsets(out, table)


def _show_offsets(out: Output, table: dict[MessageQueue, int]) -> None:
    rows = ([queue.broker_name, queue.queue_id, offset] for queue, offset in table.items())
    out.table(["brokerName", "queueId", "offset"], rows)


@commands.add("skipAccumulatedMessage")
@_group
@_topic
@click.option("-f", "--force", type=bool, default=True, show_default=True, help="As for resetOffsetByTime.")
async def skip_accumulated(admin: Admin, out: Output, *, group: str, topic: str, force: bool) -> None:
    """Let a group skip all messages stored so far: set its offsets to the queues' ends."""
    _show_offsets(out, await admin.reset_offset(topic, group, None, force=force))


@commands.add("cloneGroupOffset")
@click.option("-s", "--srcGroup", "source", required=True, help="The group to copy from.")
@click.option("-d", "--destGroup", "target", required=True, help="The group to copy to.")
@_topic
@click.option("-o", "--offline", type=bool, default=False, help="Accepted; has no effect.")
async def clone_offsets(admin: Admin, out: Output, *, source: str, target: str, topic: str, offline: bool) -> None:
    """Copy a group's offsets of a topic to another group."""
    _ = offline
    given = await admin.clone_offsets(source, target, topic)
    out.say(f"clone group offset success. srcGroup[{source}], destGroup=[{target}], topic[{topic}]")
    if out.as_json:
        _show_offsets(out, given)


@commands.add("setConsumeMode")
@_broker
@_cluster
@_topic
@_group
@click.option("-m", "--mode", type=click.Choice(["PULL", "POP"]), required=True, help="How the group consumes.")
@click.option(
    "-q", "--popShareQueueNum", "share", type=int, default=0, show_default=True, help="Queues that POP clients share."
)
async def set_consume_mode(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, topic: str, group: str, mode: str, share: int
) -> None:
    """Set whether a group pulls or pops a topic."""
    one_of(broker, cluster)
    for address in await admin.addresses(broker=broker, cluster=cluster):
        await admin.set_consume_mode(address, topic, group, mode, share=share)
        out.say(f"set consume mode to {address} success.")
    if out.as_json:
        out.record({"topic": topic, "groupName": group, "mode": mode, "popShareQueueNum": share})
