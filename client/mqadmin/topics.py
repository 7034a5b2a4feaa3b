"""mqadmin: commands for topics."""

from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.allocation import average
from trimq.client.errors import RocketMQError
from trimq.client.mqadmin.shell import Commands, Output, one_of, show_time
from trimq.client.routes import TopicRoute
from trimq.protocol.body import TopicConfig, encode_json
from trimq.protocol.topic_rules import DLQ_PREFIX, RETRY_PREFIX

commands: Commands = Commands()

_broker = click.option("-b", "--brokerAddr", "broker", help="A broker's address.")
_cluster = click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its masters.")
_topic = click.option("-t", "--topic", required=True, help="The topic.")


@commands.add("updateTopic")
@_broker
@_cluster
@_topic
@click.option(
    "-r", "--readQueueNums", "read", type=click.IntRange(1), default=8, show_default=True, help="Queues to read from."
)
@click.option(
    "-w", "--writeQueueNums", "write", type=click.IntRange(1), default=8, show_default=True, help="Queues to send to."
)
@click.option(
    "-p", "--perm", type=click.Choice(["2", "4", "6"]), default="6", show_default=True, help="2 W, 4 R, 6 RW."
)
@click.option("-o", "--order", type=bool, default=False, show_default=True, help="Mark the topic as ordered.")
@click.option("-u", "--unit", type=bool, default=False, help="Accepted; has no effect.")
@click.option("-s", "--hasUnitSub", "unit_sub", type=bool, default=False, help="Accepted; has no effect.")
@click.option("-a", "--attributes", help="Changes of attributes, of the form +key=value,-key.")
async def update_topic(  # noqa: PLR0913 - a command's options
    admin: Admin,
    out: Output,
    *,
    broker: str | None,
    cluster: str | None,
    topic: str,
    read: int,
    write: int,
    perm: str,
    order: bool,
    unit: bool,
    unit_sub: bool,
    attributes: str | None,
) -> None:
    """Create or change a topic, on one broker or on all masters of a cluster."""
    one_of(broker, cluster)
    flags = (1 if unit else 0) | (2 if unit_sub else 0)
    config = TopicConfig(
        topic_name=topic,
        read_queue_nums=read,
        write_queue_nums=write,
        perm=int(perm),
        order=order,
        topic_sys_flag=flags,
    )
    for address in await admin.addresses(broker=broker, cluster=cluster):
        await admin.update_topic(address, config, attributes=attributes)
        out.say(f"create topic to {address} success.")
    out.record({"topic": topic, "readQueueNums": read, "writeQueueNums": write, "perm": int(perm), "order": order})


@commands.add("deleteTopic")
@_topic
@click.option("-c", "--clusterName", "cluster", required=True, help="The cluster.")
async def delete_topic(admin: Admin, out: Output, *, topic: str, cluster: str) -> None:
    """Delete a topic and its messages in a cluster."""
    addresses = await admin.delete_topic(topic, cluster=cluster)
    # As in RocketMQ: a topic of this name that is created later does not inherit the order configuration.
    await admin.delete_kv("ORDER_TOPIC_CONFIG", topic)
    out.say(f"delete topic [{topic}] from cluster [{cluster}] success.")
    if out.as_json:
        out.record({"topic": topic, "cluster": cluster, "brokers": addresses})


@commands.add("updateTopicPerm")
@_broker
@_cluster
@_topic
@click.option("-p", "--perm", type=click.Choice(["2", "4", "6"]), required=True, help="2 W, 4 R, 6 RW.")
async def update_topic_perm(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, topic: str, perm: str
) -> None:
    """Change a topic's permission."""
    one_of(broker, cluster)
    for address in await admin.addresses(broker=broker, cluster=cluster):
        before = await admin.update_topic_perm(topic, int(perm), broker=address)
        out.say(f"update topic perm from {before[address]} to {perm} in {address} success.")
        if out.as_json:
            out.record({"topic": topic, "broker": address, "before": before[address], "perm": int(perm)})


@commands.add("topicList")
@click.option("-c", "--clusterModel", "by_cluster", is_flag=True, help="With clusters and consumer groups.")
async def topic_list(admin: Admin, out: Output, *, by_cluster: bool) -> None:
    """List all topics."""
    if not by_cluster:
        out.lines(await admin.topics())
        return
    rows: list[list[str]] = []
    for cluster in sorted((await admin.cluster_info()).cluster_addr_table):
        for topic in await admin.topics(cluster):
            groups = [] if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) else await admin.topic_groups(topic)
            rows += [[cluster, topic, group] for group in groups or [""]]
    out.table(["Cluster Name", "Topic", "Consumer Group"], rows)


