"""mqadmin: commands for brokers and clusters."""

import time
from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.errors import RocketMQError
from trimq.client.mqadmin.shell import Commands, Output, one_of, show_time

commands: Commands = Commands()

_broker = click.option("-b", "--brokerAddr", "broker", help="A broker's address.")
_cluster = click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its brokers.")


@commands.add("clusterList")
@click.option("-m", "--moreStats", "more", is_flag=True, help="Show the number of messages yesterday and today.")
@click.option("-i", "--interval", type=int, help="Accepted; prints once all the same. For a loop use watch(1).")
@click.option("-c", "--clusterName", "only", help="Only this cluster.")
async def cluster_list(admin: Admin, out: Output, *, more: bool, interval: int | None, only: str | None) -> None:
    """List clusters and their brokers."""
    _ = interval
    info = await admin.cluster_info()
    rows: list[list[Any]] = []
    for cluster, names in sorted(info.cluster_addr_table.items()):
        for name in sorted(names) if only in (None, cluster) else []:
            for number, address in sorted(info.broker_addr_table[name].broker_addrs.items()):
                try:
                    state = await admin.runtime_info(address)
                except RocketMQError:  # a broker that does not answer is listed all the same
                    state = {}
                row = [cluster, name, int(number), address]
                rows.append(row + (_more_columns(state) if more else _columns(state)))
    first = ["Cluster Name", "Broker Name", "BID", "Addr"]
    usual = ["Version", "InTPS", "OutTPS", "PCWait(ms)", "Hour", "SPACE", "ACTIVATED"]
    days = ["InTotalYest", "OutTotalYest", "InTotalToday", "OutTotalToday"]
    out.table([*first, *(days if more else usual)], rows)


def _columns(state: dict[str, str]) -> list[Any]:
    earliest = _number(state.get("earliestMessageTimeStamp"))
    hours = (time.time() - earliest / 1000) / 3600 if earliest > 0 else 0.0
    return [
        state.get("brokerVersionDesc", ""),
        _first(state.get("putTps")),
        _first(state.get("getTransferredTps")),
        int(_number(state.get("pageCacheLockTimeMills"))),
        round(hours, 2),
        state.get("commitLogDiskRatio", ""),
        state.get("brokerActive", ""),
    ]


def _more_columns(state: dict[str, str]) -> list[Any]:
    def between(kind: str, begin: str, end: str) -> int:
        return int(_number(state.get(f"msg{kind}Total{end}")) - _number(state.get(f"msg{kind}Total{begin}")))

    return [
        between("Put", "YesterdayMorning", "TodayMorning"),
        between("Get", "YesterdayMorning", "TodayMorning"),
        between("Put", "TodayMorning", "TodayNow"),
        between("Get", "TodayMorning", "TodayNow"),
    ]


def _first(text: str | None) -> float:
    return _number(text.split()[0]) if text and text.split() else 0.0


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


@commands.add("brokerStatus")
@_broker
@_cluster
async def broker_status(admin: Admin, out: Output, *, broker: str | None, cluster: str | None) -> None:
    """Show a broker's state, with RocketMQ's names."""
    one_of(broker, cluster)
    for address in await admin.addresses(broker=broker, cluster=cluster, masters_only=False):
        state = dict(sorted((await admin.runtime_info(address)).items()))
        out.record({"brokerAddr": address, **state} if cluster else state)


@commands.add("getBrokerConfig")
@_broker
@_cluster
async def get_config(admin: Admin, out: Output, *, broker: str | None, cluster: str | None) -> None:
    """Show a broker's configuration."""
    one_of(broker, cluster)
    for address in await admin.addresses(broker=broker, cluster=cluster, masters_only=False):
        out.say(f"============{address}============")
        out.record(dict(sorted((await admin.broker_config(address)).items())))


