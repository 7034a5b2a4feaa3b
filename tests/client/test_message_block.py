"""Blocks of messages, handed out and finished whole or in parts, behave like single messages."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.scripted import pull_header
from trimq.client import Client, ConsumerMessage, MessageQueue
from trimq.client.decode import split_messages
from trimq.client.errors import RocketMQError
from trimq.client.message_block import MessageBlock
from trimq.client.offset_window import OffsetWindow
from trimq.client.process_queue import Prefetch, ProcessQueue
from trimq.client.pulling import PullCall, Pulled
from trimq.client.read_ahead import ReadAhead
from trimq.client.ready_queue import ReadyQueue
from trimq.client.subscription import Subscription
from trimq.protocol.codes import ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_text import encode_properties
from trimq.protocol.record import RecordError, encode_record, pack_host

QUEUE = MessageQueue(topic="T", broker_name="a", queue_id=0)
HOST = pack_host("127.0.0.1", 1)
CHANCES = st.integers(0, 2**32).map(random.Random)


def record(offset: int, tag: str | None = None, size: int = 1) -> bytes:
    properties = {"TAGS": tag} if tag else {}
    return encode_record(
        topic=b"T", body=b"x" * size, properties=encode_properties(properties).encode(), queue_id=0,
        queue_offset=offset, physical_offset=0, born_timestamp=0, born_host=HOST, store_timestamp=0, store_host=HOST,
    )  # fmt: skip


def block_of(offsets: list[int]) -> MessageBlock[ConsumerMessage]:
    return MessageBlock.split(b"".join(map(record, offsets)), "a", ConsumerMessage)


@pytest.mark.parametrize("count", [1, 3, 4, 40, 300])
@given(CHANCES)
def test_a_reply_is_split_alike_whether_its_messages_have_one_size_or_several(
    count: int, chance: random.Random
) -> None:
    sizes = [chance.choice([1, 1, 1, 2]) for _ in range(count)] if chance.random() < 0.5 else [3] * count
    data = b"".join(record(5 + 2 * number, size=size) for number, size in enumerate(sizes))
    found = MessageBlock.split(data, "a", ConsumerMessage)
    assert list(found.offsets) == [5 + 2 * number for number in range(count)]
    assert [message.queue_offset for message in found] == list(found.offsets)
    assert [len(message.body) for message in found] == sizes
    assert sum(message.size for message in found) == found.size == len(data)


@given(st.integers(1, 40), CHANCES)
def test_a_reply_with_a_damaged_message_is_refused_whichever_it_is(count: int, chance: random.Random) -> None:
    one = record(1)
    data = bytearray(one * count)
    at = chance.randrange(count) * len(one)
    word = chance.choice([0, 4])  # the size, or the magic
    data[at + word : at + word + 4] = chance.choice([b"\0\0\0\0", b"\x12\x34\x56\x78"])
    with pytest.raises(RecordError):
        MessageBlock.split(bytes(data), "a", ConsumerMessage)


@dataclass
class PlainWindow:
    """The simplest model of a window: every message taken, one by one."""

    next_offset: int
    taken: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    def finished(self, offset: int) -> bool:
        known = offset in self.left
        self.left.discard(offset)
        while self.taken and self.taken[0] not in self.left:
            self.taken.pop(0)
        return known

    @property
    def figures(self) -> tuple[int, int, int]:
        return min(self.left, default=self.next_offset), len(self.taken), len(self.left)


@given(st.lists(st.lists(st.integers(1, 3), max_size=5), max_size=8), CHANCES)
def test_a_window_of_blocks_is_what_one_of_single_messages_is(blocks: list[list[int]], chance: random.Random) -> None:
    window, plain, at = OffsetWindow(0), PlainWindow(0), 0
    whole: list[list[int]] = []
    for gaps in blocks:
        offsets = []
        for gap in gaps:
            at += gap
            offsets.append(at)
        whole.append(offsets)
        window.took(offsets)
        window.moved_to(at + 1)
        plain.taken += offsets
        plain.left.update(offsets)
        plain.next_offset = at + 1
        for _ in range(chance.randrange(4)):
            if chance.random() < 0.5:
                block = chance.choice(whole)
                untouched = bool(block) and all(offset in plain.left for offset in block)
                assert window.finished_all(block) == untouched
                if untouched:
                    assert [plain.finished(offset) for offset in block] == [True] * len(block)
            else:
                offset = chance.randrange(at + 3)  # including offsets never taken and offsets already finished
                assert window.finished(offset) == plain.finished(offset)
            assert (window.committable, window.span, window.unfinished) == plain.figures
    for offset in range(at + 1):
        window.finished(offset)
    assert (window.span, window.unfinished) == (0, 0)


@given(st.lists(st.integers(1, 6), max_size=8), CHANCES)
def test_what_is_read_ahead_comes_in_order_however_it_is_taken(sizes: list[int], chance: random.Random) -> None:
    ahead: ReadAhead[ConsumerMessage] = ReadAhead()
    there: list[int] = []
    at = 0
    for size in sizes:
        ahead.add(block_of(list(range(at, at + size))))
        there += range(at, at + size)
        at += size
        for _ in range(chance.randrange(4)):
            assert bool(ahead) == bool(there)
            if not there:
                assert ahead.take_one() is None
                continue
            count = chance.randint(1, 9)
            if chance.random() < 0.4:
                one = ahead.take_one()
                assert one is not None
                taken = [one]
            else:
                block = ahead.take(count)
                assert len(block) == min(count, len(there))
                assert block.size == sum(message.size for message in block)
                assert list(block.offsets) == [message.queue_offset for message in block]
                taken = list(block)
            assert [message.queue_offset for message in taken] == there[: len(taken)]
            del there[: len(taken)]
            if chance.random() < 0.4:
                back = chance.sample(taken, chance.randint(1, len(taken)))
                ahead.put_back(back)
                there = sorted([*there, *(message.queue_offset for message in back)])
    ahead.clear()
    assert not ahead


def test_a_blocks_messages_stay_the_same_objects() -> None:
    block = block_of([1, 2, 3])
    first, rest = block.cut(1)
    assert [*first, *rest] == list(block) == block[:]
    assert rest.joined([first])[2] is block[0]
    lazily = block_of([1, 2]).joined([block_of([5])])
    assert ([message.queue_offset for message in lazily], lazily.size) == ([1, 2, 5], 3 * len(record(1)))


@dataclass
class Reply:
    """The reply of a pull: records with tags, with gaps between and behind them; or a damaged body."""

    gaps: list[tuple[int, str | None]]
    behind: int
    cut_off: int
    code: int

    def command(self, begin: int) -> tuple[RemotingCommand, int]:
        body, at = b"", begin
        for gap, tag in self.gaps:
            at += gap
            body += record(at, tag, 1 + gap)
            at += 1
        following = at + self.behind
        body = body[: len(body) - self.cut_off] if self.code == ResponseCode.SUCCESS else b""
        request = RemotingCommand.request(11)
        return request.reply(self.code, header=pull_header(following), body=body), following


REPLIES = st.builds(
    Reply,
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b", None])), max_size=5),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, 1, 40]),
    st.sampled_from([*[ResponseCode.SUCCESS] * 5, 19, 20, 21, ResponseCode.SYSTEM_ERROR]),
)


def process_queue_of(
    subscription: Subscription, on_ready: Callable[[ProcessQueue], None] = lambda _: None, *, orderly: bool = False
) -> ProcessQueue:
    """A process queue that does not pull."""
    return ProcessQueue(
        Client("127.0.0.1:1"), "g", QUEUE, subscription, 0, prefetch=Prefetch(), kind=ConsumerMessage,
        with_subscription=False, on_ready=on_ready, orderly=orderly,
    )  # fmt: skip


def test_what_has_arrived_is_read_before_a_task_waits() -> None:
    arriving = [[1, 2], [], [3]]

    def read_arrived() -> bool:
        if not arriving:
            return False
        offsets = arriving.pop(0)
        if offsets:
            process_queue.add(block_of(offsets))  # type: ignore[arg-type] # the process queue makes ConsumerMessages
        return True

    ready = ReadyQueue(read_arrived)
    process_queue = process_queue_of(Subscription("T", "*", 0), ready.add)
    found = ready.take(2)
    assert found is not None
    assert (found[0], list(found[1].offsets), len(arriving)) == (process_queue, [1, 2], 2)
    assert ready.take(2) is None  # bytes have arrived, but no complete message
    one = ready.take_one()
    assert one is not None
    assert one.queue_offset == 3
    assert ready.take_one() is None


@pytest.mark.parametrize("orderly", [False, True])
def test_a_process_queue_that_is_paused_or_busy_hands_out_nothing(orderly: bool) -> None:
    ready = ReadyQueue(lambda: False)
    process_queue = process_queue_of(Subscription("T", "*", 0), ready.add, orderly=orderly)
    process_queue.add(block_of([1, 2, 3]))  # type: ignore[arg-type] # the process queue makes ConsumerMessages
    one = ready.take_one()
    assert one is not None
    assert one.queue_offset == 1
    two = ready.take_one()
    assert (two is None) == orderly
    process_queue.finished_one(one)
    if two is None:
        two = ready.take_one()
        assert two is not None
    assert two.queue_offset == 2
    process_queue.finished_one(two)
    process_queue.pause()
    assert ready.take_one() is None
    process_queue.resume()
    three = ready.take_one()
    assert three is not None
    assert three.queue_offset == 3


@given(st.lists(REPLIES, max_size=12), st.sampled_from(["*", "a", "a || b"]), CHANCES)
def test_batches_and_single_messages_are_the_same_messages_and_the_same_offsets(
    replies: list[Reply], tags: str, chance: random.Random
) -> None:
    """Compare a process queue with a simple one, which splits each reply immediately and finishes single messages."""
    subscription = Subscription("T", tags, 0)
    process_queue = process_queue_of(subscription)
    call = PullCall("g", QUEUE, subscription, 32, with_subscription=False)
    plain = PlainWindow(0)
    expected: list[int] = []
    handled: list[list[ConsumerMessage] | MessageBlock[ConsumerMessage]] = []
    for reply in replies:
        command, following = reply.command(plain.next_offset)
        found: list[ConsumerMessage] = []
        try:
            found = split_messages(command.body, "a", ConsumerMessage) if reply.code == 0 else []
            works = reply.code in (19, 20, 21) or bool(reply.code == 0 and found)
        except ValueError:
            works = False
        if works:
            process_queue.absorb(Pulled(command, call, "a:1"))
            wanted = [m.queue_offset for m in found if not subscription.tags or m.tags in subscription.tags]
            expected += wanted
            plain.taken += wanted
            plain.left.update(wanted)
            plain.next_offset = following
        else:
            with pytest.raises((ValueError, RocketMQError)):
                process_queue.absorb(Pulled(command, call, "a:1"))
        for _ in range(chance.randrange(3)):
            if chance.random() < 0.5 and (block := process_queue.take(chance.randint(1, 8))) is not None:
                handled.append(block)  # type: ignore[arg-type] # the process queue makes ConsumerMessages
                taken = len(block)
                assert list(block.offsets) == expected[:taken]
            elif (one := process_queue.take_one()) is not None:
                assert isinstance(one, ConsumerMessage)
                handled.append([one])
                taken = 1
                assert one.queue_offset == expected[0]
            else:
                assert not expected
                continue
            del expected[:taken]
        chance.shuffle(handled)
        while handled and chance.random() < 0.6:
            messages = handled.pop()
            if chance.random() < 0.2:
                process_queue.put_back(messages)
                expected = sorted([*expected, *(message.queue_offset for message in messages)])
                continue
            if len(messages) == 1 and chance.random() < 0.5:
                process_queue.finished_one(messages[0])
            else:
                process_queue.finished(messages)
            for message in messages:
                plain.finished(message.queue_offset)
        assert (process_queue.committable, process_queue.window.span, process_queue.window.unfinished) == plain.figures
        held = [process_queue.buffer.front, *process_queue.buffer._blocks, *handled]
        assert process_queue.held_bytes == sum(message.size for messages in held for message in messages)
