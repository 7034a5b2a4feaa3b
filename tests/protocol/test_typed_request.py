"""Requests decoded in one pass: if accepted, the result equals that of decoding the whole frame."""

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import decode, encode
from trimq.protocol.headers.base import Empty
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.headers.query import QueryMessageRequestHeader
from trimq.protocol.headers.send import SendMessageRequestHeader, SendMessageRequestHeaderV2
from trimq.protocol.typed_request import NOT_DECODED, decoder

IN_FRONT = b"before it"
"""Bytes in the receive buffer in front of the frame."""

SEND = {
    "producerGroup": '"group"',
    "topic": '"topic"',
    "defaultTopic": '"TBW102"',
    "defaultTopicQueueNums": '"4"',
    "queueId": '"3"',
    "sysFlag": '"0"',
    "bornTimestamp": '"1700000000000"',
    "flag": '"5"',
    "properties": r'"KEYS\u0001k\u0002WAIT\u0001true\u0002"',
    "reconsumeTimes": '"0"',
    "unitMode": '"false"',
    "batch": '"false"',
}
SEND_V2 = {
    "a": '"group"',
    "b": '"topic"',
    "c": '"TBW102"',
    "d": '"4"',
    "e": '"3"',
    "f": '"0"',
    "g": '"1700000000000"',
    "h": '"5"',
    "i": r'"KEYS\u0001k\u0002WAIT\u0001true\u0002"',
    "j": '"0"',
    "k": '"false"',
    "m": '"false"',
}
PULL = {
    "consumerGroup": '"group"',
    "topic": '"topic"',
    "queueId": '"3"',
    "queueOffset": '"77"',
    "maxMsgNums": '"32"',
    "sysFlag": '"2"',
    "commitOffset": '"0"',
    "suspendTimeoutMillis": '"15000"',
    "subVersion": '"1700000000000"',
    "subscription": '"*"',
    "expressionType": '"TAG"',
}
QUERY = {
    "topic": '"topic"',
    "key": '"k"',
    "maxNum": '"32"',
    "beginTimestamp": '"0"',
    "endTimestamp": '"9223372036854775807"',
    "_UNIQUE_KEY_QUERY": '"false"',
}
KINDS: list[tuple[int, type[Struct], dict[str, str]]] = [
    (10, SendMessageRequestHeader, SEND),
    (310, SendMessageRequestHeaderV2, SEND_V2),
    (11, PullMessageRequestHeader, PULL),
    (12, QueryMessageRequestHeader, QUERY),
]
ALL_HEADERS: list[type[Struct]] = [*(kind for _, kind, _ in KINDS), Empty]

DEEP = "[" * 5000 + "]" * 5000
TOO_DEEP = 1_000_000
"""Nested brackets: since Python 3.14 the limit is the size of the stack, which this exceeds."""
NUMBERS = ["0", "7", "-1", "1.0", "1.5", "1e3", "2147483648", "9223372036854775807", "9223372036854775808"]
NUMBERS += ["-9223372036854775809", "9" * 25, "1e999", "-0", "01", "+5", "NaN", "Infinity", "-Infinity"]
TEXTS = [
    "",
    " ",
    " 7 ",
    "null",
    "true",
    "FALSE",
    "yes",
    "0x1f",
    "٣",
    "größe 漢字",
    "\\u00e4\\n\\ud83d\\ude00",
    "\\ud800",
]
TEXTS += ["\\/\\\\", "\\x", "a\tb", "\x7f", "\udcff"]
VALUES = [*NUMBERS, *(f'"{text}"' for text in [*NUMBERS, *TEXTS]), "null", "true", "false", "{}", "[]"]
VALUES += ['{"a":{"b":[1,null,{"c":"d"}]}}', '["a",["b"]]', "{", "", DEEP]
"""Values as written in JSON; a lone surrogate stands for a byte that is not UTF-8."""

HOSTILE = ["~body", "~typed", "~head", "~ext", "~encoding"]
ENVELOPE = ["code", "extFields", "flag", "language", "opaque", "remark", "serializeTypeCurrentRPC", "version", *HOSTILE]
Members = list[tuple[str, str]]


def json_object(members: Members, gap: str = "") -> str:
    return "{" + ",".join(f'{gap}"{key}"{gap}:{gap}{value}{gap}' for key, value in members) + "}"


