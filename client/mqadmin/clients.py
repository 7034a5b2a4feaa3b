"""mqadmin: commands for connected clients."""

from typing import Any

import click

from trimq.client.admin import Admin
from trimq.client.errors import RocketMQError
from trimq.client.mqadmin.shell import Commands, Output, show_time

commands: Commands = Commands()

_group = click.option("-g", "--consumerGroup", "group", required=True, help="The consumer group.")


@commands.add("consumerConnection")
@_group
@click.option("-b", "--brokerAddr", "broker", help="Accepted; has no effect.")
async def consumer_connection(admin: Admin, out: Output, *, group: str, broker: str | None) -> None:
    """List the members of a consumer group and their subscriptions."""
    _ = broker
    found = await admin.consumer_connection(group)
    out.table(
        ["ClientId", "ClientAddr", "Language", "Version"],
        ([one.client_id, one.client_addr, one.language, one.version] for one in found.connection_set),
    )
    out.say("\nBelow is subscription:")
    out.table(
        ["Topic", "SubExpression"],
        ([topic, one.sub_string] for topic, one in sorted(found.subscription_table.items())),
    )
    out.say("")
    out.record(
        {
            "ConsumeType": found.consume_type,
            "MessageModel": found.message_model,
            "ConsumeFromWhere": found.consume_from_where,
        }
    )


@commands.add("producerConnection")
@click.option("-g", "--producerGroup", "group", required=True, help="The producer group.")
@click.option("-t", "--topic", required=True, help="A topic to which it sends.")
async def producer_connection(admin: Admin, out: Output, *, group: str, topic: str) -> None:
    """List the members of a producer group that are connected to a broker of the topic."""
    found = await admin.producer_connection(group, topic)
    out.table(
        ["ClientId", "ClientAddr", "Language", "Version"],
        ([one.client_id, one.client_addr, one.language, one.version] for one in found.connection_set),
    )


@commands.add("producer")
@click.option("-b", "--broker", "broker", required=True, help="A broker's address.")
async def producers(admin: Admin, out: Output, *, broker: str) -> None:
    """List all producers that are connected to a broker."""
    rows: list[list[Any]] = []
    for group, members in sorted((await admin.producers(broker)).items()):
        rows += [
            [group, one.client_id, one.remote_ip, one.language, one.version, show_time(one.last_update_timestamp)]
            for one in members
        ]
    out.table(["Group", "ClientId", "Address", "Language", "Version", "LastUpdate"], rows)


@commands.add("consumerStatus")
@_group
@click.option("-i", "--clientId", "client", help="Only this client.")
@click.option("-b", "--brokerAddr", "broker", help="Accepted; has no effect.")
@click.option("-s", "--jstack", "stacks", is_flag=True, help="Add the stacks of its threads (Java only).")
async def consumer_status(
    admin: Admin, out: Output, *, group: str, client: str | None, broker: str | None, stacks: bool
) -> None:
    """Show the state that consumers report: settings, queues and rates."""
    _ = broker
    names = [client] if client else [one.client_id for one in (await admin.consumer_connection(group)).connection_set]
    for name in sorted(names):
        try:
            info = await admin.running_info(group, name, stacks=stacks)
        except RocketMQError as error:  # one of many does not answer, or has just left: go on with the others
            if client:
                raise
            out.say(f"{name}: {error}")
            continue
        out.say(f"#Client {name}")
        out.record({"ClientId": name, **dict(sorted(info.properties.items()))})
        out.table(
            ["Topic", "Broker Name", "QID", "ConsumerOffset", "Cached"],
            (
                [queue.topic, queue.broker_name, queue.queue_id, at.get("commitOffset"), at.get("cachedMsgCount")]
                for queue, at in sorted(info.queues.items())
            ),
        )
        out.table(
            ["Topic", "ConsumeRT", "ConsumeOKTPS", "ConsumeFailedTPS", "ConsumeFailedMsgs"],
            (
                [
                    topic,
                    at.get("consumeRT"),
                    at.get("consumeOKTPS"),
                    at.get("consumeFailedTPS"),
                    at.get("consumeFailedMsgs"),
                ]
                for topic, at in sorted(info.status.items())
            ),
        )
        if info.stacks:
            out.say(info.stacks)
