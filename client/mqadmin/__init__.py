"""``mqadmin``: administration from a shell, with RocketMQ's subcommand names and flags, tables, and ``--json``.

Exit status: 0 success, 1 a server refused or the outcome is unknown, 2 the command line is wrong, 3 no server answered.
A module is imported only when one of its commands runs, so that the start takes a fraction of a second.
"""

from importlib import import_module
from typing import Any, Final

try:
    import click
except ImportError:
    raise ImportError("mqadmin needs more than the SDK: pip install 'trimq[broker]'") from None

from trimq.client.mqadmin import credentials_options, tls_options

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "addWritePerm": ("namesrv", "Restore a broker's write permission in all routes."),
    "allocateMQ": ("topics", "Show how clients would share a topic's queues."),
    "brokerConsumeStats": ("brokers", "Show the progress of each group on a broker."),
    "brokerStatus": ("brokers", "Show a broker's state."),
    "cleanBrokerMetadata": ("controllers", "Let the controllers forget brokers that will not come back."),
    "cleanExpiredCQ": ("brokers", "Delete consume queues without a message in the commit log."),
    "cleanUnusedTopic": ("brokers", "Delete consume queues of deleted topics."),
    "cloneGroupOffset": ("groups", "Copy a group's offsets to another group."),
    "clusterList": ("brokers", "List clusters and their brokers."),
    "consumeMessage": ("reading", "Read messages of a topic, a queue or a period."),
    "consumerConnection": ("clients", "List the members of a consumer group and their subscriptions."),
    "consumerProgress": ("groups", "Show a group's progress; without -g, that of all groups."),
    "consumerStatus": ("clients", "Show the state that consumers report."),
    "copyAcl": ("acls", "Copy policies to another broker."),
    "copyAuth": ("users", "Copy a broker's users and policies to a file for name servers and controllers."),
    "copyUser": ("users", "Copy users to another broker."),
    "createAcl": ("acls", "Allow or deny a user actions on resources."),
    "createUser": ("users", "Create a user."),
    "deleteAcl": ("acls", "Delete a user's policies, or the entry for a resource."),
    "deleteExpiredCommitLog": ("brokers", "Delete expired commit log files now."),
    "deleteKvConfig": ("namesrv", "Delete a key at the name servers."),
    "deleteSubGroup": ("groups", "Delete a consumer group."),
    "deleteTopic": ("topics", "Delete a topic and its messages."),
    "deleteUser": ("users", "Delete a user and its policies."),
    "electMaster": ("controllers", "Make a broker the master, by the controllers."),
    "explainAccess": ("access", "Show which policy entry decides about an access, and why."),
    "getAcl": ("acls", "Show a user's policies."),
    "getBrokerConfig": ("brokers", "Show a broker's configuration."),
    "getBrokerEpoch": ("controllers", "Show the epochs of brokers' logs: which master has written what."),
    "getConsumerConfig": ("groups", "Show a consumer group's settings."),
    "getControllerConfig": ("controllers", "Show the configuration of controllers."),
    "getControllerMetaData": ("controllers", "Show the controllers, and which of them leads."),
    "getNamesrvConfig": ("namesrv", "Show the name servers' configuration."),
    "getSyncStateSet": ("controllers", "Show the master, and which brokers have every acknowledged message."),
    "getUser": ("users", "Show a user."),
    "halfMessages": ("transactions", "List half messages of transactions that have not been ended."),
    "haStatus": ("brokers", "Show a broker's replication state."),
    "listAcl": ("acls", "List policies."),
    "listUser": ("users", "List users."),
    "migrateAuth": ("access", "Make users and policies of RocketMQ 4's access control files."),
    "pendingTimers": ("timers", "List a topic's timed messages that are not delivered yet."),
    "printMsg": ("reading", "Print the messages of a topic."),
    "printMsgByQueue": ("reading", "Print the messages of one queue."),
    "producer": ("clients", "List all producers that are connected to a broker."),
    "producerConnection": ("clients", "List the members of a producer group."),
    "queryCq": ("messages", "Show units of a consume queue."),
    "queryMsgById": ("messages", "Find a message by its offset message id."),
    "queryMsgByKey": ("messages", "Find messages by key."),
    "queryMsgByOffset": ("messages", "Find a message by queue and offset."),
    "queryMsgByUniqueKey": ("messages", "Find a message by the id that its producer gave it."),
    "queryMsgTraceById": ("traces", "Show what producers and consumers have reported about a message."),
    "resetOffsetByTime": ("groups", "Set a group's offsets to a time."),
    "resumeCheckHalfMessage": ("transactions", "Let a half message be checked again from the start."),
    "sendMessage": ("messages", "Send a message."),
    "sendMsgStatus": ("messages", "Send test messages to a broker and show how long each takes."),
    "setConsumeMode": ("groups", "Set whether a group pulls or pops a topic."),
    "skipAccumulatedMessage": ("groups", "Let a group skip all messages stored so far."),
    "statsAll": ("topics", "Show the rates of all topics and their groups."),
    "switchRole": ("roles", "Show what would be lost if a slave became the master now, and how to do it."),
    "topicClusterList": ("topics", "List the clusters that have a topic."),
    "topicList": ("topics", "List all topics."),
    "topicRoute": ("topics", "Show a topic's route."),
    "topicStatus": ("topics", "Show the first and next offset of a topic's queues."),
    "updateAcl": ("acls", "Change what a user is allowed or denied."),
    "updateBrokerConfig": ("brokers", "Change a broker's configuration at run time."),
    "updateControllerConfig": ("controllers", "Change the configuration of controllers at run time."),
    "updateKvConfig": ("namesrv", "Store a value for a key at the name servers."),
    "updateNamesrvConfig": ("namesrv", "Change the name servers' configuration at run time."),
    "updateOrderConf": ("namesrv", "Get, put or delete a topic's order configuration."),
    "updateSubGroup": ("groups", "Create or change a consumer group."),
    "updateTopic": ("topics", "Create or change a topic."),
    "updateTopicPerm": ("topics", "Change a topic's permission."),
    "updateUser": ("users", "Change a user's password, type, or whether it is enabled."),
    "wipeWritePerm": ("namesrv", "Remove a broker's write permission from all routes."),
}
"""The module and the short help of each command, by name."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is requested."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with a name; None if there is none."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"trimq.client.mqadmin.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.commands.get_command(ctx, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands for --help, without importing their modules."""
        _ = ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trimq")
@tls_options.tls_options
@credentials_options.credentials_options
@click.pass_context
def main(ctx: click.Context, /, **options: Any) -> None:
    """Administration of RocketMQ and TriMQ clusters."""
    tls_options.keep(ctx, options)
    credentials_options.keep(ctx, options)


@main.command("help", hidden=True)
@click.argument("name", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """``mqadmin help updateTopic``, as in RocketMQ."""
    parent = ctx.parent or ctx
    command = main.get_command(parent, name) if name else main
    if command is None:
        raise click.UsageError(f"no command {name}")
    with click.Context(command, info_name=name or parent.info_name, parent=parent if name else None) as about:
        click.echo(command.get_help(about))