def frame(header: bytes, body: bytes = b"") -> bytes:
    """A frame without its length word."""
    return struct.pack(">I", len(header)) + header + body


def strict(value: object) -> tuple[object, str]:
    """A key for comparing values that distinguishes 1, True and 1.0."""
    return value, repr(value)


def outcome(call: Callable[[], object]) -> tuple[object, ...]:
    try:
        return strict(call())
    except RemotingError as error:
        return ("refused", error.code, error.remark)
    except OverflowError as error:
        return ("too large", str(error))


def seen(command: RemotingCommand) -> dict[str, object]:
    """The result of every attribute and method of a command that handlers use."""
    found: dict[str, object] = {
        name: strict(getattr(command, name))
        for name in ("code", "opaque", "flag", "version", "language", "remark", "encoding", "is_reply", "is_oneway")
    }
    found["body"] = bytes(command.body)
    found["ext"] = outcome(command.ext_fields)
    found |= {kind.__name__: outcome(lambda kind=kind: command.header(kind)) for kind in ALL_HEADERS}  # type: ignore[misc]
    found["reply"] = outcome(lambda: encode(command.reply(17, "no such topic", {"k": "v"}, b"x")))
    found["again"] = outcome(lambda: encode(command))
    return found


def one_pass(kind: type[Struct], header: bytes, body: bytes, buffer: bytearray) -> RemotingCommand:
    """Decode a frame in a receive buffer in one pass. Raises one of NOT_DECODED."""
    buffer[:] = IN_FRONT + header + body + b"behind it"
    view = memoryview(buffer)
    begin = len(IN_FRONT)
    end = begin + len(header)
    request = decoder(kind)(view[begin:end])
    request.body = view[end : end + len(body)]
    return request.command(view[begin:end])


@st.composite
def members(draw: st.DrawFn, ordinary: Members, names: list[str]) -> Members:
    """``ordinary`` with some fields missing, changed, repeated, or unknown."""
    found = list(ordinary)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        key = draw(st.sampled_from(names))
        change = draw(st.sampled_from(["without", "other", "twice", "twice", "twice"]))
        value = draw(st.sampled_from(['"7"', '"7"', "7", *VALUES]))
        if change == "without":
            found = [(name, text) for name, text in found if name != key]
        elif change == "other":
            found = [(name, value if name == key else text) for name, text in found]
        else:
            found.insert(draw(st.integers(0, len(found))), (key, value))
    return found


@st.composite
def headers(draw: st.DrawFn) -> tuple[type[Struct], bytes]:
    code, kind, ordinary = draw(st.sampled_from(KINDS))
    names = [*ordinary, *HOSTILE, "code", "unknown", "größe", "n", "l", "maxMsgBytes", "indexType"]
    gap = draw(st.sampled_from(["", "", " ", "\n\t"]))
    ext = json_object(draw(members(list(ordinary.items()), names)), gap)
    envelope = [
        ("code", str(code)),
        ("extFields", draw(st.sampled_from([ext, ext, ext, ext, "null", "[]", "{}"]))),
        ("flag", draw(st.sampled_from(["0", "2", '"2"', "1", "4"]))),
        ("language", '"JAVA"'),
        ("opaque", "12345"),
        ("serializeTypeCurrentRPC", '"JSON"'),
        ("version", "453"),
    ]
    if draw(st.booleans()):
        envelope.insert(draw(st.integers(0, len(envelope))), ("extFields", json_object(list(ordinary.items()))))
    if draw(st.booleans()):
        envelope += [(name, draw(st.sampled_from(["null", '{"topic":"mine"}', "{}"]))) for name in HOSTILE]
    envelope = draw(members(envelope, [*ENVELOPE, "unknown"]))
    return kind, json_object(envelope, gap).encode("utf-8", "surrogateescape")


@settings(max_examples=400)
@given(headers(), st.binary(max_size=8))
def test_what_one_pass_accepts_is_what_the_whole_frame_says(asked: tuple[type[Struct], bytes], body: bytes) -> None:
    kind, header = asked
    try:
        command = one_pass(kind, header, body, bytearray())
    except NOT_DECODED:
        return
    assert seen(command) == seen(decode(memoryview(frame(header, body))))


