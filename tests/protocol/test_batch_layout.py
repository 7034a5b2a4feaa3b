"""A layout that was learnt from one batch says of the next ones what a look at all of their bytes would."""

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from trimq.protocol import record
from trimq.protocol.batch import encode_batch, split_batch
from trimq.protocol.batch_layout import BatchLayout, BatchLayouts
from trimq.protocol.record import pack_host
from trimq.protocol.record_batch import BatchHead, ListedMessages
from trimq.protocol.record_batch_numpy import AlikeMessages

HOST = pack_host("127.0.0.1", 10911)
COUNT = 20
TEXTS = [
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x01TagA\x02",
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x01TagB\x02",
    "UNIQ_KEY\x01{at:04X}\x02TAGS\x01TagA\x02",
    "TAGS\x01TagA\x02UNIQ_KEY\x01{at:04d}\x02",
    "UNIQ_KEZ\x01{at:04d}\x02TAGS\x01TagA\x02",
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x01T\x02gA\x02",
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x02TagA\x02",
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x01Tag\x02\x02",
    "UNIQ_KEY\x01{at:04d}\x02xxxxxxxxx\x02",
    "UNIQ_KEY\x01{at:04d}\x02TAGS\x01TagA\x01",
]
"""Properties of one length, which begin, end and differ in different ways."""


def head(physical_offset: int = 1 << 41, topic: bytes = b"\x05Topic") -> BatchHead:
    return BatchHead(
        record.MAGIC_V1, 3, 1 << 40, physical_offset, record.pack_shared(0, 1, HOST, 2, HOST, 3), topic=topic
    )


def body_of(text: str, start: int = 0, size: int = 4) -> bytes:
    messages = [(at, b"%04d" % at * (size // 4), text.format(at=at).encode()) for at in range(start, start + COUNT)]
    return encode_batch(messages)


def expect_the_same(layouts: BatchLayouts, body: bytes) -> bool:
    """What is known agrees with what a first look finds; whether messages were found."""
    found, fresh = layouts.find(body), BatchLayouts().find(body)
    if found is None or fresh is None:
        assert found is fresh is None
        return False
    (rows, layout), (_, expected) = found, fresh
    assert layout.is_plain == expected.is_plain
    assert (layout.body_length, layout.text_length) == (expected.body_length, expected.text_length)
    if layout.is_plain:
        assert layout.values == expected.values
    for name in layout.values if layout.is_plain else ():
        assert layout.same(rows, name) == expected.same(rows, name)
        mine, its = layout.column(rows, name), expected.column(rows, name)
        assert mine is not None
        assert its is not None
        assert mine.tobytes() == its.tobytes()
    records, offsets = AlikeMessages(rows, layout).records(head())
    assert (bytes(records), list(offsets)) == ListedMessages(split_batch(body)).records(head())
    return True


@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(0, 9000)), min_size=2, max_size=6))
def test_batches_of_equal_lengths_one_after_another(batches: list[tuple[str, int]]) -> None:
    layouts = BatchLayouts()
    for text, start in batches:
        expect_the_same(layouts, body_of(text, start))


@given(st.sampled_from(TEXTS), st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3))
def test_any_byte_may_be_another_one_in_the_next_batch(text: str, changes: list[tuple[int, int]]) -> None:
    layouts = BatchLayouts()
    expect_the_same(layouts, body_of(text))
    changed = bytearray(body_of(text, 40))
    for place, byte in changes:
        changed[place % len(changed)] = byte
    fresh = BatchLayouts().find(changed)
    if fresh is None:
        assert layouts.find(changed) is None
    else:
        expect_the_same(layouts, bytes(changed))


def test_a_value_that_was_the_same_in_all_may_be_another_one_later() -> None:
    layouts = BatchLayouts()
    known = [layouts.find(body_of(text)) for text in (TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[1])]
    found = [each for each in known if each is not None]
    assert [layout.same(rows, "TAGS") for rows, layout in found] == ["TagA", "TagB", "TagA", "TagB"]
    assert [layout.same(rows, "UNIQ_KEY") for rows, layout in found] == [None] * 4
    assert found[1][1] is found[2][1] is found[3][1], "learnt once more, not with each batch"


def test_a_value_with_a_separator_in_it_is_learnt_once() -> None:
    layouts = BatchLayouts()
    text = "UNIQ_KEY\x01{at:04d}\x02x\x01a\x01{at:04d}\x02"
    first, second = layouts.find(body_of(text)), layouts.find(body_of(text, 5000))
    assert first is not None
    assert second is not None
    assert first[1] is second[1]
    assert expect_the_same(layouts, body_of(text, 70))


def test_texts_that_are_no_pairs_say_nothing_of_others() -> None:
    layouts = BatchLayouts()
    for text in ("abc\x02\x01xd", "abcx\x01\x02d", "abcx\x01xd"):
        assert expect_the_same(layouts, body_of(text))


def test_what_is_not_alike_takes_nothing_of_what_is_known() -> None:
    layouts = BatchLayouts()
    found = layouts.find(body_of(TEXTS[0]))
    odd = encode_batch([(at, b"%04d" % at, TEXTS[at % 10].format(at=at).encode()) for at in range(COUNT)])
    assert layouts.find(odd) is None
    again = layouts.find(body_of(TEXTS[0], 40))
    assert found is not None
    assert again is not None
    assert again[1] is found[1]


def test_ids_that_go_on_counting_are_not_learnt_again() -> None:
    layouts = BatchLayouts()
    found = [layouts.find(body_of(TEXTS[0], start)) for start in range(0, 9000, 170)]
    assert len({id(each[1]) for each in found if each is not None}) == 1
    assert None not in found


def test_each_batch_has_its_own_records_whatever_was_made_before() -> None:
    """Room is used again: nothing of an earlier batch, topic or number of messages may be left in it."""
    layouts = BatchLayouts()
    short = encode_batch([(1, b"0001", TEXTS[0].format(at=at).encode()) for at in range(COUNT + 5)])
    for body, topic in (
        (body_of(TEXTS[0]), b"\x05Topic"),
        (body_of(TEXTS[0], 70), b"\x05Other"),
        (short, b"\x05Other"),
        (body_of(TEXTS[0], 30), b"\x06Longer"),
    ):
        found = layouts.find(body)
        assert found is not None
        records, _ = AlikeMessages(*found).records(head(77, topic))
        assert bytes(records) == ListedMessages(split_batch(body)).records(head(77, topic))[0]


def test_what_is_known_has_a_limit_and_what_is_used_stays() -> None:
    layouts = BatchLayouts()
    used: list[weakref.ref[BatchLayout]] = []
    gone: list[weakref.ref[BatchLayout]] = []
    gc.disable()
    try:
        for size in range(4, 400, 4):
            assert expect_the_same(layouts, body_of(TEXTS[0], size=size))
            for number, kept in ((size, gone), (4, used)):
                found = layouts.find(body_of(TEXTS[0], size=number))
                assert found is not None
                kept.append(weakref.ref(found[1]))
                del found
        assert len({layout() for layout in used}) == 1
        assert sum(layout() is not None for layout in gone) == len(layouts._known) == 32
    finally:
        gc.enable()
    large = layouts.find(body_of(TEXTS[0], size=1 << 16))
    assert large is not None
    AlikeMessages(*large).records(head())
    assert large[1]._room is None, "room for megabytes is not kept"
