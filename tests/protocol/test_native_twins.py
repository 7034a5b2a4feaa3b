"""The native extension and Python, call by call: the extension accepts what Python accepts, with the same fields.

The Python implementation is the reference: it computes the expected results from the same bytes. Whole brokers are
compared in tests/broker/test_send_native.py. ``make nightly`` tries thousands of examples.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimq.broker.processors.end_transaction import _half_of
from trimq.broker.processors.send.send_batch import parts_of
from trimq.broker.processors.send.send_fast_path import HEADERS, MEANINGLESS
from trimq.broker.services.transaction.half_queue import State
from trimq.broker.services.transaction.messages import HalfMessages
from trimq.broker.store.log.puts import MessageInner
from trimq.protocol import record
from trimq.protocol.batch import BatchError, encode_batch
from trimq.protocol.codes import VERSION, LanguageCode, RequestCode
from trimq.protocol.command import LANGUAGE, Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import decode, encode
from trimq.protocol.hashing import key_hash, string_hash, tags_code
from trimq.protocol.headers.transaction import EndTransactionRequestHeader
from trimq.protocol.index_batch import PlainBatch
from trimq.protocol.message_keys import TAG_KEY, index_keys, key_words
from trimq.protocol.native import NATIVE, Messages, Pending
from trimq.protocol.property_names import (
    FAST_NAMES,
    NOT_IN_A_BATCH,
    PROPERTY_PGROUP,
    PROPERTY_REAL_QID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRAN_MSG,
    PROPERTY_TRANSACTION_ID,
    SLOW_NAMES,
    SLOW_PREFIXES,
)
from trimq.protocol.property_text import decode_properties, join_properties, ordinary
from trimq.protocol.queue_unit import UNIT
from trimq.protocol.record import MAX_PROPERTIES, host_flags
from trimq.protocol.record_batch import BatchHead
from trimq.protocol.timer_message import TIMER_NAMES
from trimq.protocol.topic_rules import NO_SEND_TOPICS, TRANS_HALF_TOPIC, topic_problem
from trimq.protocol.transaction import MAX_HALF_PROPERTIES, make_half
from trimq.protocol.transaction import QUEUE as HALF_QUEUE
from trimq.protocol.typed_request import NOT_DECODED, decoder

pytestmark = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")

NO_LIMITS: Final = (1 << 62, 1 << 62)
STORE_HOST: Final = record.pack_host("10.0.0.1", 10911)
HOSTS: Final = [record.pack_host("127.0.0.1", 40_000), record.pack_host("2001:db8::1", 40_001)]
ADDED: Final = b"MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02"
PHYSICAL: Final = (5 << 30) + 77
STORED_AT: Final = 1_700_000_000_999
NEXT: Final = 1 << 45
NOTHING_PENDING: Final = (0, memoryview(b""), 0, bytearray())
MANY: Final = (1 << 30, 1 << 30)
"""The most requests, and halves of transactions among them."""


def make_reader(
    *, reserved: frozenset[str] = frozenset(), tags: bool = False, store_host: bytes = STORE_HOST, halves: bool = True
) -> Any:
    """The reader, as the broker creates it."""
    assert NATIVE.extension is not None
    fast = [name for name in FAST_NAMES - reserved if name.startswith(SLOW_PREFIXES)]
    return NATIVE.extension.Reader(
        slow=[name.encode() for name in SLOW_NAMES | reserved],
        fast=[name.encode() for name in fast],
        slow_prefixes=[name.encode() for name in SLOW_PREFIXES],
        not_in_a_batch=[name.encode() for name in NOT_IN_A_BATCH],
        added=ADDED,
        tags=tags,
        store_host=store_host,
        region="DefaultRegion",
        trace="true",
        language=(LANGUAGE, int(LanguageCode[LANGUAGE])),
        version=VERSION,
        half_topic=TRANS_HALF_TOPIC,
        halves=halves,
    )


class Sent(NamedTuple):
    """A send as decoded by Python."""

    command: RemotingCommand
    header: Any
    words: tuple[str, ...]
    unique: str
    tag: str | None


def by_python(
    frame: bytes, code: int, *, reserved: frozenset[str] = frozenset(), limits: tuple[int, int] = NO_LIMITS
) -> Sent | None:
    """Decode a frame with Python; None unless it is an ordinary send within the limits.

    The conditions are those of SendFastPath.serve and the log's limits, without those that depend on topics.
    """
    view = memoryview(frame)[4:]
    try:
        command = decode(view)
        header: Any = command.header(HEADERS[code])
    except (FrameError, RemotingError):
        return None
    if command.encoding is Encoding.JSON:
        size = int.from_bytes(view[:4], "big")
        try:  # decoding in one pass must give the same
            typed = decoder(HEADERS[code])(view[4 : 4 + size])
        except NOT_DECODED:
            pass
        else:
            assert (typed.header, typed.code, typed.opaque) == (header, command.code, command.opaque)
    text = header.properties
    if command.code != code or text is None or command.flag or header.batch or header.sys_flag & ~MEANINGLESS:
        return None
    match = ordinary(reserved)(text)
    if match is None:
        return None
    keys, unique, tag = match.groups()
    raw = text.encode() + ADDED
    topic = header.topic.encode()
    size = record.record_size(header.sys_flag, len(command.body), len(topic), len(raw))
    if (
        unique is None
        or len(unique) > 256
        or header.queue_id < 0
        or not 1 <= len(command.body) <= limits[0]
        or size > limits[1]
        or len(raw) > MAX_PROPERTIES
        or not 1 <= len(topic) <= 127
    ):
        return None
    return Sent(command, header, (unique, *key_words(keys or "")), unique, tag)


def read(reader: Any, frame: bytes, code: int, host: bytes, limits: tuple[int, int] = NO_LIMITS) -> Messages | None:
    """Decode a frame with the extension; None if it does not accept it."""
    spans = [(0, len(frame), 1)]
    messages: Messages = reader.read(memoryview(frame), [code], spans, [host], MANY, limits, NOTHING_PENDING)
    assert messages.parts() == ([(1, len(frame))] if len(messages) else [(0, 0)])
    return messages if len(messages) else None


class Taken(NamedTuple):
    """A send that is to be stored: the number of its span, whose client is at ``host``."""

    span: int
    host: bytes
    sent: Sent


def next_of(queue: tuple[str, int]) -> int:
    """The next offset of a queue, different for each queue."""
    return NEXT + 1000 * string_hash(queue[0]) + queue[1]


def check_stored(messages: Messages, frames: bytes, taken: Sequence[Taken], spans: int, *, tags: bool) -> None:
    """Write the sends read by the extension, and compare all results with Python's, which handles each send alone."""
    places = {(topic, queue_id): at for at, (topic, queue_id, _, _) in enumerate(messages.queues())}
    buffer = bytearray(messages.total + 3)
    starts = list(map(next_of, places))
    front = messages.write(memoryview(frames), memoryview(buffer), 3, PHYSICAL, STORED_AT, starts)
    assert bytes(buffer[:11]) == bytes(11)
    records, rows, requests = b"", [], []
    units: dict[tuple[str, int], list[tuple[int, int, int]]] = {queue: [] for queue in places}
    replies = [b""] * spans
    for span, host, sent in taken:
        command, header = sent.command, sent.header
        queue, at = (header.topic, header.queue_id), PHYSICAL + len(records)
        queue_offset = next_of(queue) + len(units[queue])
        made = record.encode_record(
            topic=header.topic.encode(),
            body=command.body,
            properties=header.properties.encode() + ADDED,
            queue_id=header.queue_id,
            queue_offset=queue_offset,
            physical_offset=at,
            born_timestamp=header.born_timestamp,
            born_host=host,
            store_timestamp=STORED_AT,
            store_host=STORE_HOST,
            flag=header.flag,
            sys_flag=header.sys_flag | host_flags(host, STORE_HOST),
            reconsume_times=header.reconsume_times or 0,
        )
        records += made
        units[queue].append((at, len(made), tags_code(sent.tag) if sent.tag else 0))
        words = sent.words if sent.tag is None or not tags else (*sent.words, TAG_KEY + sent.tag)
        rows += [(key_hash(header.topic, word), at, STORED_AT) for word in words]
        binary = command.encoding is Encoding.ROCKETMQ
        place = (places[queue], header.queue_id, sent.unique, at, queue_offset, len(made))
        requests.append((span, command.opaque, binary, *place, False, False))
        reply = RemotingCommand(0, command.opaque, 1, VERSION, LANGUAGE, encoding=command.encoding)
        reply.ext = {
            "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
            "msgId": (STORE_HOST + at.to_bytes(8, "big")).hex().upper(),
            "queueId": str(header.queue_id),
            "queueOffset": str(queue_offset),
            "transactionId": sent.unique,
        }
        replies[span] += encode(reply)
    assert front + bytes(buffer[11:]) == records
    assert messages.total == len(records)
    assert messages.queues() == [(*queue, len(own), sum(size for _, size, _ in own)) for queue, own in units.items()]
    assert messages.units() == b"".join(struct.pack(">qiq", *unit) for own in units.values() for unit in own)
    assert messages.keys(STORED_AT).rows() == rows
    assert messages.physical_offsets() == [row[6] for row in requests]
    assert messages.requests() == requests
    assert messages.replies() == replies


