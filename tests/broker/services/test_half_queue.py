"""The table of halves, compared with a plain model, and the queue of op records with a store that refuses."""

from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trimq.broker.services.transaction import half_queue
from trimq.broker.services.transaction import ops as ops_module
from trimq.broker.services.transaction.half_queue import HalfQueue, State
from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.services.transaction.messages import HalfMessages
from trimq.broker.services.transaction.ops import End, OpQueue
from trimq.broker.store.log.puts import MessageInner
from trimq.broker.store.types import PutCallback, PutMessageResult, PutMessageStatus
from trimq.broker.testing import configuration
from trimq.protocol.transaction import op_offsets
from trimq.remoting.runtime.clock import ManualClock


class HalfQueueMachine(RuleBasedStateMachine):
    """Ends, moves and durability in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 5
        self.queue = HalfQueue(5, 5)
        self.states: dict[int, State] = {}
        self.done: set[int] = set()
        self.end = 5

    def pending(self) -> list[int]:
        return [offset for offset, state in self.states.items() if state is State.PENDING]

    @rule(count=st.integers(1, 3000))
    def halves_arrive(self, count: int) -> None:
        for offset in range(self.end, self.end + count):
            self.states[offset] = State.PENDING
        self.end += count
        self.queue.reach(self.end)
        self.queue.reach(self.end - 1)  # an older report changes nothing

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), state=st.sampled_from([State.COMMITTED, State.ROLLED_BACK, State.EXPIRED]))
    def some_end(self, data: st.DataObject, state: State) -> None:
        pending = self.pending()
        begin = data.draw(st.integers(0, len(pending) - 1))
        for offset in pending[begin : begin + data.draw(st.integers(1, 2000))]:
            self.states[offset] = state
            self.queue.set(offset, State.COMMITTING)
            self.queue.set(offset, state)

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def one_is_stored_again(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.pending()[:50]))
        self.states[offset], self.states[self.end] = State.MOVED, State.PENDING
        self.queue.moves(offset, offset, self.end)
        assert self.queue.latest(offset, offset) == self.end
        self.end += 1

    @rule(data=st.data())
    def ends_become_durable(self, data: st.DataObject) -> None:
        ended = [offset for offset, state in self.states.items() if state and offset not in self.done]
        for offset in ended[: data.draw(st.integers(0, 5000))]:
            self.done.add(offset)
            self.queue.done(offset)
        while self.first in self.done:
            self.first += 1
        assert self.queue.advance() == self.first

    @invariant()
    def agrees(self) -> None:
        assert (self.queue.end, self.queue.pending) == (self.end, len(self.pending()))
        assert list(self.queue.all_pending()) == self.pending()
        half = (self.first + self.end) // 2
        assert self.queue.count_pending(half, self.end) == len([one for one in self.pending() if one >= half])
        assert self.queue.next_pending(half, self.end) == min([o for o in self.pending() if o >= half], default=-1)
        for offset in [*range(max(0, self.first - 2), self.first + 3), self.end - 1, self.end]:
            expected = self.states.get(offset) if offset >= self.first else State.ENDED
            assert self.queue.state(offset) is expected


TestHalfQueue = HalfQueueMachine.TestCase
TestHalfQueue.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_the_memory_of_halves_that_are_done_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards a broker that runs for years: the table holds the halves from the first pending one on, and some before
    monkeypatch.setattr(half_queue, "_KEPT", 100)
    queue = HalfQueue()
    for offset in range(50_000):
        queue.reach(offset + 1)
        queue.set(offset, State.COMMITTED)
        queue.done(offset)
        queue.advance()
        assert len(queue._states) <= 100 + 2 * half_queue._TRIM_AT
    assert (queue.first, queue.end, len(queue)) == (50_000, 50_000, 0)


def test_how_the_last_halves_ended_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards producers that repeat an end: it must not be taken for another one, nor another one for it
    monkeypatch.setattr(half_queue, "_KEPT", 1000)
    monkeypatch.setattr(half_queue, "_TRIM_AT", 10)
    queue = HalfQueue(7, 7)
    ends = (State.COMMITTED, State.ROLLED_BACK, State.EXPIRED)
    for offset in range(7, 3007):
        queue.reach(offset + 1)
        queue.set(offset, ends[offset % 3])
        queue.done(offset)
        queue.advance()
    assert queue.first == 3007
    for offset in range(2007, 3007):
        assert queue.end_of(offset, offset) is ends[offset % 3]
        assert queue.state(offset) is State.ENDED
    for offset in (0, 7, 1000):
        assert queue.end_of(offset, offset) is State.ENDED
    assert queue.end_of(3007, 3007) is None


def test_all_records_of_a_half_have_its_end() -> None:
    queue = HalfQueue(0, 2)
    queue.moves(0, 0, 2)
    queue.moves(0, 2, 3)
    assert [queue.end_of(0, offset) for offset in (0, 2, 3)] == [State.PENDING] * 3
    queue.set(3, State.COMMITTED)
    assert [queue.end_of(0, offset) for offset in (0, 2, 3)] == [State.COMMITTED] * 3
    for offset in (0, 2, 3):
        queue.done(offset)
    queue.forget(0)
    assert [queue.end_of(0, offset) for offset in (0, 2, 3)] == [State.COMMITTED] * 3
    assert (queue.pending, queue.moved, queue.advance()) == (1, 0, 1)
    assert queue.end_of(1, 1) is State.PENDING
    queue.set(1, State.ROLLED_BACK)
    queue.done(1)
    assert queue.advance() == 4
    assert [queue.end_of(0, offset) for offset in (0, 2, 3)] == [State.COMMITTED] * 3


def test_the_end_of_a_half_whose_first_record_is_not_in_the_table() -> None:
    # guards halves that were stored again before this start: a record below the table has no entry
    queue = HalfQueue(5, 7)
    queue.stands_for(2, 6)
    queue.set(6, State.ROLLED_BACK)
    queue.done(6)
    queue.forget(2)
    assert (queue.end_of(2, 6), queue.end_of(2, 2)) == (State.ROLLED_BACK, State.ENDED)
    assert queue.pending == 1


def test_halves_that_are_lost_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the memory: nothing says of which half a lost record was, so its entry stayed for ever
    monkeypatch.setattr(half_queue, "_STALE_AT", 10)
    queue = HalfQueue(0, 40)
    for offset in range(40):
        queue.moves(offset, offset, 40 + offset)
    for offset in range(40, 61):
        queue.lose(offset)
    assert (queue.pending, queue.moved) == (19, 20)
    for offset in range(61, 80):
        queue.lose(offset)
    assert queue.pending == 0
    assert queue.moved < 10
    assert queue.latest(39, 39) in (39, 79)


def test_a_first_record_that_was_unreadable_is_done_with_its_half(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the table's front: a record that was done stayed unreadable, and was then sought before the first entry
    monkeypatch.setattr(half_queue, "_KEPT", 2)
    monkeypatch.setattr(half_queue, "_TRIM_AT", 1)
    queue = HalfQueue(0, 10)
    queue.hide(0)
    queue.stands_for(0, 1)
    for offset in range(1, 9):
        queue.set(offset, State.COMMITTED)
    for offset in range(9):
        queue.done(offset)
    queue.forget(0)
    assert queue.unreadable == set()
    assert (queue.advance(), queue.pending) == (9, 1)
    assert queue.table[0] > 1, "the front is freed"
    assert not queue.lose(0)
    assert not queue.lose(1)
    assert (queue.state(9), queue.pending) == (State.PENDING, 1)


def test_an_unreadable_record_that_another_one_stands_for_is_no_lost_half() -> None:
    queue = HalfQueue(0, 3)
    queue.hide(0)
    queue.hide(1)
    queue.stands_for(0, 2)
    assert not queue.lose(0)
    assert queue.lose(1)
    assert (queue.unreadable, queue.pending, queue.advance()) == (set(), 1, 2)
    assert queue.end_of(0, 0) is State.PENDING, "its last record"


class Store:
    """Takes or refuses puts; ``later`` answers them when ``answer`` is called."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.refuses = False
        self.later = False
        self.limits = 1 << 20, 1 << 20
        self._waiting: list[Callable[[], None]] = []

    def put_message(self, message: MessageInner, on_done: PutCallback) -> PutMessageResult | None:
        if self.refuses:
            result = PutMessageResult(PutMessageStatus.SERVICE_NOT_AVAILABLE, remark="full")
        else:
            self.bodies.append(bytes(message.body))
            number = len(self.bodies)
            result = PutMessageResult(PutMessageStatus.PUT_OK, number * 100, number - 1, 50)
        if not self.later:
            return result
        self._waiting.append(lambda: on_done(result))
        return None

    def answer(self) -> None:
        self._waiting.pop(0)()

    @property
    def ended(self) -> list[int]:
        return [offset for body in self.bodies for offset in op_offsets(body)]


