"""What each request code needs: one table of all codes of brokers, name servers and controllers.

The names of topics and groups are read as the handlers read them, by the same typed headers and bodies: what is checked
is what is served. A code without an entry is denied. Differences from RocketMQ 5.5.0: docs/security.md.

Source: the annotations of RocketMQ's request headers, and its DefaultAuthorizationContextBuilder.
"""

from collections.abc import Iterator
from typing import Final

from trimq.protocol.auth.model import Resource, ResourceType
from trimq.protocol.auth.rules import (
    CANNOT_READ,
    CREATE,
    DELETE,
    GET,
    LIST,
    PUB,
    SUB,
    UPDATE,
    ByNames,
    Need,
    Rule,
    always,
    consumed,
    group_field,
    of_body,
    of_cluster,
    of_fields,
    of_member,
    on_group,
    on_topic,
    topic_field,
)
from trimq.protocol.body import (
    CheckClientRequestBody,
    HeartbeatData,
    LockBatchBody,
    QueryAssignmentRequestBody,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    TopicConfigList,
)
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.headers import admin, client, controller, namesrv, offset, pull, query, send, transaction
from trimq.protocol.headers.base import Header
from trimq.protocol.topic_rules import TRANS_HALF_TOPIC

Code = RequestCode

ALL_TOPICS: Final = Resource.every(ResourceType.TOPIC)
ALL_GROUPS: Final = Resource.every(ResourceType.GROUP)

MOST_NEEDS: Final = 10_000
"""Of one request. A frame could name a million topics: to check them would take seconds, in which nothing is served."""

TO_CLIENTS: Final = frozenset(
    {
        Code.CHECK_TRANSACTION_STATE,
        Code.NOTIFY_CONSUMER_IDS_CHANGED,
        Code.RESET_CONSUMER_CLIENT_OFFSET,
        Code.GET_CONSUMER_STATUS_FROM_CLIENT,
        Code.PUSH_REPLY_MESSAGE_TO_CLIENT,
        Code.NOTIFY_UNSUBSCRIBE_LITE,
    }
)
"""Requests that only brokers send, to clients. They have no entry."""

ADMINISTRATION: Final = frozenset(
    {
        Code.UPDATE_BROKER_CONFIG,
        Code.UPDATE_AND_CREATE_TOPIC,
        Code.UPDATE_AND_CREATE_TOPIC_LIST,
        Code.UPDATE_AND_CREATE_STATIC_TOPIC,
        Code.DELETE_TOPIC_IN_BROKER,
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        Code.DELETE_SUBSCRIPTIONGROUP,
        Code.INVOKE_BROKER_TO_RESET_OFFSET,
        Code.CLONE_GROUP_OFFSET,
        Code.RESUME_CHECK_HALF_MESSAGE,
        Code.UPDATE_AND_GET_GROUP_FORBIDDEN,
        Code.SET_MESSAGE_REQUEST_MODE,
        Code.CLEAN_EXPIRED_CONSUMEQUEUE,
        Code.CLEAN_UNUSED_TOPIC,
        Code.DELETE_EXPIRED_COMMITLOG,
        Code.SWITCH_TIMER_ENGINE,
        Code.POP_ROLLBACK,
        Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG,
        Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG,
        Code.SET_COMMITLOG_READ_MODE,
        Code.PUT_KV_CONFIG,
        Code.DELETE_KV_CONFIG,
        Code.WIPE_WRITE_PERM_OF_BROKER,
        Code.ADD_WRITE_PERM_OF_BROKER,
        Code.DELETE_TOPIC_IN_NAMESRV,
        Code.REGISTER_TOPIC_IN_NAMESRV,
        Code.UPDATE_NAMESRV_CONFIG,
        Code.UPDATE_CONTROLLER_CONFIG,
        Code.CLEAN_BROKER_DATA,
        Code.CONTROLLER_ELECT_MASTER,
        Code.ADD_BROKER,
        Code.REMOVE_BROKER,
        Code.REGISTER_FILTER_SERVER,
        Code.REGISTER_MESSAGE_FILTER_CLASS,
        Code.TRIGGER_LITE_DISPATCH,
        Code.AUTH_CREATE_USER,
        Code.AUTH_UPDATE_USER,
        Code.AUTH_DELETE_USER,
        Code.AUTH_GET_USER,
        Code.AUTH_LIST_USER,
        Code.AUTH_CREATE_ACL,
        Code.AUTH_UPDATE_ACL,
        Code.AUTH_DELETE_ACL,
        Code.AUTH_GET_ACL,
        Code.AUTH_LIST_ACL,
    }
)
"""What an administrator sends. One that was recorded on a plain connection could be sent again."""