def twins(frame: bytes, code: int, *, tags: bool = False, host: bytes = HOSTS[0]) -> bool:
    """Return whether both accept a frame, with equal results. Accepted by the extension alone is a failure."""
    sent = by_python(frame, code)
    messages = read(make_reader(tags=tags), frame, code, host)
    if messages is None:
        return False
    assert sent is not None
    check_stored(messages, frame, [Taken(0, host, sent)], 1, tags=tags)
    return True


# -- frames


LETTERS: Final = st.characters(codec="utf-8", exclude_characters="\x01\x02")
NAMES: Final = st.one_of(
    st.sampled_from(sorted(FAST_NAMES | {"colour", "ä", "_x", "UNIQ_KEY1", "A\x01"})),
    st.text(LETTERS, min_size=1, max_size=6),
    st.sampled_from(sorted(SLOW_NAMES | {"__other", "POP_x", "INNER_", ""})),
)
VALUES: Final = st.one_of(
    st.sampled_from(["true", "A1", "a b", " ", " a  b ", "a\x01b", "", "false", "T#x", "ä", "😀"]),
    st.text(LETTERS, max_size=8),
)
PIECES: Final = st.tuples(NAMES, VALUES).map(lambda pair: f"{pair[0]}\x01{pair[1]}\x02")
UNIQUE: Final = st.text("0123456789ABCDEFabcdefz", min_size=1, max_size=40).map(lambda key: f"UNIQ_KEY\x01{key}\x02")
TEXTS: Final = st.one_of(
    st.tuples(st.lists(PIECES, max_size=2), UNIQUE, st.lists(PIECES, max_size=2)).map(
        lambda parts: "".join([*parts[0], parts[1], *parts[2]])
    ),
    st.lists(st.one_of(PIECES, UNIQUE, st.sampled_from(["\x01", "\x02", "x"])), max_size=5).map("".join),
)
OTHERS: Final = st.sampled_from([*sorted(FAST_NAMES - {"UNIQ_KEY", "WAIT", "KEYS", "TAGS"}), "colour", "ä"])
KEYS_AND_TAGS: Final = st.text(LETTERS, min_size=1, max_size=8) | st.sampled_from(["k1 k2", " a  b "])


@st.composite
def ordinary_texts(draw: st.DrawFn) -> str:
    """Property texts of ordinary messages. Half have keys and half have a tag, so few examples cover all kinds."""
    names = [name for name in ("KEYS", "TAGS") if draw(st.booleans())] + draw(st.lists(OTHERS, max_size=3))
    return "".join([f"{name}\x01{draw(KEYS_AND_TAGS)}\x02" for name in draw(st.permutations(names))]) + draw(UNIQUE)


ORDINARY: Final = ordinary_texts()


def one_in(count: int, rare: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """``rare`` in one of so many examples. (one_of counts a strategy that is given twice as one.)"""
    return st.sampled_from(range(count)).flatmap(lambda at: rare if at == count - 1 else usual)


MIXED: Final = one_in(3, TEXTS, ORDINARY)
MOSTLY: Final = one_in(12, TEXTS, ORDINARY)
FIELDS: Final = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
}
SHORT: Final = st.sampled_from([b"b", b"body", b""])
BODIES: Final = st.binary(min_size=1, max_size=20)
NUMBERS: Final = {
    "d": st.integers(-4, 16),
    "e": st.one_of(st.integers(0, 7), st.just((1 << 31) - 1)),
    "f": st.sampled_from([0, 1, 2, 3, 0x100, 0x700]),
    "g": st.integers(-(1 << 63), (1 << 63) - 1),
    "h": st.integers(-(1 << 31), (1 << 31) - 1),
    "j": st.integers(-(1 << 31), (1 << 31) - 1),
    "l": st.integers(-1, 16),
}
TRUTHS: Final = {"k": st.booleans(), "m": st.just(False)}
TOPICS: Final = st.sampled_from(["Orders", "T", "%RETRY%g", "x" * 127])
ENVELOPES: Final = st.fixed_dictionaries(
    {"opaque": st.integers(-(1 << 31), (1 << 31) - 1)},
    optional={
        "flag": st.just(0),
        "language": st.sampled_from(["JAVA", "GO", 7, None]),
        "version": st.integers(0, 500),
        "remark": st.sampled_from(["", "r", None]),
        "serializeTypeCurrentRPC": st.sampled_from(["JSON", None]),
    },
)


@st.composite
def sends(draw: st.DrawFn, texts: st.SearchStrategy[str] = ORDINARY) -> tuple[dict[str, Any], dict[str, Any]]:
    """Envelope and fields (by their short names) of a send."""
    fields: dict[str, Any] = {"a": "group", "b": draw(TOPICS), "c": "TBW102", "i": draw(texts)}
    fields |= {name: draw(numbers) for name, numbers in NUMBERS.items()}
    fields |= {name: draw(truths) for name, truths in TRUTHS.items()}
    for name in draw(st.sets(st.sampled_from("jklm"))):
        del fields[name]
    return draw(ENVELOPES), fields


def named(fields: dict[str, Any], code: int) -> dict[str, Any]:
    return fields if code == 310 else {FIELDS[name]: value for name, value in fields.items()}


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def framed(head: bytes, body: bytes, encoding: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(head) + len(body), encoding << 24 | len(head)) + head + body


def in_json(envelope: dict[str, Any], fields: dict[str, Any], code: int, how: dict[str, Any]) -> str:
    ext = named(fields, code)
    if not how["bare"]:
        ext = {name: as_text(value) for name, value in ext.items()}
    return headed(code, {"extFields": ext} | envelope, how)


def compact(parts: Any) -> str:
    return json.dumps(parts, separators=(",", ":"))


def headed(code: int, parts: dict[str, Any], how: dict[str, Any]) -> str:
    """A JSON header that starts with its code, as clients write it. Only such headers are read in rounds."""
    if how["turned"]:
        parts = dict(reversed(parts.items()))
    text = json.dumps(parts, separators=how["separators"], ensure_ascii=how["ascii"])
    return f'{{"code":{code},{text[1:]}'


