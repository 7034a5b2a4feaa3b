"""Request, response and language codes. Generated from codes.toml by ``python -m trimq.protocol.generate_codes``."""

from enum import IntEnum
from typing import Final

VERSION: Final = 479
"""The version ordinal sent in frames (V5_3_3). Java clients refuse SQL92 pulls from brokers below 232."""


class LanguageCode(IntEnum):
    """Language of a client, as in the header's ``language``."""

    JAVA = 0
    CPP = 1
    DOTNET = 2
    PYTHON = 3
    DELPHI = 4
    ERLANG = 5
    RUBY = 6
    OTHER = 7
    HTTP = 8
    GO = 9
    PHP = 10
    OMS = 11
    RUST = 12
    NODE_JS = 13


class RequestCode(IntEnum):
    """The operation of a request (RocketMQ's RequestCode)."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_TIMER_CHECK_POINT = 60
    GET_TIMER_METRICS = 61
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    RESUME_CHECK_HALF_MESSAGE = 323
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    UPDATE_AND_GET_GROUP_FORBIDDEN = 353
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    GET_BROKER_MEMBER_GROUP = 901
    BROKER_HEARTBEAT = 904
    EXCHANGE_BROKER_HA_INFO = 906
    GET_BROKER_HA_STATUS = 907
    CONTROLLER_ALTER_SYNC_STATE_SET = 1001
    CONTROLLER_ELECT_MASTER = 1002
    CONTROLLER_REGISTER_BROKER = 1003
    CONTROLLER_GET_REPLICA_INFO = 1004
    CONTROLLER_GET_METADATA_INFO = 1005
    CONTROLLER_GET_SYNC_STATE_DATA = 1006
    GET_BROKER_EPOCH_CACHE = 1007
    NOTIFY_BROKER_ROLE_CHANGED = 1008
    UPDATE_CONTROLLER_CONFIG = 1009
    GET_CONTROLLER_CONFIG = 1010
    CLEAN_BROKER_DATA = 1011
    CONTROLLER_GET_NEXT_BROKER_ID = 1012
    CONTROLLER_APPLY_BROKER_ID = 1013
    AUTH_CREATE_USER = 3001
    AUTH_UPDATE_USER = 3002
    AUTH_DELETE_USER = 3003
    AUTH_GET_USER = 3004
    AUTH_LIST_USER = 3005
    AUTH_CREATE_ACL = 3006
    AUTH_UPDATE_ACL = 3007
    AUTH_DELETE_ACL = 3008
    AUTH_GET_ACL = 3009
    AUTH_LIST_ACL = 3010
    AUTH_GET_FILE = 13010
    SWITCH_TIMER_ENGINE = 5001
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    POP_ROLLBACK = 200056
    BATCH_ACK_MESSAGE = 200151
    POP_LITE_MESSAGE = 200070
    LITE_SUBSCRIPTION_CTL = 200071
    ACK_LITE_MESSAGE = 200072
    NOTIFY_UNSUBSCRIBE_LITE = 200073
    GET_BROKER_LITE_INFO = 200074
    GET_PARENT_TOPIC_INFO = 200075
    GET_LITE_TOPIC_INFO = 200076
    GET_LITE_CLIENT_INFO = 200077
    GET_LITE_GROUP_INFO = 200078
    TRIGGER_LITE_DISPATCH = 200079
    UPDATE_AND_CREATE_STATIC_TOPIC = 513
    NOTIFY_MIN_BROKER_ID_CHANGE = 905
    RESET_MASTER_FLUSH_OFFSET = 908
    ADD_BROKER = 902
    REMOVE_BROKER = 903
    CHECK_ROCKSDB_CQ_WRITE_PROGRESS = 354
    EXPORT_ROCKSDB_CONFIG_TO_JSON = 355
    UPDATE_COLD_DATA_FLOW_CTR_CONFIG = 2001
    REMOVE_COLD_DATA_FLOW_CTR_CONFIG = 2002
    GET_COLD_DATA_FLOW_CTR_INFO = 2003
    SET_COMMITLOG_READ_MODE = 2004
    REGISTER_FILTER_SERVER = 301
    REGISTER_MESSAGE_FILTER_CLASS = 302
    QUERY_BROKER_OFFSET = 13
    GET_TOPIC_CONFIG_LIST = 22
    GET_TOPIC_NAME_LIST = 23
    TRIGGER_DELETE_FILES = 27
    GET_CLIENT_CONFIG = 47
    SUSPEND_CONSUMER = 209
    RESUME_CONSUMER = 210
    RESET_CONSUMER_OFFSET_IN_CONSUMER = 211
    RESET_CONSUMER_OFFSET_IN_BROKER = 212
    ADJUST_CONSUMER_THREAD_POOL = 213
    WHO_CONSUME_THE_MESSAGE = 214


class ResponseCode(IntEnum):
    """The result of a request (RocketMQ's ResponseCode and RemotingSysResponseCode)."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    TRANSACTION_SHOULD_COMMIT = 200
    TRANSACTION_SHOULD_ROLLBACK = 201
    TRANSACTION_STATE_UNKNOW = 202
    TRANSACTION_STATE_GROUP_WRONG = 203
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    BROKER_NOT_EXIST = 211
    BROKER_DISPATCH_NOT_COMPLETE = 212
    BROADCAST_CONSUMPTION = 213
    FLOW_CONTROL = 215
    NOT_LEADER_FOR_QUEUE = 501
    ILLEGAL_OPERATION = 604
    GO_AWAY = 1500
    CONTROLLER_FENCED_MASTER_EPOCH = 2000
    CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH = 2001
    CONTROLLER_INVALID_MASTER = 2002
    CONTROLLER_INVALID_REPLICAS = 2003
    CONTROLLER_MASTER_NOT_AVAILABLE = 2004
    CONTROLLER_INVALID_REQUEST = 2005
    CONTROLLER_BROKER_NOT_ALIVE = 2006
    CONTROLLER_NOT_LEADER = 2007
    CONTROLLER_BROKER_METADATA_NOT_EXIST = 2008
    CONTROLLER_INVALID_CLEAN_BROKER_METADATA = 2009
    CONTROLLER_BROKER_NEED_TO_BE_REGISTERED = 2010
    CONTROLLER_MASTER_STILL_EXIST = 2011
    CONTROLLER_ELECT_MASTER_FAILED = 2012
    CONTROLLER_ALTER_SYNC_STATE_SET_FAILED = 2013
    CONTROLLER_BROKER_ID_INVALID = 2014
    USER_NOT_EXIST = 3001
    POLICY_NOT_EXIST = 3002


HELP: Final[dict[int, str]] = {
    0: (
        "Done."
    ),
    1: (
        "The server failed while it handled the request, or the request was not acceptable in its present state. The remark states which."
    ),
    2: (
        "Too much work is waiting on this server. Nothing was stored. Try again later or on another broker."
    ),
    3: (
        "This server does not know the request code. Check that the client talks to the right kind of server (name server or broker) and docs/codes.md for what is supported."
    ),
    4: (
        "The transaction could not be ended."
    ),
    10: (
        "The message is stored, but the disk did not confirm it within syncFlushTimeout. It may be lost in a power cut. Check the disk's latency."
    ),
    11: (
        "The message is stored on the master; no slave was available to take a copy."
    ),
    12: (
        "The message is stored on the master; the slave did not confirm its copy in time."
    ),
    13: (
        "The message breaks a limit (body or properties too large, empty body, a kind of message that is not supported). It was not stored. Retrying cannot help; the remark names the limit."
    ),
    14: (
        "The store does not take messages now: its disk is over a limit, a sync failed, or it is shutting down. Nothing was stored. The remark states which."
    ),
    15: (
        "The client's version is not supported for this request."
    ),
    16: (
        "Not permitted: by the topic, group or broker (permission bits, a reserved topic, or a feature that is switched off), or to this user: the user or the signature is wrong, or no policy grants it; mqadmin explainAccess shows which entry decides."
    ),
    17: (
        "The topic does not exist here. Create it (mqadmin updateTopic), or set autoCreateTopicEnable=true; then check that clients ask the name server this broker registers with."
    ),
    18: (
        "The topic exists already."
    ),
    19: (
        "No new message at this offset."
    ),
    20: (
        "No message matched between the requested offset and nextBeginOffset. Pull again from there."
    ),
    21: (
        "The requested offset is outside the queue. Continue from nextBeginOffset."
    ),
    22: (
        "Nothing found for this query."
    ),
    23: (
        "The subscription expression cannot be parsed. Tags are written as 'a || b', everything as '*'."
    ),
    24: (
        "The broker does not know this group's subscription to the topic yet. The consumer's next heartbeat has it."
    ),
    25: (
        "The broker has an older version of the subscription. The consumer's next heartbeat has the current one."
    ),
    26: (
        "The consumer group does not exist. Create it (mqadmin updateSubGroup) or set autoCreateSubscriptionGroup=true."
    ),
    27: (
        "The broker has no filter data for this group and topic yet."
    ),
    28: (
        "The broker has older filter data for this group and topic."
    ),
    29: (
        "A parameter is outside its range. The remark names it."
    ),
    200: (
        "The transaction should be committed."
    ),
    201: (
        "The transaction should be rolled back."
    ),
    202: (
        "The state of the transaction is not known."
    ),
    203: (
        "The transaction belongs to another producer group."
    ),
    204: (
        "The message has no buyer id."
    ),
    205: (
        "The message belongs to another unit."
    ),
    206: (
        "No consumer of this group is connected."
    ),
    207: (
        "The consumer did not answer in time."
    ),
    208: (
        "There is no message at this offset."
    ),
    209: (
        "Too many requests are waiting for messages."
    ),
    210: (
        "No message arrived within the polling time."
    ),
    211: (
        "The broker is not known."
    ),
    212: (
        "The broker has not dispatched all its messages yet."
    ),
    213: (
        "The group consumes by broadcasting; this needs clustering."
    ),
    215: (
        "The server limits this client's rate. Slow down and try again."
    ),
    501: (
        "Another broker leads this queue."
    ),
    604: (
        "The operation is not allowed in the present state."
    ),
    1500: (
        "The server is shutting down. Use another broker."
    ),
    2000: (
        "The sender's epoch is not the present master's. It follows the new master."
    ),
    2001: (
        "The SyncStateSet has changed since the sender read it."
    ),
    2002: (
        "The sender is not the master."
    ),
    2003: (
        "The SyncStateSet names a broker id that was not assigned."
    ),
    2004: (
        "There is no master, and none can be elected."
    ),
    2005: (
        "A field of the request is missing or wrong. The remark names it."
    ),
    2006: (
        "A broker that the SyncStateSet names sends no heartbeats."
    ),
    2007: (
        "This controller cannot decide now. Ask another one."
    ),
    2008: (
        "The controllers do not know a broker of this name."
    ),
    2009: (
        "The broker is alive, or not known, so it is not removed."
    ),
    2010: (
        "The broker has to register with the controllers first."
    ),
    2011: (
        "The master is alive, so no other one is elected."
    ),
    2012: (
        "No broker that may be elected is alive. Start a member of the SyncStateSet."
    ),
    2013: (
        "The SyncStateSet cannot be changed like this. The remark says why."
    ),
    2014: (
        "The broker id was given to another broker."
    ),
    3001: (
        "The user does not exist."
    ),
    3002: (
        "The policy does not exist."
    ),
}
"""Response code to its meaning and what to do about it."""

NOT_SUPPORTED: Final[dict[int, str]] = {
    5001: "the RocksDB timer",
    200050: "POP consumers",
    200051: "POP consumers",
    200052: "POP consumers",
    200053: "POP consumers",
    200054: "POP consumers",
    200055: "POP consumers",
    200056: "POP consumers",
    200151: "POP consumers",
    200070: "lite topics",
    200071: "lite topics",
    200072: "lite topics",
    200073: "lite topics",
    200074: "lite topics",
    200075: "lite topics",
    200076: "lite topics",
    200077: "lite topics",
    200078: "lite topics",
    200079: "lite topics",
    513: "static topics",
    905: "slaves that act as master",
    908: "slaves that act as master",
    902: "broker containers",
    903: "broker containers",
    354: "RocksDB stores",
    355: "RocksDB stores",
    2001: "settings of cold reads",
    2002: "settings of cold reads",
    2003: "settings of cold reads",
    2004: "settings of cold reads",
    301: "filter servers",
    302: "filter servers",
    13: "requests that RocketMQ 5 does not serve either",
    22: "requests that RocketMQ 5 does not serve either",
    23: "requests that RocketMQ 5 does not serve either",
    27: "requests that RocketMQ 5 does not serve either",
    47: "requests that RocketMQ 5 does not serve either",
    209: "requests that RocketMQ 5 does not serve either",
    210: "requests that RocketMQ 5 does not serve either",
    211: "requests that RocketMQ 5 does not serve either",
    212: "requests that RocketMQ 5 does not serve either",
    213: "requests that RocketMQ 5 does not serve either",
    214: "requests that RocketMQ 5 does not serve either",
}
"""Request code that TriMQ does not serve to the feature that it belongs to."""
