"""Frames: three encodings, any split of the stream, and hostile input."""

import importlib
import json
import pkgutil
import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import headers
from trimq.protocol.codes import VERSION, RequestCode
from trimq.protocol.command import Encoding, RemotingCommand, _field_kinds
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import MAX_FRAME, MOST_FIELDS, FrameDecoder, decode, decode_at, encode
from trimq.protocol.headers.base import Header
from trimq.protocol.headers.pull import PullMessageRequestHeader
from trimq.protocol.headers.send import SendMessageRequestHeaderV2

TEXT = st.text(max_size=20)
EXT = st.dictionaries(st.text(min_size=1, max_size=8), TEXT.filter(bool), max_size=6)


def frame(header: bytes, body: bytes = b"", encoding: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), encoding << 24 | len(header)) + header + body


@given(
    code=st.sampled_from(RequestCode),
    opaque=st.integers(-(2**31), 2**31 - 1),
    ext=EXT,
    body=st.binary(max_size=64),
    remark=st.none() | TEXT.filter(bool),
    encoding=st.sampled_from(Encoding),
    oneway=st.booleans(),
)
def test_every_encoding_brings_back_what_went_in(
    code: RequestCode,
    opaque: int,
    ext: dict[str, str],
    body: bytes,
    remark: str | None,
    encoding: Encoding,
    oneway: bool,
) -> None:
    command = RemotingCommand.request(code, ext, body, oneway=oneway, encoding=encoding)
    command.opaque = opaque
    command.remark = remark
    read = decode(memoryview(encode(command))[4:])
    assert (read.code, read.opaque, read.remark) == (code, opaque, remark)
    assert (bytes(read.body), read.ext_fields(), read.is_oneway, read.encoding) == (
        body,
        ext,
        oneway,
        encoding,
    )
    assert read.version == VERSION
    assert read.language == "PYTHON"


@given(
    bodies=st.lists(st.binary(max_size=50), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_any_split_of_the_stream_gives_the_same_commands(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode(RemotingCommand.request(10, {"a": "b"}, body)) for body in bodies)
    decoder = FrameDecoder()
    commands = []
    at = 0
    for cut in cuts:
        commands += decoder.feed(stream[at : at + cut])
        at += cut
    commands += decoder.feed(stream[at:])
    assert [bytes(command.body) for command in commands] == bodies
    assert decoder.pending == 0


def test_a_reply_takes_opaque_and_encoding_of_its_request() -> None:
    request = RemotingCommand.request(34, encoding=Encoding.ROCKETMQ)
    request.opaque = 77
    reply = decode(memoryview(encode(request.reply(17, "no such topic", {"k": "v"}, b"x")))[4:])
    assert reply.is_reply
    assert (reply.opaque, reply.code, reply.remark, reply.encoding) == (
        77,
        17,
        "no such topic",
        Encoding.ROCKETMQ,
    )


def test_json_replies_have_only_text_in_their_ext_fields() -> None:
    reply = RemotingCommand.request(11).reply(0, header={"offset": "5"})
    header = json.loads(encode(reply)[8:])
    assert header["extFields"] == {"offset": "5"}
    assert list(header) == sorted(header)
    assert "remark" not in header


def test_pop_codes_survive_the_16_bits_of_the_binary_form() -> None:
    command = RemotingCommand.request(RequestCode.POP_MESSAGE, encoding=Encoding.ROCKETMQ)
    assert decode(memoryview(encode(command))[4:]).code == RequestCode.POP_MESSAGE


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="no header word"),
        pytest.param(struct.pack(">I", 50) + b"{}", id="header longer than the frame"),
        pytest.param(frame(b"{")[4:], id="broken JSON"),
        pytest.param(frame(b'{"code":"x"}')[4:], id="code is no number"),
        pytest.param(frame(b"[" * 5000)[4:], id="deep JSON"),
        pytest.param(frame(b'{"code":1,"remark":"\xff"}')[4:], id="not UTF-8"),
        pytest.param(frame(b"\x00\x01", encoding=1)[4:], id="short binary header"),
        pytest.param(
            frame(bytes(13) + b"\x7f\xff\xff\xff" + bytes(4), encoding=1)[4:],
            id="binary remark too long",
        ),
        pytest.param(frame(b"\xc1", encoding=2)[4:], id="broken msgpack"),
        pytest.param(frame(b"\x81\xa4code\xa1x", encoding=2)[4:], id="msgpack code is text"),
        pytest.param(frame(b"{}", encoding=9)[4:], id="unknown encoding"),
    ],
)
def test_a_malformed_frame_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(memoryview(data))


