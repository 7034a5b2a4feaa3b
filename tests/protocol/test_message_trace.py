"""The text of message traces: texts that Java clients have written, and every field in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol.message_trace import (
    ConsumeReturnType,
    EndState,
    EndTransactionTrace,
    MessageTrace,
    MessageType,
    PubTrace,
    RecallTrace,
    SubAfterTrace,
    SubBeforeTrace,
    TraceType,
    decode_traces,
    encode_trace,
    trace_keys,
)

FIRST = "FD00000000000000000000000000000218ED4E0E2F2A83D7DDCA0000"
HALF = "FD0000000000000000000000000000022B114E0E2F2A83D9CB9C0009"
IN_BATCH = "FD0000000000000000000000000000022B114E0E2F2A83D9CA2F0007"

#: Written by the Java client 5.5.0 at a broker of TriMQ and by 4.9.8 at Apache's 5.5.0, in runs of tests/interop.
GOLDEN: list[tuple[str, MessageTrace]] = [
    (
        (f"Pub\x011795703162314\x01DefaultRegion\x01PG_3\x01Traced_1\x01{FIRST}\x01T\x01k1 k2\x01127.0.0.1:11729\x01"
        "1\x0124\x010\x017F00000100002DD10000000000000000\x01true\x02"),
        PubTrace(
            1795703162314, "DefaultRegion", "PG_3", "Traced_1", FIRST, "T", "k1 k2", "127.0.0.1:11729",
            1, 24, MessageType.NORMAL, "7F00000100002DD10000000000000000", True,
        ),
    ),
    (
        (f"Pub\x011795703288732\x01DefaultRegion\x01PG_12\x01Traced_10\x01{HALF}\x01null\x01tk\x01127.0.0.1:31623\x01"
        "2\x01175\x011\x017F00000100007B870000000000008E86\x01true\x02"),
        PubTrace(
            1795703288732, "DefaultRegion", "PG_12", "Traced_10", HALF, None, "tk", "127.0.0.1:31623",
            2, 175, MessageType.TRANS_HALF, "7F00000100007B870000000000008E86", True,
        ),
    ),
    (
        (f"EndTransaction\x011795703288908\x01DefaultRegion\x01PG_12\x01Traced_10\x01{HALF}\x01null\x01tk\x01"
        f"127.0.0.1:31623\x012\x01{HALF}\x01COMMIT_MESSAGE\x01false\x02"),
        EndTransactionTrace(
            1795703288908, "DefaultRegion", "PG_12", "Traced_10", HALF, None, "tk", "127.0.0.1:31623",
            MessageType.TRANS_COMMIT, HALF, EndState.COMMIT, False,
        ),
    ),
    (
        ("SubBefore\x011795703289116\x01null\x01G_11\x01FD0000000000000000000000000000022B114E0E2F2A83D9CD1C0015\x01"
        f"{IN_BATCH}\x010\x01null\x02"),
        SubBeforeTrace(
            1795703289116, None, "G_11", "FD0000000000000000000000000000022B114E0E2F2A83D9CD1C0015", IN_BATCH, 0, None
        ),
    ),
    (
        (f"SubAfter\x01FD0000000000000000000000000000022B114E0E2F2A83D9CD1C0015\x01{IN_BATCH}\x013\x01false\x01null\x01"
        "4\x011795703289119\x01G_11\x02"),
        SubAfterTrace(
            "FD0000000000000000000000000000022B114E0E2F2A83D9CD1C0015", IN_BATCH, 3, False, None,
            ConsumeReturnType.FAILED, 1795703289119, "G_11",
        ),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "trace"), GOLDEN, ids=[trace.type for _, trace in GOLDEN])
def test_what_java_clients_write(text: str, trace: MessageTrace) -> None:
    assert decode_traces(text) == ([trace], 0)
    assert encode_trace(trace) == text


def test_a_whole_body_of_a_java_client() -> None:
    text = "".join(text for text, _ in GOLDEN)
    assert decode_traces(text) == ([trace for _, trace in GOLDEN], 0)
    assert decode_traces("") == ([], 0)


def pub(*last: str) -> str:
    return "\x01".join(["Pub", "5", "r", "g", "t", "id", "null", "", "h:1", "7", "3", "3", *last]) + "\x02"


@pytest.mark.parametrize(
    ("last", "offset_id", "success", "client"),
    [
        (("true",), None, True, None),
        (("off", "false"), "off", False, None),
        (("off", "TRUE", "10.0.0.1"), "off", True, "10.0.0.1"),
        (("null", "true", "10.0.0.1", "of a later version"), None, True, "10.0.0.1"),
    ],
)
def test_sends_of_other_versions(
    last: tuple[str, ...], offset_id: str | None, success: bool, client: str | None
) -> None:
    [trace] = decode_traces(pub(*last)).traces
    assert trace == PubTrace(
        5, "r", "g", "t", "id", None, "", "h:1", 7, 3, MessageType.DELAY, offset_id, success, client
    )


def test_ends_of_processing_of_other_versions() -> None:
    first = "SubAfter\x01req\x01id\x013\x01true\x01k"
    oldest = SubAfterTrace("req", "id", 3, True, "k")
    assert decode_traces(f"{first}\x02").traces == [oldest]
    coded = oldest._replace(context_code=4)
    assert decode_traces(f"{first}\x014\x02").traces == [coded]
    in_a_cloud = f"{first}\x014\x01\x02"  # it ends with a separator
    assert decode_traces(in_a_cloud).traces == [coded]
    assert encode_trace(coded) == f"{first}\x014\x02"
    assert decode_traces(f"{first}\x014\x0199\x01g\x02").traces == [coded._replace(timestamp=99, group="g")]


@pytest.mark.parametrize(
    "line",
    [
        "Rumour\x011",
        "Pub",
        pub()[:-1],  # no result
        pub("true")[:-1].replace("5", "five", 1),
        pub("true")[:-1].replace("Pub\x015", "Pub\x01 5"),
        pub("true")[:-1].replace("\x013\x013\x01", "\x013\x015\x01"),  # there are 5 message types
        pub("true")[:-1].replace("Pub\x015", "Pub\x01" + "9" * 20),
        "SubBefore\x011\x01r\x01g\x01req\x01id\x01never\x01k",
        "SubBefore\x011\x01r\x01g\x01req\x01id\x010",
        "SubAfter\x01req\x01id\x01x\x01true\x01k",
        "SubAfter\x01req\x01id\x011\x01true",
        "EndTransaction\x011\x01r\x01g\x01t\x01id\x01\x01\x01h\x012\x01tx\x01MAYBE\x01true",
        "Recall\x011\x01r\x01g\x01t\x01id",
    ],
)
def test_a_malformed_trace_is_skipped_and_counted(line: str) -> None:
    good = GOLDEN[0][0]
    assert decode_traces(f"{good}{line}\x02{good}") == ([GOLDEN[0][1]] * 2, 1)


def test_the_last_trace_may_lack_its_end() -> None:
    assert decode_traces(GOLDEN[0][0][:-1]).traces == [GOLDEN[0][1]]


texts = st.text(st.characters(exclude_characters="\x01\x02", codec="utf-8"), max_size=20)
optional = st.none() | texts.filter(lambda text: text != "null")
numbers = st.integers(-(2**63), 2**63 - 1)
pubs = st.tuples(
    numbers, optional, texts, texts, texts, optional, optional, texts, numbers, numbers,
    st.sampled_from(MessageType), optional, st.booleans(),
).map(lambda fields: PubTrace(*fields))  # fmt: skip
befores = st.tuples(numbers, optional, texts, texts, texts, numbers, optional).map(lambda f: SubBeforeTrace(*f))
afters = st.tuples(texts, texts, numbers, st.booleans(), optional, numbers).map(lambda f: SubAfterTrace(*f))
timed = st.tuples(afters, numbers, texts).map(lambda f: f[0]._replace(timestamp=f[1], group=f[2]))
ends = st.tuples(
    numbers, optional, texts, texts, texts, optional, optional, texts,
    st.sampled_from(MessageType), optional, st.sampled_from(EndState), st.booleans(),
).map(lambda fields: EndTransactionTrace(*fields))  # fmt: skip
recalls = st.tuples(numbers, optional, texts, texts, texts, st.booleans()).map(lambda f: RecallTrace(*f))
traces: st.SearchStrategy[MessageTrace] = st.one_of(pubs, befores, afters, timed, ends, recalls)


@given(st.lists(traces, max_size=5))
def test_what_is_written_is_read(several: list[MessageTrace]) -> None:
    assert decode_traces("".join(map(encode_trace, several))) == (several, 0)


@given(st.text(max_size=200) | st.lists(st.sampled_from([*TraceType, "\x01", "\x02", "1", "null", "x"])).map("".join))
def test_any_text_is_read_or_counted(text: str) -> None:
    found = decode_traces(text)
    lines = [line for line in text.split("\x02") if line]
    assert len(found.traces) + found.skipped == len(lines)


def test_a_separator_in_a_field_is_refused() -> None:
    trace = RecallTrace(1, "r", "g", "t", "id", True)
    for field in ("a\x01b", "a\x02b"):
        with pytest.raises(ValueError, match="separator"):
            encode_trace(trace._replace(topic=field))


def test_a_missing_value_and_the_word_for_it_are_the_same() -> None:
    trace = SubBeforeTrace(1, "r", "g", "req", "id", 0, "null")
    assert decode_traces(encode_trace(trace)).traces == [trace._replace(keys=None)]


def test_keys() -> None:
    trace = SubBeforeTrace(1, "r", "g", "req", "id", 0, " k1  k2\t3 ")
    assert trace_keys(trace) == ["id", "k1", "k2\t3"]
    assert trace_keys(trace._replace(keys=None)) == trace_keys(RecallTrace(1, "r", "g", "t", "id", True)) == ["id"]