@commands.add("topicRoute")
@_topic
@click.option("-l", "--list", "as_list", is_flag=True, help="Print one line for each broker.")
async def topic_route(admin: Admin, out: Output, *, topic: str, as_list: bool) -> None:
    """Show a topic's route: its queues and brokers."""
    route = await admin.route(topic)
    if not as_list:
        if out.as_json:
            import json  # noqa: PLC0415 - needed only here

            out.record(json.loads(encode_json(route)))
        else:
            click.echo(encode_json(route).decode())
        return
    brokers = {broker.broker_name: broker for broker in route.broker_datas}
    out.table(
        ["ClusterName", "BrokerName", "BrokerAddrs", "ReadQueue", "WriteQueue", "Perm"],
        (
            [
                brokers[queues.broker_name].cluster,
                queues.broker_name,
                " ".join(f"{number}={at}" for number, at in brokers[queues.broker_name].broker_addrs.items()),
                queues.read_queue_nums,
                queues.write_queue_nums,
                queues.perm,
            ]
            for queues in route.queue_datas
            if queues.broker_name in brokers
        ),
    )


@commands.add("topicStatus")
@_topic
async def topic_status(admin: Admin, out: Output, *, topic: str) -> None:
    """Show the first and next offset of a topic's queues, and when they were last written to.

    If a broker has a tier: also where its local store begins, and which offsets are in the tier.
    """
    stats = await admin.topic_stats(topic)
    rows: list[list[Any]] = [
        [queue.broker_name, queue.queue_id, at.min_offset, at.max_offset, show_time(at.last_update_timestamp)]
        for queue, at in stats.items()
    ]
    titles = ["Broker Name", "QID", "Min Offset", "Max Offset", "Last Updated"]
    if any(at.tier_max_offset is not None for at in stats.values()):
        titles += ["Local Min", "Tier Min", "Tier Max"]
        for row, at in zip(rows, stats.values(), strict=True):
            row += ["" if n is None else n for n in (at.local_min_offset, at.tier_min_offset, at.tier_max_offset)]
    out.table(titles, rows)


@commands.add("topicClusterList")
@_topic
async def topic_cluster_list(admin: Admin, out: Output, *, topic: str) -> None:
    """List the clusters that have a topic."""
    out.lines(await admin.topic_clusters(topic))


@commands.add("allocateMQ")
@_topic
@click.option("-i", "--ipList", "clients", required=True, help="Client ids, separated by commas.")
async def allocate_queues(admin: Admin, out: Output, *, topic: str, clients: str) -> None:
    """Show how clients would share a topic's queues by the average strategy."""
    names = sorted(name.strip() for name in clients.split(",") if name.strip())
    queues = sorted(TopicRoute(topic, await admin.route(topic)).read_queues)
    rows: list[list[Any]] = []
    for name in names:
        rows += [[name, queue.broker_name, queue.queue_id] for queue in average(name, queues, names)]
    out.table(["Client", "Broker Name", "QID"], rows)


@commands.add("statsAll")
@click.option("-a", "--activeTopic", "active", is_flag=True, help="Only topics with traffic.")
@click.option("-t", "--topic", "only", help="Only this topic.")
async def stats_all(admin: Admin, out: Output, *, active: bool, only: str | None) -> None:
    """Show the rates of all topics and of the groups that consume them."""
    rows: list[list[Any]] = []
    for topic in [only] if only else await admin.topics():
        if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            rows += await _stats_rows(admin, topic)
    if active:
        rows = [row for row in rows if any(row[3:])]
    out.table(["Topic", "Consumer Group", "Accumulation", "InTPS", "OutTPS", "InMsg24Hour", "OutMsg24Hour"], rows)


async def _stats_rows(admin: Admin, topic: str) -> list[list[Any]]:
    try:
        masters = await admin.topic_masters(topic)
        groups = await admin.topic_groups(topic)
    except RocketMQError:
        return []
    in_rate, in_day = await _rate(admin, masters, "TOPIC_PUT_NUMS", topic)
    if not groups:
        return [[topic, "", 0, in_rate, 0.0, in_day, 0]]
    rows = []
    for group in groups:
        out_rate, out_day = await _rate(admin, masters, "GROUP_GET_NUMS", f"{topic}@{group}")
        rows.append([topic, group, await _lag(admin, group, topic), in_rate, out_rate, in_day, out_day])
    return rows


async def _lag(admin: Admin, group: str, topic: str) -> int:
    try:
        return (await admin.consume_stats(group, topic)).lag
    except RocketMQError:
        return 0


async def _rate(admin: Admin, masters: list[str], name: str, key: str) -> tuple[float, int]:
    rate, day = 0.0, 0
    for address in masters:
        try:
            stats = await admin.broker_stats(address, name, key)
        except RocketMQError:
            continue
        rate += stats.stats_minute.tps
        day += stats.stats_day.sum
    return rate, day