BETWEEN_SERVERS: Final = frozenset(
    {
        Code.REGISTER_BROKER,
        Code.UNREGISTER_BROKER,
        Code.BROKER_HEARTBEAT,
        Code.QUERY_DATA_VERSION,
        Code.NOTIFY_MIN_BROKER_ID_CHANGE,
        Code.EXCHANGE_BROKER_HA_INFO,
        Code.RESET_MASTER_FLUSH_OFFSET,
        Code.NOTIFY_BROKER_ROLE_CHANGED,
        Code.CONTROLLER_ALTER_SYNC_STATE_SET,
        Code.CONTROLLER_REGISTER_BROKER,
        Code.CONTROLLER_APPLY_BROKER_ID,
    }
)
"""What brokers, name servers and controllers send each other. These also change something."""


def is_calling_election(command: RemotingCommand) -> bool:
    """Whether a request of ADMINISTRATION is one between servers: 1002 of a broker whose master is not alive.

    It changes nothing while the master lives. One that designates the new master is an administrator's.
    """
    if command.code != Code.CONTROLLER_ELECT_MASTER:
        return False
    try:
        return not command.header(controller.ElectMasterRequestHeader).designate_elect
    except RemotingError:
        return False


def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    """What a request needs, without repetitions; all of it. None: a user is enough.

    ``cluster`` is the name of the own cluster: one in the request is not looked at. Raises RemotingError(NO_PERMISSION)
    for a code without an entry, for a request whose topics and groups cannot be read or are blank, and for one with
    more than MOST_NEEDS of them. The needs come one by one, so that the first that is refused ends the work.
    """
    rule = TABLE.get(command.code)
    if rule is None:
        raise RemotingError(
            ResponseCode.NO_PERMISSION, f"authorization context is empty: the request code {command.code} has no entry."
        )
    return _distinct(rule, command, cluster)


def _distinct(rule: Rule, command: RemotingCommand, cluster: str) -> Iterator[Need]:
    found: set[Need] = set()
    for need in _read(rule, command, cluster):
        if need in found:
            continue
        if len(found) >= MOST_NEEDS:
            raise RemotingError(
                ResponseCode.NO_PERMISSION,
                f"a request may name {MOST_NEEDS} topics and groups: send more of them in several requests",
            )
        found.add(need)
        yield need


def _read(rule: Rule, command: RemotingCommand, cluster: str) -> Iterator[Need]:
    try:
        yield from rule(command, cluster)
    except RemotingError as error:
        if error.code == ResponseCode.NO_PERMISSION:
            raise
        raise RemotingError(ResponseCode.NO_PERMISSION, CANNOT_READ) from None


# rules of single codes


def _heartbeat(data: HeartbeatData) -> Iterator[Need]:
    """Producers need nothing: what they send is checked. A blank topic, which some clients send, gets no messages."""
    for consumer in data.consumer_data_set:
        yield on_group(consumer.group_name, SUB)
        for subscription in consumer.subscription_data_set:
            if subscription.topic.strip():
                yield from consumed(subscription.topic, consumer.group_name, SUB, SUB)


def _locks(body: LockBatchBody) -> Iterator[Need]:
    yield on_group(body.consumer_group, SUB)
    for queue in body.mq_set:
        yield from consumed(queue.topic, body.consumer_group, SUB, SUB)


