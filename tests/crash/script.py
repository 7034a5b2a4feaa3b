"""The script that crashes at each of its disk calls, and the promises that the store has made by then.

It consists of chapters, each with its own store from opening to orderly stop: sends of every kind in both flush modes,
log, queue and index files that roll over, retention, topics that are deleted and created again, state files. A chapter
can be run alone on the disk that the previous one left.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple

import trio

from tests.crash.timed import LOG_FILE, SLOTS, TIMED, running_timer
from tests.crash.transactions import HalfPromise, Producer, TransactionEvent, Transactions, add_event
from tests.store.builders import HOST_V6, batch, message
from tests.store.simdisk import SimDisk
from trimq.broker.config import FlushDiskType, MessageStoreConfig
from trimq.broker.services.state_file import StateFile, StateFileError, encode_pieces
from trimq.broker.store.durability.log_sync import SyncPlace
from trimq.broker.store.message_store import MessageStore
from trimq.broker.store.types import PutMessageResult, PutMessageStatus
from trimq.protocol.hashing import tags_code
from trimq.protocol.timer_layout import out_time
from trimq.protocol.timer_message import RECALL_TAG
from trimq.protocol.topic_rules import SCHEDULE_TOPIC, TIMER_TOPIC
from trimq.remoting.runtime.clock import ManualClock

ROOT: Final = "/store"
STATE: Final = f"{ROOT}/config/topics.json"
FILE_SIZE: Final = 8192
DELAYS_MS: Final = {1: 1_000, 2: 5_000}
START_MS: Final = 1_700_000_000_000
PRECISIONS: Final = (1000, 100)
"""Those that chapters and starts after a crash have: most starts find the timer with another one."""


class Sent(NamedTuple):
    """A message as sent."""

    topic: str
    queue_id: int
    body: bytes
    properties: str
    tags_code: int | None
    """None for a delayed message: its unit holds the due time instead, which depends on the store time."""

    @property
    def out_ms(self) -> int | None:
        """TIMER_OUT_MS; None unless it is a timed message or a delete mark."""
        _, _, rest = self.properties.partition("TIMER_OUT_MS\x01")
        return int(rest.partition("\x02")[0]) if rest else None

    @property
    def keys(self) -> tuple[str, ...]:
        """The words by which a query finds the message."""
        return _keys(self.properties)


@lru_cache(maxsize=10_000)
def _keys(properties: str) -> tuple[str, ...]:
    words: list[str] = []
    for part in properties.split("\x02"):
        name, _, value = part.partition("\x01")
        if name in ("KEYS", "UNIQ_KEY"):
            words += value.split()
    return tuple(words)


# -- events


class Acknowledged(NamedTuple):
    """The store acknowledged a message. ``durable``: the answer promised that it is durable."""

    body: bytes
    queue_offset: int
    physical_offset: int
    size: int
    durable: bool


class Deleting(NamedTuple):
    """From now on records before the log offset ``below`` may be deleted."""

    below: int


class Dropping(NamedTuple):
    """From now on the messages of a topic may be deleted."""

    topic: str


class Writing(NamedTuple):
    """A write of a value to the state file has started."""

    value: int


class Written(NamedTuple):
    """The write has been confirmed as durable."""

    value: int


class Recalling(NamedTuple):
    """The recall of a timed message has started: the message ``mark`` is its delete mark."""

    mark: bytes
    recalled: bytes


Event = Sent | Acknowledged | Recalling | Deleting | Dropping | Writing | Written | TransactionEvent


class Moment(NamedTuple):
    """A moment of the run: the number of events so far, and the log offset up to which the log was durable."""

    events: int
    flushed: int


@dataclass
class Promise:
    """What a store has to hold after a crash at some moment."""

    sent: dict[bytes, Sent] = field(default_factory=dict)
    durable: dict[bytes, Acknowledged] = field(default_factory=dict)
    """Messages that must be stored, unless their log file expired or their topic was dropped."""
    placed: dict[bytes, Acknowledged] = field(default_factory=dict)
    """Messages that must be at these offsets if they are stored at all."""
    deleted_below: int = 0
    dropped: set[bytes] = field(default_factory=set)
    delivered: set[bytes] = field(default_factory=set)
    """Timed messages whose copies may have expired."""
    recalls: dict[bytes, bytes] = field(default_factory=dict)
    """The timed messages of which a recall has started, by their delete marks."""
    state: tuple[int, int] = (0, 0)
    """The state file holds no older value than the first and no newer one than the second."""
    halves: dict[bytes, HalfPromise] = field(default_factory=dict)


def promise(events: Iterable[Event], moment: Moment, *, killed: bool = False) -> Promise:
    """The promise that follows from the events up to a moment.

    ``killed``: only the process ended, the page cache survived, so that every acknowledged message must be stored.
    """
    made = Promise()
    for event, _ in zip(events, range(moment.events), strict=False):
        match event:
            case Sent():
                made.sent[event.body] = event
            case Acknowledged():
                made.placed[event.body] = event
                if killed or event.durable or event.physical_offset + event.size <= moment.flushed:
                    made.durable[event.body] = event
            case Recalling():
                made.recalls[event.mark] = event.recalled
            case Deleting():
                made.deleted_below = event.below
                made.delivered.update(body for body, sent in made.sent.items() if sent.topic == TIMER_TOPIC)
            case Dropping():
                made.dropped.update(body for body, sent in made.sent.items() if sent.topic == event.topic)
            case Writing():
                made.state = (made.state[0], event.value)
            case Written():
                made.state = (event.value, event.value)
            case _:
                add_event(made.halves, event, moment.flushed, killed=killed)
    return made


# -- the script

Operation = Callable[["Script"], Awaitable[None]]


def configuration(*, sync: bool, precision: int) -> MessageStoreConfig:
    """A store with files so small that each kind of file rolls over every few messages."""
    return MessageStoreConfig(
        store_path_root_dir=ROOT,
        mapped_file_size_commit_log=FILE_SIZE,
        mapped_file_size_consume_queue=120,
        commit_log_reserve_step=4096,
        max_message_size=4000,
        max_hash_slot_num=8,
        max_index_num=16,
        message_delay_level="1s 5s",
        flush_disk_type=FlushDiskType.SYNC_FLUSH if sync else FlushDiskType.ASYNC_FLUSH,
        flush_commit_log_least_pages=0,
        flush_interval_consume_queue=300,
        flush_consume_queue_least_pages=0,
        flush_consume_queue_thorough_interval=900,
        delete_when="",
        file_reserved_time=72,
        delete_commit_log_files_interval=0,  # a flush between two deletions would hide what only it makes durable
        mapped_file_size_timer_log=LOG_FILE,
        timer_precision_ms=precision,
    )


def open_store(
    disk: SimDisk, *, sync: bool, clock: ManualClock | None = None, precision: int = PRECISIONS[0]
) -> MessageStore:
    """Create the script's store on ``disk``; ``precision``: timerPrecisionMs."""
    return MessageStore(
        configuration(sync=sync, precision=precision),
        disk=disk,
        clock=clock or ManualClock(START_MS),
        sync_place=SyncPlace.THREAD,
        timer_slots=SLOTS,
    )


