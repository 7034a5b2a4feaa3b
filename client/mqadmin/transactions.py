"""mqadmin: commands for transactions."""

import time
from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.mqadmin.shell import Commands, Output, one_of, show_time

commands: Commands = Commands()


@commands.add("halfMessages")
@click.option("-b", "--brokerAddr", "broker", help="A broker's address.")
@click.option("-c", "--clusterName", "cluster", help="A cluster's name: all its brokers.")
@click.option("-g", "--producerGroup", "group", help="Only those of this producer group.")
@click.option("-t", "--topic", help="Only those for this topic.")
async def half_messages(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, group: str | None, topic: str | None
) -> None:
    """List half messages of transactions that have not been ended."""
    one_of(broker, cluster)
    rows: list[list[Any]] = []
    now = time.time()
    for address in await admin.addresses(broker=broker, cluster=cluster):
        async for half in admin.pending_halves(address):
            if group in (None, half.group) and topic in (None, half.topic):
                age, prepared = round(max(0.0, now - half.prepared)), show_time(half.prepared * 1000)
                place = [address, half.queue_offset, half.topic, half.group]
                rows.append([*place, half.checks, age, prepared, half.message_id, half.offset_message_id])
    out.table(
        ["Broker", "Offset", "Topic", "Producer Group", "Checks", "Age(s)", "Prepared", "MsgId", "OffsetMsgId"], rows
    )


@commands.add("resumeCheckHalfMessage")
@click.option("-i", "--msgId", "message_id", required=True, help="The offset message id of the half message.")
@click.option("-t", "--topic", help="Accepted; has no effect.")
async def resume(admin: Admin, out: Output, *, message_id: str, topic: str | None) -> None:
    """Let a half message be checked again from the start, also one that was checked too often."""
    _ = topic
    await admin.resume_check(message_id)
    out.say(f"{message_id} is checked again.")
