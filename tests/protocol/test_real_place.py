"""REAL_TOPIC and REAL_QID of parked messages: what is delivered, and what is refused."""

import pytest

from trimq.protocol.real_place import MAX_QUEUE_ID, RealPlace, real_place
from trimq.protocol.topic_rules import NO_SEND_TOPICS


@pytest.mark.parametrize("topic", ["T", "%RETRY%G", "%DLQ%G", "%RETRY%" + "g" * 200, "TBW102", "RMQ_SYS_TRACE_TOPIC"])
def test_topics_that_clients_may_send_to(topic: str) -> None:
    assert real_place(topic, "3") == RealPlace(topic, 3)


@pytest.mark.parametrize("topic", [*sorted(NO_SEND_TOPICS), "rmq_sys_wheel_timer"])
def test_topics_of_the_broker(topic: str) -> None:
    # guards against forged op records and halves, and against a message that is delivered into its own queue for ever
    assert real_place(topic, "0") == f"REAL_TOPIC is {topic}, a topic of the broker itself"


@pytest.mark.parametrize("topic", ["../../../evil", "a/b", ".", "nul\0", "x" * 128, " ", "t\n", "\ud800", "ü" * 80])
def test_names_that_are_no_topics(topic: str) -> None:
    # guards files outside the store, and names that no file can have
    reason = real_place(topic, "0")
    assert isinstance(reason, str)
    assert reason.startswith("REAL_TOPIC: the topic ")
    assert len(reason) < 1000


@pytest.mark.parametrize("topic", [None, ""])
def test_a_missing_topic(topic: str | None) -> None:
    assert real_place(topic, "0") == "it has no REAL_TOPIC"


@pytest.mark.parametrize(("text", "queue_id"), [(None, 0), ("0", 0), ("07", 7), ("2147483647", MAX_QUEUE_ID)])
def test_queues(text: str | None, queue_id: int) -> None:
    assert real_place("T", text) == RealPlace("T", queue_id)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1 ", " 1", "1\n", "1.0", "0x1", "\u0661", "2147483648", "9" * 5000, "1_0"]
)
def test_other_texts_are_no_queues(text: str) -> None:
    # guards the field QUEUEID, which has 4 bytes, and the number of queues and files that a client can cause
    reason = real_place("T", text)
    assert isinstance(reason, str)
    assert reason.startswith("REAL_QID is ")
    assert len(reason) < 100


def test_queues_that_the_topic_does_not_have() -> None:
    assert real_place("T", "3", 4) == RealPlace("T", 3)
    assert real_place("T", "4", 4) == "REAL_QID is 4, but the queues end at 3"