HOWS: Final = st.fixed_dictionaries(
    {
        "bare": st.booleans(),
        "turned": st.booleans(),
        "ascii": st.booleans(),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
    }
)
CODES: Final = st.sampled_from([10, 310])
CLIENT_SENDS: Final = json.loads(Path(__file__).with_name("client_sends.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("which", range(len(CLIENT_SENDS)), ids=lambda at: f"{CLIENT_SENDS[at]['client']} {at}")
@pytest.mark.parametrize("tags", [False, True])
def test_what_official_clients_write_is_taken(which: int, tags: bool) -> None:
    """Headers written by the clients' own code, which differ in escapes and in the order of fields.

    From Java's RemotingCommand.headerEncode (fastjson and binary), the struct of Go's client with both of its encoders,
    and buildHeader of ali-ons (JSON.stringify), for both forms of a send.
    """
    recorded = CLIENT_SENDS[which]
    binary = "hex" in recorded
    head = bytes.fromhex(recorded["hex"]) if binary else recorded["json"].encode()
    code = int.from_bytes(head[:2], "big") if binary else json.loads(head)["code"]
    frame = framed(head, b"body", int(binary))
    assert twins(frame, code, tags=tags)
    sent = by_python(frame, code)
    assert sent is not None
    assert sent.header.properties == (
        'KEYS\x01k1 "é"\x02UNIQ_KEY\x017F00000100002A9F\x02TAGS\x01TagÄ\x02WAIT\x01true\x02'
        'o\'dd/<a&b>\x01\\tab\tline\r\n\x08\x0c\x7f\x1f\u2028\x02😀\x01{"a":1}\x02'
    )


@given(send=sends(), code=CODES, how=HOWS, body=BODIES, tags=st.booleans(), host=st.sampled_from(HOSTS))
def test_ordinary_sends_are_taken(
    send: tuple[dict[str, Any], dict[str, Any]], code: int, how: dict[str, Any], body: bytes, tags: bool, host: bytes
) -> None:
    head = in_json(*send, code, how)
    assert twins(framed(head.encode(), body), code, tags=tags, host=host)


@given(send=sends(), code=CODES, body=BODIES, tags=st.booleans(), host=st.sampled_from(HOSTS))
def test_ordinary_sends_in_binary_are_taken(
    send: tuple[dict[str, Any], dict[str, Any]], code: int, body: bytes, tags: bool, host: bytes
) -> None:
    envelope, fields = send
    ext = {name: as_text(value) for name, value in named(fields, code).items()}
    opaque, version = envelope["opaque"], envelope.get("version", 0)
    command = RemotingCommand(code, opaque, 0, version, "GO", ext=ext, body=body, encoding=Encoding.ROCKETMQ)
    assert twins(encode(command), code, tags=tags, host=host)


ODD: Final = [
    *'{}[]":,\\',
    *"019-+. tfn\x00\x1f\x7fé😀",
    *["null", "true", "false", "1e3", "1.0", "-0", "00", "NaN", '"', '""', '":"', '","', "{}", "[]", "/**/"],
    *["\\u", "\\u0001", "\\ud83d", "\\ude00", "\\ud83d\\ude00", "\\x", "\\/"],
    *['"zz":"\\x",', '"n":"\\u0041",', '"zz":"\\u0041",', '"language":"\\q",', '"remark":"\\n",'],
    *['"e":3,', '"e":"3",', '"batch":true,', '"m":"true",', '"code":12,', '"opaque":1,', '"k":"1",', '"k":"TRUE",'],
    *['"~ext":{},', '"~body":"",', "9223372036854775808", "2147483648", "\u2028", "\ufeff", "\t", "\r\n"],
]
"""Characters that are inserted in a header."""
CHANGES: Final = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 4), st.sampled_from(ODD)), min_size=1, max_size=3
)


def changed(text: str, changes: Sequence[tuple[float, int, str]]) -> str:
    """Replace some characters by others, at relative positions from 0 (the start) to 1."""
    for where, count, new in changes:
        at = int(where * len(text))
        text = text[:at] + new + text[at + count :]
    return text


@given(send=sends(MIXED), code=CODES, how=HOWS, changes=st.one_of(st.just([]), CHANGES), body=SHORT)
def test_what_the_extension_takes_of_any_json_python_takes(
    send: tuple[dict[str, Any], dict[str, Any]],
    code: int,
    how: dict[str, Any],
    changes: list[tuple[float, int, str]],
    body: bytes,
) -> None:
    head = changed(in_json(*send, code, how), changes)
    frame = framed(head.encode("utf-8", "surrogatepass"), body)
    taken = twins(frame, code, tags=True)
    if not changes:  # in the usual form both accept it or neither does
        assert taken == (by_python(frame, code) is not None)


PLAIN: Final = {"a": "g", "b": "T", "c": "T", "d": "4", "e": "1", "f": "0", "g": "17", "h": "0"}
PLAIN_TEXT: Final = "UNIQ_KEY\x01A\x02"


def plain_frame(code: int, *, binary: bool, flag: int = 0, body: bytes = b"body", **fields: str) -> bytes:
    ext = named(PLAIN | {"i": PLAIN_TEXT} | fields, code)
    encoding = Encoding.ROCKETMQ if binary else Encoding.JSON
    return encode(RemotingCommand(code, 7, flag, 1, "GO", ext=ext, body=body, encoding=encoding))


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("code", [10, 310])
@pytest.mark.parametrize(
    "change",
    [
        {"flag": 1},
        {"flag": 2},
        {"m": "true"},
        {"f": "4"},
        {"f": "8"},
        {"f": "16"},
        {"f": "32"},
        {"e": "-1"},
        {"b": ""},
        {"b": "x" * 128},
        {"body": b""},
        {"i": "TAGS\x01a\x02"},
        {"i": "UNIQ_KEY\x01A\x02DELAY\x011\x02"},
    ],
    ids=str,
)
def test_what_is_not_ordinary_is_left(code: int, binary: bool, change: dict[str, Any]) -> None:
    assert twins(plain_frame(code, binary=binary), code)
    frame = plain_frame(code, binary=binary, **change)
    assert by_python(frame, code) is None
    assert not twins(frame, code)


@pytest.mark.parametrize("field", [*"abcdefghi", "jklm"])
@pytest.mark.parametrize("binary", [False, True])
def test_a_field_that_is_there_twice_is_left(field: str, binary: bool) -> None:
    """Of equal names Python takes the last; the extension must not take another."""
    more: dict[str, Any] = dict(zip("jklm", ["3", "false", "4", "false"], strict=True))
    if binary:
        frame = plain_frame(310, binary=True, **more)
        for name in field:
            value = (PLAIN | {"i": PLAIN_TEXT} | more)[name].encode()
            own = struct.pack(">H1sI", 1, name.encode(), len(value)) + value
            (size,) = struct.unpack_from(">I", frame, 4)
            head, ext_at = frame[8 : 8 + (size & 0xFFFFFF)], 8 + 17
            (ext_size,) = struct.unpack_from(">I", frame, ext_at)
            head = head[:17] + struct.pack(">I", ext_size + len(own)) + own + head[21:]
            assert not twins(framed(head, b"body", 1), 310)
        return
    head = plain_frame(310, binary=False, **more)[8:-4]
    assert twins(framed(head, b"body"), 310)
    for name in field:
        first = head.replace(b'{"a"', b'{"%s":"8","a"' % name.encode(), 1)
        assert first != head
        assert not twins(framed(first, b"body"), 310)


@pytest.mark.parametrize("where", ["fields", "language", "serializeTypeCurrentRPC"])
@pytest.mark.parametrize("escape", ["\\x", "\\u00", "\\ud800", "\\udc00\\ud800"])
def test_a_wrong_escape_is_left_to_python(where: str, escape: str) -> None:
    """This holds for values that are not used, too: Python closes the connection."""
    ext = {
        "a": "g",
        "b": "T",
        "c": "T",
        "d": 4,
        "e": 1,
        "f": 0,
        "g": 1,
        "h": 0,
        "i": "UNIQ_KEY\x01A\x02",
        "zz": "fields",
    }
    parts = {
        "code": 310,
        "extFields": ext,
        "language": "language",
        "serializeTypeCurrentRPC": "serializeTypeCurrentRPC",
    }
    head = compact(parts)
    assert twins(framed(head.encode(), b"body"), 310)
    frame = framed(head.replace(f':"{where}"', f':"{escape}"').encode(), b"body")
    with pytest.raises(FrameError):
        decode(memoryview(frame)[4:])
    assert not twins(frame, 310)


@given(send=sends(MIXED), code=CODES, body=SHORT, data=st.data())
def test_what_the_extension_takes_of_any_binary_python_takes(
    send: tuple[dict[str, Any], dict[str, Any]], code: int, body: bytes, data: st.DataObject
) -> None:
    envelope, fields = send
    ext = {name: as_text(value) for name, value in named(fields, code).items()}
    command = RemotingCommand(code, envelope["opaque"], 0, 1, "GO", ext=ext, encoding=Encoding.ROCKETMQ)
    head = bytearray(encode(command)[8:])
    changes = data.draw(st.lists(st.tuples(st.integers(0, len(head) - 1), st.integers(0, 255)), max_size=2))
    for at, value in changes:
        head[at] = value
    frame = framed(bytes(head), body, 1)
    taken = twins(frame, code, tags=True)
    if not changes:
        assert taken == (by_python(frame, code) is not None)


# -- rounds