@pytest.mark.parametrize("total", [0, 3, MAX_FRAME - 3, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_length_word_outside_its_range_is_a_frame_error(total: int) -> None:
    with pytest.raises(FrameError):
        FrameDecoder().feed(struct.pack(">I", total))


@given(st.binary(max_size=200), st.integers(0, 3))
def test_no_bytes_do_anything_but_decode_or_raise_frame_error(header: bytes, encoding: int) -> None:
    with suppress(FrameError):
        decode(memoryview(frame(header, encoding=encoding))[4:])


def both_passes(fields: dict[str, object], kind: type[msgspec.Struct]) -> list[dict[str, object]]:
    """The fields as read by the fast pass over the header, and as read by the tolerant one."""
    command = decode(memoryview(frame(json.dumps({"code": 310, "extFields": fields}).encode()))[4:])
    outcomes: list[dict[str, object]] = []
    for request in (command, RemotingCommand(310, ext=command.ext_fields())):
        try:
            outcomes.append(msgspec.structs.asdict(request.header(kind)))
        except RemotingError as error:
            outcomes.append({"error": (error.code, error.remark)})
    return outcomes


SEND: dict[str, object] = {
    "a": "g",
    "b": "t",
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "g": "1700000000000",
    "h": "0",
}


@given(
    changes=st.dictionaries(
        st.sampled_from("abcdefghijklmn"),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(2**40), 2**40),
            st.sampled_from(
                [
                    "",
                    " ",
                    "true",
                    "TRUE",
                    "false",
                    "False",
                    "1",
                    "0",
                    "abc",
                    "-5",
                    " 7",
                    "2147483648",
                ]
            ),
        ),
    )
)
def test_the_fast_and_the_tolerant_pass_agree(changes: dict[str, object]) -> None:
    fields = SEND | changes
    fast, tolerant = both_passes(fields, SendMessageRequestHeaderV2)
    assert fast == tolerant


def header_kinds() -> list[type[Header]]:
    for module in pkgutil.iter_modules(headers.__path__, headers.__name__ + "."):
        importlib.import_module(module.name)
    found = [Header]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found[1:] if kind.__struct_fields__]


KINDS = header_kinds()
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.text("0123456789+- .eEtrufals\u0663x", max_size=6)
)


