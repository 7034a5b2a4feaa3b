"""How a rule of the table of permissions reads the topics and groups of a request.

The names are read as the handlers read them, by the same typed headers and bodies: what is checked is what is served.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec import Struct

from trimq.protocol.auth.model import Action, Resource
from trimq.protocol.body import decode_json
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.topic_rules import RETRY_PREFIX

CANNOT_READ: Final = "parse authorization context error."


class Need(NamedTuple):
    """Access to a resource: one of ``actions`` has to be allowed."""

    resource: Resource
    actions: tuple[Action, ...]


Rule = Callable[[RemotingCommand, str], Iterable[Need]]
"""What a request needs; the text is the name of the own cluster. Raises RemotingError for what cannot be read."""

PUB: Final = (Action.PUB,)
SUB: Final = (Action.SUB,)
CREATE: Final = (Action.CREATE,)
UPDATE: Final = (Action.UPDATE,)
DELETE: Final = (Action.DELETE,)
GET: Final = (Action.GET,)
LIST: Final = (Action.LIST,)


def on_topic(name: str | None, actions: tuple[Action, ...]) -> Need:
    """A need of a topic. A retry topic stands for its group: to send to it is what the group's members do."""
    if name is None or not name.strip():
        raise RemotingError(ResponseCode.NO_PERMISSION, CANNOT_READ)
    if name.startswith(RETRY_PREFIX):
        return on_group(name.removeprefix(RETRY_PREFIX), SUB if actions == PUB else actions)
    return Need(Resource.topic(name), actions)


def on_group(name: str | None, actions: tuple[Action, ...]) -> Need:
    """A need of a consumer group."""
    if name is None or not name.strip():
        raise RemotingError(ResponseCode.NO_PERMISSION, CANNOT_READ)
    return Need(Resource.group(name.removeprefix(RETRY_PREFIX)), actions)


def consumed(topic: str | None, group: str | None, on_topics: tuple[Action, ...], on: tuple[Action, ...]) -> list[Need]:
    """What a member of ``group`` needs in ``topic``. Its own retry topic needs nothing else; others' are refused."""
    if topic is not None and topic.startswith(RETRY_PREFIX):
        own = on_group(group, on)
        if topic.removeprefix(RETRY_PREFIX) != own.resource.name:
            text = f"the topic {topic} is not the retry topic of the group {group}."
            raise RemotingError(ResponseCode.NO_PERMISSION, text)
        return [own]
    return [on_topic(topic, on_topics), on_group(group, on)]


class Named(NamedTuple):
    """The attribute of a header that names a topic or a group."""

    name: str
    make: Callable[[str | None, tuple[Action, ...]], Need]
    actions: tuple[Action, ...]
    optional: bool = False


def topic_field(actions: tuple[Action, ...], name: str = "topic", *, optional: bool = False) -> Named:
    """A topic's name in the attribute ``name``. ``optional``: without one nothing is needed."""
    return Named(name, on_topic, actions, optional)


def group_field(actions: tuple[Action, ...], name: str = "group", *, optional: bool = False) -> Named:
    """The same of a consumer group."""
    return Named(name, on_group, actions, optional)


@dataclass(frozen=True, eq=False)
class ByNames:
    """A rule that reads ``attributes`` of a header and nothing else: requests with the same names need the same.

    ``of`` is what requests with these names need, in the order of ``attributes``. Raises RemotingError.
    """

    kind: type[Struct]
    attributes: tuple[str, ...]
    of: Callable[[tuple[str | None, ...]], Iterable[Need]]

    def __call__(self, command: RemotingCommand, _cluster: str) -> Iterable[Need]:
        """See Rule."""
        header = command.header(self.kind)
        return self.of(tuple([getattr(header, name) for name in self.attributes]))


def of_fields(kind: type[Struct], *fields: Named) -> Rule:
    """The topics and groups that a header names."""

    def of(names: tuple[str | None, ...]) -> Iterator[Need]:
        for field, name in zip(fields, names, strict=True):
            if not (field.optional and not (name and name.strip())):
                yield field.make(name, field.actions)

    return ByNames(kind, tuple([field.name for field in fields]), of)


def of_member(
    kind: type[Struct],
    on_topics: tuple[Action, ...],
    on: tuple[Action, ...],
    *,
    topic: str = "topic",
    group: str = "consumer_group",
) -> Rule:
    """The topic and the consumer group in a header."""
    return ByNames(kind, (topic, group), lambda names: consumed(names[0], names[1], on_topics, on))


MOST_BODY: Final = 2 * 1024 * 1024
MOST_LENIENT: Final = 64 * 1024
"""Bytes of a body whose topics and groups are checked; those of one that is not standard JSON, which takes 2 us a byte.

The body is read before it is known whether its sender may do anything: one of 16 MB would take up to 30 s, in which
nothing is served.
"""


def of_body(kind: type[Any], read: Callable[[Any], Iterable[Need]]) -> Rule:
    """The topics and groups in a JSON body."""

    def rule(command: RemotingCommand, _cluster: str) -> Iterable[Need]:
        size = len(command.body)
        if size > MOST_BODY:
            text = f"the body may have {MOST_BODY} bytes while authorization is on: send it in several requests"
            raise RemotingError(ResponseCode.NO_PERMISSION, text)
        return read(decode_json(command.body, kind, lenient=size <= MOST_LENIENT))

    return rule


def always(*found: Need) -> Rule:
    """The same for every request."""

    def rule(_command: RemotingCommand, _cluster: str) -> Iterable[Need]:
        return found

    return rule


def of_cluster(actions: tuple[Action, ...]) -> Rule:
    """The own cluster, whatever cluster the request names."""

    def rule(_command: RemotingCommand, cluster: str) -> list[Need]:
        return [Need(Resource.cluster(cluster), actions)]

    return rule
