"""Two brokers of one name on one bucket: their calls come in any order, and some fail. One of them is the owner.

``make nightly`` tries thousands of examples.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.simdisk import SimDisk
from tests.store.tiered.bucket.faulty_store import BROKER, CLUSTER, PREFIX, FaultyStore
from tests.store.tiered.bucket.history import built, check_history, check_named, epoch_of, manifest
from trimq.broker.store.tiered.bucket import manifest_pages
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.manifest import FencedError, Manifest
from trimq.protocol.bucket_manifest import Root, decode_root
from trimq.protocol.bucket_names import ROOT

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Turns(SimDisk):
    """Each call waits until it is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[trio.Event] = []

    async def run(self, fn: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        turn = trio.Event()
        self.waiting.append(turn)
        await turn.wait()
        return fn(*args)

    async def give(self, choose: Callable[[int], int]) -> bool:
        """Let one call go on, as soon as all wait. False if there is none."""
        await trio.testing.wait_all_tasks_blocked()
        if self.waiting:
            self.waiting.pop(choose(len(self.waiting))).set()
            await trio.testing.wait_all_tasks_blocked()
            return True
        return False

    async def give_all(self) -> None:
        """Let all calls go on, in any order. They are shielded, so this is necessary after a failure too."""
        with trio.CancelScope(shield=True):
            while await self.give(lambda _: 0):
                pass


class Broker:
    """Claims the bucket, then uploads, joins and saves until it is done or fenced."""

    def __init__(self, name: str, bucket: Bucket) -> None:
        numbers = count()
        self.bucket = bucket
        self.manifest = Manifest(bucket, CLUSTER, BROKER, new_owner=lambda: f"{name}{next(numbers)}")

    async def run(self, steps: Sequence[str]) -> None:
        try:
            await self.repeat(self.manifest.claim)
            for step in steps:
                await self.repeat({"upload": self.upload, "join": self.join, "save": self.manifest.save}[step])
        except FencedError:
            assert not self.manifest.is_owner

    async def run_last(self) -> None:
        """Save what there is, if it may."""
        try:
            await self.repeat(self.manifest.save)
        except FencedError:
            assert not self.manifest.is_owner

    async def repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await act()
            except OSError as error:
                assert "away" in str(error)  # noqa: PT017 - any other error is one of the code

    async def create(self, name: str, data: bytes) -> None:
        """As a broker whose reply was lost: it knows that only itself writes objects with its epoch."""
        try:
            await self.bucket.create(name, [data])
        except FileExistsError:
            pass

    async def upload(self) -> None:
        entry, data = built(self.manifest.end, epoch=epoch_of(self.manifest))
        await self.create(entry.object.name, data)
        self.manifest.add(entry)

    async def join(self) -> None:
        parts = self.manifest.entries[-4:-1]
        if len(parts) == 3:
            generation = max(part.object.generation for part in parts) + 1
            begin, end = parts[0].object.begin, parts[-1].object.end
            entry, data = built(begin, end, epoch=epoch_of(self.manifest), generation=generation)
            await self.create(entry.object.name, data)
            self.manifest.change([part.object for part in parts], [entry])
            await self.repeat(self.manifest.save)


EXAMPLES = max(150, settings().max_examples)
STEPS = st.lists(st.sampled_from(["upload", "upload", "upload", "join", "save"]), max_size=12)
FAULTS = st.dictionaries(st.integers(1, 120), st.booleans(), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_pages, "PAGE_ROWS", 3 * (48 + 80))
        yield


async def _play(steps: Sequence[Sequence[str]], order: st.DataObject, faults: dict[int, bool]) -> None:
    store = FaultyStore()
    for call, after in faults.items():
        store.fail(call, OSError("away"), after=after)
    turns = Turns()
    brokers = [Broker(name, Bucket(store, turns, PREFIX)) for name in "ab"]
    last = Root(CLUSTER, BROKER, 0, "")
    async with trio.open_nursery() as nursery:
        for broker, its in zip(brokers, steps, strict=True):
            nursery.start_soon(broker.run, its)
        try:
            while await turns.give(lambda waiting: order.draw(st.integers(0, waiting - 1))):
                last = _next_root(store, last)
        finally:
            await turns.give_all()
    # Each saves once more.
    winner, loser = brokers if last.owner[0] == "a" else brokers[::-1]
    kept = list(winner.manifest.entries)
    async with trio.open_nursery() as nursery:
        for broker in brokers:
            nursery.start_soon(broker.run_last)
        await turns.give_all()
    assert winner.manifest.is_owner
    assert not loser.manifest.is_owner
    store.fail_no_more()
    reader = manifest(store.bucket())
    await reader.load()
    assert reader.root == winner.manifest.root
    assert reader.entries == winner.manifest.entries == kept
    check_history(kept, winner.manifest.end)
    check_named(store, reader)


def _next_root(store: FaultyStore, last: Root) -> Root:
    if ROOT not in store.objects():
        return last
    root = decode_root(store.get(ROOT))
    if root != last:
        assert root.sequence > last.sequence
        assert root.epoch >= last.epoch
        assert root.end >= last.end
        assert root.owner == last.owner or root.epoch > last.epoch
    return root


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.tuples(STEPS, STEPS), st.data(), FAULTS)
def test_one_owner(steps: tuple[list[str], list[str]], order: st.DataObject, faults: dict[int, bool]) -> None:
    trio.run(_play, steps, order, faults)
