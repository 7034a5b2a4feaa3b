from trimq.namesrv.departures import Departures


def test_the_oldest_go_first_when_there_are_too_many_brokers() -> None:
    departures = Departures(max_brokers=2)
    for name in "abc":
        departures.add(name, ["T"], 0.0, "why")
    assert [each.broker_name for each in departures.with_topic("T")] == ["c", "b"]


def test_the_oldest_go_first_when_there_are_too_many_topics() -> None:
    departures = Departures(max_topics=3)
    departures.add("a", ["T", "U"], 0.0, "why")
    departures.add("b", ["T", "U"], 0.0, "why")
    assert [each.broker_name for each in departures.with_topic("T")] == ["b"]


def test_one_broker_with_more_topics_than_are_kept_is_not_remembered() -> None:
    departures = Departures(max_topics=3)
    departures.add("a", ["1", "2", "3", "4"], 0.0, "why")
    assert len(departures) == 0
    assert departures.last() is None


def test_leaving_twice_counts_once() -> None:
    departures = Departures(max_topics=3)
    for at in (1.0, 2.0):
        departures.add("a", ["1", "2"], at, "why")
    last = departures.last()
    assert last is not None
    assert last.at == 2.0
    departures.forget("a")
    departures.add("b", ["1", "2", "3"], 0.0, "why")
    assert len(departures) == 1
