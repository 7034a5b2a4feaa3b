"""mqadmin: which policy decides about an access, and users of RocketMQ 4's access control (ACL 1.0)."""

from pathlib import Path

import click

from trimq.client.admin import Admin
from trimq.client.admin.users import usable
from trimq.client.errors import UsageError
from trimq.client.mqadmin.acls import actions_of, subject_text
from trimq.client.mqadmin.shell import Commands, Output, one_of
from trimq.client.mqadmin.users import on_brokers, to_change
from trimq.protocol.auth.decision import decide, explain, refusal
from trimq.protocol.auth.migrate import Migration
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Resource,
    ResourceType,
    User,
    UserChange,
    address_of,
    username_of,
)
from trimq.protocol.auth.rules import on_topic
from trimq.protocol.topic_rules import RETRY_PREFIX

commands: Commands = Commands()

_NOWHERE = "an address that is not given"


@commands.add("explainAccess")
@click.option("-b", "--brokerAddr", "broker", required=True, help="The broker's address.")
@click.option("-s", "--subject", "subject", required=True, help="User:NAME.")
@click.option("-r", "--resource", "resource", required=True, help="Topic:NAME, Group:NAME or Cluster:NAME.")
@click.option(
    "-a", "--actions", "actions", required=True, help="What is asked for; of several, by commas, one suffices."
)
@click.option("-i", "--sourceIp", "source_ip", help="The address that the request comes from.")
async def explain_access(
    admin: Admin, out: Output, *, broker: str, subject: str, resource: str, actions: str, source_ip: str | None
) -> None:
    """Show whether a broker permits a user something, and which policy entry decides why.

    It looks at the user and its policies as the broker has them now, and decides by the same rules.
    """
    subject = subject_text(subject)
    asked, wanted = usable(lambda: Resource.parse(resource)), actions_of(actions)
    if not wanted:
        raise UsageError("give at least one action with -a")
    if asked.resource_type is ResourceType.TOPIC and asked.name.startswith(RETRY_PREFIX):
        asked, wanted = usable(lambda: on_topic(asked.name, wanted))  # as the broker's gate: it stands for its group
    if source_ip is not None and address_of(source_ip) is None:
        raise UsageError(f"-i {source_ip}: expected an IP address")
    source = source_ip or _NOWHERE
    user = await admin.user(broker, username_of(subject))
    acl = await admin.acl(broker, subject) if user is not None else None
    allowed, reason = _verdict(subject, user, acl, asked, wanted, source)
    out.record(
        {
            "Subject": subject,
            "Resource": asked.key,
            "Actions": ", ".join(action.value for action in wanted),
            "SourceIp": source_ip or "",
            "Allowed": allowed,
            "Reason": reason,
        }
    )
    if user is not None and not user.is_super:
        out.table(
            ["PolicyType", "Resource", "Decision", "Matches", "Decides", "Why"],
            (
                [
                    considered.policy_type.value,
                    considered.entry.resource.key,
                    considered.entry.decision.value,
                    considered.matches,
                    considered.decides,
                    considered.why,
                ]
                for considered in explain(acl, asked, wanted, source)
            ),
        )


def _verdict(
    subject: str, user: User | None, acl: Acl | None, asked: Resource, wanted: tuple[Action, ...], source: str
) -> tuple[bool, str]:
    if user is None:
        return False, f"there is no {subject} on this broker: make it with mqadmin createUser"
    if not user.is_enabled:
        return False, f"{subject} is disabled: mqadmin updateUser -s enable"
    if user.is_super:
        return True, f"{subject} is a Super: no policy is looked at"
    verdict = decide(acl, asked, wanted, source)
    if not verdict.allowed:
        return False, refusal(user.username, asked, source, verdict.reason)
    assert verdict.entry is not None, "an entry allows it"
    return True, f"the entry for {verdict.entry.resource.key} allows it"


@commands.add("migrateAuth")
@on_brokers
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), help="A plain_acl.yml.")
@click.option("-d", "--directory", "directory", type=click.Path(path_type=Path), help="A conf/acl with such files.")
@click.option("--dry-run", is_flag=True, help="Only show what would be made; no broker is needed.")
async def migrate_auth(
    admin: Admin,
    out: Output,
    *,
    broker: str | None,
    cluster: str | None,
    file: Path | None,
    directory: Path | None,
    dry_run: bool,
) -> None:
    """Make users and policies of the accounts in RocketMQ 4's files, and say what is left out.

    A user that a broker has already is not changed. An admin becomes a Super; lists of addresses that need no check
    have no counterpart. The files need the extra trimq[security] (PyYAML).
    """
    if file is None and directory is None:
        raise click.UsageError("give -f, -d or both")
    if not dry_run:
        one_of(broker, cluster)
    migration = _read(file, directory)
    for line in migration.dropped:
        click.echo(f"Note: {line}", err=True)
    rows: list[list[str]] = []
    for address in [""] if dry_run else await to_change(admin, broker, cluster):
        for username, migrated in migration.users.items():
            result = "would be made" if dry_run else await _make(admin, address, migrated.user, migrated.acl)
            entries = sum(len(policy.entries) for policy in migrated.acl.policies) if migrated.acl is not None else 0
            rows.append([address, username, migrated.user.user_type.value, str(entries), result])
    out.table(["Broker", "UserName", "UserType", "Entries", "Result"], rows)


def _read(file: Path | None, directory: Path | None) -> Migration:
    from trimq.remoting.auth.acl_v1_files import AclFilesError, files_in, read_files  # noqa: PLC0415 - rarely used

    try:
        return read_files([*([file] if file is not None else []), *(files_in(directory) if directory else [])])
    except AclFilesError as error:
        raise UsageError(str(error)) from None


async def _make(admin: Admin, address: str, user: User, acl: Acl | None) -> str:
    if await admin.user(address, user.username) is not None:
        return "exists: not changed"
    await admin.create_user(address, user.username, UserChange(user.password, user.user_type, user.user_status))
    if acl is not None:
        await admin.create_acl(address, acl)
    return "made"