SENT: Final = st.tuples(sends(MOSTLY), st.booleans(), HOWS, BODIES, st.sampled_from(["Orders", "Orders", "Other"]))
ROUNDS: Final = st.lists(
    one_in(4, st.lists(SENT, max_size=1), st.lists(SENT, min_size=2, max_size=6)), min_size=1, max_size=4
)
"""The sends of each connection: in binary or another encoding, their bodies, and their topics."""


def frame_of(one: Any, code: int) -> bytes:
    (envelope, fields), binary, how, body, topic = one
    fields = fields | {"b": topic, "e": fields["e"] % 2}
    if not binary:
        return framed(in_json(envelope, fields, code, how).encode(), body)
    ext = {name: as_text(value) for name, value in named(fields, code).items()}
    command = RemotingCommand(code, envelope["opaque"], 0, 1, "GO", ext=ext, body=body, encoding=Encoding.ROCKETMQ)
    return encode(command)


@given(
    connections=ROUNDS,
    code=CODES,
    tags=st.booleans(),
    most=one_in(3, st.integers(0, 12), st.just(1 << 30)),
    of_each=one_in(3, st.integers(0, 5), st.just(1 << 30)),
    bad=one_in(
        3, st.sets(st.tuples(st.sampled_from(["Orders", "Other"]), st.integers(0, 1)), max_size=3), st.just(set())
    ),
    cut=st.integers(0, 3),
)
def test_rounds_are_what_python_makes_of_each(
    connections: list[Any], code: int, tags: bool, most: int, of_each: int, bad: set[tuple[str, int]], cut: int
) -> None:
    """Accept each connection's sends up to the first that is not ordinary, then up to the first to an invalid queue."""
    frames, spans, hosts = b"", [], []
    taken: list[Taken] = []
    parts, left_parts = [], []
    left: list[Taken] = []
    for number, sent_here in enumerate(connections):
        frames += b"other"
        host = HOSTS[number % 2]
        begin = stop = good_stop = len(frames)
        own = [frame_of(one, code) for one in sent_here]
        frames += b"".join(own)
        if cut and own:  # the last frame of each is incomplete
            frames = frames[:-cut]
        count = good = 0
        for one in own:
            sent = by_python(one, code)
            if sent is None or count == of_each or len(taken) == most or stop + len(one) > len(frames):
                break
            if good == count and (sent.header.topic, sent.header.queue_id) not in bad:
                good, good_stop = good + 1, stop + len(one)
                left.append(Taken(number, host, sent))
            count, stop = count + 1, stop + len(one)
            taken.append(Taken(number, host, sent))
        parts.append((count, stop))
        left_parts.append((good, good_stop))
        spans.append((begin, len(frames), of_each))
        hosts.append(host)
    messages: Messages = make_reader(tags=tags).read(
        memoryview(frames), [code], spans, hosts, (most, 0), NO_LIMITS, NOTHING_PENDING
    )
    assert messages.parts() == parts
    assert len(messages) == len(taken)
    if bad:
        messages.leave_out([(topic, queue_id) not in bad for topic, queue_id, _, _ in messages.queues()], [])
        assert messages.parts() == left_parts
    if len(messages):
        check_stored(messages, frames, left if bad else taken, len(spans), tags=tags)
    else:
        assert not (left if bad else taken)
        assert (messages.total, messages.queues(), messages.requests()) == (0, [], [])


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_what_stands_behind_a_message_that_is_left_out_does_not_overtake_it(bad: int) -> None:
    """It drops sends of its own connection only; those of others stay, to the same queues too."""
    frames, spans, taken, parts = b"", [], [], []
    for number, queues in enumerate([[0, 1, 0, 2], [2, 2, 1], [0], [1, 0, 0]]):
        begin = stop = len(frames)
        own = [plain_frame(310, binary=at % 2 == 0, e=str(queue_id)) for at, queue_id in enumerate(queues)]
        kept = queues.index(bad) if bad in queues else len(queues)
        for frame in own[:kept]:
            sent = by_python(frame, 310)
            assert sent is not None
            taken.append(Taken(number, HOSTS[number % 2], sent))
            stop += len(frame)
        frames += b"".join(own)
        spans.append((begin, len(frames), 9))
        parts.append((kept, stop))
    hosts = [HOSTS[number % 2] for number in range(4)]
    messages: Messages = make_reader().read(
        memoryview(frames), [310], spans, hosts, (99, 0), NO_LIMITS, NOTHING_PENDING
    )
    assert len(messages) == 11
    messages.leave_out([queue_id != bad for _, queue_id, _, _ in messages.queues()], [])
    assert messages.parts() == parts
    check_stored(messages, frames, taken, 4, tags=False)


@pytest.mark.parametrize("body", [b"", bytes(101)])
def test_a_queue_that_nothing_goes_to_is_not_met(body: bytes) -> None:
    """The first message to it exceeds a limit, another client's does not: the first must leave no trace."""
    frames, spans = b"", []
    for topic, key, data in [("Orders", "A", body), ("Payments", "B", body), ("Orders", "OrdersPayments", bytes(100))]:
        ext = {"a": "g", "b": topic, "c": "T", "d": 4, "e": 1, "f": 0, "g": 1, "h": 0, "i": f"UNIQ_KEY\x01{key}\x02"}
        begin = len(frames)
        frames += framed(compact({"code": 310, "extFields": ext}).encode(), data)
        spans.append((begin, len(frames), 9))
    messages = make_reader().read(
        memoryview(frames), [310], spans, [HOSTS[0]] * 3, (9, 9), (100, 1 << 20), NOTHING_PENDING
    )
    assert messages.parts() == [(0, spans[0][0]), (0, spans[1][0]), (1, spans[2][1])]
    sent = by_python(frames[spans[2][0] :], 310)
    assert sent is not None
    check_stored(messages, frames, [Taken(2, HOSTS[0], sent)], 3, tags=False)


# -- transactions


GROUP: Final = "PG"
OF_HALVES: Final = {PROPERTY_TRAN_MSG: "true", PROPERTY_PGROUP: GROUP}
END: Final = RequestCode.END_TRANSACTION
LOG_START: Final = 3 << 30


class Made(NamedTuple):
    """What Python makes of a request: the message to store, and the queue id and unique key that the reply names.

    A rollback has no message. ``real``: where a half is for, also one that is rolled back.
    """

    command: RemotingCommand
    message: MessageInner | None
    named: tuple[int, str] = (0, "")
    real: tuple[str, int] | None = None

    @property
    def is_end(self) -> bool:
        return self.command.code == END


def keyed(message: MessageInner, properties: dict[str, str], *, tags: bool) -> MessageInner:
    message.tags_code = tags_code(properties["TAGS"]) if "TAGS" in properties else 0
    message.keys = index_keys(properties, tags=tags)
    return message


def send_made(frame: bytes, code: int, host: bytes, *, tags: bool) -> Made | None:
    """A half, or an ordinary send, as send.py stores it. None for others, and for what it refuses."""
    header: Any
    sent = by_python(frame, code)
    if sent is not None:
        command, header, real = sent.command, sent.header, None
        properties = decode_properties(header.properties)
        raw, sys_flag, topic, queue_id = (
            header.properties.encode() + ADDED,
            header.sys_flag,
            header.topic,
            header.queue_id,
        )
    else:
        try:
            command = decode(memoryview(frame)[4:])
            header = command.header(HEADERS[code])
        except (FrameError, RemotingError):
            return None
        properties, sys_flag = decode_properties(header.properties or ""), header.sys_flag & ~4
        if command.code != code or header.sys_flag & 12 != 4 or sys_flag & ~MEANINGLESS or "UNIQ_KEY" not in properties:
            return None
        if header.topic in NO_SEND_TOPICS or header.queue_id < 0 or header.batch or not command.body:
            return None
        if not properties.keys().isdisjoint({*TIMER_NAMES, "DELAY"}):
            return None
        real = (header.topic, header.queue_id)
        properties |= decode_properties(ADDED.decode())
        make_half(properties, *real, header.producer_group)
        raw, topic, queue_id = join_properties(properties).encode(), TRANS_HALF_TOPIC, HALF_QUEUE
        if len(raw) > MAX_HALF_PROPERTIES:
            return None
    message = MessageInner(
        topic,
        queue_id,
        bytes(command.body),
        raw,
        header.born_timestamp,
        host,
        STORE_HOST,
        header.flag,
        sys_flag,
        header.reconsume_times or 0,
    )
    return Made(command, keyed(message, properties, tags=tags), (header.queue_id, properties["UNIQ_KEY"]), real)