def _checked_subscription(body: CheckClientRequestBody) -> Iterator[Need]:
    yield on_group(body.group, SUB)
    if body.subscription_data is not None:
        yield from consumed(body.subscription_data.topic, body.group, SUB, SUB)


def _clone(command: RemotingCommand, _cluster: str) -> Iterator[Need]:
    """314. Without a topic it copies the offsets in every topic."""
    header = command.header(admin.CloneGroupOffsetRequestHeader)
    yield on_group(header.src_group, GET)
    yield on_group(header.dest_group, UPDATE)
    named = header.topic and header.topic.strip()
    yield on_topic(header.topic, UPDATE) if named else Need(ALL_TOPICS, UPDATE)


def _consume_stats(command: RemotingCommand, _cluster: str) -> Iterator[Need]:
    """208. The list of topics comes before the single topic, as in the handler; without both it is about the group."""
    header = command.header(admin.GetConsumeStatsRequestHeader)
    yield on_group(header.consumer_group, GET)
    named = [topic.strip() for topic in (header.topic_list or "").split(";") if topic.strip()]
    if not named and header.topic and header.topic.strip():
        named = [header.topic]
    for topic in named:
        yield on_topic(topic, GET)


def _correction(command: RemotingCommand, _cluster: str) -> Iterator[Need]:
    """308. The groups that are left out are not read, so only the compared one is needed."""
    header = command.header(admin.QueryCorrectionOffsetRequestHeader)
    yield on_topic(header.topic, GET)
    if header.compare_group.strip():
        yield on_group(header.compare_group, GET)


def _ended(names: tuple[str | None, ...]) -> Iterator[Need]:
    """37. RocketMQ 4's producers name no topic; those of 5 answer a check with that of all halves.

    Then nothing is needed here: the handler asks for the topic of the half in any case (remoting/auth/permit.py).
    """
    (topic,) = names
    if topic and topic.strip() and topic != TRANS_HALF_TOPIC:
        yield on_topic(topic, PUB)


class _TopicAndGroup(Header):
    """Topic and consumer group: the requests of POP consumers, which are not served."""

    topic: str
    consumer_group: str


_sends_v2 = of_fields(send.SendMessageRequestHeaderV2, topic_field(PUB))
_sends = of_fields(send.SendMessageRequestHeader, topic_field(PUB))
_pulls = of_member(pull.PullMessageRequestHeader, SUB, SUB)
_pops = of_member(_TopicAndGroup, SUB, SUB)
_topic_get = of_fields(admin.TopicRequestHeader, topic_field(GET))
_any_sub = always(Need(ALL_TOPICS, SUB), Need(ALL_GROUPS, SUB))