def make_ops(tmp_path: object, store: Store, end: int = 100, **changes: object) -> tuple[OpQueue, HalfQueue]:
    halves = HalfQueue(0, end)
    config = configuration(tmp_path, changes)  # type: ignore[arg-type]
    return OpQueue(config, store, HalfMessages(bytes(8), tags=False), halves, ManualClock()), halves


def add(ops: OpQueue, halves: HalfQueue, *offsets: int) -> None:
    for offset in offsets:
        halves.set(offset, State.ROLLED_BACK)
        ops.add(End(offset, offset))


def test_ends_that_the_store_refuses_are_written_later_in_their_order(tmp_path: object) -> None:
    # guards ends that come while the disk is full
    store = Store()
    ops, halves = make_ops(tmp_path, store, transactionOpMsgMaxSize=4)
    store.refuses = True
    add(ops, halves, 1, 2, 3, 4, 5, 6)
    assert ops.waiting == 6
    store.refuses = False
    while ops.waiting:
        ops.write()
    assert store.ended == [1, 2, 3, 4, 5, 6]


def test_one_op_record_is_put_at_a_time(tmp_path: object) -> None:
    # guards the order of ends under SYNC_FLUSH, where a put takes its time
    store = Store()
    store.later = True
    ops, halves = make_ops(tmp_path, store, transactionOpMsgMaxSize=4)
    add(ops, halves, 1, 2, 3, 4, 5)
    assert store.ended == [1, 2]
    store.answer()
    assert store.ended == [1, 2, 3, 4]
    store.answer()
    ops.write()
    store.answer()
    assert store.ended == [1, 2, 3, 4, 5]


