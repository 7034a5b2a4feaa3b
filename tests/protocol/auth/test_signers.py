"""Who has signed a frame: the native extension, its Python reference, and the signature of the decoded request agree.

A verifier may leave a request to the full path, but must never name a user whose signature it is not.
"""

import json
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimq.protocol.auth.signature import ACCESS_KEY, SIGNATURE, content, is_valid, sign
from trimq.protocol.auth.signers import PythonSigners
from trimq.protocol.auth.stamp import STAMP, Stamp, is_stamped, read_stamp, stamp_text
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.errors import FrameError, RemotingError
from trimq.protocol.frame import decode, encode
from trimq.protocol.native import NATIVE, Asked, RawStamp, Signers, StampedFrame

USERS = {"app": "12345678", "Jürgen": "gehäim", "other": ""}
NAMES = list(USERS)
TOPICS = [(10, "topic"), (310, "b"), (37, "topic")]
MARK = b"tmq1:"
NO_USER = b"of no user"


Found = tuple[int, int, str | None, RawStamp | None]
"""User, code, topic, stamp."""


def filled(signers: Signers, *, need_stamps: bool = False) -> Signers:
    for number, (name, secret) in enumerate(USERS.items()):
        assert signers.add(name, secret.encode(), need_stamps) == number
    return signers


def python() -> Signers:
    return filled(PythonSigners(TOPICS, MARK, NO_USER))


def implementations(*, need_stamps: bool = False) -> list[Signers]:
    extension = NATIVE.extension
    made: list[Signers] = [PythonSigners(TOPICS, MARK, NO_USER)]
    if extension is not None:
        made.append(extension.Signers(TOPICS, MARK, NO_USER))
    return [filled(signers, need_stamps=need_stamps) for signers in made]


def framed(head: bytes, body: bytes, encoding: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(head) + len(body), encoding << 24 | len(head)) + head + body


def json_head(code: int, fields: dict[str, Any], version: int, *, ascii_only: bool = True) -> bytes:
    header = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA", "opaque": 7, "version": version}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def signed(fields: dict[str, str], name: str, body: bytes, version: int) -> dict[str, str]:
    fields = fields | {ACCESS_KEY: name}
    return fields | {SIGNATURE: sign(USERS[name], fields, body, version)}


def by_the_command(frame: bytes) -> Found | None:
    """What the full path finds: the signature over all fields of the decoded request, and the stamp.

    None also for a stamp that cannot be read.
    """
    try:
        command = decode(memoryview(frame)[4:])
        fields = command.ext_fields()
    except (FrameError, RemotingError):
        return None
    name = fields.get(ACCESS_KEY, "")
    if name not in USERS or not is_valid(USERS[name], fields.get(SIGNATURE), fields, command.body, command.version):
        return None
    text = content(fields, command.body, command.version)
    stamp = read_stamp(text) if is_stamped(text) else None
    if is_stamped(text) and stamp is None:
        return None
    return NAMES.index(name), command.code, fields.get(dict(TOPICS).get(command.code, "")), stamp


def split(frame: bytes) -> tuple[memoryview, memoryview]:
    view = memoryview(frame)
    body_at = 8 + (int.from_bytes(frame[4:8], "big") & 0xFFFFFF)
    return view[8:body_at], view[body_at:]


def check(frame: bytes, *, expected: Found | None, exactly: bool) -> None:
    """Each implementation finds ``expected``, or, unless ``exactly``, nothing; that also for users who need stamps."""
    for signers in implementations():
        check_one(signers, frame, expected, exactly=exactly)
    for signers in implementations(need_stamps=True):
        check_one(signers, frame, None if expected is None or expected[3] is None else expected, exactly=exactly)


