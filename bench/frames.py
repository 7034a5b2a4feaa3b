"""Frames as the load generator (bench/rmqload) makes them, and the configuration of the broker that gets them."""

import struct
from typing import Final

from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, sign
from trimq.protocol.batch import encode_batch
from trimq.protocol.frame import decode
from trimq.protocol.sysflag import TRANSACTION_PREPARED

BODY: Final = bytes(range(256)) * 4
BATCH: Final = 32
"""Messages of a batch, and the most messages of a pull."""
FIRST: Final = 1_000_000
"""The first number. All numbers have the same count of digits, so that frames of one kind have one length."""
BIG: Final = {
    "mappedFileSizeCommitLog": 1 << 30,
    "commitLogReserveStep": 64 << 20,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
}
"""File sizes of a broker as in production, or nearly."""
_QUERIED: Final = 4000


def frame(code: int, opaque: int, fields: str, body: bytes = b"") -> bytes:
    """A request in JSON encoding."""
    header = (
        f'{{"code":{code},"extFields":{{{fields}}},"flag":0,"language":"JAVA","opaque":{opaque},'
        '"serializeTypeCurrentRPC":"JSON","version":479}'
    ).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def signed(request: bytes, name: str, secret: str) -> bytes:
    """``request``, made by ``frame``, with the signature of a user whose name needs no escapes."""
    command = decode(memoryview(request)[4:])
    signature = sign(secret, command.ext_fields() | {ACCESS_KEY: name}, command.body, command.version)
    header = request[8 : len(request) - len(command.body)]
    added = f',"{ACCESS_KEY}":"{name}","{SIGNATURE}":"{signature}"}},"flag":'.encode()
    header = added.join(header.rsplit(b'},"flag":', 1))
    body = bytes(command.body)
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def send_fields(topic: str, queue_id: int, properties: str, *, batch: bool = False, sys_flag: int = 0) -> str:
    """The ext fields of a send; ``properties`` as escaped inside a JSON string."""
    return (
        f'"a":"load","b":"{topic}","c":"TBW102","d":"4","e":"{queue_id}","f":"{sys_flag}","g":"1700000000000","h":"0",'
        f'"i":"{properties}","j":"0","k":"false","l":"0","m":"{str(batch).lower()}","n":"broker-a"'
    )


def unique(number: int) -> str:
    """The unique key of a message."""
    return f"7F0000011F9018B4{number:016X}"


def key(number: int) -> str:
    """The key of a message, which ``query`` uses."""
    return f"k{FIRST + number}"


def _properties(number: int) -> str:
    return f"KEYS\x01{key(number)}\x02UNIQ_KEY\x01{unique(number)}\x02TAGS\x01TagA\x02"


def escaped(text: str) -> str:
    """Escape the separators of properties for JSON; for texts that need no other escapes."""
    return text.replace("\x01", "\\u0001").replace("\x02", "\\u0002")


def send(number: int) -> bytes:
    """A message of 1 KiB with two keys and a tag."""
    return frame(310, FIRST + number, send_fields("Requests", number % 4, escaped(_properties(number))), BODY)


def half(number: int) -> bytes:
    """The same as the half message of a transaction."""
    text = "TRAN_MSG\x01true\x02PGROUP\x01load\x02" + _properties(number)
    fields = send_fields("Requests", number % 4, escaped(text), sys_flag=TRANSACTION_PREPARED)
    return frame(310, FIRST + number, fields, BODY)


def commit(offset: int, place: int) -> bytes:
    """The commit of a half by its queue offset and its log offset."""
    key = unique(offset)
    return frame(
        37,
        FIRST + offset,
        f'"producerGroup":"load","tranStateTableOffset":"{offset}","commitLogOffset":"{place}","commitOrRollback":"8",'
        f'"fromTransactionCheck":"false","msgId":"{key}","transactionId":"{key}"',
    )


def batch(number: int) -> bytes:
    """32 messages of 1 KiB in one request."""
    texts = [_properties(at).encode() for at in range(number * BATCH, (number + 1) * BATCH)]
    fields = send_fields("Requests", number % 4, "", batch=True)
    return frame(320, FIRST + number, fields, encode_batch([(0, BODY, text) for text in texts]))


def pull_fields(topic: str, queue_id: int, offset: int, count: int) -> str:
    """The ext fields of a pull."""
    return (
        f'"consumerGroup":"load","topic":"{topic}","queueId":"{queue_id}","queueOffset":"{offset}",'
        f'"maxMsgNums":"{count}","sysFlag":"4","commitOffset":"0","suspendTimeoutMillis":"0","subscription":"*",'
        '"subVersion":"0","expressionType":"TAG"'
    )


def pull(number: int) -> bytes:
    """A pull of up to 32 messages, among the first 1,280 of each queue."""
    return frame(11, FIRST + number, pull_fields("Requests", number % 4, number % 40 * BATCH, BATCH))


def query(number: int) -> bytes:
    """A query by key for one message, among the first 4,000."""
    return frame(
        12,
        FIRST + number,
        f'"topic":"Requests","key":"{key(number % _QUERIED)}","maxNum":"32","beginTimestamp":"0",'
        '"endTimestamp":"9223372036854775807"',
    )
