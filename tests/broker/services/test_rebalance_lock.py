from trimq.broker.services.rebalance_lock import RebalanceLockManager
from trimq.protocol.body import MessageQueue
from trimq.remoting.runtime.clock import ManualClock


def queue(number: int, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name="b", queue_id=number)


Q = [queue(number) for number in range(4)]


def test_the_first_gets_the_lock_and_keeps_it_by_renewing() -> None:
    clock = ManualClock()
    locks = RebalanceLockManager(clock)
    assert locks.lock_batch("G", "a", Q[:2]) == Q[:2]
    assert locks.lock_batch("G", "b", Q) == Q[2:]
    for _ in range(5):
        clock.advance(20)
        assert locks.lock_batch("G", "a", Q) == Q[:2]
        assert locks.lock_batch("G", "b", Q) == Q[2:]
    assert locks.is_locked("G", "T", 0, "a")
    assert not locks.is_locked("G", "T", 0, "b")
    assert not locks.is_locked("H", "T", 0, "a")


def test_a_lock_ends_60_s_after_its_last_renewal() -> None:
    clock = ManualClock()
    locks = RebalanceLockManager(clock)
    locks.lock_batch("G", "a", Q[:1])
    clock.advance(60)
    assert locks.lock_batch("G", "b", Q[:1]) == []
    assert locks.any_live_lock("G")
    clock.advance(0.001)
    assert not locks.any_live_lock("G")
    assert not locks.is_locked("G", "T", 0, "a")
    assert locks.lock_batch("G", "b", Q[:1]) == Q[:1]


def test_only_the_holder_gives_a_lock_back() -> None:
    locks = RebalanceLockManager(ManualClock())
    locks.lock_batch("G", "a", Q[:2])
    locks.unlock_batch("G", "b", Q)
    assert locks.lock_batch("G", "b", Q[:2]) == []
    locks.unlock_batch("G", "a", Q[:1])
    assert locks.lock_batch("G", "b", Q[:2]) == Q[:1]


def test_groups_and_topics_do_not_meet() -> None:
    locks = RebalanceLockManager(ManualClock())
    assert locks.lock_batch("G", "a", [queue(0), queue(0, "U")]) == [queue(0), queue(0, "U")]
    assert locks.lock_batch("H", "b", [queue(0)]) == [queue(0)]
    assert not locks.any_live_lock("I")


def test_nothing_is_left_of_what_is_gone() -> None:
    clock = ManualClock()
    locks = RebalanceLockManager(clock)
    locks.lock_batch("none", "a", [])
    locks.lock_batch("G", "a", Q)
    locks.unlock_batch("G", "a", Q)
    locks.lock_batch("H", "a", Q)
    clock.advance(61)
    locks.lock_batch("I", "a", Q)
    locks.remove_expired()
    assert list(locks._groups) == ["I"]