def check_one(signers: Signers, frame: bytes, expected: Found | None, *, exactly: bool) -> None:
    asked = signers.asked(memoryview(frame))
    assert asked == expected or (asked is None and not exactly)
    if frame[4] == 0:
        signer = signers.signer(*split(frame))
        if expected is not None and (exactly or signer is not None):
            user, _, _, stamp = expected
            assert signer == (user if stamp is None else (user, stamp))
        else:
            assert signer is None
    found: Any = [(0, 0, [])], []
    if asked is not None:
        user, code, topic, stamp = asked
        stamped = [] if stamp is None else [(0, 0, 0, user, code, stamp)]
        found = [(1, len(frame), [((user, code, topic), 0, 0)])], stamped
    assert signers.round(memoryview(frame), [(0, len(frame), 1)], 1) == found


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
NO_STAMPS = (MARK.decode(), "tmq1:310:1:" + "A" * 16 + ":1", "tmq1:310:1:" + "A" * 15 + "+:1;")
STAMPS = st.one_of(
    st.just({}),
    st.builds(
        lambda *parts: {STAMP: stamp_text(*parts)},
        st.integers(0, 10**10 - 1),
        st.integers(0, 10**15 - 1),
        st.text("AZaz09_-", min_size=16, max_size=16),
        st.integers(0, 10**18 - 1),
    ),
    st.sampled_from([*NO_STAMPS]).map(lambda text: {STAMP: text}),
)
FIELD_NAMES = st.sampled_from(["a", "c", "Z", "properties", "_UNIQUE_KEY_QUERY", "SecurityToken", "topic", "b", "zz"])


@given(
    st.dictionaries(FIELD_NAMES, TEXTS, max_size=6),
    st.sampled_from(NAMES),
    st.binary(max_size=100),
    st.sampled_from([10, 310, 37]),
    st.sampled_from([0, 393, 394, 479]),
    st.sampled_from(["escaped", "raw", "binary"]),
    st.randoms(use_true_random=False),
    STAMPS,
)
@example({"topic": "T", "_UNIQUE_KEY_QUERY": "true"}, "app", b"", 10, 393, "escaped", None, {})
@example({"topic": "T", "_UNIQUE_KEY_QUERY": "true"}, "app", b"", 10, 394, "binary", None, {})
@example({"topic": "T"}, "app", b"", 10, 394, "binary", None, {STAMP: stamp_text(10, 5, "A" * 16, 10**18 - 1)})
def test_a_signed_frame(
    fields: dict[str, str],
    name: str,
    body: bytes,
    code: int,
    version: int,
    form: str,
    random: Any,
    stamp: dict[str, str],
) -> None:
    fields = fields | stamp
    ext = list(signed(fields, name, body, version).items())
    if random is not None:
        random.shuffle(ext)
    if form == "binary":
        command = RemotingCommand(code, 7, 0, version, "JAVA", ext=dict(ext), body=body, encoding=Encoding.ROCKETMQ)
        frame = encode(command)
    else:
        frame = framed(json_head(code, dict(ext), version, ascii_only=form == "escaped"), body)
    expected = by_the_command(frame)
    assert (expected is None) == (stamp.get(STAMP) in NO_STAMPS)
    # The extension leaves a request whose topic or name has escapes to Python.
    usual = fields.get("b" if code == 310 else "topic", "") + name
    has_escapes = json.dumps(usual, ensure_ascii=form == "escaped") != f'"{usual}"'
    check(frame, expected=expected, exactly=form == "binary" or not has_escapes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"topic":"T"', '"topic":"U"'),
        ('"topic":"T"', '"topic":"T","topic":"T"'),
        ('"topic":"T"', '"topic":"T","topic":"U"'),
        ('"topic":"T"', '"topic":"U","topic":"T"'),
        ('"topic":"T"', '"topi\\u0063":"T"'),
        ('"topic":"T"', '"topic":"\\u0054"'),
        ('"topic":"T"', '"topic":null'),
        ('"topic":"T"', '"topic":["T"]'),
        ('"topic":"T"', '"topic":"T","é":"x"'),
        ('"topic":"T"', '"topic":"T","zz":"x"'),
        ('"topic":"T"', '"topic":"T","zz":"\\ud800"'),
        ('"topic":"T"', '"topic":"T","zz":null'),
        ('"AccessKey":"app"', '"AccessKey":"other"'),
        ('"AccessKey":"app"', '"AccessKey":"no-user"'),
        ('"AccessKey":"app"', '"AccessKey":""'),
        ('"AccessKey":"app"', '"AccessKey":"app","AccessKey":"other"'),
        ('"AccessKey":"app"', '"AccessKey":"other","AccessKey":"app"'),
        ('"AccessKey":"app",', ""),
        ('"queueId":"3"', '"queueId":3'),
        ('"queueId":"3"', '"queueId":true'),
        ('"queueId":"3"', '"queueId":3.0'),
        ('"version":479', '"version":"479"'),
        ('"version":479', '"version":393'),
        ('"version":479', '"version":479,"version":1'),
        ('"version":479', '"version":479,"extFields":{}'),
        ('"version":479', '"version":479,"code":310'),
        ('"code":10', '"code":310'),
        ('"code":10', '"code":11'),
        ('"code":10', '"code":10.0'),
        ('"flag":0', '"flag":1'),
        ('"Signature":"', '"Signature":"x'),
        ('="', '"'),
        ("{", "["),
        ('"version":479}', '"version":479}}'),
        ('"version":479}', '"version":479'),
    ],
)
@pytest.mark.parametrize("more", [{}, {"_UNIQUE_KEY_QUERY": "true"}, {STAMP: stamp_text(10, 1, "A" * 16, 1)}])
def test_unusual_and_hostile_headers(old: str, new: str, more: dict[str, str]) -> None:
    text = json_head(10, signed({"topic": "T", "queueId": "3"} | more, "app", b"body", 479), 479).decode()
    assert old in text
    frame = framed(text.replace(old, new, 1).encode(), b"body")
    check(frame, expected=by_the_command(frame), exactly=False)


