"""Which entry of a user's policies decides about a request.

Of the entries of Custom that are about the resource, about at least one of the requested actions and about the source
address, the most precise decides: a full name, then the longest prefix, then all of the type (``Topic:*``), then ``*``;
at equal rank one that denies. Only if there is none, those of Default are looked at in the same way. If there is none
either, the request is refused. An entry about other actions is no obstacle, even if its resource is more precise.

Source: RocketMQ's AclAuthorizationHandler.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trimq.protocol.auth.model import (
    Acl,
    Action,
    Decision,
    PolicyEntry,
    PolicyType,
    Resource,
    ResourcePattern,
    ResourceType,
    address_of,
    subject_of,
)

NO_MATCH = "no matched policies."
DENIED = "the decision is deny."


class Verdict(NamedTuple):
    """The decision, the entry that made it and its policy's type (None: no entry did), and the reason of a refusal."""

    allowed: bool
    entry: PolicyEntry | None
    policy_type: PolicyType | None
    reason: str


class Considered(NamedTuple):
    """An entry, and what it has to do with a request: ``why`` is a text for people."""

    policy_type: PolicyType
    entry: PolicyEntry
    matches: bool
    decides: bool
    why: str


def decide(acl: Acl | None, resource: Resource, actions: Sequence[Action], source_ip: str) -> Verdict:
    """Whether a user with these policies may do one of ``actions`` to ``resource`` from ``source_ip``."""
    if acl is not None:
        source = address_of(source_ip)
        for policy_type in PolicyType:
            found = [
                entry
                for entry in acl.entries(policy_type)
                if entry.resource.covers(resource) and entry.has_one_of(actions) and entry.is_from(source)
            ]
            if found:
                best = min(found, key=_rank)
                allowed = best.decision is Decision.ALLOW
                return Verdict(allowed, best, policy_type, "" if allowed else DENIED)
    return Verdict(False, None, None, NO_MATCH)


def refusal(username: str, resource: Resource, source_ip: str, reason: str) -> str:
    """The remark of a refused request."""
    return f"{subject_of(username)} has no permission to access {resource.key} from {source_ip}, {reason}"


def explain(acl: Acl | None, resource: Resource, actions: Sequence[Action], source_ip: str) -> list[Considered]:
    """All entries, those that were compared first in front: what each has to do with the request, and which decides."""
    if acl is None:
        return []
    verdict = decide(acl, resource, actions, source_ip)
    return [
        _considered(verdict, policy_type, entry, resource, actions, source_ip)
        for policy_type in PolicyType
        for entry in sorted(acl.entries(policy_type), key=_rank)
    ]


def _considered(
    verdict: Verdict,
    policy_type: PolicyType,
    entry: PolicyEntry,
    resource: Resource,
    actions: Sequence[Action],
    source_ip: str,
) -> Considered:
    problems = list(_problems(entry, resource, actions, source_ip))
    decides = verdict.policy_type is policy_type and verdict.entry is entry
    if problems:
        why = "; ".join(problems)
    elif decides:
        why = f"decides: {entry.decision.value}"
    elif policy_type is verdict.policy_type:
        why = f"matches, but {_named(verdict)} is more precise, or denies at equal rank"
    else:
        why = f"matches, but Default counts only if no Custom entry matches: {_named(verdict)} does"
    return Considered(policy_type, entry, not problems, decides, why)


def _problems(entry: PolicyEntry, resource: Resource, actions: Iterable[Action], source_ip: str) -> Iterator[str]:
    if not entry.resource.covers(resource):
        yield f"is not about {resource.key}"
    if not entry.has_one_of(actions):
        asked = " or ".join(action.value for action in actions)
        yield f"is not about {asked}: no obstacle and no help"
    if not entry.is_from(address_of(source_ip)):
        yield f"is not about requests from {source_ip}"


def _named(verdict: Verdict) -> str:
    assert verdict.entry is not None, "an entry matches"
    return f"{verdict.entry.decision.value} {verdict.entry.resource.key}"


def _rank(entry: PolicyEntry) -> tuple[int, int, bool]:
    """The order of precision: the entry with the smallest rank decides."""
    resource = entry.resource
    if resource.resource_type is ResourceType.ANY:
        place, length = 3, 0
    elif resource.pattern is ResourcePattern.ANY:
        place, length = 2, 0
    elif resource.pattern is ResourcePattern.PREFIXED:
        place, length = 1, len(resource.name)
    else:
        place, length = 0, 0
    return place, -length, entry.decision is Decision.ALLOW
