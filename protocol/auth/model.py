"""Users and policies of ACL 2.0: their types, the rules for what is allowed in them, and how changes merge.

The texts and codes of errors are RocketMQ's, since mqadmin shows them. Names of types and actions are read in
any case and written as RocketMQ writes them. Source: its modules auth and common (Resource, Policy, Acl, User).
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Self

from trimq.protocol.auth.stamp import MARK
from trimq.protocol.codes import ResponseCode
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC, TRANS_HALF_TOPIC

MOST_NAME_BYTES: Final = 255
MOST_SECRET_BYTES: Final = 1024
MOST_RESOURCE_BYTES: Final = 512
MOST_ENTRIES: Final = 1000
"""Entries of all policies of one user."""
MOST_SOURCE_IPS: Final = 100
"""Source addresses of one entry."""

_MAPPED_BITS: Final = 96
"""Of an IPv4 address in IPv6 form (::ffff:10.0.0.1), in front of the IPv4 address."""

OF_ALL_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC, TRANS_HALF_TOPIC, TRANS_CHECK_MAX_TIME_TOPIC})
"""Topics that have messages of all topics: delayed ones, timed ones, halves. Who reads them reads what is denied to him
in a message's own topic, so an entry has to name them in full: ``Topic:*`` and ``*`` do not cover them."""

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Named(Enum):
    """The values are RocketMQ's names."""

    @classmethod
    def of(cls, text: Any) -> Self | None:
        """The member with this name in any case; None if there is none."""
        if not isinstance(text, str):
            return None
        wanted = text.strip().lower()
        return next((member for member in cls if member.value.lower() == wanted), None)


class UserType(_Named):
    """A Super may do everything: no policy of his is looked at."""

    SUPER = "Super"
    NORMAL = "Normal"


class UserStatus(_Named):
    """A disabled user is refused."""

    ENABLE = "enable"
    DISABLE = "disable"


class Action(_Named):
    """What a request does to a resource. ANY is only asked for, never granted: one action of any kind is enough."""

    ALL = "All"
    ANY = "Any"
    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


class ResourceType(_Named):
    """The kind of a resource. ANY: everything."""

    ANY = "Any"
    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


class ResourcePattern(_Named):
    """How a resource's name is compared."""

    ANY = "ANY"
    LITERAL = "LITERAL"
    PREFIXED = "PREFIXED"


class Decision(_Named):
    """What an entry says."""

    ALLOW = "Allow"
    DENY = "Deny"


