"""``mqadmin``: administration from a shell, with RocketMQ's subcommand names and flags, tables, and ``--json``.

Exit status: 0 done, 1 a server refused or the outcome is not known, 2 the command line is wrong, 3 nobody answers.
The commands' modules are imported when one of their commands runs, so that the start takes a fraction of a second.
"""

from importlib import import_module
from typing import Final

try:
    import click
except ImportError:
    raise ImportError("mqadmin needs more than the SDK: pip install 'trimq[broker]'") from None

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "addWritePerm": ("namesrv", "Routes tell clients again to send to a broker."),
    "allocateMQ": ("topics", "How a topic's queues would be shared by clients."),
    "brokerConsumeStats": ("brokers", "How far each group is on a broker."),
    "brokerStatus": ("brokers", "A broker's state."),
    "cleanExpiredCQ": ("brokers", "Delete queues that have nothing in the commit log any more."),
    "cleanUnusedTopic": ("brokers", "Delete queues whose topic is gone."),
    "cloneGroupOffset": ("groups", "Give a group the offsets of another."),
    "clusterList": ("brokers", "Clusters and their brokers."),
    "consumeMessage": ("reading", "Read messages of a topic, its queues or a time."),
    "consumerConnection": ("clients", "The members of a consumer group, and what they subscribe to."),
    "consumerProgress": ("groups", "How far a group is; without -g, all groups."),
    "consumerStatus": ("clients", "What consumers tell of themselves."),
    "deleteExpiredCommitLog": ("brokers", "Delete commit-log files that have expired, now."),
    "deleteKvConfig": ("namesrv", "Delete a value at the name servers."),
    "deleteSubGroup": ("groups", "Delete a consumer group."),
    "deleteTopic": ("topics", "Delete a topic and its messages."),
    "getBrokerConfig": ("brokers", "A broker's configuration."),
    "getConsumerConfig": ("groups", "A consumer group's settings."),
    "getNamesrvConfig": ("namesrv", "The name servers' configuration."),
    "haStatus": ("brokers", "How a broker replicates."),
    "printMsg": ("reading", "Print the messages of a topic."),
    "printMsgByQueue": ("reading", "Print the messages of one queue."),
    "producer": ("clients", "All producers that a broker knows."),
    "producerConnection": ("clients", "The members of a producer group."),
    "queryCq": ("messages", "Entries of a consume queue."),
    "queryMsgById": ("messages", "A message by its offset id."),
    "queryMsgByKey": ("messages", "Messages by key."),
    "queryMsgByOffset": ("messages", "A message by queue and offset."),
    "queryMsgByUniqueKey": ("messages", "A message by its producer's id."),
    "resetOffsetByTime": ("groups", "Set a group's offsets to a time."),
    "sendMessage": ("messages", "Send a message."),
    "sendMsgStatus": ("messages", "Send test messages to a broker and tell how long they take."),
    "setConsumeMode": ("groups", "Say whether a group pulls or pops a topic."),
    "skipAccumulatedMessage": ("groups", "Let a group pass over what has accumulated."),
    "statsAll": ("topics", "Rates of all topics and their groups."),
    "topicClusterList": ("topics", "The clusters that have a topic."),
    "topicList": ("topics", "All topics."),
    "topicRoute": ("topics", "Where a topic is."),
    "topicStatus": ("topics", "The bounds of a topic's queues."),
    "updateBrokerConfig": ("brokers", "Change a broker's configuration while it runs."),
    "updateKvConfig": ("namesrv", "Store a value at the name servers."),
    "updateNamesrvConfig": ("namesrv", "Change the name servers' configuration while they run."),
    "updateOrderConf": ("namesrv", "Get, put or delete the order configuration of a topic."),
    "updateSubGroup": ("groups", "Make or change a consumer group."),
    "updateTopic": ("topics", "Make or change a topic."),
    "updateTopicPerm": ("topics", "Change a topic's permission."),
    "wipeWritePerm": ("namesrv", "Routes tell clients not to send to a broker any more."),
}
"""Name to the module that has it, and what it does."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; None for a name that is not there."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"trimq.client.mqadmin.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.commands.get_command(ctx, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list for --help, without importing any of them."""
        _ = ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trimq")
def main() -> None:
    """Administration of RocketMQ and TriMQ clusters."""


@main.command("help", hidden=True)
@click.argument("name", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """``mqadmin help updateTopic``, as RocketMQ has it."""
    parent = ctx.parent or ctx
    command = main.get_command(parent, name) if name else main
    if command is None:
        raise click.UsageError(f"no command {name}")
    with click.Context(command, info_name=name or parent.info_name, parent=parent if name else None) as about:
        click.echo(command.get_help(about))