@pytest.mark.parametrize("name", [*ENVELOPE, "unknown"])
def test_each_value_in_the_envelope(name: str) -> None:
    """The same, for cases that random headers may not produce."""
    ordinary = [("code", "12"), ("extFields", json_object(list(QUERY.items()))), ("opaque", "1")]
    compare([[*ordinary, (name, value)] for value in VALUES])
    compare([[pair for pair in ordinary if pair[0] != name] + [(name, value)] for value in VALUES])


@pytest.mark.parametrize("name", [*QUERY, *HOSTILE, "code", "indexType", "unknown"])
def test_each_value_in_the_ext_fields(name: str) -> None:
    ordinary = list(QUERY.items())
    for fields in (ordinary, [pair for pair in ordinary if pair[0] != name]):
        compare([[("code", "12"), ("extFields", json_object([*fields, (name, value)]))] for value in VALUES])


def compare(envelopes: list[Members]) -> None:
    for envelope in envelopes:
        header = json_object(envelope).encode("utf-8", "surrogateescape")
        try:
            command = one_pass(QueryMessageRequestHeader, header, b"b", bytearray())
        except NOT_DECODED:
            continue
        assert seen(command) == seen(decode(memoryview(frame(header, b"b")))), header[:1000]


def test_a_request_as_the_java_client_writes_it() -> None:
    header = (
        rb'{"code":11,"extFields":{"queueId":"3","maxMsgNums":"32","sysFlag":"2","suspendTimeoutMillis":"15000",'
        rb'"commitOffset":"-1","topic":"gr\u00f6\u00dfe","queueOffset":"9223372036854775807","expressionType":"TAG",'
        rb'"subVersion":"0","consumerGroup":"a \"b\"","bname":"broker-a"},"flag":2,"language":"JAVA","opaque":-7,'
        rb'"serializeTypeCurrentRPC":"JSON","version":453}'
    )
    command = one_pass(PullMessageRequestHeader, header, b"the body", bytearray())
    assert (command.code, command.opaque, command.flag, command.version, command.language) == (11, -7, 2, 453, "JAVA")
    assert (command.is_oneway, command.is_reply, command.encoding) == (True, False, Encoding.JSON)
    assert bytes(command.body) == b"the body"
    assert command.header(PullMessageRequestHeader) == PullMessageRequestHeader(
        consumer_group='a "b"',
        topic="größe",
        queue_id=3,
        queue_offset=2**63 - 1,
        max_msg_nums=32,
        sys_flag=2,
        commit_offset=-1,
        suspend_timeout_millis=15000,
        sub_version=0,
        expression_type="TAG",
    )
    assert command.ext_fields()["bname"] == "broker-a"
    assert len(command.ext_fields()) == 11


@pytest.mark.parametrize(("code", "kind", "fields"), KINDS)
def test_ordinary_requests_are_accepted(code: int, kind: type[Struct], fields: dict[str, str]) -> None:
    header = json_object([("code", str(code)), ("extFields", json_object(list(fields.items())))]).encode()
    command = one_pass(kind, header, b"", bytearray())
    assert command.ext_fields().keys() == fields.keys()
    assert command.header(kind) is command.header(kind)
    assert seen(command) == seen(decode(memoryview(frame(header))))


def test_names_with_a_tilde_are_unknown_fields() -> None:
    hostile = [(name, '"mine"') for name in HOSTILE if name != "~ext"] + [("~ext", '{"topic":"mine"}')]
    header = json_object(
        [*hostile, ("code", "12"), ("extFields", json_object([*QUERY.items(), *hostile[:4]])), *hostile]
    ).encode()
    command = one_pass(QueryMessageRequestHeader, header, b"the body", bytearray())
    assert (bytes(command.body), command.encoding, command.ext) == (b"the body", Encoding.JSON, None)
    assert command.header(QueryMessageRequestHeader).topic == "topic"
    assert command.ext_fields()["~body"] == "mine"
    assert command.ext_fields()["topic"] == "topic"


def test_the_last_of_two_counts() -> None:
    ext = json_object([*QUERY.items(), ("topic", '"second"')])
    header = json_object([("code", "12"), ("extFields", "{}"), ("opaque", "1"), ("code", "13"), ("opaque", "2")])
    with pytest.raises(NOT_DECODED):
        one_pass(QueryMessageRequestHeader, header.encode(), b"", bytearray())
    header = header.replace("{}", ext)
    command = one_pass(QueryMessageRequestHeader, header.encode(), b"", bytearray())
    assert (command.code, command.opaque) == (13, 2)
    assert command.header(QueryMessageRequestHeader).topic == command.ext_fields()["topic"] == "second"