class PolicyType(_Named):
    """The entries of Default are only looked at if none of Custom decides."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


@dataclass(frozen=True, slots=True)
class User:
    """A user. ``password`` is the secret key in clear: it is in no text of this object."""

    username: str
    password: str = field(repr=False)
    user_type: UserType = UserType.NORMAL
    user_status: UserStatus = UserStatus.ENABLE

    @property
    def is_super(self) -> bool:
        """Whether everything is allowed."""
        return self.user_type is UserType.SUPER

    @property
    def is_enabled(self) -> bool:
        """Whether requests of this user are looked at."""
        return self.user_status is UserStatus.ENABLE


@dataclass(frozen=True, slots=True)
class UserChange:
    """The fields of a user that a request gives; None: not given."""

    password: str | None = field(default=None, repr=False)
    user_type: UserType | None = None
    user_status: UserStatus | None = None

    def applied_to(self, user: User) -> User:
        """The user with the given fields."""
        return replace(
            user,
            password=user.password if self.password is None else self.password,
            user_type=self.user_type or user.user_type,
            user_status=self.user_status or user.user_status,
        )


@dataclass(frozen=True, slots=True)
class Resource:
    """What a request is about, or what an entry covers. ``name`` is empty if the pattern is ANY."""

    resource_type: ResourceType
    pattern: ResourcePattern
    name: str = ""

    @classmethod
    def topic(cls, name: str) -> "Resource":
        """One topic, as a request names it."""
        return cls(ResourceType.TOPIC, ResourcePattern.LITERAL, name)

    @classmethod
    def group(cls, name: str) -> "Resource":
        """One consumer group, as a request names it."""
        return cls(ResourceType.GROUP, ResourcePattern.LITERAL, name)

    @classmethod
    def cluster(cls, name: str) -> "Resource":
        """One cluster."""
        return cls(ResourceType.CLUSTER, ResourcePattern.LITERAL, name)

    @classmethod
    def every(cls, resource_type: ResourceType) -> "Resource":
        """All resources of a type: what a request that lists them is about."""
        return cls(resource_type, ResourcePattern.ANY)

    @classmethod
    def parse(cls, text: Any) -> "Resource":
        """The resource of an entry: ``Topic:name``, ``Topic:prefix*``, ``Topic:*``, ``*``.

        Raises RemotingError(NO_PERMISSION). A * before the end is refused: RocketMQ reads ``Topic:a*b*`` as
        ``Topic:a*``.
        """
        if not isinstance(text, str) or not text.strip():
            raise refused("The resource is null.")
        text = text.strip()
        if text == "*":
            return cls(ResourceType.ANY, ResourcePattern.ANY)
        kind, _, name = text.partition(":")
        resource_type = ResourceType.of(kind)
        if resource_type is None or resource_type is ResourceType.ANY:
            raise refused(
                f"The resource type is unknown: {_shown(text)}; "
                "expected Cluster:, Topic:, Group:, Namespace: or * alone."
            )
        if name == "*":
            return cls(resource_type, ResourcePattern.ANY)
        front = name.removesuffix("*")
        if not front:
            raise refused(f"The resource name is empty: {_shown(text)}; {resource_type.value}:* means all.")
        if "*" in front:
            raise refused(f"The resource name is illegal: {_shown(text)}; * is allowed at its end only.")
        _check_text(front, "The resource name", MOST_RESOURCE_BYTES)
        return cls(resource_type, ResourcePattern.PREFIXED if front != name else ResourcePattern.LITERAL, front)

    @property
    def key(self) -> str:
        """The text that ``parse`` reads."""
        if self.resource_type is ResourceType.ANY:
            return "*"
        tail = "" if self.pattern is ResourcePattern.LITERAL else "*"
        return f"{self.resource_type.value}:{self.name}{tail}"

    def covers(self, asked: "Resource") -> bool:
        """Whether an entry with this resource is about the one that a request asks for."""
        if asked.name in OF_ALL_TOPICS and asked.resource_type is ResourceType.TOPIC:
            return self == asked
        if self.resource_type is ResourceType.ANY:
            return True
        if self.resource_type is not asked.resource_type:
            return False
        if self.pattern is ResourcePattern.ANY:
            return True
        if asked.pattern is not ResourcePattern.LITERAL:
            return False
        return asked.name == self.name if self.pattern is ResourcePattern.LITERAL else asked.name.startswith(self.name)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A decision about the actions on a resource, from everywhere or from some addresses (``source_ips``)."""

    resource: Resource
    actions: tuple[Action, ...]
    decision: Decision
    source_ips: tuple[str, ...] = ()

    def has_one_of(self, actions: Iterable[Action]) -> bool:
        """Whether the entry is about at least one of the actions."""
        own = self.actions
        return Action.ALL in own or any(action is Action.ANY or action in own for action in actions)

    def is_from(self, source: IPAddress | None) -> bool:
        """Whether the entry is about requests from this address.

        An address that is not known (None) is refused by every entry that asks for one.
        """
        if not self.source_ips:
            return True
        if source is None:
            return self.decision is Decision.DENY
        return any(source in network_of(text) for text in self.source_ips)


@dataclass(frozen=True, slots=True)
class Policy:
    """The entries of one type, at most one for each resource."""

    policy_type: PolicyType
    entries: tuple[PolicyEntry, ...]


@dataclass(frozen=True, slots=True)
class Acl:
    """The policies of a subject (``User:name``), at most one of each type."""

    subject: str
    policies: tuple[Policy, ...] = ()

    @property
    def username(self) -> str:
        """The name in the subject."""
        return username_of(self.subject)

    def entries(self, policy_type: PolicyType) -> tuple[PolicyEntry, ...]:
        """The entries of a type; empty if there are none."""
        return next((policy.entries for policy in self.policies if policy.policy_type is policy_type), ())

    def merged(self, policies: Iterable[Policy]) -> "Acl":
        """With these policies too: an entry replaces the one of its type and resource; the last of several counts.

        Raises RemotingError(NO_PERMISSION) if there are more than MOST_ENTRIES then.
        """
        tables: dict[PolicyType, dict[Resource, PolicyEntry]] = {}
        for policy in (*self.policies, *policies):
            table = tables.setdefault(policy.policy_type, {})
            for entry in policy.entries:
                table[entry.resource] = entry
        count = sum(map(len, tables.values()))
        if count > MOST_ENTRIES:
            raise refused(f"{self.subject} would have {count} policy entries; {MOST_ENTRIES} are allowed.")
        return Acl(self.subject, tuple(Policy(kind, tuple(table.values())) for kind, table in tables.items()))

    def without(self, policy_type: PolicyType, resource: Resource) -> "Acl | None":
        """Without the entry of this type and resource; None if nothing is left."""
        kept = tuple(
            Policy(policy.policy_type, entries)
            for policy in self.policies
            if (
                entries := tuple(
                    entry
                    for entry in policy.entries
                    if policy.policy_type is not policy_type or entry.resource != resource
                )
            )
        )
        return Acl(self.subject, kept) if kept else None

    def about(self, text: str) -> "Acl | None":
        """Only the entries whose resource has this text in its key; None if there are none."""
        kept = tuple(
            Policy(policy.policy_type, entries)
            for policy in self.policies
            if (entries := tuple(entry for entry in policy.entries if text in entry.resource.key))
        )
        return Acl(self.subject, kept) if kept else None


