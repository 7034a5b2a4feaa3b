"""Requests of every code with an odd text in one field of the body, or of the header, and whether servers outlive them.

An odd text is half a surrogate pair: it has no UTF-8 form, so a reply or a request to another client that repeated it
could not be encoded. JSON can have it as an escape, and as bytes that are not UTF-8.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import trio

from tests.broker.auth.requests import CASES
from tests.broker.auth.signed import signed
from tests.canary import look_at_reply
from tests.remoting.fuzz.fields import ODD_TEXTS, Request
from trimq.protocol.codes import RequestCode as Code
from trimq.protocol.command import RemotingCommand
from trimq.protocol.frame import FrameDecoder

VERSION: Final = 479
USER: Final = {"username": "u", "password": "canary-odd", "userType": "Normal", "userStatus": "enable"}
POLICY: Final = {"resource": "Topic:T", "actions": ["Pub"], "sourceIps": ["127.0.0.1"], "decision": "Allow"}
ACL: Final = {"subject": "User:u", "policies": [{"policyType": "Custom", "entries": [POLICY]}]}
QUEUES: Final = {"brokerName": "b", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
TOPIC: Final = {"topicName": "T", "topicFilterType": "SINGLE_TAG", "attributes": {"+a": "b"}}
BODIES: Final[dict[int, Any]] = {
    Code.AUTH_CREATE_USER: USER,
    Code.AUTH_UPDATE_USER: USER,
    Code.AUTH_CREATE_ACL: ACL,
    Code.AUTH_UPDATE_ACL: ACL,
    Code.REGISTER_BROKER: {
        "topicConfigSerializeWrapper": {
            "topicConfigTable": {"T": TOPIC},
            "topicQueueMappingInfoMap": {"T": {"topic": "T", "bname": "b", "scope": "s"}},
        },
        "filterServerList": ["f"],
    },
    Code.REGISTER_TOPIC_IN_NAMESRV: {
        "brokerDatas": [{"cluster": "c", "brokerName": "b", "brokerAddrs": {"0": "a"}}],
        "queueDatas": [QUEUES],
        "orderTopicConf": "b:1",
    },
    Code.QUERY_DATA_VERSION: {"counter": "1"},
    Code.CONTROLLER_ALTER_SYNC_STATE_SET: {"syncStateSet": ["1"], "syncStateSetEpoch": "1"},
    Code.CONTROLLER_GET_SYNC_STATE_DATA: ["broker-a"],
    Code.UPDATE_AND_CREATE_TOPIC_LIST: {"topicConfigList": [TOPIC]},
    Code.HEART_BEAT: {
        "clientID": "c",
        "producerDataSet": [{"groupName": "P"}],
        "consumerDataSet": [
            {
                "groupName": "G",
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "subscriptionDataSet": [
                    {"topic": "T", "subString": "a", "tagsSet": ["a"], "codeSet": ["97"], "expressionType": "TAG"}
                ],
            }
        ],
    },
    Code.CHECK_CLIENT_CONFIG: {
        "clientId": "c",
        "group": "G",
        "namespace": "n",
        "subscriptionData": {"topic": "T", "subString": "a", "expressionType": "SQL92"},
    },
    Code.QUERY_ASSIGNMENT: {
        "topic": "T",
        "consumerGroup": "G",
        "messageModel": "CLUSTERING",
        "clientId": "c",
        "strategyName": "AVG",
    },
}
ANY: Final = {"topic": "T", "group": "G", "groupName": "G", "topicName": "T", "clientId": "c", "username": "u"}
"""A body for the other codes. What they do not know is ignored."""
NAMES: Final = {
    "username": "u",
    "subject": "User:u",
    "topic": "T",
    "group": "G",
    "brokerName": "b",
    "clusterName": "c",
    "brokerAddr": "127.0.0.1:1",
    "brokerId": "1",
    "namespace": "n",
    "key": "k",
    "value": "v",
}
"""Header fields of codes that CASES has none for."""

Sign = Callable[[dict[str, str], bytes], dict[str, str]]


def by(name: str, secret: str) -> Sign:
    """Signs as this user."""
    return lambda ext, body: signed(ext, body, name, secret, VERSION)


def bodies(value: Any) -> Iterator[Any]:
    """``value`` with one of its texts, or the name of a member, replaced by an odd text, for each of these."""
    if isinstance(value, str):
        yield from (f"{value}{odd}" for odd in ODD_TEXTS)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from ([*value[:at], odd, *value[at + 1 :]] for odd in bodies(item))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (value | {name: odd} for odd in bodies(item))
            yield {(f"{key}{ODD_TEXTS[0]}" if key == name else key): each for key, each in value.items()}


def requests(code: int, sign: Sign) -> Iterator[bytes]:
    """The frames of a code."""
    case = CASES.get(code)
    ext = dict(case.ext) if case is not None and case.ext else NAMES
    if code == Code.END_TRANSACTION:  # of a half that is not there: otherwise the broker would wait for it
        ext["commitLogOffset"] = str(1 << 40)
    body = BODIES.get(code) or (case is not None and case.body) or ANY
    for odd in bodies(body if not isinstance(body, bytes) else ANY):
        data = json.dumps(odd).encode()
        yield Request(code, list(sign(ext, data).items()), data, VERSION, binary=False, ascii_only=True).frame()
    data = json.dumps(body).encode() if not isinstance(body, bytes) else body
    for name in ext:
        fields = sign(ext | {name: f"{ext[name]}{ODD_TEXTS[0]}"}, data)
        yield Request(code, list(fields.items()), data, VERSION, binary=False, ascii_only=False).frame()


async def _reply(stream: trio.SocketStream) -> RemotingCommand | None:
    """The reply; None if the server closes the connection instead."""
    decoder = FrameDecoder()
    while True:
        data = await stream.receive_some()
        look_at_reply(data)
        for command in decoder.feed(data) if data else ():
            if command.is_reply:
                return command
        if not data:
            return None


async def outlives(address: tuple[str, int], ask: Callable[[], Awaitable[object]], sign: Sign | None = None) -> int:
    """Send all requests, each is answered or its connection closed. ``ask`` asks on another connection after each code.

    Returns the number of requests that were answered.
    """
    answered = 0
    stream = await trio.open_tcp_stream(*address)
    for code in Code:
        for frame in requests(code, sign or (lambda ext, _: ext)):
            await stream.send_all(frame)
            try:
                with trio.fail_after(20):
                    reply = await _reply(stream)
            except BaseException as error:
                error.add_note(f"{code!r}: {frame!r}")
                raise
            if reply is None:
                await stream.aclose()
                stream = await trio.open_tcp_stream(*address)
            else:
                assert reply.opaque == 7
                answered += 1
        await ask()
    await stream.aclose()
    return answered