REST = ":000000000000001:" + "A" * 16 + ":7;"
READ = Stamp(310, 1, b"A" * 16, 7)


@pytest.mark.parametrize(
    ("fields", "body", "stamp"),
    [
        ({"!once": "tmq1:"}, "", "left"),
        ({"!once": "tmq1:310:"}, "", "left"),
        ({"!": "tm", "!!": "", "!!!": "q1", "!!!!": ":3"}, "", "left"),
        ({"!once": "tmq1:310" + REST}, "", READ),
        ({"!once": "tmq1:310" + REST + "tmq1:"}, "", READ),
        ({"!": "tm", "!!": "", "!!!": "q1", "!!!!": ":3", "!!!!!": "10" + REST}, "", READ),
        ({"0": "tmq1:310" + REST}, "", READ),
        ({"!once": "tmq1;"}, "", None),
        ({"!once": "tmq1"}, "", None),
        ({"!": "t", "!!": "tmq1:"}, "", None),
        ({"zz": "tmq1:310" + REST}, "", None),
        ({}, "tmq1:310" + REST, None),
        ({"!once": "tmq1:00000000310" + REST}, "", "left"),
        ({"!once": "tmq1:310:0000000000000001:" + "A" * 16 + ":7;"}, "", "left"),
        ({"!once": "tmq1:310:1:" + "A" * 16 + ":0000000000000000007;"}, "", "left"),
        ({"!once": "tmq1:310:1:" + "A" * 17 + ":7;"}, "", "left"),
        ({"!once": "tmq1:310:1:" + "A" * 15 + "é:7;"}, "", "left"),
        ({"!once": "tmq1:٣10:1:" + "A" * 16 + ":7;"}, "", "left"),
    ],
)
def test_requests_whose_signed_text_begins_with_the_mark(
    fields: dict[str, str], body: str, stamp: Stamp | str | None
) -> None:
    frame = framed(json_head(10, signed({"topic": "T"} | fields, "app", body.encode(), 479), 479), body.encode())
    expected = None if isinstance(stamp, str) else (0, 10, "T", stamp)
    assert by_the_command(frame) == expected
    check(frame, expected=expected, exactly="é" not in str(fields))


def test_a_stamp_that_goes_on_in_the_body() -> None:
    name, body = next(iter(USERS)), b":310" + REST.encode()
    fields = {ACCESS_KEY: "tmq1"}
    fields[SIGNATURE] = sign(USERS[name], fields, body, 479)
    frame = framed(json_head(10, fields, 479), body)
    for signers in implementations():
        signers.add("tmq1", USERS[name].encode(), False)
        assert signers.asked(frame) == (len(USERS), 10, None, READ)