class Log:
    """A part of the log with halves, other bytes before each, and the table of their states."""

    def __init__(self, first: int = 0, gap: int = 3) -> None:
        self.data = b""
        self.first = first
        self.gap = bytes([0xA5]) * gap
        self.states = bytearray()
        self.halves: list[tuple[int, int]] = []
        """Queue offset and log offset of each."""

    def add(self, properties: bytes, host: bytes = HOSTS[0], store_host: bytes = STORE_HOST, **fields: Any) -> None:
        self.data += self.gap
        offset, physical = self.first + len(self.states), LOG_START + len(self.data)
        flags = fields.pop("sys_flag", 0) | host_flags(host, store_host)
        usual: dict[str, Any] = {"body": b"body", "born_timestamp": 5, "store_timestamp": 6}
        self.data += record.encode_record(
            topic=TRANS_HALF_TOPIC.encode(),
            properties=properties,
            queue_id=HALF_QUEUE,
            queue_offset=offset,
            physical_offset=physical,
            born_host=host,
            store_host=store_host,
            sys_flag=flags,
            **(usual | fields),
        )
        self.states.append(State.PENDING)
        self.halves.append((offset, physical))

    @property
    def pending(self) -> Pending:
        return LOG_START, memoryview(self.data), self.first, self.states

    def end_made(self, frame: bytes, *, tags: bool) -> Made | None:
        """The end of a half, as end_transaction.py ends a pending one. None for others."""
        try:
            command = decode(memoryview(frame)[4:])
            header = command.header(EndTransactionRequestHeader)
            at = header.commit_log_offset - LOG_START
            data = memoryview(self.data)[at:] if 0 <= at <= len(self.data) - 8 else memoryview(b"")
            size = int.from_bytes(data[:4], "big")
            half = _half_of(header, data[:size] if size <= len(data) else b"", [(header.commit_log_offset, size, 0)])
        except (FrameError, RemotingError):
            return None
        at = half.origin - self.first
        is_pending = half.is_first and 0 <= at < len(self.states) and self.states[at] == State.PENDING
        if command.code != END or header.commit_or_rollback not in (8, 12) or not is_pending:
            return None
        message = HalfMessages(STORE_HOST, tags=tags).committed(half) if header.commit_or_rollback == 8 else None
        return Made(command, message, real=None if message else (half.topic, half.queue_id))


def end_frame(
    half: tuple[int, int], state: int, *, binary: bool = False, how: dict[str, Any] | None = None, **more: Any
) -> bytes:
    flag, opaque = more.pop("flag", 0), more.pop("opaque", 9)
    fields = {"producerGroup": GROUP, "tranStateTableOffset": half[0], "commitLogOffset": half[1]}
    fields |= {"commitOrRollback": state, "msgId": "7F00", "fromTransactionCheck": False, "topic": "Orders"}
    ext = fields | more
    if binary or how is None or not how["bare"]:
        ext = {name: as_text(value) for name, value in ext.items()}
    if how is not None and not binary:
        return framed(headed(END, {"extFields": ext, "flag": flag, "opaque": opaque}, how).encode(), b"")
    encoding = Encoding.ROCKETMQ if binary else Encoding.JSON
    return encode(RemotingCommand(END, opaque, flag, 1, "GO", ext=ext, encoding=encoding))


def check_made(messages: Messages, frames: bytes, made: Sequence[tuple[int, Made]], spans: int) -> None:
    """Write what the extension has read, and compare all results with those of each request by Python.

    ``made``: the number of its span, and the request.
    """
    reals = [one.real for _, one in made if one.real is not None]
    assert messages.real_places() == list(dict.fromkeys(reals))
    places = {(topic, queue_id): at for at, (topic, queue_id, _, _) in enumerate(messages.queues())}
    stored = [one.message for _, one in made if one.message is not None]
    assert set(places) == {(message.topic, message.queue_id) for message in stored}
    assert len(messages) == len(stored)
    front, buffer = b"", bytearray(messages.total)
    if stored:
        front = messages.write(
            memoryview(frames), memoryview(buffer), 0, PHYSICAL, STORED_AT, list(map(next_of, places))
        )
    records, rows, requests, ends = b"", [], [], []
    units: dict[tuple[str, int], list[tuple[int, int, int]]] = {queue: [] for queue in places}
    replies = [b""] * spans
    for span, one in made:
        command, message, at = one.command, one.message, PHYSICAL + len(records)
        binary, oneway = command.encoding is Encoding.ROCKETMQ, bool(command.flag & 2)
        reply = command.reply()
        if message is None:
            requests.append((span, command.opaque, binary, -1, 0, "", -1, -1, 0, True, oneway))
        else:
            queue = (message.topic, message.queue_id)
            queue_offset = next_of(queue) + len(units[queue])
            data = record.encode_record(
                topic=message.topic.encode(),
                body=message.body,
                properties=message.properties,
                queue_id=message.queue_id,
                queue_offset=queue_offset,
                physical_offset=at,
                born_timestamp=message.born_timestamp,
                born_host=message.born_host,
                store_timestamp=STORED_AT,
                store_host=message.store_host,
                flag=message.flag,
                sys_flag=message.sys_flag & ~0x30 | host_flags(message.born_host, message.store_host),
                reconsume_times=message.reconsume_times,
                prepared_transaction_offset=message.prepared_transaction_offset,
            )
            records += data
            units[queue].append((at, len(data), message.tags_code))
            rows += [(key_hash(message.topic, word), at, STORED_AT) for word in message.keys]
            named = (message.queue_id, "") if one.is_end else one.named
            place = (places[queue], *named, at, queue_offset, len(data))
            requests.append((span, command.opaque, binary, *place, one.is_end, oneway))
            if not one.is_end:
                reply.ext = {
                    "MSG_REGION": "DefaultRegion",
                    "TRACE_ON": "true",
                    "msgId": (STORE_HOST + at.to_bytes(8, "big")).hex().upper(),
                    "queueId": str(one.named[0]),
                    "queueOffset": str(queue_offset),
                    "transactionId": one.named[1],
                }
        if one.is_end:
            header = command.header(EndTransactionRequestHeader)
            ends.append((header.tran_state_table_offset, header.commit_log_offset, message is not None))
        if not oneway:
            replies[span] += encode(reply)
    assert front + bytes(buffer[8:]) == records
    assert messages.queues() == [(*queue, len(own), sum(size for _, size, _ in own)) for queue, own in units.items()]
    assert messages.units() == b"".join(struct.pack(">qiq", *unit) for own in units.values() for unit in own)
    assert messages.keys(STORED_AT).rows() == rows
    assert messages.ends() == ends
    assert messages.requests() == requests
    assert messages.replies() == replies


def may_be_sent_to(topic: str) -> bool:
    return topic not in NO_SEND_TOPICS and topic_problem(topic) is None


def transaction_twins(frame: bytes, code: int, log: Log | None = None, *, tags: bool = False, **more: Any) -> bool:
    """Return whether both accept a half or an end, with equal results; by the extension alone is a failure."""
    host, limits = more.pop("host", HOSTS[0]), more.pop("limits", NO_LIMITS)
    log = Log() if log is None else log
    spans = [(0, len(frame), 1)]
    reader = make_reader(tags=tags, **more)
    messages = reader.read(memoryview(frame), [code], spans, [host], MANY, limits, log.pending)
    alone = reader.send(memoryview(frame), [code])
    if messages.parts() == [(0, 0)]:
        assert (len(messages), messages.ends(), messages.requests(), messages.replies()) == (0, [], [], [b""])
        return False
    assert messages.parts() == [(1, len(frame))]
    made = log.end_made(frame, tags=tags) if code == END else send_made(frame, code, host, tags=tags)
    if made is None and not all(may_be_sent_to(topic) for topic, *_ in [*messages.queues(), *messages.real_places()]):
        return False  # the caller leaves out what is for such a topic
    assert made is not None
    if made.command.encoding is Encoding.ROCKETMQ:
        assert alone is None
    else:
        assert (alone is True) == (made.is_end or made.real is not None)
    check_made(messages, frame, [(0, made)], 1)
    return True


