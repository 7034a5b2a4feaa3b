"""mqadmin: commands for name servers."""

import click

from trimq.client.admin import Admin
from trimq.client.errors import UsageError
from trimq.client.mqadmin.shell import Commands, Output

commands: Commands = Commands()

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"

_name = click.option("-b", "--brokerName", "broker", required=True, help="A broker's name.")
_namespace = click.option("-s", "--namespace", required=True, help="The namespace of the key.")
_key = click.option("-k", "--key", required=True, help="The key.")
_value = click.option("-v", "--value", required=True, help="The value.")


@commands.add("wipeWritePerm")
@_name
async def wipe_write_perm(admin: Admin, out: Output, *, broker: str) -> None:
    """Remove a broker's write permission from all routes, so that clients stop sending to it."""
    counts = await admin.wipe_write_perm(broker)
    rows = ([broker, server, count] for server, count in counts.items())
    out.table(["Broker Name", "Name Server", "Topics Wiped"], rows)


@commands.add("addWritePerm")
@_name
async def add_write_perm(admin: Admin, out: Output, *, broker: str) -> None:
    """Restore a broker's write permission in all routes after wipeWritePerm."""
    counts = await admin.add_write_perm(broker)
    rows = ([broker, server, count] for server, count in counts.items())
    out.table(["Broker Name", "Name Server", "Topics Added"], rows)


@commands.add("getNamesrvConfig")
async def get_config(admin: Admin, out: Output) -> None:
    """Show the configuration of each name server."""
    for address, config in sorted((await admin.namesrv_config()).items()):
        out.say(f"============{address}============")
        out.record(dict(sorted(config.items())))


@commands.add("updateNamesrvConfig")
@_key
@_value
async def update_config(admin: Admin, out: Output, *, key: str, value: str) -> None:
    """Change the configuration of all name servers at run time."""
    await admin.update_namesrv_config({key: value})
    out.record({"key": key, "value": value})


@commands.add("updateKvConfig")
@_namespace
@_key
@_value
async def update_kv(admin: Admin, out: Output, *, namespace: str, key: str, value: str) -> None:
    """Store a value for a key at all name servers."""
    await admin.put_kv(namespace, key, value)
    out.say("create or update kv config to namespace success.")
    if out.as_json:
        out.record({"namespace": namespace, "key": key, "value": value})


@commands.add("deleteKvConfig")
@_namespace
@_key
async def delete_kv(admin: Admin, out: Output, *, namespace: str, key: str) -> None:
    """Delete a key at all name servers."""
    await admin.delete_kv(namespace, key)
    out.say("delete kv config from namespace success.")
    if out.as_json:
        out.record({"namespace": namespace, "key": key})


@commands.add("updateOrderConf")
@click.option("-t", "--topic", required=True, help="The topic.")
@click.option("-v", "--orderConf", "value", help="For put: the queues of each broker, as broker-a:4;broker-b:4.")
@click.option("-m", "--method", type=click.Choice(["get", "put", "delete"]), required=True, help="The operation.")
async def order_config(admin: Admin, out: Output, *, topic: str, value: str | None, method: str) -> None:
    """Get, put or delete a topic's order configuration."""
    if method == "put":
        if value is None:
            raise click.UsageError("-m put needs -v")
        await admin.put_kv(ORDER_NAMESPACE, topic, value)
    elif method == "delete":
        await admin.delete_kv(ORDER_NAMESPACE, topic)
    else:
        value = await admin.get_kv(ORDER_NAMESPACE, topic)
        if value is None:
            raise UsageError(f"the topic {topic} has no order configuration", code=22)
    out.record({"topic": topic, "orderConf": value, "method": method})
