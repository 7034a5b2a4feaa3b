"""A stream of segments against a plain list: growth, gaps, expiry, failures, kills and power cuts in any order."""

import errno
from dataclasses import dataclass, field

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.store.simdisk import Loss, PowerCut, SimDisk
from trimq.broker.store.tiered.container.flat_append_file import FlatAppendFile
from trimq.broker.store.tiered.driver.factory import FileSegmentFactory
from trimq.broker.store.tiered.driver.file_segment import Piece
from trimq.broker.store.tiered.driver.metadata import DefaultMetadataStore
from trimq.broker.tiered_config import PLUG_IN, POSIX_PROVIDER, TieredStoreConfig
from trimq.protocol.tiered_layout import UNSET_TIME, SegmentType, segment_file, segment_name

MAX_SIZE = 100
CONFIG = TieredStoreConfig(
    message_store_plug_in=PLUG_IN,
    tiered_backend_service_provider=POSIX_PROVIDER,
    tiered_store_file_path="/tier",
    tiered_store_commit_log_max_size=MAX_SIZE,
)
PATH = "b/TT/0"
FOLDER = segment_file("/tier", "C", PATH, SegmentType.COMMIT_LOG, 0).rpartition("/")[0]
Step = tuple[str, int, int]

SIZES = [1, 7, 30, 60, 100, 130]
FAULT = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, len(Loss) - 1), st.integers(0, 12)),
    st.tuples(st.just("fail"), st.integers(0, 6), st.integers(1, 6)),
)
APPEND = st.tuples(st.just("append"), st.sampled_from(SIZES), st.sampled_from([0, 20, 40]))
CHANGE = st.one_of(
    APPEND,
    st.tuples(st.sampled_from(["init", "roll", "destroy"]), st.just(0), st.just(0)),
    st.tuples(st.just("gap"), st.sampled_from([0, 1, 50]), st.just(0)),
    st.tuples(st.just("expire"), st.integers(0, 12).map(lambda n: 10 * n), st.just(0)),
    st.tuples(st.just("below"), st.integers(0, 3), st.integers(-1, 1)),
)
AGAIN = st.tuples(st.sampled_from(["restart", "kill"]), st.just(0), st.just(0))
OTHER = st.one_of(
    AGAIN,
    st.tuples(st.just("read"), st.integers(-5, 400), st.integers(1, 300)),
    st.tuples(st.just("take_back"), st.just(0), st.just(0)),
)
STEPS = st.lists(
    st.one_of(
        APPEND.map(lambda step: [step]),
        st.one_of(CHANGE, OTHER, FAULT).map(lambda step: [step]),
        st.tuples(FAULT, CHANGE).map(list),
        st.just([("destroy", 0, 0), ("init", 0, 0), ("append", 7, 0), ("take_back", 0, 0), ("expire", 0, 0)]),
        st.tuples(FAULT, CHANGE, APPEND, AGAIN).map(list),
        st.tuples(st.tuples(st.just("fail"), st.just(5), st.just(1)), CHANGE, APPEND, APPEND, AGAIN).map(list),
    ),
    max_size=20,
).map(lambda parts: [step for part in parts for step in part])
FAILING = ["*", "data_sync", "pwrite", "rename", "sync_directory", "delete", "*"]


@dataclass
class Segment:
    """A segment of the model: its begin, its bytes, and the times of what was appended."""

    base: int
    data: bytes = b""
    begin: int = UNSET_TIME
    end: int = UNSET_TIME

    @property
    def behind(self) -> int:
        return self.base + len(self.data)


@dataclass
class Model:
    """The stream as a list."""

    segments: list[Segment] = field(default_factory=list)

    def roll(self, base: int) -> None:
        if self.segments and not self.segments[-1].data:
            if self.segments[-1].base == base:
                return
            self.segments.pop()
        self.segments.append(Segment(base))

    def append(self, data: bytes, begin: int, end: int) -> int:
        last = self.segments[-1]
        if last.data and len(last.data) + len(data) > MAX_SIZE:
            self.roll(last.behind)
            last = self.segments[-1]
        position = last.behind
        last.data += data
        last.begin = begin if last.begin == UNSET_TIME else min(last.begin, begin)
        last.end = end if last.end == UNSET_TIME else max(last.end, end)
        return position

    def expire(self, before: int) -> None:
        while self.segments and self.segments[0].end != UNSET_TIME and self.segments[0].end < before:
            if len(self.segments) == 1:
                if not self.segments[0].data:
                    return
                self.roll(self.segments[0].behind)
            self.segments.pop(0)

    def below(self, offset: int) -> None:
        while len(self.segments) > 1 and self.segments[0].behind <= offset:
            self.segments.pop(0)

    def read(self, offset: int, length: int) -> bytes:
        found = b""
        for segment in self.segments:
            at = offset + len(found)
            if segment.base <= at < segment.behind:
                found += segment.data[at - segment.base :][: length - len(found)]
        return found

    def copy(self) -> "Model":
        return Model([Segment(s.base, s.data, s.begin, s.end) for s in self.segments])