@commands.add("updateBrokerConfig")
@_broker
@_cluster
@click.option("-k", "--key", required=True, help="The name of the option.")
@click.option("-v", "--value", required=True, help="Its new value.")
@click.option("-a", "--updateAllBroker", "slaves", is_flag=True, help="With -c: slaves too.")
async def update_config(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, key: str, value: str, slaves: bool
) -> None:
    """Change a broker's configuration at run time."""
    one_of(broker, cluster)
    addresses = await admin.addresses(broker=broker, cluster=cluster, masters_only=not slaves)
    for address in addresses:
        await admin.update_broker_config(address, {key: value})
        out.say(f"update broker config success, {address}")
    if out.as_json:
        out.record({"key": key, "value": value, "brokers": addresses})


@commands.add("brokerConsumeStats")
@click.option("-b", "--brokerAddr", "broker", required=True, help="A broker's address.")
@click.option("-o", "--order", "orderly", type=bool, default=False, help="Only orderly groups.")
@click.option("-l", "--level", type=int, default=0, show_default=True, help="Only queues with a larger lag.")
@click.option("-t", "--timeoutMillis", "timeout", type=int, help="Accepted; has no effect.")
async def consume_stats(
    admin: Admin, out: Output, *, broker: str, orderly: bool, level: int, timeout: int | None
) -> None:
    """Show the progress of each group on a broker."""
    _ = timeout
    from trimq.client.admin.models import queue_table  # noqa: PLC0415 - needed only here

    answer = await admin.broker_consume_stats(broker, orderly=orderly)
    rows: list[list[Any]] = []
    for groups in answer.get("consumeStatsList") or []:
        for group, stats in groups.items():
            for one in stats:
                for queue, at in queue_table(one.get("offsetTable")).items():
                    lag = at["brokerOffset"] - at["consumerOffset"]
                    if lag > level or not level:
                        ends = [at["brokerOffset"], at["consumerOffset"], lag, show_time(at.get("lastTimestamp", 0))]
                        rows.append([queue.topic, group, queue.broker_name, queue.queue_id, *ends])
    columns = ["Topic", "Group", "Broker Name", "QID", "Broker Offset", "Consumer Offset", "Diff", "LastTime"]
    out.table(columns, sorted(rows, key=lambda row: tuple(row[:4])))
    out.say(f"\nDiff Total: {answer.get('totalDiff', 0)}")


@commands.add("haStatus")
@_broker
@_cluster
@click.option("-i", "--interval", type=int, help="Accepted; prints once all the same. For a loop use watch(1).")
async def ha_status(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, interval: int | None
) -> None:
    """Show a broker's replication state."""
    _ = interval
    one_of(broker, cluster)
    for address in await admin.addresses(broker=broker, cluster=cluster):
        out.record({"brokerAddr": address, **await admin.ha_status(address)})


async def _call_each(admin: Admin, out: Output, broker: str | None, cluster: str | None, method: str) -> None:
    """Calls a method of Admin for the address of each of the brokers."""
    addresses = await admin.addresses(broker=broker, cluster=cluster)
    for address in addresses:
        await getattr(admin, method)(address)
        out.say(f"success: {address}")
    if out.as_json:
        out.lines(addresses)


@commands.add("cleanExpiredCQ")
@_broker
@_cluster
async def clean_queues(admin: Admin, out: Output, *, broker: str | None, cluster: str | None) -> None:
    """Delete consume queues without a message in the commit log."""
    await _call_each(admin, out, broker, cluster, "clean_expired_queues")


@commands.add("cleanUnusedTopic")
@_broker
@_cluster
async def clean_topics(admin: Admin, out: Output, *, broker: str | None, cluster: str | None) -> None:
    """Delete the consume queues of deleted topics."""
    await _call_each(admin, out, broker, cluster, "clean_unused_topics")


@commands.add("deleteExpiredCommitLog")
@_broker
@_cluster
async def delete_expired(admin: Admin, out: Output, *, broker: str | None, cluster: str | None) -> None:
    """Delete expired commit log files now."""
    await _call_each(admin, out, broker, cluster, "delete_expired_commit_log")