def test_an_end_is_done_once_its_record_is_durable(tmp_path: object) -> None:
    store = Store()
    ops, halves = make_ops(tmp_path, store, end=4)
    done: list[int] = []
    ops.on_done = lambda end: done.append(end.offset)
    add(ops, halves, 0, 1)
    ops.write()
    add(ops, halves, 2)
    ops.write()
    for flushed, first, op in ((149, 0, 0), (150, 2, 1), (249, 2, 1), (250, 3, 2)):
        for _ in ops.settle(flushed):
            pass
        assert halves.advance() == first
        assert ops.advance(first) == op
    assert (done, ops.end) == ([0, 1, 2], 2)


def test_memory_is_bounded_while_one_half_is_not_done(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half 0 is pending, so the op records of all others are needed by a start. No record may be passed too early.
    monkeypatch.setattr(ops_module, "_MOST_RECORDS", 3)
    store = Store()
    ops, halves = make_ops(tmp_path, store, end=9)
    for offset in (1, 2, 3, 8, 4, 5, 6, 7):
        add(ops, halves, offset)
        ops.write()
    assert len(list(ops.settle(850))) == 8
    assert len(ops._records) == 3
    assert ops.advance(halves.advance()) == 0
    assert ops.advance(8) == 2, "the third record stands for half 8 and those after it"
    assert ops.advance(9) == 8


def test_a_start_remembers_a_bounded_number_of_op_records(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_module, "_MOST_RECORDS", 3)
    ops, _ = make_ops(tmp_path, Store())
    ops.start_at(10, 15, [(10, 3), (11, 4), (12, 50), (13, 6), (14, 5)])
    assert len(ops._records) == 3
    assert [ops.advance(half) for half in (3, 4, 5, 50, 51)] == [10, 11, 12, 12, 15]


def test_a_stop_may_settle_between_the_steps_of_a_look(tmp_path: object) -> None:
    store = Store()
    ops, halves = make_ops(tmp_path, store, end=4)
    for offset in range(4):
        add(ops, halves, offset)
        ops.write()
    steps = ops.settle(1000)
    next(steps)
    assert len(list(ops.settle(1000))) == 3
    assert list(steps) == []
    assert halves.advance() == 4


@pytest.mark.parametrize("largest", [9, 10])
def test_op_records_fit_into_the_store(tmp_path: object, largest: int) -> None:
    # guards ends: a record that the store can never take would keep all others back
    store = Store()
    store.limits = largest, 1000
    store.later = True
    ops, halves = make_ops(tmp_path, store, transactionOpMsgMaxSize=100)
    add(ops, halves, 1, 2, 3, 10, 11, 12, 13, 14)
    assert store.bodies == [b"1,2,3,10,"]
    for _ in range(2):
        store.answer()
    assert store.bodies == [b"1,2,3,10,", b"11,12,13,"]
    ops.write()
    assert store.ended == [1, 2, 3, 10, 11, 12, 13, 14]


async def test_the_last_ends_are_written_at_the_stop(tmp_path: object) -> None:
    store = Store()
    ops, halves = make_ops(tmp_path, store, transactionOpMsgMaxSize=4)
    store.later = True
    add(ops, halves, 1, 2, 3)
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            for _ in range(2):
                await trio.testing.wait_all_tasks_blocked()
                store.answer()

        nursery.start_soon(answer)
        assert await ops.drain()
    assert store.ended == [1, 2, 3]
    store.later, store.refuses = False, True
    add(ops, halves, 4)
    assert not await ops.drain()
    assert ops.waiting == 1


class Units:
    """A half queue whose records have the log offsets 0, 10, 20 and so on."""

    min_phy_offset = 0

    def min_offset(self, _topic: str, _queue_id: int) -> int:
        return 0

    def max_offset(self, _topic: str, _queue_id: int) -> int:
        return 10

    async def queue_units(self, _topic: str, _queue_id: int, offset: int, _count: int) -> list[tuple[int, int, int]]:
        await trio.lowlevel.checkpoint()
        return [(10 * offset, 10, 0)] if offset < 10 else []


async def test_the_log_is_held_from_the_first_half_on_that_is_not_done() -> None:
    # guards halves of producers that are away for longer than fileReservedTime, and those whose end may be lost
    halves = HalfQueue(0, 10)
    halves.hide(3)
    held = HeldHalves(Units(), halves)
    for offset in (0, 1, 4, 5):
        halves.set(offset, State.COMMITTED)
    halves.advance()
    assert await held.lowest() == 0, "the commit records may not be durable yet"
    for offset in (0, 1, 4, 5):
        halves.done(offset)
    halves.advance()
    assert await held.lowest() == 20
    assert await held.count(0, 60) == 2
    assert await held.count(35, 1000) == 4
    assert halves.pending == 5, "what could not be read is held, and counts as deleted with its file"
    halves.lose(3)
    for offset in (2, 6, 7, 8, 9):
        halves.set(offset, State.ROLLED_BACK)
        halves.done(offset)
    halves.advance()
    assert await held.lowest() is None
    assert await held.count(0, 1000) == 0