class Run:
    """One play of steps."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(seed=seed)
        self.model = Model()
        self.now = 1000
        self.number = 0
        self.taken: int | None = None
        """Where the last piece begins, if it may be taken back."""
        self.is_loose = False
        """Whether bytes of a piece that does not count may stand behind the end."""
        self.going: set[int] = set()
        """The bases of segments whose deletion has begun: a restart may complete it."""

    async def open(self) -> None:
        self.disk.clear_failures()
        self.metadata = DefaultMetadataStore(self.disk, "/store", "b", lambda: self.now)
        self.metadata.load()
        factory = FileSegmentFactory(CONFIG, self.disk, "C")
        self.file = FlatAppendFile(factory, self.metadata, SegmentType.COMMIT_LOG, PATH)
        await self.file.recover()

    def be_sound(self) -> None:
        """No failure and no cut from here on."""
        self.disk.clear_failures()
        self.disk.cut_at = None

    async def apply(self, step: Step) -> None:
        """Do a step in the file, then in the model."""
        name, first, second = step
        model, taken = self.model.copy(), None
        if name in {"append", "roll", "gap"} and not self.file.segments:
            name, first = "init", 0
        if name == "append":
            data = bytes([self.number % 251]) * first
            self.number += 1
            pieces: list[Piece] = [data[: first // 2], memoryview(data)[first // 2 :]]
            self.is_loose = True
            found = await self.file.append(pieces, first, self.now - second, self.now)
            taken = model.append(data, self.now - second, self.now)
            assert found == taken
            self.is_loose = False
        elif name == "init":
            await self.file.init_offset(first)
            if not model.segments:
                model.roll(first)
        elif name in {"roll", "gap"}:
            base = self.file.commit_offset + first
            await self.file.roll(None if name == "roll" else base)
            model.roll(base)
        elif name == "expire":
            model.expire(self.now - first)
            self._expect_loss(model)
            await self.file.destroy_expired(self.now - first)
        elif name == "below":
            ends = [segment.behind for segment in model.segments]
            offset = ends[min(first, len(ends) - 1)] + second if ends else 0
            model.below(offset)
            self._expect_loss(model)
            await self.file.destroy_below(offset)
        elif name == "destroy":
            model.segments.clear()
            self._expect_loss(model)
            await self.file.destroy()
        elif name == "take_back" and self.taken is not None and self.taken >= model.segments[-1].base:
            self.is_loose = True
            self.file.take_back(self.taken)
            last = model.segments[-1]
            last.data = last.data[: self.taken - last.base]
        self.model, self.taken = model, taken
        self.going &= {segment.base for segment in model.segments}

    def _expect_loss(self, model: Model) -> None:
        """Note which segments a step takes away, before it begins."""
        kept = {segment.base for segment in model.segments}
        self.going |= {segment.base for segment in self.model.segments} - kept

    async def check(self, *, times: bool = True) -> None:
        """The file is the model."""
        assert [(s.base_offset, s.commit_position) for s in self.file.segments] == [
            (s.base, len(s.data)) for s in self.model.segments
        ]
        if times:
            for one, other in zip(self.file.segments, self.model.segments, strict=True):
                assert (one.min_timestamp, one.max_timestamp) == (other.begin, other.end)
        assert self.file.min_offset == (self.model.segments[0].base if self.model.segments else 0)
        assert self.file.commit_offset == (self.model.segments[-1].behind if self.model.segments else 0)
        for segment in self.model.segments:
            if segment.data:
                assert await self.file.read(segment.base, len(segment.data)) == segment.data

    async def read(self, offset: int, length: int) -> None:
        expected = self.model.read(offset, length)
        if expected:
            assert await self.file.read(offset, length) == expected
        else:
            with pytest.raises(LookupError):
                await self.file.read(offset, length)

    async def adopt(self, name: str, before_ms: int = 0, *, restarted: bool) -> None:
        """A step has failed or was interrupted: nothing else is lost; what it did in part is taken over."""
        before = {segment.base: segment for segment in self.model.segments}
        found: list[Segment] = []
        for segment in self.file.segments:
            old = before.get(segment.base_offset, Segment(segment.base_offset))
            assert segment.commit_position >= len(old.data)
            if len(old.data) < segment.commit_position:
                # The owner of the stream cuts them.
                assert restarted
                assert self.is_loose
                assert segment is self.file.segments[-1]
                assert self.file.confirmed <= len(old.data)
                await self.file.cut(segment.base_offset + len(old.data))
                self.is_loose = False
            found.append(Segment(old.base, old.data, segment.min_timestamp, segment.max_timestamp))
            if old.data:
                # They may be those of its first piece; without times it would expire at once.
                assert UNSET_TIME not in {segment.min_timestamp, segment.max_timestamp}
        kept = {segment.base for segment in found}
        lost = [segment for base, segment in before.items() if base not in kept and segment.data]
        assert {segment.base for segment in lost} <= self.going
        if name == "expire":
            assert all(segment.end < before_ms for segment in lost)
        ends = [segment.behind for segment in before.values() if segment.data and segment.base not in self.going]
        assert not ends or self.file.commit_offset >= max(ends)
        self.model, self.taken = Model(found), None
        if restarted:
            self.going.clear()
        await self.check(times=False)

    def check_files(self) -> None:
        """After a restart there is no file that the metadata does not know, but for one that was given up."""
        names = {segment_name(segment.base_offset) for segment in self.file.segments}
        full = {segment_name(segment.base_offset) for segment in self.file.segments if segment.commit_position}
        assert full <= set(self.disk.list(FOLDER)) <= names


async def play(steps: list[Step], seed: int) -> None:
    run = Run(seed)
    await run.open()
    name = ""
    for step in steps:
        name, first, second = step
        run.now += 10
        try:
            if name == "fail":
                run.disk.fail(FAILING[first], errno.EIO, second)
            elif name == "read":
                run.be_sound()
                await run.read(first, second)
            elif name in {"restart", "kill"}:
                if name == "restart":
                    run.be_sound()
                    await run.metadata.persist()
                    assert run.disk.open_files() == 0
                else:
                    run.disk = run.disk.after_kill()
                await run.open()
                if name == "restart" and not run.is_loose:
                    await run.check()
                    run.check_files()
                await run.adopt("", restarted=True)
            elif name == "cut":
                run.disk.loss = list(Loss)[first]
                run.disk.cut_at = run.disk.calls + second if second else None
                if not second:
                    run.disk = run.disk.power_cut()
                    await run.open()
                    await run.adopt("", restarted=True)
            else:
                await run.apply(step)
                run.be_sound()
                await run.check()
        except OSError:
            run.be_sound()
            await run.adopt(name, run.now - first, restarted=False)
        except PowerCut:
            run.disk = run.disk.power_cut()
            await run.open()
            await run.adopt(name, run.now - first, restarted=True)


@settings(max_examples=800, deadline=None)
@given(STEPS, st.integers(0, 1000))
@example(
    # A restart completes a deletion that failed.
    [
        ("init", 0, 0),
        ("append", 1, 0),
        ("cut", 0, 0),
        ("roll", 0, 0),
        ("fail", 4, 1),
        ("expire", 0, 0),
        ("take_back", 0, 0),
        ("kill", 0, 0),
    ],
    0,
)
@example(
    # An append that fails after a roll that failed: both write the metadata.
    [
        ("init", 0, 0),
        ("append", 30, 0),
        ("append", 60, 0),
        ("restart", 0, 0),
        ("fail", 0, 1),
        ("roll", 0, 0),
        ("fail", 0, 1),
        ("append", 1, 0),
        ("append", 30, 0),
        ("restart", 0, 0),
    ],
    0,
)
@example(
    # A power cut takes the mark of a deletion that a start after a kill has completed: not without the file.
    [
        ("cut", 0, 0),
        ("init", 0, 0),
        ("append", 1, 0),
        ("restart", 0, 0),
        ("cut", 0, 0),
        ("init", 0, 0),
        ("append", 100, 0),
        ("restart", 0, 0),
        ("fail", 0, 5),
        ("expire", 0, 0),
        ("cut", 0, 5),
        ("kill", 0, 0),
    ],
    0,
)
def test_the_stream_is_the_list(steps: list[Step], seed: int) -> None:
    trio.run(play, steps, seed)


async def test_a_segment_that_could_not_be_added_is_gone_with_the_next_append() -> None:
    run = Run(0)
    await run.open()
    for step in (("init", 0, 0), ("append", 60, 0)):
        await run.apply(step)
    run.disk.fail("sync_directory", errno.EIO)  # the metadata have their name, and list the segment
    with pytest.raises(OSError, match="Input/output"):
        await run.file.roll()
    run.be_sound()
    await run.apply(("append", 30, 0))
    run.disk = run.disk.after_kill()
    await run.open()
    await run.check()
    assert run.file.commit_offset == 90


async def test_bytes_of_a_failed_write_are_not_found_behind_a_shorter_one() -> None:
    run = Run(0)
    await run.open()
    await run.apply(("init", 0, 0))
    run.disk.fail("data_sync", errno.EIO, 2)  # the first is that of the metadata
    with pytest.raises(OSError, match="Input/output"):
        await run.file.append([bytes(60)], 60, run.now, run.now)
    run.be_sound()
    await run.apply(("append", 7, 0))
    run.disk = run.disk.after_kill()
    await run.open()
    await run.check(times=False)
    assert run.file.commit_offset == 7