OWN_NAMES: Final = st.sampled_from(
    [*sorted(FAST_NAMES - {"UNIQ_KEY", "WAIT", PROPERTY_PGROUP, PROPERTY_TRANSACTION_ID}), "colour", "ä", "_x"]
)


@st.composite
def half_properties(draw: st.DrawFn, more: dict[str, str] | None = None) -> dict[str, str]:
    """Properties of a half of which the extension leaves none to Python."""
    properties = dict.fromkeys(draw(st.lists(OWN_NAMES, max_size=4, unique=True)), "")
    for name in properties:
        properties[name] = draw(KEYS_AND_TAGS)
    if draw(st.booleans()):
        properties["WAIT"] = "true"
    properties |= OF_HALVES | {"UNIQ_KEY": draw(st.text("0123456789ABCDEF", min_size=1, max_size=40))} | (more or {})
    return dict(draw(st.permutations(list(properties.items()))))


REAL_TOPICS: Final = st.sampled_from(["Orders", "T", "x" * 127, "a|b"])
QUEUE_IDS: Final = st.one_of(st.integers(0, 7), st.just((1 << 31) - 1))


@st.composite
def stored_properties(draw: st.DrawFn) -> dict[str, str]:
    """Properties of a half in the log."""
    more = {PROPERTY_REAL_TOPIC: draw(REAL_TOPICS), PROPERTY_REAL_QID: str(draw(QUEUE_IDS))}
    return draw(half_properties(decode_properties(ADDED.decode()) | more | {PROPERTY_TRANSACTION_ID: "A1"}))


HALF_FLAGS: Final = st.sampled_from([4, 5, 6, 0x104, 0x707])


@st.composite
def half_frames(draw: st.DrawFn, code: int, texts: st.SearchStrategy[str]) -> bytes:
    envelope, fields = draw(sends(texts))
    fields |= {"f": draw(HALF_FLAGS), "m": False}
    fields["j"] = 0
    if draw(st.booleans()):
        del fields["j"]
    body = draw(BODIES)
    if draw(st.booleans()):
        return framed(in_json(envelope, fields, code, draw(HOWS)).encode(), body)
    ext = {name: as_text(value) for name, value in named(fields, code).items()}
    return encode(RemotingCommand(code, envelope["opaque"], 0, 1, "GO", ext=ext, body=body, encoding=Encoding.ROCKETMQ))


@given(data=st.data(), code=CODES, tags=st.booleans(), host=st.sampled_from(HOSTS))
def test_halves_are_taken(data: st.DataObject, code: int, tags: bool, host: bytes) -> None:
    frame = data.draw(half_frames(code, half_properties().map(join_properties)))
    assert transaction_twins(frame, code, tags=tags, host=host)


ODD_PAIRS: Final = [
    *[("TRAN_MSG", value) for value in ("true", "false", "TRUE")],
    *[("PGROUP", "x"), ("REAL_TOPIC", "T"), ("REAL_TOPIC", TRANS_HALF_TOPIC), ("REAL_QID", "1"), ("REAL_QID", "01")],
    *[("__transactionId__", "B"), ("UNIQ_KEY", "B"), ("KEYS", "k"), ("TAGS", "t"), ("MSG_REGION", "x"), ("DELAY", "3")],
    *[("TRAN_PREPARED_QUEUE_OFFSET", "0"), ("TRANSACTION_CHECK_TIMES", "1"), ("TRANS_OFFSET", "1"), ("POP_CK", "c")],
    *[("CHECK_IMMUNITY_TIME_IN_SECONDS", "9"), ("TIMER_DELAY_SEC", "9")],
]
ODD_PIECES: Final = st.sampled_from([*[f"{name}\x01{value}\x02" for name, value in ODD_PAIRS], "x", "\x01", "\x02"])


@st.composite
def odd_texts(draw: st.DrawFn, properties: st.SearchStrategy[dict[str, str]]) -> str:
    """Texts of halves, some without a piece or with other ones."""
    pieces = [f"{name}\x01{value}\x02" for name, value in draw(properties).items()]
    for _ in range(draw(st.integers(0, 2))):
        del pieces[draw(st.integers(0, len(pieces) - 1))]
    for piece in draw(st.lists(st.one_of(ODD_PIECES, PIECES), max_size=2)):
        pieces.insert(draw(st.integers(0, len(pieces))), piece)
    return "".join(pieces)


@given(data=st.data(), code=CODES, tags=st.booleans())
def test_what_the_extension_takes_of_any_half_python_takes(data: st.DataObject, code: int, tags: bool) -> None:
    frame = data.draw(half_frames(code, odd_texts(half_properties())))
    transaction_twins(frame, code, tags=tags)


@st.composite
def logs(draw: st.DrawFn, count: int = 1) -> Log:
    log = Log(draw(st.integers(0, 1 << 40)), draw(st.integers(0, 9)))
    for _ in range(count):
        log.add(
            join_properties(draw(stored_properties())).encode(),
            draw(st.sampled_from(HOSTS)),
            draw(st.sampled_from([STORE_HOST, HOSTS[1]])),
            body=draw(BODIES),
            sys_flag=draw(st.sampled_from([0, 1, 2, 0x100, 0x703])),
            flag=draw(NUMBERS["h"]),
            born_timestamp=draw(NUMBERS["g"]),
            store_timestamp=draw(NUMBERS["g"]),
            reconsume_times=draw(NUMBERS["j"]),
            prepared_transaction_offset=draw(NUMBERS["g"]),
        )
    return log


STATES: Final = st.sampled_from([8, 12])


@given(
    log=logs(),
    state=STATES,
    binary=st.booleans(),
    how=HOWS,
    oneway=st.booleans(),
    check=st.booleans(),
    opaque=NUMBERS["h"],
    tags=st.booleans(),
)
def test_ends_are_taken(
    log: Log, state: int, binary: bool, how: dict[str, Any], oneway: bool, check: bool, opaque: int, tags: bool
) -> None:
    more = {"flag": 2 if oneway else 0, "opaque": opaque, "fromTransactionCheck": check}
    frame = end_frame(log.halves[0], state, binary=binary, how=how, **more)
    assert transaction_twins(frame, END, log, tags=tags)


@given(text=odd_texts(stored_properties()), state=STATES, harm=st.lists(st.tuples(st.integers(0), st.integers(0, 255))))
def test_what_the_extension_ends_of_any_half_python_ends(text: str, state: int, harm: list[tuple[int, int]]) -> None:
    """Halves with other properties, and damaged ones."""
    log = Log(first=5)
    log.add(text.encode())
    data = bytearray(log.data)
    for at, value in harm[:2]:
        data[at % len(data)] = value
    log.data = bytes(data)
    frame = end_frame(log.halves[0], state)
    transaction_twins(frame, END, log, tags=True)


@given(log=logs(), state=STATES, how=HOWS, changes=CHANGES)
def test_what_the_extension_takes_of_any_end_python_takes(
    log: Log, state: int, how: dict[str, Any], changes: list[tuple[float, int, str]]
) -> None:
    frame = end_frame(log.halves[0], state, how=how)
    head = changed(frame[8:].decode(), changes)
    transaction_twins(framed(head.encode("utf-8", "surrogatepass"), b""), END, log)