class Start(NamedTuple):
    """State of a script at the start of a chapter."""

    events: tuple[Event, ...]
    state: int
    flushed: int
    wall_ms: int


class Script:
    """One run of chapters. ``events`` lists all events so far; ``operations`` counts the operations by name."""

    def __init__(self, disk: SimDisk, seed: int) -> None:
        self.disk = disk
        self.seed = seed
        self.random = Random(seed)
        self.clock = ManualClock(START_MS)
        disk._now_ms = self.clock.wall_ms
        self.events: list[Event] = []
        self.operations: dict[str, int] = {}
        self.number = 0
        self.state = 0
        self.sync = False
        self.faults_expected = False
        self.committed: set[bytes] = set()
        """Halves that the checks after this run have committed."""
        self.store: MessageStore
        self.producer: Producer
        self._flushed_before = 0

    def at_start_of(self, chapter: "Start") -> None:
        """Continue from the start of a chapter of another run."""
        self.events = list(chapter.events)
        self.state = chapter.state
        self._flushed_before = chapter.flushed
        self.clock.set_wall_ms(chapter.wall_ms)

    def start(self) -> "Start":
        """The script's state, to be passed to ``at_start_of`` later."""
        return Start(tuple(self.events), self.state, self.moment().flushed, self.clock.wall_ms())

    def moment(self) -> Moment:
        """The current moment of the run."""
        try:
            flushed = self.store.flushed_offset
        except AttributeError:  # no store is open yet
            flushed = self._flushed_before
        return Moment(len(self.events), flushed)

    async def chapter(self, at: int) -> None:
        """Run one chapter; it is always the same for a seed, whether or not other chapters ran before."""
        self.random = Random(f"{self.seed} {at}")
        self.number = 1000 * at
        self.sync, operations = CHAPTERS[at]
        self.count("restart" if at else "start")
        precision = PRECISIONS[at % 3 % 2]
        self.store = open_store(self.disk, sync=self.sync, clock=self.clock, precision=precision)
        async with self.store.opened(), running_timer(self.store, self.disk, self.clock):
            transactions = Transactions(self.store, self.disk, self.clock)
            await transactions.open()
            self.producer = Producer(transactions, self.random, self.events.append)
            for operation in operations:
                self.count(operation.__name__.strip("_"))
                self.clock.advance(0.01)
                try:
                    await operation(self)
                except (OSError, StateFileError):  # an injected error, reported to the operation's caller
                    if not self.faults_expected:
                        raise
            await transactions.stop()
        self._flushed_before = self.store.flushed_offset
        self.count("clean stop")

    def count(self, name: str) -> None:
        """Count one more operation of a kind."""
        self.operations[name] = self.operations.get(name, 0) + 1

    # building blocks of the operations

    def make(self, topic: str, queue_id: int, size: int) -> Sent:
        """Make a new message and note it as sent."""
        self.number += 1
        level = 0
        text = f"UNIQ_KEY\x01u{self.number}\x02KEYS\x01group{self.number % 5} {topic}\x02"
        tag = self.random.choice(("", "Red", "Blue"))
        if tag:
            text += f"TAGS\x01{tag}\x02"
        if topic == SCHEDULE_TOPIC:
            level = queue_id + 1
            text += f"DELAY\x01{level}\x02REAL_TOPIC\x01Alpha\x02REAL_QID\x010\x02"
        if topic == TIMER_TOPIC:
            due = out_time(self.clock.wall_ms() + self.random.choice((500, 1500, 2500, 9_000, 100_000)), 1000)
            text += f"TIMER_OUT_MS\x01{due}\x02REAL_TOPIC\x01{TIMED}\x02REAL_QID\x010\x02"
        body = self.number.to_bytes(4, "big") + self.random.randbytes(size)
        sent = Sent(topic, queue_id, body, text, None if level else tags_code(tag))
        self.events.append(sent)
        return sent

    async def send(
        self, topic: str, queue_id: int, sizes: Iterable[int], *, wait: bool = True, v6: bool = False
    ) -> None:
        """Send a message, or several as a batch, and with ``wait`` wait for the answer."""
        await self.put([self.make(topic, queue_id, size) for size in sizes], wait=wait, v6=v6)

    async def recall(self) -> None:
        """Store the delete mark of a timed message that is not due yet, if there is one."""
        stored = {event.body for event in self.events if isinstance(event, Acknowledged)}
        done = {body for event in self.events if isinstance(event, Recalling) for body in event}
        now = self.clock.wall_ms()
        waiting = [
            event
            for event in self.events
            if isinstance(event, Sent) and event.body in stored - done and (event.out_ms or 0) > now
        ]
        if not waiting:
            return
        chosen = self.random.choice(waiting)
        self.number += 1
        key = chosen.properties.partition("\x02")[0]
        text = (
            f"TAGS\x01{RECALL_TAG}\x02TIMER_DEL_UNIQKEY\x01{key.partition(chr(1))[2]}\x02{key}\x02"
            f"TIMER_OUT_MS\x01{chosen.out_ms}\x02REAL_TOPIC\x01{TIMED}\x02REAL_QID\x010\x02"
        )
        body = self.number.to_bytes(4, "big") + b"0"
        mark = Sent(TIMER_TOPIC, 0, body, text, tags_code(RECALL_TAG))
        self.events += [Recalling(body, chosen.body), mark]
        await self.put([mark])
        await trio.sleep(0.1)  # a precision passes between a recall and the delivery: the mark is readable by then

    async def put(self, sent: Sequence[Sent], *, wait: bool = True, v6: bool = False) -> None:
        """Put messages of one queue, noted as sent, and with ``wait`` wait for the answer."""
        topic, queue_id = sent[0].topic, sent[0].queue_id
        done = trio.Event()
        durable = self.sync

        def answer(result: PutMessageResult) -> None:
            if result.ok:
                offsets = result.offsets or [result.physical_offset]
                ends = [*offsets[1:], result.physical_offset + result.size]
                for at, (one, phy, end) in enumerate(zip(sent, offsets, ends, strict=True)):
                    promised = durable and result.status is PutMessageStatus.PUT_OK
                    self.events.append(Acknowledged(one.body, result.queue_offset + at, phy, end - phy, promised))
            done.set()

        if len(sent) == 1:
            result = self.store.put_message(_message(sent[0], v6=v6), answer)
        else:
            put = batch(
                [one.body for one in sent],
                topic,
                queue_id,
                properties=[one.properties.encode() for one in sent],
                tags_codes=[one.tags_code or 0 for one in sent],
                keys=[one.keys for one in sent],
            )
            result = self.store.put_message(put, answer)
        if result is not None:
            answer(result)
        elif wait:
            await done.wait()


