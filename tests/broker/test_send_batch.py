"""What is taken out of the messages of a batch, whichever way it is looked at."""

import json

from hypothesis import given
from hypothesis import strategies as st

from broker.processors.message_text import index_keys, pairs, tag_hash
from broker.processors.send_batch import batch_reply, entries_of, message_ids
from protocol.batch import decode_batch, encode_batch
from protocol.frame import decode

NAMES = st.sampled_from(["UNIQ_KEY", "TAGS", "KEYS", "WAIT", "color", "DELAY", "", "ä"])
VALUES = st.sampled_from(["a", "a b", " ", "", "true", "x" * 200, "ä", "a\x01b"])
TEXTS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(
    lambda items: "".join(f"{name}\x01{value}\x02" for name, value in items)
)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "TAGS\x01open"]), st.sampled_from([0, 10, 5000])), max_size=6))
def test_entries_are_what_the_properties_say(messages: list[tuple[str, str, int]]) -> None:
    checked: list[dict[str, str]] = []
    body = encode_batch([(7, b"b" * size, (text + more).encode()) for text, more, size in messages])
    entries = entries_of(memoryview(bytearray(body)), checked.append)
    assert len(entries) == len(messages)
    for entry, (text, more, size) in zip(entries, messages, strict=True):
        properties = dict(pairs(text + more))
        assert bytes(entry.body) == b"b" * size
        assert entry.properties == (text + more).encode()
        assert (entry.flag, entry.tags_code, entry.keys) == (7, tag_hash(properties), index_keys(properties))
    delayed = [dict(pairs(text + more)) for text, more, _ in messages]
    assert checked == [properties for properties in delayed if "DELAY" in properties]


def test_entries_keep_nothing_of_the_receive_buffer() -> None:
    body = bytearray(encode_batch([(0, b"short", b""), (0, b"l" * 9000, b"")]))
    entries = entries_of(memoryview(body), lambda _: None)
    body[:] = bytes(len(body))
    assert [bytes(entry.body) for entry in entries] == [b"short", b"l" * 9000]
    assert [item.flag for item in decode_batch(encode_batch([(3, b"x", b"")]))] == [3]


def test_the_reply_names_every_message() -> None:
    assert message_ids("0A", [1, 255]) == "0A0000000000000001,0A00000000000000FF"
    many = list(range(3000))
    assert message_ids("0A", many) == ",".join(f"0A{number:016X}" for number in many)
    frame = batch_reply("DefaultRegion", "true", "0A01", 3, 17, 99)
    reply = decode(memoryview(frame)[4:])
    assert (reply.code, reply.opaque, reply.flag) == (0, 99, 1)
    assert reply.ext_fields() == {
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "msgId": "0A01",
        "queueId": "3",
        "queueOffset": "17",
    }
    assert json.loads(frame[8:])["language"] == "PYTHON"