@given(log=logs(), state=STATES, data=st.data())
def test_what_the_extension_takes_of_any_end_in_binary_python_takes(log: Log, state: int, data: st.DataObject) -> None:
    head = bytearray(end_frame(log.halves[0], state, binary=True)[8:])
    for _ in range(data.draw(st.integers(0, 2))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    transaction_twins(framed(bytes(head), b"", 1), END, log)


STORED: Final = join_properties(
    OF_HALVES
    | {"UNIQ_KEY": "A1", "KEYS": "k1 k2", "TAGS": "t", PROPERTY_TRANSACTION_ID: "A1"}
    | {PROPERTY_REAL_TOPIC: "Orders", PROPERTY_REAL_QID: "3"}
)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("state", [8, 12])
@pytest.mark.parametrize(
    "change",
    [
        {"producerGroup": "other"},
        {"producerGroup": ""},
        {"tranStateTableOffset": 6},
        {"tranStateTableOffset": -1},
        {"tranStateTableOffset": 1 << 63},
        {"commitLogOffset": LOG_START},
        {"commitLogOffset": -1},
        {"commitOrRollback": 4},
        {"commitOrRollback": 24},
        {"commitOrRollback": "8.0"},
        {"flag": 1},
        {"flag": 3},
    ],
    ids=str,
)
def test_an_end_that_does_not_match_is_left(state: int, binary: bool, change: dict[str, Any]) -> None:
    log = Log(first=5)
    for _ in range(2):
        log.add(STORED.encode())
    assert transaction_twins(end_frame(log.halves[0], state, binary=binary), END, log)
    assert not transaction_twins(end_frame(log.halves[0], state, binary=binary, **change), END, log)


@pytest.mark.parametrize("state", [8, 12])
@pytest.mark.parametrize("own", sorted({*map(int, State), 15, 16, 128, 255}))
def test_only_a_pending_half_is_ended(state: int, own: int) -> None:
    log = Log(first=5)
    log.add(STORED.encode())
    log.states[0] = own
    assert transaction_twins(end_frame(log.halves[0], state), END, log) == (own == State.PENDING)


def test_a_reader_without_halves_leaves_them() -> None:
    log = Log()
    log.add(STORED.encode())
    half = plain_frame(310, binary=False, f="4", i=join_properties(OF_HALVES | {"UNIQ_KEY": "A1"}))
    for code, frame in ((END, end_frame(log.halves[0], 8)), (310, half)):
        assert transaction_twins(frame, code, log)
        assert not transaction_twins(frame, code, log, halves=False)


@pytest.mark.parametrize("space", [0, 1])
def test_a_half_leaves_room_for_what_it_gets_later(space: int) -> None:
    properties = OF_HALVES | {"UNIQ_KEY": "A1", "p": ""}
    whole = properties | decode_properties(ADDED.decode())
    make_half(whole, "T", 1, GROUP)
    properties["p"] = "v" * (MAX_HALF_PROPERTIES - len(join_properties(whole)) + space)
    frame = plain_frame(310, binary=True, f="4", i=join_properties(properties))
    assert transaction_twins(frame, 310) == (not space)
    assert (send_made(frame, 310, HOSTS[0], tags=False) is not None) == (not space)


@pytest.mark.parametrize("front", [' {"code":37,', '{ "code":37,', '{"code" :37,', '{"code": 37,', '{"code":37 ,'])
def test_a_header_that_does_not_start_with_its_code_is_left(front: str) -> None:
    log = Log()
    log.add(STORED.encode())
    head = end_frame(log.halves[0], 8)[8:].decode()
    assert head.startswith('{"code":37,')
    assert transaction_twins(framed(head.encode(), b""), END, log)
    other = framed((front + head.removeprefix('{"code":37,')).encode(), b"")
    assert log.end_made(other, tags=False) is not None
    assert not transaction_twins(other, END, log)


STEPS: Final = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["send", "half", "commit", "rollback", "half"]), st.booleans(), st.booleans()),
        max_size=6,
    ),
    min_size=1,
    max_size=4,
)


@given(
    steps=STEPS,
    log=logs(4),
    data=st.data(),
    most=one_in(3, st.integers(0, 4), st.just(1 << 30)),
    tags=st.booleans(),
    bad=st.sets(st.integers(0, 9), max_size=2),
    unreal=st.sets(st.integers(0, 4), max_size=1),
)
def test_mixed_rounds_are_what_python_makes_of_each(
    steps: list[Any], log: Log, data: st.DataObject, most: int, tags: bool, bad: set[int], unreal: set[int]
) -> None:
    """Sends, up to ``most`` halves, and ends, a half of the log once; then those of them that are good."""
    frames, spans, made, stops = b"", [], [], []
    left, halves = [at % 4 for at in range(7)], 0
    ended: set[int] = set()
    for number, kinds in enumerate(steps):
        host, begin = HOSTS[number % 2], len(frames)
        is_open, own_stops = True, [begin]
        for kind, binary, oneway in kinds:
            one: Made | None = None
            if kind in ("commit", "rollback"):
                if not left:
                    continue
                at = left.pop()
                flag = 2 if oneway else 0
                frame = end_frame(log.halves[at], 8 if kind == "commit" else 12, binary=binary, flag=flag)
                if at not in ended:
                    one = log.end_made(frame, tags=tags)
                    assert one is not None
                if is_open and one is not None:
                    ended.add(at)
            elif kind == "half":
                frame = data.draw(half_frames(310, half_properties().map(join_properties)))
                if halves < most:
                    one = send_made(frame, 310, host, tags=tags)
                    halves += is_open
            else:
                frame = plain_frame(310, binary=binary, e=str(number), b="Orders")
                one = send_made(frame, 310, host, tags=tags)
            frames += frame
            is_open = is_open and one is not None
            if is_open and one is not None:
                made.append((number, one))
                own_stops.append(len(frames))
        spans.append((begin, len(frames), 99))
        stops.append(own_stops)
    hosts = [HOSTS[number % 2] for number in range(len(spans))]
    messages: Messages = make_reader(tags=tags).read(
        memoryview(frames), [310, END], spans, hosts, (99, most), NO_LIMITS, log.pending
    )
    assert messages.parts() == [(len(own) - 1, own[-1]) for own in stops]
    if bad or unreal:
        queues = [(topic, queue_id) for at, (topic, queue_id, _, _) in enumerate(messages.queues()) if at in bad]
        reals = [place for at, place in enumerate(messages.real_places()) if at in unreal]
        messages.leave_out(
            [at not in bad for at in range(len(messages.queues()))],
            [at not in unreal for at in range(len(messages.real_places()))],
        )
        kept: list[tuple[int, Made]] = []
        shut: set[int] = set()
        for span, one in made:
            message = one.message
            is_bad = message is not None and (message.topic, message.queue_id) in queues
            if is_bad or one.real in reals:
                shut.add(span)
            if span not in shut:
                kept.append((span, one))
        made = kept
        counts = [sum(span == number for span, _ in made) for number in range(len(spans))]
        assert messages.parts() == [(count, stops[number][count]) for number, count in enumerate(counts)]
    check_made(messages, frames, made, len(spans))


# -- rules


@given(
    text=TEXTS,
    reserved=st.frozensets(
        st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "WAIT", "colour", "__SHARDINGKEY"]), max_size=2
    ),
    limits=st.tuples(st.integers(0, 8), st.integers(0, 400)) | st.just(NO_LIMITS),
)
@example(text="UNIQ_KEY\x01A\x02", reserved=frozenset(), limits=(3, 400)).via("the body alone exceeds its limit")
@example(text="UNIQ_KEY\x01A\x02", reserved=frozenset(), limits=(4, 100)).via("the record alone exceeds its limit")
def test_rules_are_those_of_the_pattern(text: str, reserved: frozenset[str], limits: tuple[int, int]) -> None:
    """The rules include property names reserved by features, and small limits."""
    ext = {"a": "g", "b": "Orders", "c": "T", "d": "4", "e": "1", "f": "0", "g": "1", "h": "0", "i": text}
    frame = framed(compact({"code": 310, "extFields": ext, "opaque": 3}).encode(), b"body")
    sent = by_python(frame, 310, reserved=reserved, limits=limits)
    messages = read(make_reader(reserved=reserved), frame, 310, HOSTS[0], limits)
    assert (messages is None) == (sent is None)
    if messages is not None and sent is not None:
        check_stored(messages, frame, [Taken(0, HOSTS[0], sent)], 1, tags=False)


@pytest.mark.parametrize("at_most", [256, 257])
def test_the_longest_unique_key(at_most: int) -> None:
    ext = {"a": "g", "b": "T", "c": "T", "d": "4", "e": "1", "f": "0", "g": "1", "h": "0"}
    ext["i"] = "UNIQ_KEY\x01" + "A" * at_most + "\x02"
    frame = framed(compact({"code": 310, "extFields": ext}).encode(), b"body")
    assert twins(frame, 310) == (at_most == 256)
    assert (by_python(frame, 310) is not None) == (at_most == 256)


# -- batches


BATCHED: Final = st.tuples(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.binary(max_size=20),
    st.one_of(
        TEXTS,
        TEXTS.map(lambda text: text[:-1]),
        st.just(""),
        st.lists(PIECES, max_size=3).map("".join),
        st.just("TAGS\x01\x03\x02"),
    ).map(str.encode)
    | st.binary(max_size=9),
)
"""Flag, body and properties."""


