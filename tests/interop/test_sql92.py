"""Consumers with SQL92 expressions: the broker evaluates them on the properties of messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interop.harness.drivers import JavaClient, PartnerError, Record, bodies, message, unique
from tests.interop.harness.servers import Cluster

COLOURS = ("red", "green", "blue", None)

#: Expressions, and what they mean for the properties below.
RED = "colour = 'red' AND size > 5"
MIDDLE = "(size BETWEEN 2 AND 6 AND colour IS NOT NULL) OR (colour IN ('blue', 'black') AND NOT (size < 18))"


def is_red(colour: str | None, size: int) -> bool:
    return colour == "red" and size > 5


def is_middle(colour: str | None, size: int) -> bool:
    return (2 <= size <= 6 and colour is not None) or (colour == "blue" and size >= 18)


def coloured(size: int, wave: str) -> Record:
    colour = COLOURS[size % len(COLOURS)]
    named = {} if colour is None else {"colour": colour}
    return message(f"{wave}{size}", tags=("Even", "Odd")[size % 2], properties={"size": str(size), **named})


def expected(wave: str, wanted: Callable[[str | None, int], bool]) -> list[str]:
    return [f"{wave}{size}" for size in range(24) if wanted(COLOURS[size % len(COLOURS)], size)]


def test_two_groups_on_one_topic(cluster: Cluster, java: JavaClient) -> None:
    """The second wave finds waiting pulls, which only a wanted message may end."""
    topic = cluster.create_topic(unique("Sql"), queues=1)
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), sql={topic: RED}, orderly=True) as red,
        java.consumer(cluster, unique("G"), sql={topic: MIDDLE}, orderly=True) as middle,
        java.consumer(cluster, unique("G"), {topic: "Odd"}, orderly=True) as odd,
    ):
        last = message("end", tags="Odd", properties={"size": "20", "colour": "blue"})
        red_last = message("end", properties={"size": "20", "colour": "red"})
        reds, middles = [], []
        for wave in ("first", "second"):
            reds += expected(wave, is_red)
            middles += expected(wave, is_middle)
            producer.send(topic, [coloured(size, wave) for size in range(24)])
            assert bodies(red.received(len(reds))) == reds
            assert bodies(middle.received(len(middles))) == middles
        producer.send(topic, [red_last, last])
        assert bodies(red.received(len(reds) + 1)) == [*reds, "end"]
        assert bodies(middle.received(len(middles) + 1)) == [*middles, "end"]
        assert len(odd.received(25)) == 25
    assert len(reds) > 5
    assert len(middles) > 5


def test_retry(cluster: Cluster, java: JavaClient) -> None:
    """A message that its consumer sends back is judged by the expression for its own topic."""
    topic = cluster.create_topic(unique("SqlRetry"), queues=1)
    with (
        java.producer(cluster) as producer,
        java.consumer(cluster, unique("G"), sql={topic: RED}, fail_until=1) as consumer,
    ):
        producer.send(topic, [coloured(size, "m") for size in range(24)])
        wanted = expected("m", is_red)
        got = consumer.received(2 * len(wanted))
    assert sorted((record["body"], record["reconsume"]) for record in got) == sorted(
        (body, times) for body in wanted for times in (0, 1)
    )


@pytest.mark.parametrize("expression", ["size >", "size BETWEEN 3 AND 1", "colour > 'red'", "'red'", "*"])
def test_an_expression_that_is_none(cluster: Cluster, java: JavaClient, expression: str) -> None:
    topic = cluster.create_topic(unique("SqlWrong"))
    with (
        pytest.raises(PartnerError) as refused,
        java.consumer(cluster, unique("G"), sql={topic: expression}),
    ):
        pass
    assert 23 in refused.value.codes


def test_where_property_filters_are_off(hasty: Cluster, java: JavaClient) -> None:
    """They are off in the original's default configuration."""
    topic = hasty.create_topic(unique("SqlOff"))
    with (
        pytest.raises(PartnerError) as refused,
        java.consumer(hasty, unique("G"), sql={topic: "a > 1"}),
    ):
        pass
    assert 1 in refused.value.codes


def test_a_group_with_a_new_expression(cluster: Cluster, java: JavaClient) -> None:
    topic, group = cluster.create_topic(unique("SqlNew"), queues=1), unique("G")
    with java.producer(cluster) as producer:
        with java.consumer(cluster, group, sql={topic: "size = 1"}) as consumer:
            producer.send(topic, [coloured(size, "a") for size in range(4)])
            assert bodies(consumer.received(1)) == ["a1"]
            producer.send(topic, [coloured(1, "last")])
            consumer.received(2)
            consumer.wait_for_position(topic, 5)
        with java.consumer(cluster, group, sql={topic: "size = 2"}) as consumer:
            producer.send(topic, [coloured(size, "b") for size in range(4)])
            assert bodies(consumer.received(1)) == ["b2"]


def test_lite_pull(cluster: Cluster, java: JavaClient) -> None:
    topic = cluster.create_topic(unique("SqlLite"), queues=1)
    with java.producer(cluster) as producer, java.lite_consumer(cluster, unique("G"), sql={topic: RED}) as consumer:
        producer.send(topic, [coloured(size, "m") for size in range(24)])
        wanted = expected("m", is_red)
        assert bodies(consumer.poll(len(wanted))) == wanted