def _message(sent: Sent, *, v6: bool) -> Any:
    host = {"born_host": HOST_V6, "sys_flag": 0x10} if v6 else {}
    return message(
        sent.body,
        sent.topic,
        sent.queue_id,
        properties=sent.properties.encode(),
        tags_code=sent.tags_code or 0,
        keys=sent.keys,
        **host,
    )


# -- operations


async def _send_small(script: Script) -> None:
    await script.send(script.random.choice(("Alpha", "Beta")), script.random.randrange(2), [5])


async def _send_v6(script: Script) -> None:
    await script.send("Alpha", 0, [30], v6=True)


async def _send_medium(script: Script) -> None:
    await script.send("Alpha", script.random.randrange(2), [script.random.choice((300, 700, 1300))])


async def _send_large(script: Script) -> None:
    await script.send("Beta", 1, [3900])


async def _send_and_go_on(script: Script) -> None:
    await script.send("Alpha", 0, [script.random.choice((20, 900))], wait=False)


async def _send_batch(script: Script) -> None:
    await script.send("Beta", 0, [10, script.random.choice((20, 500)), 40])


async def _send_delayed(script: Script) -> None:
    await script.send(SCHEDULE_TOPIC, script.random.randrange(2), [25])


async def _send_timed(script: Script) -> None:
    await script.send(TIMER_TOPIC, 0, [script.random.choice((20, 400))])


