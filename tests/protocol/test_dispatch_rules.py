"""Where each kind of record is dispatched, and the tag slot of its unit, as in RocketMQ."""

import pytest

from trimq.protocol import sysflag
from trimq.protocol.dispatch_rules import IN_INDEX, IN_QUEUE, KIND, due_time, unit_tags_code
from trimq.protocol.hashing import tags_code
from trimq.protocol.topic_rules import SCHEDULE_TOPIC

DELAYS = (0, 1000, 5000, 10_000)


@pytest.mark.parametrize(
    ("kind", "queue", "index"),
    [
        (sysflag.TRANSACTION_NOT, True, True),
        (sysflag.TRANSACTION_PREPARED, False, True),
        (sysflag.TRANSACTION_COMMIT, True, True),
        (sysflag.TRANSACTION_ROLLBACK, False, False),
    ],
)
def test_where_each_kind_of_records_goes(kind: int, queue: bool, index: bool) -> None:
    for others in (0, sysflag.COMPRESSED, 0xFFFF_FFFF & ~KIND):
        assert (IN_QUEUE[(kind | others) & KIND], IN_INDEX[(kind | others) & KIND]) == (queue, index)


@pytest.mark.parametrize(
    ("delay", "due"),
    [
        ("1", 101_000),
        ("3", 110_000),
        ("4", 110_000),
        ("99", 110_000),
        ("0", None),
        ("", None),
        ("-1", None),
        ("+1", None),
        ("1.5", None),
        ("²", None),
    ],
)
def test_due_times(delay: str, due: int | None) -> None:
    assert due_time(delay, 100_000, DELAYS) == due


def test_without_levels_a_delayed_message_is_due_in_a_second() -> None:
    assert due_time("3", 100_000, (0,)) == 101_000


@pytest.mark.parametrize(
    ("topic", "text", "code"),
    [
        ("Orders", "TAGS\x01paid\x02DELAY\x012\x02", tags_code("paid")),
        ("Orders", "", 0),
        (SCHEDULE_TOPIC, "TAGS\x01paid\x02DELAY\x012\x02", 105_000),
        (SCHEDULE_TOPIC, "TAGS\x01paid\x02DELAY\x010\x02", tags_code("paid")),
        (SCHEDULE_TOPIC, "TAGS\x01paid\x02", tags_code("paid")),
    ],
)
def test_tag_slots(topic: str, text: str, code: int) -> None:
    assert unit_tags_code(topic, text, 100_000, DELAYS) == code