def ext_with(**fields: str) -> Members:
    return [("code", "12"), ("extFields", json_object(list((QUERY | fields).items())))]


REFUSED: dict[str, Members] = {
    "no code": ext_with()[1:],
    "a code that is no number": [("code", '"x"'), *ext_with()[1:]],
    "no ext fields": ext_with()[:1],
    "null for ext fields": [("code", "12"), ("extFields", "null")],
    "a list for ext fields": [("code", "12"), ("extFields", "[]")],
    "text for ext fields": [("code", "12"), ("extFields", '"topic"')],
    "nothing mandatory": [("code", "12"), ("extFields", "{}")],
    "a number for a text": ext_with(topic="7"),
    "null for what is mandatory": ext_with(topic="null"),
    "blanks for a number": ext_with(maxNum='" "'),
    "a number too large": ext_with(maxNum='"2147483648"'),
    "an unknown NaN": ext_with(unknown="NaN"),
    "unknown and deep": ext_with(unknown="[" * TOO_DEEP + "]" * TOO_DEEP),
    "text that is not UTF-8": ext_with(topic='"\udcff"'),
    "a remark that is no text": [*ext_with(), ("remark", "5")],
    "null for the flag": [*ext_with(), ("flag", "null")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_to_be_decoded_whole_is_left(name: str) -> None:
    with pytest.raises(NOT_DECODED):
        one_pass(
            QueryMessageRequestHeader,
            json_object(REFUSED[name]).encode("utf-8", "surrogateescape"),
            b"",
            bytearray(),
        )


@pytest.mark.parametrize("extra", [("remark", "5"), ("remark", "{}"), ("~ext", "5"), ("~ext", "[]")])
def test_a_frame_that_is_broken_is_broken_in_one_pass_too(extra: tuple[str, str]) -> None:
    """Otherwise a handler would get a command whose ext fields cannot be decoded."""
    header = json_object([*ext_with(), extra]).encode()
    with pytest.raises(FrameError):
        decode(memoryview(frame(header)))
    with pytest.raises(NOT_DECODED):
        one_pass(QueryMessageRequestHeader, header, b"", bytearray())


def test_a_remark_is_kept() -> None:
    header = json_object([*ext_with(), ("remark", '"why"')]).encode()
    assert one_pass(QueryMessageRequestHeader, header, b"", bytearray()).remark == "why"


HEADER = json_object([*ext_with(unknown='"größe"'), ("opaque", "5"), ("flag", "2"), ("language", '"JAVA"')]).encode()


def resize(buffer: bytearray) -> None:
    """Resize the buffer. Raises BufferError if a view of it exists."""
    buffer += b"more"
    del buffer[-4:]


def test_a_copy_is_independent_of_the_buffer() -> None:
    buffer = bytearray()
    command = one_pass(QueryMessageRequestHeader, HEADER, b"the body", buffer)
    with pytest.raises(BufferError):
        resize(buffer)
    before = seen(command)
    command.copy_buffers()
    buffer[:] = b"#" * len(buffer)
    resize(buffer)
    assert seen(command) == before == seen(decode(memoryview(frame(HEADER, b"the body"))))
    assert type(command.body) is bytes


def test_without_a_copy_the_header_is_its_own_already() -> None:
    buffer = bytearray()
    command = one_pass(QueryMessageRequestHeader, HEADER, b"the body", buffer)
    before = strict(command.header(QueryMessageRequestHeader))
    buffer[:] = b"#" * len(buffer)
    assert strict(command.header(QueryMessageRequestHeader)) == before
    assert command.language == "JAVA"


@pytest.mark.parametrize("copied", [False, True])
def test_what_drops_its_buffers_keeps_no_view_and_can_reply(copied: bool) -> None:
    buffer = bytearray()
    command = one_pass(QueryMessageRequestHeader, HEADER, b"the body", buffer)
    whole = decode(memoryview(frame(HEADER, b"the body")))
    for each in (command, whole):
        if copied:
            each.copy_buffers()
        each.drop_buffers()
    resize(buffer)
    kept: dict[str, Any] = seen(command)
    assert kept == seen(whole)
    assert getattr(command, "typed") is None, "the header may be as long as the properties of a message"  # noqa: B009 - of a TypedCommand
    assert kept["ext"] == strict({})
    assert kept["body"] == b""
