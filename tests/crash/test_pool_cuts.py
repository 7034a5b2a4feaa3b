"""The crash enumeration of the script, with the transient store pool in its ASYNC_FLUSH chapters."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.crash import enumeration, faults, promises, script, timed
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.durability.commit import CommitRealTimeService
from trimq.broker.store.message_store import MessageStore
from trimq.protocol.message import StoredMessage


@pytest.fixture(autouse=True)
def _pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the pool; a kill may then take as much as a power cut, because uncommitted messages are in a buffer."""
    plain, promise, pull, wait = script.configuration, script.promise, promises.pull_all, timed.settle

    def configuration(*, sync: bool, precision: int) -> MessageStoreConfig:
        return replace(
            plain(sync=sync, precision=precision),
            transient_store_pool_enable=True,
            transient_store_pool_size=2,
            commit_interval_commit_log=20,
            commit_commit_log_thorough_interval=20,
        )

    def without_kills(*arguments: Any, killed: bool = False) -> script.Promise:
        return promise(*arguments, killed=False)

    async def commit(store: MessageStore) -> None:
        # A message can be read only after its commit, which would otherwise come a moment later.
        if isinstance(store.write_path.durability, CommitRealTimeService):
            await store.write_path.durability.commit_buffers()

    async def pull_all(store: MessageStore, topic: str, queue_id: int, *, holes: bool) -> list[StoredMessage]:
        await commit(store)
        return await pull(store, topic, queue_id, holes=holes)

    async def settle(store: MessageStore) -> None:
        await wait(store)
        await commit(store)
        await wait(store)

    monkeypatch.setattr(promises, "pull_all", pull_all)
    monkeypatch.setattr(timed, "settle", settle)
    monkeypatch.setattr(script, "configuration", configuration)
    for module in (enumeration, faults):
        monkeypatch.setattr(module, "promise", without_kills)


@pytest.mark.slow
def test_a_sample_of_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    found = enumeration.Enumeration(5)
    for part in range(0, 800, 60):
        found.run(part, 800, second=1)
    with capsys.disabled():
        sys.stdout.write(f"\n{found.tally}\n")
    assert found.tally.states > 100


@pytest.mark.slow
def test_a_sample_of_faults(capsys: pytest.CaptureFixture[str]) -> None:
    found = faults.Faults(5).run(7, 40)
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")
    assert found.runs > 20
