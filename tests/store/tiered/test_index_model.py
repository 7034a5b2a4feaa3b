"""The tier's key index against a dict: puts, flushes, uploads, failures, restarts, power cuts, expiry in any order."""

import errno

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.simdisk import Loss, SimDisk
from tests.store.tiered.index_stores import NOW, Wall, index, numbers
from trimq.broker.store.tiered.container.index_store_service import IndexStoreService
from trimq.protocol.tiered_index_batch import KeysOfMessage

KEYS = ["a", "b", "ключ", "shared"]
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.lists(st.sampled_from(KEYS), max_size=4, unique=True), st.integers(-90_000, 90_000)
        ),
        st.tuples(st.just("put"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True), st.just(0)),
        st.tuples(st.sampled_from(["flush", "upload", "restart", "stop", "kill"]), st.none(), st.none()),
        st.tuples(st.just("cut"), st.sampled_from(list(Loss)), st.none()),
        st.tuples(
            st.just("fail"), st.sampled_from(["*", "data_sync", "pwrite", "reserve", "create"]), st.integers(1, 9)
        ),
        st.tuples(st.just("query"), st.sampled_from(KEYS), st.integers(-100_000, 100_000)),
        st.tuples(st.just("expire"), st.none(), st.none()),
    ),
    max_size=60,
)


class Model:
    """The messages that were put: their keys and store times. ``done`` are in the index for certain."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(seed=seed)
        self.wall = Wall()
        self.messages: list[tuple[tuple[str, ...], int]] = []
        self.expired = 0

    async def open(self) -> IndexStoreService:
        self.disk.clear_failures()
        service = await index(self.disk, self.wall, slots=3, items=7)
        until = service.indexed_until(7, 0)
        assert until is not None
        # As the dispatcher does after a start
        for number in range(until // 100, len(self.messages)):
            self.put(service, number)
        return service

    def put(self, service: IndexStoreService, number: int) -> None:
        keys, store_ms = self.messages[number]
        service.put_messages([KeysOfMessage("TT", 7, 0, keys, number * 100, 100, store_ms)])

    def expected(self, key: str, begin: int, end: int) -> set[int]:
        return {n for n, (keys, ms) in enumerate(self.messages) if key in keys and begin <= ms <= end}

    async def check(self, service: IndexStoreService, key: str, begin: int, end: int) -> None:
        found = await numbers(service, key, begin=begin, end=end)
        assert len(found) == len(set(found))
        # Seconds are rounded towards the begin time, so 0 stands for nearly two of them
        wide = self.expected(key, begin - 2000, end + 2000)
        assert self.expected(key, begin, end) <= set(found) <= wide
        for number in found:
            assert key in self.messages[number][0]


async def play(steps: list[tuple[str, object, object]], seed: int) -> None:
    model = Model(seed)
    service = await model.open()
    for name, what, more in steps:
        model.wall.ms += 7
        try:
            if name == "put":
                assert isinstance(what, list)
                assert isinstance(more, int)
                model.messages.append((tuple(what), model.wall.ms + more))
                model.put(service, len(model.messages) - 1)
            elif name == "flush":
                await service.flush()
                until = service.indexed_until(7, 0)
                assert until == 100 * len(model.messages)
            elif name == "upload":
                await service.upload_next()
            elif name == "expire":
                await service.expire()
            elif name == "fail":
                assert isinstance(more, int)
                model.disk.fail(str(what), errno.EIO, more)
            elif name == "query":
                assert isinstance(more, int)
                model.disk.clear_failures()
                await model.check(service, str(what), model.wall.ms + more, model.wall.ms + more + 20_000)
            else:
                if name == "kill":
                    model.disk = model.disk.after_kill()
                elif name == "cut":
                    assert isinstance(what, Loss)
                    model.disk = model.disk.power_cut(what)
                else:
                    await service.close(upload=name == "stop")
                    assert model.disk.open_files() == 0
                service = await model.open()
        except OSError:
            continue
        model.disk.check_mapped_stores()
    model.disk.clear_failures()
    await service.close()
    service = await model.open()
    for key in KEYS:
        await model.check(service, key, 0, 1 << 50)
        await model.check(service, key, NOW, NOW + 50)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 1000))
def test_the_index_answers_as_a_dict(steps: list[tuple[str, object, object]], seed: int) -> None:
    trio.run(play, steps, seed)
