"""Replies to pulls: the code for each result of the store, and headers from a template.

Source: RocketMQ's PullMessageProcessor and DefaultPullMessageResultHandler.
"""

import struct
from typing import Final

from trimq.broker.store.types import GetMessageResult, GetMessageStatus
from trimq.protocol.codes import VERSION, ResponseCode
from trimq.protocol.command import LANGUAGE, RemotingCommand
from trimq.protocol.errors import RemotingError
from trimq.protocol.frame import encode_head

BROKER_FORBIDDEN: Final = 1
GROUP_FORBIDDEN: Final = 2
TOPIC_FORBIDDEN: Final = 3
BROADCASTING_FORBIDDEN: Final = 4
SUBSCRIPTION_FORBIDDEN: Final = 5

NOT_FOUND: Final = int(ResponseCode.PULL_NOT_FOUND)
MOVED: Final = int(ResponseCode.PULL_OFFSET_MOVED)
_pack_words: Final = struct.Struct(">II").pack
_TEMPLATE: Final = (
    '{"code":%d,"extFields":{"groupSysFlag":"%d","maxOffset":"%d","minOffset":"%d","nextBeginOffset":"%d",'
    f'"suggestWhichBrokerId":"%d","topicSysFlag":"%d"}},"flag":1,"language":"{LANGUAGE}","opaque":%d,'
    f'"remark":"%s","serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
_BY_STATUS: Final = {
    GetMessageStatus.FOUND: ResponseCode.SUCCESS,
    GetMessageStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    GetMessageStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.NO_MATCHED_LOGIC_QUEUE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.NO_MESSAGE_IN_QUEUE: ResponseCode.PULL_NOT_FOUND,
    GetMessageStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
    GetMessageStatus.OFFSET_RESET: ResponseCode.PULL_OFFSET_MOVED,
}
_CODES: Final = tuple(int(_BY_STATUS[status]) for status in GetMessageStatus)
_NAMES: Final = tuple(status.name.encode() for status in GetMessageStatus)
_EMPTY_QUEUE: Final = (GetMessageStatus.NO_MATCHED_LOGIC_QUEUE, GetMessageStatus.NO_MESSAGE_IN_QUEUE)


class PullForbiddenError(RemotingError):
    """NO_PERMISSION, with RocketMQ's number for the reason in the header of the reply."""

    def __init__(self, forbidden_type: int, remark: str) -> None:
        super().__init__(ResponseCode.NO_PERMISSION, remark)
        self.forbidden_type = forbidden_type


def forbidden(command: RemotingCommand, error: PullForbiddenError) -> RemotingCommand:
    """The reply to a pull that is not allowed."""
    return command.reply(error.code, error.remark, {"forbiddenType": str(error.forbidden_type)})


def code_of(status: GetMessageStatus, offset: int) -> int:
    """The code of the reply to a pull at ``offset`` with the result ``status``."""
    if offset != 0 and status in _EMPTY_QUEUE:
        return MOVED
    return _CODES[status]


def ask_again(command: RemotingCommand, offset: int) -> bytes:
    """The reply to a held pull that is not served: PULL_NOT_FOUND at its own offset, so the client sends it again."""
    nothing = GetMessageResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, 0, offset)
    return pull_head(command, NOT_FOUND, nothing, (0, 0), 0)


def found_template(topic_flag: int, group_flag: int) -> bytes:
    """A template for the header of replies with messages; it takes max, min and next offset, and the opaque."""
    return (
        _TEMPLATE.replace(b'"code":%d', b'"code":0', 1)
        .replace(b'"groupSysFlag":"%d"', b'"groupSysFlag":"%d"' % group_flag, 1)
        .replace(b'"suggestWhichBrokerId":"%d"', b'"suggestWhichBrokerId":"0"', 1)
        .replace(b'"topicSysFlag":"%d"', b'"topicSysFlag":"%d"' % topic_flag, 1)
        .replace(b"%s", b"FOUND", 1)
    )


def pull_head(
    command: RemotingCommand,
    code: int,
    result: GetMessageResult,
    flags: tuple[int, int],
    body_size: int,
    suggested: int = 0,
) -> bytes:
    """The length words and the header of a reply, without its body. ``flags``: the sysFlags of topic and group.

    ``suggested``: the id of the broker from which the client shall pull next; 0 is the master.
    """
    topic_flag, group_flag = flags
    if command.encoding:
        ext = {
            "suggestWhichBrokerId": str(suggested),
            "nextBeginOffset": str(result.next_begin_offset),
            "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset),
            "topicSysFlag": str(topic_flag),
            "groupSysFlag": str(group_flag),
        }
        return encode_head(command.reply(code, result.status.name, ext), body_size)
    header = _TEMPLATE % (
        code,
        group_flag,
        result.max_offset,
        result.min_offset,
        result.next_begin_offset,
        suggested,
        topic_flag,
        command.opaque,
        _NAMES[result.status],
    )
    size = len(header)
    return _pack_words(size + 4 + body_size, size) + header
