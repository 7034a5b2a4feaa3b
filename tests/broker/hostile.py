"""Frames that no honest client sends: valid requests of every kind, and mutations of them."""

import json
import random
import struct
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from tests.broker.wire_client import consumer, properties_text, pull_ext, send_ext
from trimq.protocol import frame
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError

_QUEUE: Final = {"topic": "Orders", "queueId": 0}
_GROUP_QUEUE: Final = {"consumerGroup": "G", **_QUEUE}
_END: Final = {
    "producerGroup": "P",
    "tranStateTableOffset": 0,
    "commitLogOffset": 0,
    "msgId": "u",
    "transactionId": "u",
}
_PROPERTIES: Final = {"KEYS": "k1 k2", "UNIQ_KEY": "7F0000010001AABBCCDD000000010001", "TAGS": "a", "WAIT": "true"}

_REPLY: Final = {"REPLY_TO_CLIENT": "c", "CORRELATION_ID": "1", "MSG_TYPE": "reply"}


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def golden_requests() -> list[tuple[int, dict[str, Any], bytes]]:
    """(code, ext fields, body) of a valid request of each kind. The broker has the topic Orders and the group G."""
    heartbeat = {
        "clientID": "c",
        "producerDataSet": [{"groupName": "P"}],
        "consumerDataSet": [consumer("G", "Orders", "a || b")],
    }
    queues = [{"topic": "Orders", "brokerName": "broker-a", "queueId": 0}]
    batch = encode_batch([(0, b"one", properties_text(_PROPERTIES).encode()), (1, b"two", b"")])
    create = {
        "topic": "Orders",
        "defaultTopic": "TBW102",
        "readQueueNums": 4,
        "writeQueueNums": 4,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
    }
    code = RequestCode
    assignment = {"topic": "Orders", "consumerGroup": "G", "clientId": "c", "strategyName": "AVG"}
    assignment |= {"messageModel": "CLUSTERING"}
    return [
        (code.SEND_MESSAGE_V2, send_ext("Orders", _PROPERTIES), b"body"),
        (code.SEND_MESSAGE, send_ext("Orders", _PROPERTIES, v1=True), b"body"),
        (code.SEND_MESSAGE_V2, send_ext("Orders", {"DELAY": "3"}), b"body"),
        (code.SEND_MESSAGE_V2, send_ext("%RETRY%G", reconsume_times=3), b"body"),
        (code.SEND_MESSAGE_V2, send_ext("Orders", {"TRAN_MSG": "true", "PGROUP": "P"}, sys_flag=4), b"half"),
        (code.END_TRANSACTION, _END | {"commitOrRollback": 8}, b""),
        (code.END_TRANSACTION, _END | {"commitOrRollback": 12, "fromTransactionCheck": "true"}, b""),
        (code.RESUME_CHECK_HALF_MESSAGE, {"topic": "Orders", "msgId": "0" * 32}, b""),
        (code.SEND_BATCH_MESSAGE, send_ext("Orders", batch="true"), batch),
        (code.CONSUMER_SEND_MSG_BACK, {"offset": 0, "group": "G", "delayLevel": 0, "originTopic": "Orders"}, b""),
        (code.PULL_MESSAGE, pull_ext("Orders"), b""),
        (code.PULL_MESSAGE, pull_ext("Orders", 10**9, sysFlag=6), b""),
        (code.LITE_PULL_MESSAGE, pull_ext("Orders", sysFlag=20), b""),
        (
            code.QUERY_MESSAGE,
            {"topic": "Orders", "key": "k1", "maxNum": 10, "beginTimestamp": 0, "endTimestamp": 2**62},
            b"",
        ),
        (code.VIEW_MESSAGE_BY_ID, {"offset": 0}, b""),
        (code.QUERY_CONSUMER_OFFSET, _GROUP_QUEUE, b""),
        (code.UPDATE_CONSUMER_OFFSET, _GROUP_QUEUE | {"commitOffset": 1}, b""),
        (code.SEARCH_OFFSET_BY_TIMESTAMP, _QUEUE | {"timestamp": 1}, b""),
        (code.GET_MAX_OFFSET, _QUEUE, b""),
        (code.GET_MIN_OFFSET, _QUEUE, b""),
        (code.GET_EARLIEST_MSG_STORETIME, _QUEUE, b""),
        (code.HEART_BEAT, {}, _json(heartbeat)),
        (code.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "P", "consumerGroup": "G"}, b""),
        (code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"}, b""),
        (
            code.CHECK_CLIENT_CONFIG,
            {},
            _json({"clientId": "c", "group": "G", "subscriptionData": {"topic": "Orders", "expressionType": "TAG"}}),
        ),
        (code.LOCK_BATCH_MQ, {}, _json({"consumerGroup": "G", "clientId": "c", "mqSet": queues})),
        (code.UNLOCK_BATCH_MQ, {}, _json({"consumerGroup": "G", "clientId": "c", "mqSet": queues})),
        (code.UPDATE_AND_CREATE_TOPIC, create, b""),
        (code.GET_TOPIC_CONFIG, {"topic": "Orders"}, b""),
        (code.GET_TOPIC_STATS_INFO, {"topic": "Orders"}, b""),
        (code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, _json({"groupName": "G"})),
        (code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "G"}, b""),
        (code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"}, b""),
        (code.GET_CONSUME_STATS, {"consumerGroup": "G", "topicList": "Orders"}, b""),
        (code.QUERY_CONSUME_TIME_SPAN, {"topic": "Orders", "group": "G"}, b""),
        (code.QUERY_CONSUME_QUEUE, {"topic": "Orders", "queueId": 0, "index": 0, "count": 5}, b""),
        (code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "Orders"}, b""),
        (
            code.INVOKE_BROKER_TO_RESET_OFFSET,
            {"topic": "Orders", "group": "G", "timestamp": -1, "isForce": "true"},
            b"",
        ),
        (code.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "x"}, b""),
        (code.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "G", "clientId": "x", "msgId": "0" * 32}, b""),
        (code.UPDATE_BROKER_CONFIG, {}, b"longPollingEnable=true\n"),
        (code.QUERY_CORRECTION_OFFSET, {"compareGroup": "G", "topic": "Orders"}, b""),
        (code.CLONE_GROUP_OFFSET, {"srcGroup": "G", "destGroup": "G", "topic": "Orders"}, b""),
        (code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": "G", "topic": "Orders", "readable": "true"}, b""),
        (code.SEND_REPLY_MESSAGE_V2, send_ext("Orders", _PROPERTIES | _REPLY), b"body"),
        (code.SEND_REPLY_MESSAGE, send_ext("Orders", _PROPERTIES | _REPLY, v1=True), b"body"),
        (code.QUERY_ASSIGNMENT, {}, _json(assignment)),
        (code.SET_MESSAGE_REQUEST_MODE, {}, _json({"topic": "Orders", "consumerGroup": "G", "mode": "PULL"})),
        (code.GET_ALL_MESSAGE_REQUEST_MODE, {}, b""),
    ]


