"""One valid request of each code, and what a user needs for it, written from the facts and not from the table."""

import json
from typing import Any, NamedTuple

from trimq.protocol.codes import RequestCode as Code
from trimq.protocol.command import RemotingCommand

CLUSTER = "own"
TOPIC_PUB, TOPIC_SUB, TOPIC_GET = "Topic:T Pub", "Topic:T Sub", "Topic:T Get"
GROUP_SUB, GROUP_GET = "Group:G Sub", "Group:G Get"
READ, WRITE = "Cluster:own Get", "Cluster:own Update"


class Case(NamedTuple):
    """A request. Each of ``needs`` is needed; one of the actions joined by | is enough."""

    ext: dict[str, str]
    body: Any
    needs: tuple[str, ...]

    def command(self, code: int) -> RemotingCommand:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return RemotingCommand(int(code), version=479, ext=dict(self.ext), body=body)


def case(*needs: str, body: Any = b"", **ext: object) -> Case:
    return Case({name: str(value) for name, value in ext.items()}, body, needs)


SEND = {
    "producerGroup": "P",
    "topic": "T",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": 4,
    "queueId": 0,
    "sysFlag": 0,
}
SEND |= {"bornTimestamp": 1, "flag": 0}
SEND_V2 = {"a": "P", "b": "T", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0}
PULL = {
    "consumerGroup": "G",
    "topic": "T",
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 1,
    "sysFlag": 0,
    "commitOffset": 0,
}
PULL |= {"suspendTimeoutMillis": 0, "subVersion": 0}
QUEUE = {"topic": "T", "queueId": 0}
LOCK = {"consumerGroup": "G", "clientId": "c", "mqSet": [{"topic": "T", "brokerName": "b", "queueId": 0}]}
ASSIGNMENT = {"topic": "T", "consumerGroup": "G", "messageModel": "CLUSTERING"}
HEARTBEAT = {
    "clientID": "c",
    "producerDataSet": [{"groupName": "P"}],
    "consumerDataSet": [
        {"groupName": "G", "subscriptionDataSet": [{"topic": "T"}, {"topic": "%RETRY%G"}, {"topic": ""}]}
    ],
}
CREATE_TOPIC = {"topic": "T", "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
CREATE_TOPIC |= {"topicFilterType": "SINGLE_TAG"}
TOPIC_AND_GROUP = {"topic": "T", "consumerGroup": "G"}
NAMES = {"brokerName": "b", "clusterName": "other", "brokerAddr": "127.0.0.1:1", "brokerId": 0}

CASES: dict[int, Case] = {
    Code.SEND_MESSAGE: case(TOPIC_PUB, **SEND),
    Code.SEND_MESSAGE_V2: case(TOPIC_PUB, **SEND_V2),
    Code.SEND_BATCH_MESSAGE: case(TOPIC_PUB, **SEND_V2),
    Code.SEND_REPLY_MESSAGE: case(TOPIC_PUB, **SEND),
    Code.SEND_REPLY_MESSAGE_V2: case(TOPIC_PUB, **SEND_V2),
    Code.RECALL_MESSAGE: case(TOPIC_PUB, topic="T", recallHandle="x"),
    Code.END_TRANSACTION: case(
        TOPIC_PUB,
        topic="T",
        producerGroup="P",
        tranStateTableOffset=0,
        commitLogOffset=0,
        commitOrRollback=8,
        msgId="x",
    ),
    Code.PULL_MESSAGE: case(TOPIC_SUB, GROUP_SUB, **PULL),
    Code.LITE_PULL_MESSAGE: case(TOPIC_SUB, GROUP_SUB, **PULL),
    Code.CONSUMER_SEND_MSG_BACK: case(TOPIC_SUB, GROUP_SUB, offset=0, group="G", delayLevel=0, originTopic="T"),
    Code.HEART_BEAT: case(GROUP_SUB, TOPIC_SUB, body=HEARTBEAT),
    Code.UNREGISTER_CLIENT: case(GROUP_SUB, clientID="c", producerGroup="P", consumerGroup="G"),
    Code.GET_CONSUMER_LIST_BY_GROUP: case("Group:G Sub|Get", consumerGroup="G"),
    Code.QUERY_CONSUMER_OFFSET: case("Topic:T Sub|Get", "Group:G Sub|Get", queueId=0, **TOPIC_AND_GROUP),
    Code.UPDATE_CONSUMER_OFFSET: case(
        "Topic:T Sub|Update", "Group:G Sub|Update", queueId=0, commitOffset=0, **TOPIC_AND_GROUP
    ),
    Code.LOCK_BATCH_MQ: case(GROUP_SUB, TOPIC_SUB, body=LOCK),
    Code.UNLOCK_BATCH_MQ: case(GROUP_SUB, TOPIC_SUB, body=LOCK),
    Code.CHECK_CLIENT_CONFIG: case(
        GROUP_SUB, TOPIC_SUB, body={"clientId": "c", "group": "G", "subscriptionData": {"topic": "T"}}
    ),
    Code.QUERY_ASSIGNMENT: case(TOPIC_SUB, GROUP_SUB, body=ASSIGNMENT),
    Code.SET_MESSAGE_REQUEST_MODE: case(TOPIC_SUB, "Group:G Update", body=ASSIGNMENT),
    Code.CONSUME_MESSAGE_DIRECTLY: case(TOPIC_SUB, GROUP_SUB, clientId="c", msgId="x", **TOPIC_AND_GROUP),
    Code.POP_MESSAGE: case(TOPIC_SUB, GROUP_SUB, **TOPIC_AND_GROUP),
    Code.ACK_MESSAGE: case(TOPIC_SUB, GROUP_SUB, **TOPIC_AND_GROUP),
    Code.PEEK_MESSAGE: case(TOPIC_SUB, GROUP_SUB, **TOPIC_AND_GROUP),
    Code.CHANGE_MESSAGE_INVISIBLETIME: case(TOPIC_SUB, GROUP_SUB, **TOPIC_AND_GROUP),
    Code.NOTIFICATION: case(TOPIC_SUB, GROUP_SUB, **TOPIC_AND_GROUP),
    Code.POLLING_INFO: case(TOPIC_GET, GROUP_GET, **TOPIC_AND_GROUP),
    Code.BATCH_ACK_MESSAGE: case("Topic:* Sub", "Group:* Sub"),
    Code.POP_LITE_MESSAGE: case("Topic:* Sub", "Group:* Sub"),
    Code.LITE_SUBSCRIPTION_CTL: case("Topic:* Sub", "Group:* Sub"),
    Code.ACK_LITE_MESSAGE: case("Topic:* Sub", "Group:* Sub"),
    Code.QUERY_MESSAGE: case("Topic:T Sub|Get", topic="T", key="k", maxNum=1, beginTimestamp=0, endTimestamp=1),
    Code.VIEW_MESSAGE_BY_ID: case(TOPIC_GET, topic="T", offset=0),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: case(TOPIC_GET, timestamp=0, **QUEUE),
    Code.GET_MAX_OFFSET: case(TOPIC_GET, **QUEUE),
    Code.GET_MIN_OFFSET: case(TOPIC_GET, **QUEUE),
    Code.GET_EARLIEST_MSG_STORETIME: case(TOPIC_GET, **QUEUE),
    Code.GET_TOPIC_STATS_INFO: case(TOPIC_GET, topic="T"),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: case(TOPIC_GET, topic="T"),
    Code.GET_TOPIC_CONFIG: case(TOPIC_GET, topic="T"),
    Code.CHECK_ROCKSDB_CQ_WRITE_PROGRESS: case(TOPIC_GET, topic="T"),
    Code.GET_CONSUME_STATS: case(GROUP_GET, TOPIC_GET, **TOPIC_AND_GROUP),
    Code.QUERY_CONSUME_TIME_SPAN: case(TOPIC_GET, GROUP_GET, topic="T", group="G"),
    Code.QUERY_CORRECTION_OFFSET: case(TOPIC_GET, GROUP_GET, topic="T", compareGroup="G", filterGroups="H"),
    Code.QUERY_CONSUME_QUEUE: case(TOPIC_GET, GROUP_GET, index=0, count=1, consumerGroup="G", **QUEUE),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: case(TOPIC_GET, GROUP_GET, topic="T", group="G"),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: case(TOPIC_GET, GROUP_GET, topic="T", group="G"),
    Code.UPDATE_AND_CREATE_TOPIC: case("Topic:T Create", **CREATE_TOPIC),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: case(
        "Topic:T Create", "Topic:U Create", body={"topicConfigList": [{"topicName": "T"}, {"topicName": "U"}]}
    ),
    Code.UPDATE_AND_CREATE_STATIC_TOPIC: case("Topic:T Create", **CREATE_TOPIC),
    Code.DELETE_TOPIC_IN_BROKER: case("Topic:T Delete", topic="T"),
    Code.RESUME_CHECK_HALF_MESSAGE: case("Topic:T Update", topic="T", msgId="x"),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: case("Group:G Create", body={"groupName": "G"}),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: case(
        "Group:G Create", "Group:H Create", body={"groupConfigList": [{"groupName": "G"}, {"groupName": "H"}]}
    ),
    Code.DELETE_SUBSCRIPTIONGROUP: case("Group:G Delete", groupName="G"),
    Code.GET_CONSUMER_CONNECTION_LIST: case(GROUP_GET, consumerGroup="G"),
    Code.GET_CONSUMER_RUNNING_INFO: case(GROUP_GET, consumerGroup="G", clientId="c"),
    Code.QUERY_TOPICS_BY_CONSUMER: case(GROUP_GET, group="G"),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: case(GROUP_GET, group="G"),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: case("Topic:T Update", "Group:G Update", topic="T", group="G", timestamp=0),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: case("Topic:T Update", "Group:G Update", topic="T", group="G"),
    Code.CLONE_GROUP_OFFSET: case(
        "Group:S Get", "Group:G Update", "Topic:T Update", srcGroup="S", destGroup="G", topic="T"
    ),
    Code.GET_ALL_TOPIC_CONFIG: case("Topic:* List"),
    Code.GET_TIMER_METRICS: case("Topic:* List"),
    Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: case("Topic:* List"),
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: case("Group:* List"),
    Code.GET_COLD_DATA_FLOW_CTR_INFO: case("Group:* List"),
    Code.GET_ALL_MESSAGE_REQUEST_MODE: case("Topic:* List", "Group:* List"),
    Code.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: case("Group:* Update"),
    Code.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: case("Group:* Update"),
    Code.GET_ROUTEINFO_BY_TOPIC: case("Topic:T Pub|Sub|Get", topic="T"),
    Code.DELETE_TOPIC_IN_NAMESRV: case("Topic:T Delete", topic="T", clusterName="other"),
    Code.REGISTER_TOPIC_IN_NAMESRV: case("Topic:T Create", topic="T"),
    Code.GET_BROKER_MEMBER_GROUP: case(READ, **NAMES),
    Code.QUERY_DATA_VERSION: case(WRITE, **NAMES),
    Code.GET_TOPICS_BY_CLUSTER: case(READ, cluster="other"),
}
CASES |= dict.fromkeys(
    (26, 28, 43, 45, 60, 907, 1007, 204, 315, 317, 328, 355, 3004, 3005, 3009, 3010, 13010), case(READ)
)
CASES |= dict.fromkeys((101, 106, 206, 219, 304, 311, 312, 313, 319, 1004, 1005, 1006, 1010, 1012), case(READ))
CASES |= dict.fromkeys((13, *range(200074, 200079)), case(READ))
CASES |= dict.fromkeys((25, 306, 316, 329, 2004, 200056, 5001, 905, 906, 908, 1008, 200079), case(WRITE))
CASES |= dict.fromkeys((3001, 3002, 3003, 3006, 3007, 3008, 902, 903, 301, 302), case(WRITE))
CASES |= dict.fromkeys((100, 102, 103, 104, 205, 318, 327, 904), case(WRITE, **NAMES))
CASES |= dict.fromkeys((1001, 1002, 1003, 1009, 1011, 1013), case(WRITE, **NAMES))
CASES |= dict.fromkeys((22, 23, 27, 47, 209, 210, 211, 212, 213, 214), case(WRITE))
