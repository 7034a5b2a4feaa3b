"""Which request codes a broker with ``adminListenAddress`` serves only there.

Everything is for administrators but what is listed here: a new code is theirs until it is added here.
"""

from typing import Final

from trimq.protocol.auth.permissions import BETWEEN_SERVERS, TO_CLIENTS
from trimq.protocol.codes import RequestCode

Code = RequestCode

OF_CLIENTS: Final = frozenset(
    {
        Code.SEND_MESSAGE,
        Code.SEND_MESSAGE_V2,
        Code.SEND_BATCH_MESSAGE,
        Code.SEND_REPLY_MESSAGE,
        Code.SEND_REPLY_MESSAGE_V2,
        Code.RECALL_MESSAGE,
        Code.END_TRANSACTION,
        Code.CONSUMER_SEND_MSG_BACK,
        Code.PULL_MESSAGE,
        Code.LITE_PULL_MESSAGE,
        Code.HEART_BEAT,
        Code.UNREGISTER_CLIENT,
        Code.CHECK_CLIENT_CONFIG,
        Code.GET_CONSUMER_LIST_BY_GROUP,
        Code.LOCK_BATCH_MQ,
        Code.UNLOCK_BATCH_MQ,
        Code.QUERY_ASSIGNMENT,
        Code.QUERY_CONSUMER_OFFSET,
        Code.UPDATE_CONSUMER_OFFSET,
        Code.SEARCH_OFFSET_BY_TIMESTAMP,
        Code.GET_MAX_OFFSET,
        Code.GET_MIN_OFFSET,
        Code.GET_EARLIEST_MSG_STORETIME,
        Code.QUERY_MESSAGE,
        Code.VIEW_MESSAGE_BY_ID,
        # Of one topic or group: RocketMQ's proxies ask for these, and Spark's readers for the offsets of a topic.
        Code.GET_TOPIC_CONFIG,
        Code.GET_SUBSCRIPTIONGROUP_CONFIG,
        Code.GET_TOPIC_STATS_INFO,
        # POP consumers are answered that they are not supported.
        Code.POP_MESSAGE,
        Code.ACK_MESSAGE,
        Code.PEEK_MESSAGE,
        Code.CHANGE_MESSAGE_INVISIBLETIME,
        Code.NOTIFICATION,
        Code.POLLING_INFO,
        Code.BATCH_ACK_MESSAGE,
        Code.POP_LITE_MESSAGE,
        Code.LITE_SUBSCRIPTION_CTL,
        Code.ACK_LITE_MESSAGE,
    }
)
"""What clients send, RocketMQ's and TriMQ's, to produce and to consume."""

READ_BY_SERVERS: Final = frozenset(
    {
        Code.GET_ALL_TOPIC_CONFIG,
        Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        Code.GET_ALL_CONSUMER_OFFSET,
        Code.GET_ALL_DELAY_OFFSET,
        Code.GET_ALL_MESSAGE_REQUEST_MODE,
        Code.GET_TIMER_CHECK_POINT,
        Code.GET_TIMER_METRICS,
        Code.GET_BROKER_RUNTIME_INFO,
        Code.GET_BROKER_EPOCH_CACHE,
        Code.AUTH_GET_FILE,
    }
)
"""What slaves and controllers read from a master, at the address that the name server knows. These change nothing."""

ON_ADMIN_PORT: Final = frozenset(Code) - OF_CLIENTS - READ_BY_SERVERS - BETWEEN_SERVERS - TO_CLIENTS
"""What only the admin port serves."""