_NAMED: Final[dict[int, Rule]] = {
    # sending
    Code.SEND_MESSAGE: _sends,
    Code.SEND_MESSAGE_V2: _sends_v2,
    Code.SEND_BATCH_MESSAGE: _sends_v2,
    Code.SEND_REPLY_MESSAGE: _sends,
    Code.SEND_REPLY_MESSAGE_V2: _sends_v2,
    Code.RECALL_MESSAGE: of_fields(send.RecallMessageRequestHeader, topic_field(PUB)),
    Code.END_TRANSACTION: ByNames(transaction.EndTransactionRequestHeader, ("topic",), _ended),
    # consuming
    Code.PULL_MESSAGE: _pulls,
    Code.LITE_PULL_MESSAGE: _pulls,
    Code.CONSUMER_SEND_MSG_BACK: of_member(
        send.ConsumerSendMsgBackRequestHeader, SUB, SUB, topic="origin_topic", group="group"
    ),
    Code.HEART_BEAT: of_body(HeartbeatData, _heartbeat),
    Code.UNREGISTER_CLIENT: of_fields(
        client.UnregisterClientRequestHeader, group_field(SUB, "consumer_group", optional=True)
    ),
    Code.GET_CONSUMER_LIST_BY_GROUP: of_fields(
        client.GetConsumerListByGroupRequestHeader, group_field(SUB + GET, "consumer_group")
    ),
    Code.QUERY_CONSUMER_OFFSET: of_member(offset.QueryConsumerOffsetRequestHeader, SUB + GET, SUB + GET),
    Code.UPDATE_CONSUMER_OFFSET: of_member(offset.UpdateConsumerOffsetRequestHeader, SUB + UPDATE, SUB + UPDATE),
    Code.LOCK_BATCH_MQ: of_body(LockBatchBody, _locks),
    Code.UNLOCK_BATCH_MQ: of_body(LockBatchBody, _locks),
    Code.CHECK_CLIENT_CONFIG: of_body(CheckClientRequestBody, _checked_subscription),
    Code.QUERY_ASSIGNMENT: of_body(
        QueryAssignmentRequestBody, lambda body: consumed(body.topic, body.consumer_group, SUB, SUB)
    ),
    Code.SET_MESSAGE_REQUEST_MODE: of_body(
        SetMessageRequestModeRequestBody, lambda body: consumed(body.topic, body.consumer_group, SUB, UPDATE)
    ),
    Code.CONSUME_MESSAGE_DIRECTLY: of_member(client.ConsumeMessageDirectlyRequestHeader, SUB, SUB),
    Code.POP_MESSAGE: _pops,
    Code.ACK_MESSAGE: _pops,
    Code.PEEK_MESSAGE: _pops,
    Code.CHANGE_MESSAGE_INVISIBLETIME: _pops,
    Code.NOTIFICATION: _pops,
    Code.POLLING_INFO: of_member(_TopicAndGroup, GET, GET),
    Code.BATCH_ACK_MESSAGE: _any_sub,  # not served, so its body has no type here
    Code.POP_LITE_MESSAGE: _any_sub,
    Code.LITE_SUBSCRIPTION_CTL: _any_sub,
    Code.ACK_LITE_MESSAGE: _any_sub,
    # reading messages and positions
    Code.QUERY_MESSAGE: of_fields(query.QueryMessageRequestHeader, topic_field(SUB + GET)),
    Code.VIEW_MESSAGE_BY_ID: of_fields(query.ViewMessageRequestHeader, topic_field(GET)),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: of_fields(offset.SearchOffsetRequestHeader, topic_field(GET)),
    Code.GET_MAX_OFFSET: of_fields(offset.GetMaxOffsetRequestHeader, topic_field(GET)),
    Code.GET_MIN_OFFSET: of_fields(offset.GetMinOffsetRequestHeader, topic_field(GET)),
    Code.GET_EARLIEST_MSG_STORETIME: of_fields(offset.GetEarliestMsgStoretimeRequestHeader, topic_field(GET)),
    Code.GET_TOPIC_STATS_INFO: _topic_get,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _topic_get,
    Code.GET_TOPIC_CONFIG: _topic_get,
    Code.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: _topic_get,
    Code.GET_CONSUME_STATS: _consume_stats,
    Code.QUERY_CONSUME_TIME_SPAN: of_fields(
        admin.QueryConsumeTimeSpanRequestHeader, topic_field(GET), group_field(GET)
    ),
    Code.QUERY_CORRECTION_OFFSET: _correction,
    Code.QUERY_CONSUME_QUEUE: of_fields(
        admin.QueryConsumeQueueRequestHeader, topic_field(GET), group_field(GET, "consumer_group", optional=True)
    ),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: of_fields(
        admin.QuerySubscriptionByConsumerRequestHeader, topic_field(GET), group_field(GET)
    ),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: of_fields(
        client.GetConsumerStatusRequestHeader, topic_field(GET), group_field(GET)
    ),
    # topics and groups
    Code.UPDATE_AND_CREATE_TOPIC: of_fields(admin.CreateTopicRequestHeader, topic_field(CREATE)),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: of_body(
        TopicConfigList, lambda body: (on_topic(config.topic_name, CREATE) for config in body.topic_config_list)
    ),
    Code.UPDATE_AND_CREATE_STATIC_TOPIC: of_fields(admin.TopicRequestHeader, topic_field(CREATE)),
    Code.DELETE_TOPIC_IN_BROKER: of_fields(admin.TopicRequestHeader, topic_field(DELETE)),
    Code.RESUME_CHECK_HALF_MESSAGE: of_fields(transaction.ResumeCheckHalfMessageRequestHeader, topic_field(UPDATE)),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: of_body(
        SubscriptionGroupConfig, lambda config: [on_group(config.group_name, CREATE)]
    ),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: of_body(
        SubscriptionGroupList, lambda body: (on_group(config.group_name, CREATE) for config in body.group_config_list)
    ),
    Code.DELETE_SUBSCRIPTIONGROUP: of_fields(
        admin.DeleteSubscriptionGroupRequestHeader, group_field(DELETE, "group_name")
    ),
    Code.GET_CONSUMER_CONNECTION_LIST: of_fields(admin.ConsumerGroupRequestHeader, group_field(GET, "consumer_group")),
    Code.GET_CONSUMER_RUNNING_INFO: of_fields(
        client.GetConsumerRunningInfoRequestHeader, group_field(GET, "consumer_group")
    ),
    Code.QUERY_TOPICS_BY_CONSUMER: of_fields(admin.GroupRequestHeader, group_field(GET)),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: of_fields(admin.GroupRequestHeader, group_field(GET)),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: of_fields(
        client.ResetOffsetRequestHeader, topic_field(UPDATE), group_field(UPDATE)
    ),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: of_fields(
        admin.UpdateGroupForbiddenRequestHeader, topic_field(UPDATE), group_field(UPDATE)
    ),
    Code.CLONE_GROUP_OFFSET: _clone,
    Code.GET_ALL_TOPIC_CONFIG: always(Need(ALL_TOPICS, LIST)),
    Code.GET_TIMER_METRICS: always(Need(ALL_TOPICS, LIST)),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: always(Need(ALL_TOPICS, LIST)),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: always(Need(ALL_GROUPS, LIST)),
    Code.GET_COLD_DATA_FLOW_CTR_INFO: always(Need(ALL_GROUPS, LIST)),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: always(Need(ALL_TOPICS, LIST), Need(ALL_GROUPS, LIST)),
    Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: always(Need(ALL_GROUPS, UPDATE)),
    Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: always(Need(ALL_GROUPS, UPDATE)),
    # name servers
    Code.GET_ROUTEINFO_BY_TOPIC: of_fields(namesrv.GetRouteInfoRequestHeader, topic_field(PUB + SUB + GET)),
    Code.DELETE_TOPIC_IN_NAMESRV: of_fields(namesrv.DeleteTopicFromNamesrvRequestHeader, topic_field(DELETE)),
    Code.REGISTER_TOPIC_IN_NAMESRV: of_fields(namesrv.RegisterTopicRequestHeader, topic_field(CREATE)),
}

