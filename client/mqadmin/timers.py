"""mqadmin: timed messages that are not delivered yet."""

import time

import click

from trimq.client.admin import Admin
from trimq.client.mqadmin.shell import Commands, Output, show_time

commands: Commands = Commands()


@commands.add("pendingTimers")
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("-c", "--maxNum", "most", type=click.IntRange(1), default=1000, show_default=True, help="Most messages.")
async def pending(admin: Admin, out: Output, *, topic: str, most: int) -> None:
    """List a topic's timed messages that are not delivered yet, the next one first."""
    now = time.time() * 1000
    found = await admin.pending_timers(topic, max_messages=most)
    out.table(
        ["Due", "In s", "Broker Name", "QID", "MsgId", "Keys", "Bytes", "Stored", "Rolls", "Recalled"],
        (
            [
                show_time(timer.due),
                round((timer.due - now) / 1000),
                timer.queue.broker_name,
                timer.queue.queue_id,
                timer.message.message_id,
                " ".join(timer.message.keys),
                len(timer.message.body),
                show_time(timer.message.head.store_timestamp),
                timer.rolls,
                timer.recalled,
            ]
            for timer in found
        ),
    )
