"""The parts extracted from the messages of a batch, whichever path parses them."""

import json

from hypothesis import given
from hypothesis import strategies as st

from trimq.broker.processors.send.message_properties import tag_hash
from trimq.broker.processors.send.send_batch import batch_reply, message_ids, parts_of
from trimq.protocol.batch import decode_batch, encode_batch
from trimq.protocol.frame import decode
from trimq.protocol.message_keys import index_keys
from trimq.protocol.property_text import decode_properties

NAMES = st.sampled_from(["UNIQ_KEY", "TAGS", "KEYS", "WAIT", "color", "DELAY", "", "ä"])
VALUES = st.sampled_from(["a", "a b", " ", "", "true", "x" * 200, "ä", "a\x01b", "a\x03b"])
TEXTS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(
    lambda items: "".join(f"{name}\x01{value}\x02" for name, value in items)
)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["", "TAGS\x01open"]), st.sampled_from([0, 10, 5000])), max_size=6))
def test_parts_are_what_the_properties_say(messages: list[tuple[str, str, int]]) -> None:
    checked: list[dict[str, str]] = []
    body = encode_batch([(7, b"b" * size, (text + more).encode()) for text, more, size in messages])
    parts = parts_of(memoryview(bytearray(body)), checked.append, tags_too=True)
    of_each = list(zip(parts.messages.items(), parts.tags_codes, parts.keys, strict=True))
    assert len(of_each) == len(messages)
    for ((flag, data, raw), tags_code, keys), (text, more, size) in zip(of_each, messages, strict=True):
        properties = decode_properties(text + more)
        assert bytes(data) == b"b" * size
        assert raw == (text + more).encode()
        assert (flag, tags_code, keys) == (7, tag_hash(properties), index_keys(properties, tags=True))
    delayed = [decode_properties(text + more) for text, more, _ in messages]
    assert checked == [properties for properties in delayed if "DELAY" in properties]


@given(
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6), st.sampled_from(["KEYS", "TAGS", "DELAYED", "WAIT"])
)
def test_parts_of_messages_of_one_shape(values: list[str], name: str) -> None:
    texts = [f"UNIQ_KEY\x01{at}\x02{name}\x01{value}\x02" for at, value in enumerate(values)]
    parts = parts_of(
        encode_batch([(at, b"b", text.encode()) for at, text in enumerate(texts)]), lambda _: None, tags_too=True
    )
    properties = [decode_properties(text) for text in texts]
    assert [item.flag for item in parts.messages.items()] == list(range(len(values)))
    assert parts.tags_codes == list(map(tag_hash, properties))
    assert parts.keys == [index_keys(one, tags=True) for one in properties]


def test_a_text_without_pairs_is_not_searched_from_each_of_its_letters() -> None:
    """That would be a billion steps."""
    assert decode_properties("a" * 32_767) == {}
    assert parts_of(encode_batch([(0, b"b", b"a" * 32_767)] * 20), lambda _: None, tags_too=False).keys == [()] * 20


def test_texts_without_their_last_separator() -> None:
    """Java's client omits it since 4.9.1. Thousands of such messages must not block the broker."""
    texts = [f"TAGS\x01t\x02UNIQ_KEY\x01{at:032X}" for at in range(20_000)]
    parts = parts_of(encode_batch([(0, b"b", text.encode()) for text in texts]), lambda _: None, tags_too=False)
    assert parts.messages.items()[0].properties == texts[0].encode()
    assert list(parts.keys) == [(f"{at:032X}",) for at in range(20_000)]
    assert set(parts.tags_codes) == {ord("t")}


def test_long_bodies_are_not_copied() -> None:
    """The commit log copies them, and so does a put that waits for space in it."""
    body = encode_batch([(0, b"short", b""), (0, b"l" * 9000, b"")])
    parts = parts_of(memoryview(body), lambda _: None, tags_too=False)
    assert [type(data) for _, data, _ in parts.messages.items()] == [bytes, memoryview]
    same = parts_of(memoryview(encode_batch([(0, b"l" * 9000, b"")] * 3)), lambda _: None, tags_too=False)
    assert [type(data) for _, data, _ in same.messages.items()] == [memoryview] * 3
    assert [item.flag for item in decode_batch(encode_batch([(3, b"x", b"")]))] == [3]


def test_the_reply_names_every_message() -> None:
    v4, v6 = bytes.fromhex("7F00000100002A9F"), bytes.fromhex("FD00000000000000000000000000000100002A9F")
    assert message_ids(v4, [255]) == "7F00000100002A9F00000000000000FF"
    for host in (v4, v6):
        many = [*range(300), 1 << 62]
        assert message_ids(host, many) == ",".join(f"{host.hex().upper()}{number:016X}" for number in many)
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