_CLUSTER_GET: Final = (
    Code.GET_BROKER_CONFIG,
    Code.GET_BROKER_RUNTIME_INFO,
    Code.GET_ALL_CONSUMER_OFFSET,
    Code.GET_ALL_DELAY_OFFSET,
    Code.GET_TIMER_CHECK_POINT,
    Code.GET_BROKER_HA_STATUS,
    Code.GET_BROKER_EPOCH_CACHE,
    Code.GET_PRODUCER_CONNECTION_LIST,
    Code.VIEW_BROKER_STATS_DATA,
    Code.GET_BROKER_CONSUME_STATS,
    Code.GET_ALL_PRODUCER_INFO,
    Code.EXPORT_ROCKSDB_CONFIG_TO_JSON,
    Code.QUERY_BROKER_OFFSET,
    Code.GET_BROKER_LITE_INFO,
    Code.GET_PARENT_TOPIC_INFO,
    Code.GET_LITE_TOPIC_INFO,
    Code.GET_LITE_CLIENT_INFO,
    Code.GET_LITE_GROUP_INFO,
    Code.AUTH_GET_USER,
    Code.AUTH_LIST_USER,
    Code.AUTH_GET_ACL,
    Code.AUTH_LIST_ACL,
    Code.AUTH_GET_FILE,
    # name servers
    Code.GET_KV_CONFIG,
    Code.GET_KVLIST_BY_NAMESPACE,
    Code.GET_BROKER_CLUSTER_INFO,
    Code.GET_BROKER_MEMBER_GROUP,
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    Code.GET_TOPICS_BY_CLUSTER,
    Code.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    Code.GET_UNIT_TOPIC_LIST,
    Code.GET_HAS_UNIT_SUB_TOPIC_LIST,
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    Code.GET_NAMESRV_CONFIG,
    # controllers
    Code.CONTROLLER_GET_REPLICA_INFO,
    Code.CONTROLLER_GET_METADATA_INFO,
    Code.CONTROLLER_GET_SYNC_STATE_DATA,
    Code.CONTROLLER_GET_NEXT_BROKER_ID,
    Code.GET_CONTROLLER_CONFIG,
)