_SUBJECT: Final = "User:"


def subject_of(username: str) -> str:
    """The subject of a user."""
    return _SUBJECT + username


def username_of(subject: Any) -> str:
    """The user's name in a subject. Raises RemotingError if it is another kind of subject or has no name."""
    if not isinstance(subject, str) or not subject.strip():
        raise RemotingError(ResponseCode.INVALID_PARAMETER, "The subject is blank")
    kind, _, name = subject.partition(":")
    if kind.strip().lower() != "user":
        raise RemotingError(
            ResponseCode.SYSTEM_ERROR, f"The subject type is unknown: {_shown(subject)}; expected User:."
        )
    return checked_username(name)


def checked_username(name: Any) -> str:
    """The name, if a user may have it: 1 to MOST_NAME_BYTES bytes of printable text. Raises RemotingError."""
    if not isinstance(name, str) or not name.strip():
        raise RemotingError(ResponseCode.INVALID_PARAMETER, "The username is blank")
    _check_text(name, "The username", MOST_NAME_BYTES)
    if name.startswith(MARK):  # what this user signs would be taken for a stamp
        raise RemotingError(ResponseCode.INVALID_PARAMETER, f"The username must not begin with {MARK}")
    return name


def checked_secret(text: Any) -> str:
    """The password, if a user may have it: 1 to MOST_SECRET_BYTES bytes. Raises RemotingError, without the password."""
    if not isinstance(text, str) or not text.strip():
        raise refused("password can not be blank")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise refused("password is not a valid text") from None
    if size > MOST_SECRET_BYTES:
        raise refused(f"password is longer than {MOST_SECRET_BYTES} bytes")
    return text


def checked_policies(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies, if they may be stored. Raises RemotingError."""
    if not policies:
        raise RemotingError(ResponseCode.SYSTEM_ERROR, "The body of acl is null, or it has no policies.")
    if sum(len(policy.entries) for policy in policies) > MOST_ENTRIES:
        raise refused(f"more than {MOST_ENTRIES} policy entries")
    for policy in policies:
        if not policy.entries:
            raise refused("The policy entries is empty.")
        for entry in policy.entries:
            _check_entry(entry)
    return tuple(policies)


def _check_entry(entry: PolicyEntry) -> None:
    if not entry.actions:
        raise refused("The actions is empty.")
    if Action.ANY in entry.actions:
        raise refused("The actions can not be Any.")
    if len(entry.source_ips) > MOST_SOURCE_IPS:
        raise refused(f"more than {MOST_SOURCE_IPS} source ips for {entry.resource.key}")
    for text in entry.source_ips:
        if not text.strip():
            raise refused("The source ip is empty.")
        try:
            network_of(text)
        except ValueError:
            raise refused(
                f"The source ip is invalid. Expected an address or a CIDR block instead of {_shown(text)}"
            ) from None


@lru_cache(maxsize=4096)
def network_of(text: str) -> IPNetwork:
    """The network of a source address: one address or a CIDR block. Raises ValueError.

    One of IPv4 addresses in IPv6 form is that of the IPv4 addresses, as in ``address_of``.
    """
    network = ipaddress.ip_network(text.strip(), strict=False)
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if mapped is None or network.prefixlen < _MAPPED_BITS:
        return network
    return ipaddress.IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))


@lru_cache(maxsize=4096)
def address_of(text: str) -> IPAddress | None:
    """The address that a connection comes from; None if the text is none.

    An IPv4 address in IPv6 form, as a socket for both has it, is the IPv4 address. A zone (``%eth0``) is left out.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def refused(text: str) -> RemotingError:
    """The error for what is not allowed."""
    return RemotingError(ResponseCode.NO_PERMISSION, text)


def _check_text(text: str, what: str, most: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RemotingError(ResponseCode.INVALID_PARAMETER, f"{what} is not a valid text") from None
    if size > most:
        raise RemotingError(ResponseCode.INVALID_PARAMETER, f"{what} is longer than {most} bytes")
    if not text.isprintable():
        raise RemotingError(ResponseCode.INVALID_PARAMETER, f"{what} has characters that cannot be printed")


def _shown(text: str) -> str:
    """Text of a request in an error: short, printable."""
    return ascii(text[:64])[1:-1]