def batch_by_python(body: bytes, host: bytes, store_host: bytes, *, tags: bool) -> tuple[Any, ...] | None:
    """Records, units and index rows of a batch; None if it is no batch, or has properties not allowed in one."""

    def refuse(properties: dict[str, str]) -> None:
        raise RemotingError(1, repr(properties))

    try:
        parts = parts_of(body, refuse, tags_too=tags)
    except (BatchError, RemotingError):
        return None
    if not len(parts.messages):
        return None
    sys_flag = 0x101 | host_flags(host, store_host)
    shared = record.pack_shared(sys_flag, -5, host, STORED_AT, store_host, 3)
    head = BatchHead(record.MAGIC_V1, 6, NEXT, PHYSICAL, shared, b"\x06Orders")
    records, offsets = parts.messages.records(head)
    sizes = [end - begin for begin, end in zip(offsets, [*offsets[1:], PHYSICAL + len(records)], strict=True)]
    units = b"".join(map(struct.Struct(">qiq").pack, offsets, sizes, parts.tags_codes))
    rows = [
        (key_hash("Orders", key), offset, STORED_AT)
        for offset, keys in zip(offsets, parts.keys, strict=True)
        for key in keys
    ]
    return bytes(records), units, rows


def is_plain(message: tuple[int, bytes, bytes]) -> bool:
    """Whether the extension handles a message itself, without Python."""
    _, body, raw = message
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    names = [piece.partition("\x01") for piece in text.removesuffix("\x02").split("\x02")] if text else []
    return bool(body) and all(
        name and value and name not in SLOW_NAMES | NOT_IN_A_BATCH
        and (name in FAST_NAMES or not name.startswith(SLOW_PREFIXES))
        for name, _, value in names
    )  # fmt: skip


IN_A_BATCH: Final = st.tuples(
    st.integers(-(1 << 31), (1 << 31) - 1), st.binary(min_size=1, max_size=20), ORDINARY.map(str.encode)
).filter(is_plain)


@given(
    messages=one_in(3, st.lists(BATCHED, max_size=6), st.lists(IN_A_BATCH, min_size=2, max_size=6)),
    tags=st.booleans(),
    host=st.sampled_from(HOSTS),
    store_host=st.sampled_from([STORE_HOST, record.pack_host("2001:db8::2", 10911)]),
    harm=one_in(3, st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), st.none()),
    cut=st.sampled_from([0, 0, 0, 1, 7]),
)
def test_batches_are_pythons(
    messages: list[tuple[int, bytes, bytes]],
    tags: bool,
    host: bytes,
    store_host: bytes,
    harm: tuple[float, int] | None,
    cut: int,
) -> None:
    body = bytearray(encode_batch(messages))
    if cut:
        del body[-cut:]
    if harm is not None and body:
        body[int(harm[0] * len(body))] = harm[1]
    sent = bytes(body)
    reader = make_reader(tags=tags, store_host=store_host)
    found = reader.batch(sent, "Orders", 6, (0x101, -5, 3), host, NO_LIMITS)
    if harm is None and not cut:
        assert (found is not None) == (bool(messages) and all(map(is_plain, messages)))
    if found is None:
        return
    expected = batch_by_python(sent, host, store_host, tags=tags)
    assert expected is not None
    buffer = bytearray(found.total)
    front = found.write(sent, memoryview(buffer), 0, PHYSICAL, STORED_AT, [NEXT])
    assert (front + bytes(buffer[8:]), found.units(), found.keys(STORED_AT).rows()) == expected


@pytest.mark.parametrize("name", sorted(NOT_IN_A_BATCH | {"__other", "POP_CK", "TRACE_ON"}))
@pytest.mark.parametrize("at", [0, 1])
def test_a_batch_with_what_it_may_not_have_is_left(name: str, at: int) -> None:
    texts = ["UNIQ_KEY\x01A\x02", "KEYS\x01k\x02"]
    reader = make_reader()
    body = encode_batch([(1, b"b", text.encode()) for text in texts])
    assert reader.batch(body, "Orders", 6, (0, 0, 0), HOSTS[0], NO_LIMITS) is not None
    texts[at] += f"{name}\x011\x02"
    body = encode_batch([(1, b"b", text.encode()) for text in texts])
    assert reader.batch(body, "Orders", 6, (0, 0, 0), HOSTS[0], NO_LIMITS) is None


# -- hashes


WORDS: Final = st.text(st.characters(codec="utf-8"), max_size=12)
ENTRIES: Final = st.lists(
    st.tuples(
        WORDS, st.lists(WORDS, min_size=1, max_size=4).map(tuple), st.integers(0, 1 << 60), st.integers(0, 1 << 50)
    ),
    min_size=1,
    max_size=5,
)


@given(entries=ENTRIES)
@example(entries=[("T", ("polygenelubricants", ""), 1, 2)])
@example(entries=[("", ("\x00" * 5,), 1, 2)])
def test_hashes_of_keys_are_pythons(entries: list[tuple[str, tuple[str, ...], int, int]]) -> None:
    assert NATIVE.extension is not None
    hashes, physical, times = NATIVE.extension.flat(entries)
    found = [memoryview(hashes).cast("i").tolist(), memoryview(physical).cast("q").tolist()]
    found.append(memoryview(times).cast("q").tolist())
    assert found == list(map(list, PlainBatch().flat(entries)))


def with_hash(wanted: int) -> str:
    """A text with this hash: seven letters from "@" on, the digits of a number in base 31."""
    powers = [31**power for power in reversed(range(7))]
    rest = (wanted - ord("@") * sum(powers)) & 0xFFFFFFFF
    text = ""
    for power in powers:
        text += chr(ord("@") + rest // power)
        rest %= power
    assert string_hash(text) == wanted
    return text


@pytest.mark.parametrize("value", [-(1 << 31), (1 << 31) - 1, -1, 0, 1])
def test_tags_codes_at_the_edges(value: int) -> None:
    tag = with_hash(value)
    body = encode_batch([(0, b"b", f"TAGS\x01{tag}\x02".encode())])
    found = make_reader(tags=True).batch(body, "Orders", 6, (0, 0, 0), HOSTS[0], NO_LIMITS)
    found.write(body, memoryview(bytearray(found.total)), 0, PHYSICAL, STORED_AT, [NEXT])
    assert UNIT.unpack(found.units())[2] == value == tags_code(tag)


# -- entries of an index file


@given(
    slots=st.integers(1, 9),
    known=st.lists(st.integers(0, 30), max_size=8),
    lost=st.lists(st.integers(0, 30), max_size=8),
    new=st.lists(
        st.tuples(st.integers(0, (1 << 31) - 1), st.integers(0, 1 << 60), st.integers(0, 1 << 31)), max_size=9
    ),
    begin=st.integers(-1, 1 << 40),
)
def test_entries_are_written_as_pythons_are(
    slots: int, known: list[int], lost: list[int], new: list[tuple[int, int, int]], begin: int
) -> None:
    """Entries are written behind the counted ones, over entries that a killed process has left."""
    extension, plain = NATIVE.extension, PlainBatch()
    assert extension is not None
    files = [bytearray(40 + 4 * slots + 20 * (len(known) + len(lost) + len(new) + 2)) for _ in range(2)]
    count = 1 + len(known)
    for file in files:
        view = memoryview(file)
        for first, hashes in ((1, known), (count, lost)):
            plain.put(view, slots, first, hashes, [7] * len(hashes), [8] * len(hashes))
    hashes, physical, times = ([row[at] for row in new] for at in range(3))
    seconds = extension.seconds(memoryview(struct.pack(f"={len(new)}q", *times)).cast("B").cast("q"), begin)
    assert memoryview(seconds).cast("i").tolist() == list(plain.seconds(times, begin))
    used = extension.put_entries(
        memoryview(files[0]),
        slots,
        count,
        memoryview(struct.pack(f"={len(new)}i", *hashes)).cast("B").cast("i"),
        memoryview(struct.pack(f"={len(new)}q", *physical)).cast("B").cast("q"),
        memoryview(seconds).cast("i"),
    )
    assert used == plain.put(memoryview(files[1]), slots, count, hashes, physical, list(plain.seconds(times, begin)))
    assert files[0] == files[1]