_CLUSTER_UPDATE: Final = (
    Code.UPDATE_BROKER_CONFIG,
    Code.CLEAN_EXPIRED_CONSUMEQUEUE,
    Code.CLEAN_UNUSED_TOPIC,
    Code.DELETE_EXPIRED_COMMITLOG,
    Code.SET_COMMITLOG_READ_MODE,
    Code.POP_ROLLBACK,
    Code.SWITCH_TIMER_ENGINE,
    Code.TRIGGER_LITE_DISPATCH,
    Code.NOTIFY_MIN_BROKER_ID_CHANGE,
    Code.EXCHANGE_BROKER_HA_INFO,
    Code.RESET_MASTER_FLUSH_OFFSET,
    Code.NOTIFY_BROKER_ROLE_CHANGED,
    Code.ADD_BROKER,
    Code.REMOVE_BROKER,
    Code.REGISTER_FILTER_SERVER,
    Code.REGISTER_MESSAGE_FILTER_CLASS,
    Code.AUTH_CREATE_USER,
    Code.AUTH_UPDATE_USER,
    Code.AUTH_DELETE_USER,
    Code.AUTH_CREATE_ACL,
    Code.AUTH_UPDATE_ACL,
    Code.AUTH_DELETE_ACL,
    # name servers
    Code.PUT_KV_CONFIG,
    Code.DELETE_KV_CONFIG,
    Code.REGISTER_BROKER,
    Code.UNREGISTER_BROKER,
    Code.BROKER_HEARTBEAT,
    Code.QUERY_DATA_VERSION,  # it counts as a heartbeat: a broker that is dead would stay in the routes
    Code.WIPE_WRITE_PERM_OF_BROKER,
    Code.ADD_WRITE_PERM_OF_BROKER,
    Code.UPDATE_NAMESRV_CONFIG,
    # controllers
    Code.CONTROLLER_ALTER_SYNC_STATE_SET,
    Code.CONTROLLER_ELECT_MASTER,
    Code.CONTROLLER_REGISTER_BROKER,
    Code.CONTROLLER_APPLY_BROKER_ID,
    Code.UPDATE_CONTROLLER_CONFIG,
    Code.CLEAN_BROKER_DATA,
    # what RocketMQ does not serve either
    Code.GET_TOPIC_CONFIG_LIST,
    Code.GET_TOPIC_NAME_LIST,
    Code.TRIGGER_DELETE_FILES,
    Code.GET_CLIENT_CONFIG,
    Code.SUSPEND_CONSUMER,
    Code.RESUME_CONSUMER,
    Code.RESET_CONSUMER_OFFSET_IN_CONSUMER,
    Code.RESET_CONSUMER_OFFSET_IN_BROKER,
    Code.ADJUST_CONSUMER_THREAD_POOL,
    Code.WHO_CONSUME_THE_MESSAGE,
)

TABLE: Final[dict[int, Rule]] = {
    **_NAMED,
    **dict.fromkeys(_CLUSTER_GET, of_cluster(GET)),
    **dict.fromkeys(_CLUSTER_UPDATE, of_cluster(UPDATE)),
}
