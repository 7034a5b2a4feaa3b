"""mqadmin: commands for policies."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import click

from trimq.client.admin import Admin
from trimq.client.admin.users import usable
from trimq.client.errors import UsageError
from trimq.client.mqadmin.shell import Commands, Output
from trimq.client.mqadmin.users import done, first_found, on_brokers, to_ask, to_change, words
from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    checked_policies,
    subject_of,
    username_of,
)

commands: Commands = Commands()

F = TypeVar("F", bound=Callable[..., Any])

_COLUMNS = ("Subject", "PolicyType", "Resource", "Actions", "SourceIp", "Decision")
_subject = click.option("-s", "--subject", "subject", required=True, help="User:NAME.")


def actions_of(text: str) -> tuple[Action, ...]:
    """The actions of an option. Raises UsageError for an unknown one."""
    found = []
    for word in words(text):
        action = Action.of(word)
        if action is None:
            raise UsageError(f"{word!r} is no action: there are {', '.join(known.value for known in Action)}")
        found.append(action)
    return tuple(found)


def subject_text(text: str) -> str:
    """A subject as brokers write it. Raises UsageError for another kind than User:NAME."""
    return subject_of(usable(lambda: username_of(text.strip())))


def _policies(function: F) -> F:
    for option in (
        click.option("-d", "--decision", type=click.Choice(["Allow", "Deny"], case_sensitive=False), required=True),
        click.option("-i", "--sourceIp", "source_ips", help="Only from these addresses or networks, by commas."),
        click.option("-a", "--actions", "actions", required=True, help="Pub,Sub,Create,Update,Delete,Get,List or All."),
        click.option(
            "-r",
            "--resources",
            "resources",
            required=True,
            help="Topic:NAME, Group:NAME or Cluster:NAME, by commas; NAME* is a prefix, Topic:* all topics, * all.",
        ),
        _subject,
        on_brokers,
    ):
        function = option(function)
    return function


def _acl(subject: str, resources: str, actions: str, source_ips: str | None, decision: str) -> Acl:
    """The entries that the options mean, checked as the broker does."""
    found = Decision.of(decision)
    assert found is not None, "click has checked it"
    granted, addresses = actions_of(actions), tuple(words(source_ips))
    entries = tuple(
        PolicyEntry(usable(partial(Resource.parse, word)), granted, found, addresses) for word in words(resources)
    )
    policies = usable(lambda: checked_policies((Policy(PolicyType.CUSTOM, entries),)))
    return Acl(subject_text(subject), policies)


@commands.add("createAcl")
@_policies
async def create_acl(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, subject: str, **policies: Any
) -> None:
    """Allow or deny a user actions on resources, on a broker or on each of a cluster."""
    acl = _acl(subject, **policies)
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.create_acl(address, acl)
        out.say(f"create acl to {address} success.")
    done(out, changed)


@commands.add("updateAcl")
@_policies
async def update_acl(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, subject: str, **policies: Any
) -> None:
    """Change what a user is allowed or denied: the entries for these resources are replaced, others stay."""
    acl = _acl(subject, **policies)
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.update_acl(address, acl)
        out.say(f"update acl to {address} success.")
    done(out, changed)


@commands.add("deleteAcl")
@on_brokers
@_subject
@click.option("-r", "--resources", "resource", help="Only the entry for this resource. Default: all policies.")
async def delete_acl(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, subject: str, resource: str | None
) -> None:
    """Delete a user's policies, or the entry for a resource."""
    subject = subject_text(subject)
    changed = await to_change(admin, broker, cluster)
    for address in changed:
        await admin.delete_acl(address, subject, resource)
        out.say(f"delete acl to {address} success.")
    done(out, changed)


@commands.add("getAcl")
@on_brokers
@_subject
async def get_acl(admin: Admin, out: Output, *, broker: str | None, cluster: str | None, subject: str) -> None:
    """Show a user's policies: of a cluster those of the first master that has any."""
    subject = subject_text(subject)
    found = await first_found(await to_ask(admin, broker, cluster), lambda address: admin.acl(address, subject))
    _print(out, [found] if found is not None else [])


@commands.add("listAcl")
@on_brokers
@click.option("-s", "--subject", "subject", help="Only subjects with this in their names.")
@click.option("-r", "--resource", "resource", help="Only resources with this in their names.")
async def list_acl(
    admin: Admin, out: Output, *, broker: str | None, cluster: str | None, subject: str | None, resource: str | None
) -> None:
    """List policies: of a cluster those of the first master that has any."""
    addresses = await to_ask(admin, broker, cluster)
    found = await first_found(addresses, lambda address: admin.acls(address, subject, resource))
    _print(out, found or [])


def _print(out: Output, acls: list[Acl]) -> None:
    out.table(_COLUMNS, (row for acl in acls for row in _rows(acl, as_json=out.as_json)))


def _rows(acl: Acl, *, as_json: bool) -> Iterator[list[Any]]:
    for policy in acl.policies:
        for entry in policy.entries:
            lists: list[Any] = [[action.value for action in entry.actions], list(entry.source_ips)]
            if not as_json:
                lists = [", ".join(values) for values in lists]
            yield [acl.subject, policy.policy_type.value, entry.resource.key, *lists, entry.decision.value]


@commands.add("copyAcl")
@click.option("-f", "--fromBroker", "source", required=True, help="The address of the broker to copy from.")
@click.option("-t", "--toBroker", "target", required=True, help="The address of the broker to copy to.")
@click.option("-s", "--subjects", "subjects", help="Only of these, User:NAME, separated by commas.")
async def copy_acl(admin: Admin, out: Output, *, source: str, target: str, subjects: str | None) -> None:
    """Copy policies to another broker, which must have the users: see copyUser. Its other entries stay."""
    if subjects:
        names = [subject_text(word) for word in words(subjects)]
        found = [acl for name in names if (acl := await admin.acl(source, name)) is not None]
    else:
        found = await admin.acls(source)
    for acl in found:
        if await admin.acl(target, acl.subject) is None:
            await admin.create_acl(target, acl)
        else:
            await admin.update_acl(target, acl)
        out.say(f"copy acl of {acl.subject} from {source} to {target} success.")
