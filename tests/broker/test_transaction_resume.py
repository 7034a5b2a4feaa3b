"""RESUME_CHECK_HALF_MESSAGE (323): of each expired half a new half is made once, over restarts and further checks."""

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.transactions import COMMIT, EXPIRED, HALF, OK, OP, ROLLBACK, Life
from tests.broker.wire_client import WireClient
from tests.store.builders import message
from trimq.broker.services.transaction import resumed as resumed_module
from trimq.broker.services.transaction.held_halves import HeldHalves
from trimq.broker.store.types import PutCallback, PutMessageResult
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import RemotingCommand
from trimq.protocol.property_text import join_properties


async def expire(life: Life, *names: bytes) -> dict[bytes, str]:
    """Let halves expire; returns the offset message ids of their records in TRANS_CHECK_MAX_TIME_TOPIC."""
    life.broker.configuration.change({"transactionCheckMax": "1"})
    await life.join()
    for name in names:
        await life.prepare(name)
    await life.advance(7)
    await life.round()
    await life.round()
    life.broker.configuration.change({"transactionCheckMax": "15"})
    return {found.body: found.offset_message_id for found in await life.stored(EXPIRED, [0])}


async def resume(life: Life, message_id: str) -> RemotingCommand:
    return await life.client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"topic": EXPIRED, "msgId": message_id})


async def commit_all(life: Life) -> None:
    """Answer the checks of a round with a commit."""
    await life.join()
    await life.advance(7)
    for check in await life.round():
        assert (await life.answer(check, COMMIT)).code == OK


async def settled(life: Life) -> None:
    """All ends become durable, and the group's offsets pass them."""
    await life.advance(4)
    assert await life.broker.context.store.flush()
    await life.advance(1.1)
    await life.advance(1.1)


async def refused(life: Life, message_id: str, half: int) -> None:
    reply = await resume(life, message_id)
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert str(reply.remark).endswith(f"has been resumed already, as half message {half}")


async def test_a_half_that_was_resumed_and_stored_again_is_not_resumed_again(tmp_path: Path) -> None:
    # guards the new half's copy, which stands for it after a check: the first record of it is done then
    async with Life(tmp_path / "store").running() as life:
        expired = (await expire(life, b"half"))[b"half"]
        assert (await resume(life, expired)).code == OK
        await life.advance(7)
        await life.round()
        await settled(life)
        await refused(life, expired, 2)
        await commit_all(life)
        await settled(life)
        await refused(life, expired, 2)
        assert await life.bodies() == [b"half"]


@pytest.mark.parametrize("ended", [False, True], ids=["pending", "committed"])
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_resumed_half_is_not_resumed_again_after_a_restart(tmp_path: Path, end: str, ended: bool) -> None:
    # guards against a second commit by an administrator who repeats the command: nothing in memory knows the first one
    life = Life(tmp_path / "store")
    async with life.running():
        expired = (await expire(life, b"half"))[b"half"]
        assert (await resume(life, expired)).code == OK
        if ended:
            await commit_all(life)
        await settled(life)
        if end == "kill":
            await life.kill()
    for _ in range(2):
        async with life.running():
            await refused(life, expired, 2)
            await commit_all(life)
            assert await life.bodies() == [b"half"]


async def test_a_resumed_half_that_expired_again_can_be_resumed_again(tmp_path: Path) -> None:
    # guards the message: its last record in TRANS_CHECK_MAX_TIME_TOPIC stands for it
    async with Life(tmp_path / "store").running() as life:
        first = (await expire(life, b"half"))[b"half"]
        assert (await resume(life, first)).code == OK
        second = (await expire(life))[b"half"]
        assert second != first
        await refused(life, first, 2)
        assert (await resume(life, second)).code == OK
        await refused(life, first, 2)
        await refused(life, second, 4)
        await commit_all(life)
        assert await life.bodies() == [b"half"]