def golden_frames() -> list[bytes]:
    """Each golden request in each of the three header encodings."""
    return [
        frame.encode(
            RemotingCommand(
                int(code),
                number,
                version=479,
                language="JAVA",
                ext={name: str(value) for name, value in ext.items() if value is not None},
                body=body,
                encoding=encoding,
            )
        )
        for encoding in Encoding
        for number, (code, ext, body) in enumerate(golden_requests(), 1)
    ]


_INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5C, 0x7B, 0x7D, 0x30, 0x2D)
_NUMBERS: Final = ("-1", "0", "2147483647", "-2147483648", "2147483648", "9223372036854775807", "-9223372036854775808")
_VALUES: Final = (*_NUMBERS, "9" * 40, "", " ", "true", "null", "é" * 10, "\x01", "\x02", "x" * 300, "%RETRY%G", "*")


def mutated(rng: random.Random, golden: list[bytes]) -> bytes:
    """One hostile frame. Its length word is correct unless the mutation is to the length word."""
    data = bytearray(rng.choice(golden))
    kind = rng.randrange(8)
    if kind == 0:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(4, len(data))] = rng.choice(_INTERESTING)
    elif kind == 1:
        at = rng.randrange(8, len(data))
        del data[at : at + rng.randrange(1, 20)]
    elif kind == 2:
        at = rng.randrange(8, len(data))
        data[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif kind == 3:
        return _other_value(rng, bytes(data))
    elif kind == 4:
        struct.pack_into(">I", data, 4, rng.getrandbits(32))
    elif kind == 5:
        data[rng.randrange(8, len(data)) :] = b""
    elif kind == 6:
        data = bytearray(8) + rng.randbytes(rng.randrange(0, 200))
        struct.pack_into(">I", data, 4, rng.choice((0, 1, 2, 3)) << 24 | rng.randrange(len(data)))
    else:
        struct.pack_into(">I", data, 0, rng.getrandbits(rng.randrange(1, 33)))
        return bytes(data)
    struct.pack_into(">I", data, 0, len(data) - 4)
    return bytes(data)


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """A valid frame except for one or two ext values, and sometimes its body."""
    command = frame.decode(memoryview(data)[4:])
    ext: dict[str, Any] = dict(command.ext_fields())
    for name in rng.sample(sorted(ext), min(len(ext), rng.randrange(1, 3))):
        ext[name] = rng.choice(_VALUES)
    if ext and rng.random() < 0.2:
        del ext[rng.choice(sorted(ext))]
    body = bytes(command.body)
    if rng.random() < 0.2:
        body = rng.choice((b"", b"{}", b"[]", b"null", body[: len(body) // 2], b"[" * 500, body + b"}"))
    command.ext, command.body = ext, body
    command.flag = rng.choice((0, 0, 0, 2, -16))
    return frame.encode(command)


def is_killer(data: bytes) -> bool:
    """Whether the broker closes the connection because of this frame, so that no later frame is served."""
    (total,) = struct.unpack_from(">I", data)
    if total != len(data) - 4:
        return True
    try:
        frame.decode(memoryview(data)[4:])
    except FrameError:
        return True
    return False


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
_names = st.sampled_from(
    [*sorted({name for _, ext, _ in golden_requests() for name in ext}), "clientID", "nothing", ""]
)
_headers = st.fixed_dictionaries(
    {"code": st.sampled_from([int(code) for code in RequestCode]) | st.integers(-(2**40), 2**40)},
    optional={
        "opaque": st.integers(-(2**31), 2**31 - 1) | _json_values,
        "flag": st.sampled_from([0, 2, 4]) | _json_values,
        "version": st.integers(0, 1000) | _json_values,
        "language": st.sampled_from(["JAVA", "GO", "X"]) | _json_values,
        "remark": _json_values,
        "extFields": st.dictionaries(_names, _json_values | st.sampled_from(_VALUES), max_size=14) | _json_values,
    },
)


@st.composite
def hostile_frames(draw: st.DrawFn) -> bytes:
    """A frame whose header is JSON of an unexpected shape, or arbitrary bytes."""
    if draw(st.booleans()):
        header = json.dumps(draw(_headers)).encode("utf-8", "surrogatepass")
        kind = 0
    else:
        header = draw(st.binary(max_size=100))
        kind = draw(st.integers(0, 3))
    body = draw(st.binary(max_size=60) | _json_values.map(lambda value: json.dumps(value).encode()))
    word = kind << 24 | (len(header) if draw(st.integers(0, 9)) else draw(st.integers(0, 0xFFFFFF)))
    return struct.pack(">II", 4 + len(header) + len(body), word) + header + body