async def _send_timed_and_go_on(script: Script) -> None:
    await script.send(TIMER_TOPIC, 0, [25], wait=False)


async def _recall(script: Script) -> None:
    await script.recall()


async def _slots_end(script: Script) -> None:
    """Slots become due, and the timer's checkpoint comes soon after that."""
    script.clock.advance(1.1)
    await trio.sleep(0.1)
    script.clock.advance(0.6)
    await trio.sleep(0.1)


async def _timers_end(script: Script) -> None:
    """All timed messages become due, and the timer's checkpoint comes after that."""
    script.clock.advance(86_400)
    await trio.sleep(0.1)
    script.clock.advance(0.6)
    await trio.sleep(0.1)


async def _send_to_gamma(script: Script) -> None:
    await script.send("Gamma", 0, [15])


async def _flush_passes(script: Script) -> None:
    """Wait long enough for a flush of the log and the queues, but not for a checkpoint."""
    await trio.sleep(0.6)


async def _checkpoint_passes(script: Script) -> None:
    await trio.sleep(1.3)


async def _make_queues(script: Script) -> None:
    script.store.create_queues("Empty", 2)
    await trio.sleep(0.05)


async def _drop_gamma(script: Script) -> None:
    script.events.append(Dropping("Gamma"))
    await script.store.delete_topic("Gamma")


async def _drop_empty(script: Script) -> None:
    await script.store.delete_topic("Empty")


async def _expire(script: Script) -> None:
    """Move the clock four days ahead: all log files but the last one expire.

    A last file that is full expires too: it may be deleted as soon as the next file exists, which an injected error
    may delay.
    """
    script.clock.advance(4 * 86_400)
    files = script.store.files.files
    is_full = bool(files) and files[-1].is_full
    if files:
        # The timer delivers what is due by the new time, so that the last file may be full before the cleaner looks.
        script.events.append(Deleting(files[-1].end))
    await script.store.delete_expired_now()
    await trio.sleep(0.05)  # the service's own look: it must not come after the log has rolled over once more
    await script.store._clean.look()
    # The request holds for 19 more looks: one of them would delete files that pending messages hold until then.
    script.store._clean._manual_rounds = 0
    if not is_full:
        script.events.append(Deleting(script.store.min_phy_offset))