@given(st.data())
def test_the_two_passes_agree_on_every_header(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    usual = {bool: "true", int: "7", str: "text"}
    plain: dict[str, object] = {name: usual[of] for name, _, of in _field_kinds(kind)}
    names = st.sampled_from([*plain, "another"])
    fields = plain | data.draw(st.dictionaries(names, VALUES, max_size=3))
    for name in data.draw(st.lists(names, max_size=2)):
        fields.pop(name, None)
    fast, tolerant = both_passes(fields, kind)
    assert fast == tolerant


def test_numbers_booleans_and_nulls_of_node_are_read_as_text_and_numbers() -> None:
    fields = {
        "consumerGroup": "g",
        "topic": 12,
        "queueId": 3,
        "queueOffset": 0,
        "maxMsgNums": 32,
        "sysFlag": 6,
    } | {
        "commitOffset": 0,
        "suspendTimeoutMillis": 15000,
        "subVersion": 1700000000000,
        "subscription": None,
        "unknown": {"x": 1},
    }
    command = decode(memoryview(frame(json.dumps({"code": 11, "extFields": fields}).encode()))[4:])
    header = command.header(PullMessageRequestHeader)
    assert (
        header.topic,
        header.queue_id,
        header.subscription,
        header.suspend_timeout_millis,
    ) == ("12", 3, None, 15000)
    assert command.ext_fields()["sysFlag"] == "6"


def test_a_missing_mandatory_field_is_named() -> None:
    command = RemotingCommand.request(310, {key: str(value) for key, value in SEND.items() if key != "e"})
    with pytest.raises(RemotingError, match="field e is missing"):
        command.header(SendMessageRequestHeaderV2)


@pytest.mark.parametrize("encoding", Encoding)
def test_a_frame_inside_a_larger_buffer_reads_as_alone(encoding: Encoding) -> None:
    command = RemotingCommand.request(RequestCode.PULL_MESSAGE, {"a": "b"}, b"body", encoding=encoding)
    whole = encode(command)
    buffer = memoryview(b"before" + whole + b"after")
    (word,) = struct.unpack_from(">I", whole, 4)
    inside = decode_at(buffer, word, 6 + 8, 6 + len(whole))
    alone = decode(memoryview(whole)[4:])
    assert (inside.code, inside.ext_fields(), bytes(inside.body)) == (alone.code, alone.ext_fields(), b"body")
    with pytest.raises(FrameError, match="header of"):
        decode_at(buffer, 0xFFFFFF, 6 + 8, 6 + len(whole))


@pytest.mark.parametrize("encoding", [Encoding.ROCKETMQ, Encoding.MSGPACK])
def test_a_header_that_is_decoded_at_once_has_so_many_fields_at_most(encoding: Encoding) -> None:
    """A million would take seconds, in which nothing is served, before anything is known of the sender."""
    fields = {f"k{number}": "v" for number in range(MOST_FIELDS)}
    data = encode(RemotingCommand(10, ext=fields, encoding=encoding))
    assert decode(memoryview(data)[4:]).ext_fields() == fields
    with pytest.raises(FrameError):
        decode(memoryview(encode(RemotingCommand(10, ext=fields | {"one": "more"}, encoding=encoding)))[4:])


def test_a_json_header_cannot_set_what_is_not_in_the_protocol() -> None:
    hostile = b'{"code":1,"~ext":{"x":"y"},"~encoding":2,"~body":"text"}'
    command = decode(memoryview(frame(hostile, b"body"))[4:])
    assert (command.ext, command.encoding, bytes(command.body)) == (None, Encoding.JSON, b"body")


NOT_ENCODED: dict[str, tuple[RemotingCommand, tuple[Encoding, ...]]] = {
    "half a pair in the remark": (RemotingCommand(1, remark="\ud800"), tuple(Encoding)),
    "half a pair in a field": (RemotingCommand(1, ext={"a": "\udc00"}), tuple(Encoding)),
    "half a pair in a name": (RemotingCommand(1, ext={"\udc00": "a"}), tuple(Encoding)),
    "a long name": (RemotingCommand(1, ext={"k" * 0x10000: "v"}), (Encoding.ROCKETMQ,)),
    "a large code": (RemotingCommand(10**30), (Encoding.MSGPACK,)),
    "a large opaque": (RemotingCommand(1, 10**30), (Encoding.ROCKETMQ, Encoding.MSGPACK)),
    "a large version": (RemotingCommand(1, version=1 << 15), (Encoding.ROCKETMQ,)),
    "another type": (RemotingCommand(1, remark=object()), tuple(Encoding)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        pytest.param(command, encoding, id=f"{name} {encoding.name}")
        for name, (command, encodings) in NOT_ENCODED.items()
        for encoding in encodings
    ],
)
def test_what_has_no_form_in_its_encoding(command: RemotingCommand, encoding: Encoding) -> None:
    command = msgspec.structs.replace(command, encoding=encoding)
    with pytest.raises(FrameError, match="the header has no form in its encoding") as caught:
        encode(command)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("field", [b'"topic":"%s"', b'"%s":"T"'], ids=["value", "name"])
@pytest.mark.parametrize("half", [b"\xed\xa0\x80", b"\xed\xb0\x80x", b"\xed\xa0\x80\xed\xb0\x80", b"\xff"])
def test_ext_fields_with_bytes_of_half_a_pair_are_refused(field: bytes, half: bytes) -> None:
    """The JSON of ext fields that are not used is not decoded with the header, so its bytes are checked later."""
    header = b'{"code":105,"extFields":{' + field % half + b'},"opaque":7}'
    (command,) = FrameDecoder().feed(frame(header))
    with pytest.raises(RemotingError, match="the ext fields are not JSON"):
        command.ext_fields()
    with pytest.raises(RemotingError, match="the ext fields are not JSON"):
        command.header(PullMessageRequestHeader)
