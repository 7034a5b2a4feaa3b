"""Queues for clients that leave the rebalancing to the broker: QUERY_ASSIGNMENT (400), and the modes: 401, 402.

Every answer says PULL: there is no POP here. A group whose stored mode is POP, set here or by the broker that had the
store before, pulls: its clients get their shares of the queues as any group of pulling clients does.

Source: RocketMQ's QueryAssignmentProcessor.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from trimq.broker.config import BrokerConfig
from trimq.broker.processors.common import invalid, no_such_topic
from trimq.broker.services.consumers import ConsumerManager
from trimq.broker.services.groups import SubscriptionGroupManager
from trimq.broker.services.message_request_mode import POP, PULL, MessageRequestModeManager
from trimq.broker.services.topic_routes import QueueRoute, TopicRouteInfoManager
from trimq.broker.services.topics import TopicConfigManager
from trimq.protocol.body import (
    MessageQueueAssignment,
    QueryAssignmentRequestBody,
    QueryAssignmentResponseBody,
    SetMessageRequestModeRequestBody,
    decode_json,
    encode_json,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.json_pieces import BATCH, list_pieces, object_pieces
from trimq.protocol.topic_rules import RETRY_PREFIX, topic_problem
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.server.connection import Connection
from trimq.remoting.server.handler_table import HandlerTable
from trimq.remoting.server.handlers import Outcome
from trimq.remoting.server.large_reply import in_slices

_BROADCASTING: Final = "BROADCASTING"
_CLUSTERING: Final = "CLUSTERING"
_MODELS: Final = frozenset({_BROADCASTING, _CLUSTERING, "LITE_SELECTIVE"})
_UNCHANGED: Final = encode_json(QueryAssignmentResponseBody())
"""Without assignments the client keeps the queues that it has."""


def average(index: int, clients: int, queues: int) -> range:
    """The numbers of the queues of one client: consecutive ones, the first clients get one more (AVG)."""
    size, rest = divmod(queues, clients)
    start = index * size + min(index, rest)
    return range(start, start + size + (index < rest))


def circle(index: int, clients: int, queues: int) -> range:
    """The numbers of the queues of one client if they are dealt to the clients in turn (AVG_BY_CIRCLE)."""
    return range(index, queues, clients)


STRATEGIES: Final[dict[str, Callable[[int, int, int], range]]] = {"AVG": average, "AVG_BY_CIRCLE": circle}
"""The strategies that a client may name."""


class QueryAssignmentProcessor:
    """Answers clients with their queues, and keeps the modes of groups."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        consumers: ConsumerManager,
        routes: TopicRouteInfoManager,
        modes: MessageRequestModeManager,
    ) -> None:
        self._configuration = configuration
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._routes = routes
        self._modes = modes

    def register(self, table: HandlerTable) -> None:
        """Register the handlers of this family."""
        table.register(RequestCode.QUERY_ASSIGNMENT, self.query_assignment)
        table.register(RequestCode.SET_MESSAGE_REQUEST_MODE, self.set_mode)
        table.register(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, self.all_modes)

    def query_assignment(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """QUERY_ASSIGNMENT (400): a client's queues of a topic, to be pulled.

        The body of the reply is ``{}``, which leaves the client as it is, if the group has no member here, the topic
        has no route, or the broker does not know the strategy. A client that is no member of the group gets no queue.
        INVALID_PARAMETER for a name that no topic can have, SYSTEM_ERROR for an unknown messageModel.
        """
        body = decode_json(command.body, QueryAssignmentRequestBody)
        if body.message_model not in _MODELS:
            raise RemotingError(ResponseCode.SYSTEM_ERROR, f"messageModel is {body.message_model[:32]!r}")
        if (problem := topic_problem(body.topic)) is not None:
            raise invalid(problem)
        if body.message_model == _CLUSTERING and not self._can_share(body):
            return command.reply(body=_UNCHANGED)
        known, route = self._routes.known(body.topic)
        if known:
            return self._answer(connection, command, body, route)
        command.drop_buffers()
        return self._when_asked(connection, command, body)

    def _can_share(self, body: QueryAssignmentRequestBody) -> bool:
        """Whether the group's queues can be shared: checked before a name server is asked."""
        if not self._configuration.section(BrokerConfig).server_load_balancer_enable:
            return True
        return (
            self._consumers.group(body.consumer_group) is not None
            and body.strategy_name in STRATEGIES
            and bool(body.client_id.strip())
        )

    async def _when_asked(
        self, connection: Connection, command: RemotingCommand, body: QueryAssignmentRequestBody
    ) -> Any:
        return self._answer(connection, command, body, await self._routes.find(body.topic))

    def _answer(
        self,
        connection: Connection,
        command: RemotingCommand,
        body: QueryAssignmentRequestBody,
        route: QueueRoute | None,
    ) -> Outcome:
        numbers = self._numbers(body, route)
        if route is None or numbers is None:
            return command.reply(body=_UNCHANGED)
        rows = _rows(route, numbers)
        if len(numbers) <= BATCH:  # clients send this at every rebalance: reply without starting a task
            return command.reply(body=encode_json(QueryAssignmentResponseBody(message_queue_assignments=list(rows))))
        return in_slices(connection, command, object_pieces(("messageQueueAssignments", list_pieces(rows))))

    def _numbers(self, body: QueryAssignmentRequestBody, route: QueueRoute | None) -> range | None:
        """The numbers of the client's queues; None if its queues cannot be known."""
        if route is None or body.message_model not in (_BROADCASTING, _CLUSTERING):
            return None
        balances = self._configuration.section(BrokerConfig).server_load_balancer_enable
        if body.message_model == _BROADCASTING or not balances:
            return range(route.total)
        info = self._consumers.group(body.consumer_group)
        if info is None or not route.total:  # the last member may have left while the name server was asked
            return None
        ids = info.client_ids()
        if body.client_id not in ids:
            return range(0)
        index = sum(other < body.client_id for other in ids)
        return STRATEGIES[body.strategy_name](index, len(ids), route.total)

    async def set_mode(self, _connection: Connection, command: RemotingCommand) -> RemotingCommand:
        """SET_MESSAGE_REQUEST_MODE (401): store how a group gets the messages of a topic.

        NO_PERMISSION for a retry topic, TOPIC_NOT_EXIST, SUBSCRIPTION_GROUP_NOT_EXIST, INVALID_PARAMETER for a mode
        that is neither PULL nor POP, SYSTEM_BUSY beyond maxOffsetGroups modes.
        """
        body = decode_json(command.body, SetMessageRequestModeRequestBody)
        if body.topic.startswith(RETRY_PREFIX):
            raise RemotingError(
                ResponseCode.NO_PERMISSION, f"{body.topic} is a retry topic: these are always pulled, set no mode"
            )
        if self._topics.get(body.topic) is None:
            raise no_such_topic(body.topic)
        if self._groups.find(body.consumer_group) is None:
            raise self._groups.missing(body.consumer_group)
        if body.mode not in (PULL, POP):
            raise invalid(f"the mode is {body.mode[:32]!r}; it must be PULL or POP")
        self._modes.set(body)
        await self._modes.persisted()
        return command.reply()

    async def all_modes(self, connection: Connection, command: RemotingCommand) -> Outcome:
        """GET_ALL_MESSAGE_REQUEST_MODE (402): all stored modes."""
        return await in_slices(connection, command, self._modes.pieces())


def _rows(route: QueueRoute, numbers: range) -> Iterator[MessageQueueAssignment]:
    return (MessageQueueAssignment(message_queue=queue, mode=PULL) for queue in route.queues(numbers))