async def test_each_part_of_the_half_queue_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards an administrator who resumes thousands of messages: each would read the queue again
    monkeypatch.setattr(resumed_module, "_UNITS", 2)
    life = Life(tmp_path / "store")
    async with life.running():
        expired = await expire(life, b"a", b"b", b"c")
        assert (await resume(life, expired[b"b"])).code == OK
        for number in range(5):
            await life.end(await life.prepare(b"%d" % number), ROLLBACK)
    async with life.running():
        read: list[int] = []
        one = resumed_module.ResumedHalves._read

        async def counted(halves: Any, physical_offset: int, offset: int) -> None:
            read.append(offset)
            await one(halves, physical_offset, offset)

        monkeypatch.setattr(resumed_module.ResumedHalves, "_read", counted)
        await refused(life, expired[b"b"], 6)
        assert (await resume(life, expired[b"c"])).code == OK
        assert (await resume(life, expired[b"a"])).code == OK
        for name, half in ((b"a", 13), (b"b", 6), (b"c", 12)):
            await refused(life, expired[name], half)
        assert read == list(range(6, 12))


async def test_two_requests_at_the_same_time_make_one_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Life(tmp_path / "store").running() as life:
        expired = (await expire(life, b"half"))[b"half"]
        store = life.broker.context.store
        put, held = store.put_message, trio.Event()
        release: list[Any] = []

        def slow(message: Any, on_done: PutCallback) -> PutMessageResult | None:
            result = put(message, on_done)
            assert result is not None
            release.append(lambda: on_done(result))
            held.set()
            return None

        monkeypatch.setattr(store, "put_message", slow)
        replies: list[int] = []

        async def ask(client: WireClient) -> None:
            replies.append((await client.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, {"msgId": expired})).code)

        async with WireClient.connect(life.broker.endpoint) as other, trio.open_nursery() as nursery:
            nursery.start_soon(ask, life.client)
            nursery.start_soon(ask, other)
            await held.wait()
            await life.settled()
            monkeypatch.undo()
            release[0]()
        assert sorted(replies) == [OK, ResponseCode.SYSTEM_ERROR]
        assert len(release) == 1
        assert life.pending == 1


async def test_what_was_deleted_with_its_log_file_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the memory of a broker on which halves are resumed for years
    monkeypatch.setattr(resumed_module, "_FEW", 2)
    async with Life(tmp_path / "store").running() as life:
        store = life.broker.context.store
        halves = resumed_module.ResumedHalves(store, HeldHalves(store, life.transactions.halves))
        for place in range(6):
            halves.note(place, place)
        monkeypatch.setattr(type(store), "min_phy_offset", 4)
        assert [await halves.find(place) for place in (3, 4, 5)] == [-1, 4, 5]


async def test_a_client_cannot_claim_that_a_half_was_resumed(tmp_path: Path) -> None:
    # guards another producer's expired half: it could never be resumed
    async with Life(tmp_path / "store").running() as life:
        expired = (await expire(life, b"half"))[b"half"]
        await life.prepare(b"forged", properties={"TRAN_RESUMED_OFFSET": str(int(expired[16:], 16))})
        assert (await resume(life, expired)).code == OK


async def test_an_expired_half_for_a_topic_of_the_broker_is_not_resumed(tmp_path: Path) -> None:
    # guards records that the check has moved there because they cannot be committed
    async with Life(tmp_path / "store").running() as life:
        text = join_properties({"REAL_TOPIC": OP, "REAL_QID": "0", "UNIQ_KEY": "u"}).encode()
        life.broker.context.store.put_message(message(b"0,", EXPIRED, 0, properties=text), lambda _: None)
        (found,) = await life.stored(EXPIRED, [0])
        reply = await resume(life, found.offset_message_id)
        assert (reply.code, "REAL_TOPIC" in str(reply.remark)) == (ResponseCode.SYSTEM_ERROR, True)
        assert not await life.stored(HALF, [0])