def test_an_unknown_name_with_the_signature_of_no_user() -> None:
    fields = {"topic": "T", ACCESS_KEY: "unknown"}
    fields[SIGNATURE] = sign(NO_USER.decode(), fields, b"", 479)
    frame = framed(json_head(10, fields, 479), b"")
    for signers in implementations():
        assert (signers.asked(frame), signers.signer(*split(frame))) == (None, None)


def test_other_codes_and_encodings_have_no_frames() -> None:
    fields = signed({"topic": "T"}, "app", b"", 479)
    other = framed(json_head(11, fields, 479), b"")
    for signers in implementations():
        assert signers.signer(*split(other)) == 0
        assert signers.asked(other) is None
        for encoding in (Encoding.MSGPACK, 3):
            assert signers.asked(framed(json_head(10, fields, 479), b"", encoding)) is None
        assert signers.asked(b"\0\0\0") is None


@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 250))
@example(b"\0\0\0\4\0\0\0\0", 0, 8)
def test_any_bytes(data: bytes, begin: int, end: int) -> None:
    for signers in implementations():
        assert signers.asked(data) is None
        assert signers.signer(data, data) is None
        assert signers.round(data, [(begin, end, 5)], 5) == ([(0, begin, [])], [])


@given(
    st.lists(
        st.lists(st.sampled_from(["app T", "app U", "other T", "app T stamped", "wrong"]), max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 7),
    st.integers(0, 12),
)
@example([["app T", "app U", "app T"], ["wrong", "app T"], ["other T", "wrong"]], 7, 12)
@example([["app T", "app T"], ["app T"]], 7, 2)
@example([["app T", "app T stamped"], ["app U stamped"]], 7, 9)
def test_rounds(requests: list[list[str]], own: int, most: int) -> None:
    frames = bytearray(b"xyz")
    spans: list[tuple[int, int, int]] = []
    expected = []
    stamped: list[StampedFrame] = []
    rest = most
    for span in requests:
        begin = len(frames)
        count, stop, asked = 0, begin, dict[Asked, tuple[Asked, int, int]]()
        ended = False
        for number, text in enumerate(span):
            name, topic, stamp, *_ = [*text.split(" "), "", ""]
            made = {STAMP: stamp_text(10, number, "A" * 16, number)} if stamp else {}
            fields = signed({"topic": topic} | made, "app" if name == "wrong" else name, b"%d" % number, 479)
            frames += framed(json_head(10, fields, 479), b"x" if name == "wrong" else b"%d" % number)
            ended = ended or name == "wrong" or count == own or rest == 0
            if not ended:
                one = (NAMES.index(name), 10, topic)
                asked.setdefault(one, (one, count, stop))
                if stamp:
                    parts = Stamp(10, number, b"A" * 16, number)
                    stamped.append((len(spans), count, stop, one[0], 10, parts))
                count, stop, rest = count + 1, len(frames), rest - 1
        frames += b"\0\0\1"
        spans.append((begin, len(frames), own))
        expected.append((count, stop, list(asked.values())))
    for signers in implementations():
        assert signers.round(memoryview(frames), spans, most) == (expected, stamped)


def test_long_headers_and_many_fields_are_left_to_the_full_path() -> None:
    """Their limits are there, and it refuses what is beyond these."""
    for signers in implementations():
        few = signed({f"f{number}": "x" for number in range(50)}, "app", b"", 505)
        asked = signers.asked(memoryview(framed(json_head(10, few, 505), b"")))
        assert asked is not None
        assert asked[0] == 0
    many = framed(json_head(10, signed({f"f{number}": "x" for number in range(70)}, "app", b"", 505), 505), b"")
    long = framed(json_head(10, signed({"a": "x" * 17_000}, "app", b"", 505), 505), b"")
    for frame in (many, long):
        assert by_the_command(frame) is not None
        assert python().asked(memoryview(frame)) is None
        assert python().signer(*split(frame)) is None