async def _write_state(script: Script) -> None:
    """Change the state file; the change is confirmed when it is durable."""
    script.state += 1
    value = script.state
    script.events.append(Writing(value))
    file = StateFile(script.disk, STATE, lambda: encode_pieces({"value": value}))
    file.changed()
    await file.persisted()
    script.events.append(Written(value))


async def _prepare(script: Script) -> None:
    script.number += 1
    body = script.number.to_bytes(4, "big") + script.random.randbytes(10)
    await script.producer.prepare(body, f"u{script.number}", durable=script.sync)


async def _commit(script: Script) -> None:
    await script.producer.commit(durable=script.sync)


async def _roll_back(script: Script) -> None:
    await script.producer.roll_back()


async def _check_back(script: Script) -> None:
    await script.producer.store_again()


async def _check_all(script: Script) -> None:
    await script.producer.store_all_again()


async def _expire_half(script: Script) -> None:
    await script.producer.expire()


async def _resume_half(script: Script) -> None:
    await script.producer.resume()


async def _write_ops(script: Script) -> None:
    await script.producer.write_ops()


async def _settle(script: Script) -> None:
    await script.producer.settle()


CHAPTERS: Final[list[tuple[bool, list[Operation]]]] = [
    (
        False,
        [
            _write_state,
            _make_queues,
            _send_small,
            _prepare,
            _prepare,
            _prepare,
            _send_batch,
            _send_delayed,
            _send_timed,
            _send_timed,
            _send_medium,
            _recall,
            _send_to_gamma,
            _slots_end,
            _send_to_gamma,
            _send_timed,
            _commit,
            _flush_passes,
            _roll_back,
            _check_back,
            _settle,
            _write_ops,
            _settle,
            _send_large,
            _write_state,
            _send_large,
            _commit,
            _prepare,
            _expire_half,
            _resume_half,
            _checkpoint_passes,
            _settle,
            _prepare,
            _check_back,
            _send_small,
            _send_v6,
        ],
    ),
    (
        True,
        [
            _send_small,
            _send_and_go_on,
            _commit,
            _settle,
            _prepare,
            _commit,
            _send_batch,
            _send_large,
            _drop_gamma,
            _send_medium,
            _write_state,
            _send_to_gamma,
            _send_timed,
            _slots_end,
            _send_timed_and_go_on,
            _recall,
            _send_delayed,
            _send_batch,
            _slots_end,
            _check_back,
            _expire_half,
            _checkpoint_passes,
            _settle,
            _resume_half,
            _prepare,
            _roll_back,
            _write_ops,
            _settle,
            _send_and_go_on,
            _send_small,
        ],
    ),
    (
        False,
        [
            _prepare,
            _send_large,
            _send_small,
            _timers_end,  # they would hold the log too; and its checkpoint makes the half durable
            _check_all,
            _expire,  # nothing yet: the halves that were stored again are not durable
            _flush_passes,
            _settle,
            _expire,
            _send_batch,
            _prepare,
            _prepare,
            _flush_passes,
            _settle,
            _commit,
            _send_to_gamma,
            _send_small,
            _drop_empty,
            _send_timed,
            _check_back,
            _commit,
            _write_ops,
            _settle,
            _checkpoint_passes,
            _send_timed,
            _recall,
            _send_large,
            _send_batch,
            _send_delayed,
        ],
    ),
    (
        True,
        [
            _send_batch,
            _write_state,
            _send_large,
            _send_large,
            _send_small,
            _check_all,
            _settle,
            _expire,
            _send_and_go_on,
            _send_and_go_on,
            _send_v6,
            _write_state,
            _send_timed,
            _recall,
            _send_batch,
            _slots_end,
            _checkpoint_passes,
            _send_delayed,
            _send_timed,
            _send_small,
        ],
    ),
    (
        False,
        [
            _send_small,
            _send_batch,
            _send_medium,
            _send_timed,
            _send_timed,
            _flush_passes,
            _recall,
            _slots_end,
            _prepare,
            _check_back,
            _commit,
            _flush_passes,
            _settle,
            _prepare,
            _commit,
            _commit,
            _write_ops,
            _settle,
            _write_state,
            _send_to_gamma,
            _drop_gamma,
            _send_medium,
            _send_small,
        ],
    ),
]


async def load_state(disk: SimDisk) -> int:
    """Read the value in the state file; 0 if the file does not exist."""
    state = await StateFile(disk, STATE, lambda: ()).load()
    return 0 if state is None else int(state["value"])
