"""Half messages over restarts and kills: what is pending is checked, what is ended is never ended again."""

import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.broker.transactions import COMMIT, EXPIRED, HALF, OK, OP, ROLLBACK, Life, asked_for
from tests.store.builders import message
from trimq.broker.services.transaction import read_back as read_back_module
from trimq.broker.start_error import StartError
from trimq.protocol.codes import ResponseCode
from trimq.protocol.message import decode_message
from trimq.protocol.property_text import join_properties

SYNC = {"flushDiskType": "SYNC_FLUSH"}
MODES = pytest.mark.parametrize("changes", [{}, SYNC], ids=["async", "sync"])


async def asked(life: Life) -> list[tuple[bytes, str]]:
    """The bodies and check counts of a round after the immunity."""
    await life.join()
    await life.advance(7)
    found = [decode_message(bytes(check.body)) for check in await life.round()]
    return [(message.body, message.properties["TRANSACTION_CHECK_TIMES"]) for message in found]


@MODES
@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_pending_halves_are_checked_after_a_restart(tmp_path: Path, changes: dict[str, str], end: str) -> None:
    life = Life(tmp_path / "store", **changes)
    async with life.running():
        halves = [await life.prepare(b"%d" % number) for number in range(5)]
        await life.end(halves[1])
        await life.end(halves[3], ROLLBACK)
        await life.advance(5)
        if end == "kill":
            await life.kill()
    async with life.running():
        assert life.pending == 3
        assert await asked(life) == [(b"0", "1"), (b"2", "1"), (b"4", "1")]
        assert (await life.end(halves[0])).code == OK
        assert await life.bodies() == [b"0", b"1"]


@MODES
@pytest.mark.parametrize("wait", [0, 5], ids=["op record missing", "op record written"])
async def test_a_half_committed_before_a_kill_is_not_committed_again(
    tmp_path: Path, changes: dict[str, str], wait: int
) -> None:
    # guards the central promise: the commit record is in the log, its op record is not, and the producer commits again
    life = Life(tmp_path / "store", **changes)
    async with life.running():
        half, other = await life.prepare(b"half"), await life.prepare(b"other")
        await life.end(half)
        await life.advance(wait)
        await life.kill()
    for _ in range(2):
        async with life.running():
            assert await asked(life) == [(b"other", str(life._lives))]
            assert (await life.end(half, COMMIT)).code == (OK if life._lives == 1 and not wait else 1)
            assert (await life.end(half, ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
            assert await life.bodies() == [b"half"]
            await life.advance(5)
            assert (await life.ops())[0].startswith(b"0,")
            await life.kill()
    assert other


async def test_a_rollback_without_an_op_record_is_asked_for_again(tmp_path: Path) -> None:
    # what is allowed: nothing in the log shows the rollback
    life = Life(tmp_path / "store")
    async with life.running():
        await life.end(await life.prepare(), ROLLBACK)
        await life.kill()
    async with life.running():
        assert await asked(life) == [(b"half", "1")]


async def test_an_orderly_stop_leaves_nothing_to_read_back(tmp_path: Path) -> None:
    # guards the op records of the last seconds, and a start that would read the log for nothing
    life = Life(tmp_path / "store")
    async with life.running():
        await life.end(await life.prepare(b"0"), ROLLBACK)
        await life.end(await life.prepare(b"1"))
        pending = await life.prepare(b"2")
    async with life.running():
        assert life.pending == 1
        store = life.broker.context.store
        state = msgspec.json.decode((life.directory / "config" / "transaction.json").read_bytes())
        assert state == {"settledOffset": store.max_phy_offset, "opOffset": 1}
        assert (life.offset(HALF), life.offset(OP)) == (2, 1)
        assert await asked(life) == [(b"2", "1")]
        assert (await life.end(pending)).code == OK


@pytest.mark.parametrize("stored_offsets", [True, False], ids=["offsets kept", "offsets lost"])
async def test_a_half_stored_again_before_a_kill_stays_one_half(tmp_path: Path, stored_offsets: bool) -> None:
    # guards against a second check, and so a second commit, of the first record after its copy was stored
    life = Life(tmp_path / "store")
    async with life.running():
        await life.join()
        half = await life.prepare(b"half")
        await life.prepare(b"before")
        await life.advance(7)
        await life.round()
        await life.round()
        await life.kill()
    if not stored_offsets:
        (life.directory / "config" / "consumerOffset.json").unlink(missing_ok=True)
    async with life.running():
        assert life.pending == 2
        assert sorted(await asked(life)) == [(b"before", "3"), (b"half", "3")]
        assert (await life.end(half)).code == OK
        assert not [body for body, _ in await asked(life) if body == b"half"]
        await life.advance(5)
        await life.kill()
    async with life.running():
        assert [body for body, _ in await asked(life)] == [b"before"]
        assert await life.bodies() == [b"half"]


@pytest.mark.parametrize("which", ["first", "between", "last"])
@pytest.mark.parametrize("case", ["no op record", "op record", "group's offset behind them"])
async def test_a_late_commit_before_a_kill_ends_all_records_of_its_half(tmp_path: Path, which: str, case: str) -> None:
    # guards the commit record that names another record of the half than the one that stands for it
    life = Life(tmp_path / "store", flushConsumerOffsetInterval="3600000")
    async with life.running():
        await life.join()
        half = await life.prepare(b"half")
        await life.advance(7)
        checks = [check for _ in range(3) for check in await life.round()]
        if case == "group's offset behind them":
            await life.broker.context.store.flush()
            await life.advance(1)
            assert life.offset(HALF) == asked_for(checks[2]).queue_offset
            await life.broker.context.offsets.persist()
        place = {"first": half, "between": asked_for(checks[1]), "last": asked_for(checks[2])}[which]
        assert (await life.end(place)).code == OK
        if case == "op record":
            await life.advance(3)
            assert await life.ops() == [b"0,3,"]
        await life.kill()
    async with life.running():
        assert life.pending == 0
        assert not await asked(life)
        for each in (half, *map(asked_for, checks)):
            assert (await life.end(each)).code in (OK, ResponseCode.SYSTEM_ERROR)
        assert await life.bodies() == [b"half"]


async def test_a_rollback_in_an_op_record_ends_all_records_of_its_half(tmp_path: Path) -> None:
    # guards the records between the first and the last one, which no op record names
    life = Life(tmp_path / "store", flushConsumerOffsetInterval="3600000")
    async with life.running():
        await life.join()
        await life.prepare(b"half")
        await life.advance(7)
        checks = [check for _ in range(3) for check in await life.round()]
        assert (await life.answer(checks[2], ROLLBACK)).code == OK
        await life.advance(3)
        assert await life.ops() == [b"0,3,"]
        await life.kill()
    async with life.running():
        assert not await asked(life)


async def test_each_half_is_checked_once_after_a_start_before_it_expires(tmp_path: Path) -> None:
    # guards halves that had their checks before a long outage: their producer may only have come back with this start
    life = Life(tmp_path / "store", transactionCheckMax="2")
    async with life.running():
        await life.join()
        await life.prepare()
        await life.advance(7)
        assert len([check for _ in range(2) for check in await life.round()]) == 2
    async with life.running():
        assert await asked(life) == [(b"half", "3")]
        assert not await life.stored(EXPIRED, [0])
        assert await asked(life) == []
        assert len(await life.stored(EXPIRED, [0])) == 1


async def test_an_expired_half_without_an_op_record_stays_expired(tmp_path: Path) -> None:
    life = Life(tmp_path / "store", transactionCheckMax="1")
    async with life.running():
        await life.join()
        half = await life.prepare()
        await life.advance(7)
        await life.round()
        await life.round()
        await life.kill()
    async with life.running():
        assert not await asked(life)
        assert (await life.end(half, check=True)).code == ResponseCode.SYSTEM_ERROR
        assert len(await life.stored(EXPIRED, [0])) == 1


async def test_age_alone_ends_no_half(tmp_path: Path) -> None:
    # guards halves older than fileReservedTime: RocketMQ drops them without a check
    life = Life(tmp_path / "store")
    async with life.running():
        await life.prepare()
    life.clock.advance(80 * 3600)
    async with life.running():
        assert await asked(life) == [(b"half", "1")]


# damaged op queues


def _delete_queue(life: Life) -> None:
    shutil.rmtree(life.directory / "consumequeue" / OP)
    (life.directory / "checkpoint").unlink()


def _set_offset(life: Life, topic: str, offset: int) -> None:
    path = life.directory / "config" / "consumerOffset.json"
    state: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {"offsetTable": {}}
    state["offsetTable"][f"{topic}@CID_RMQ_SYS_TRANS"] = {"0": offset}
    path.write_bytes(msgspec.json.encode(state))


def _wrong_op_offset(life: Life) -> None:
    _set_offset(life, OP, 77)


def _damaged_op_record(life: Life) -> None:
    """The body of the first op record is another text of the same length, with its checksum."""
    path = next((life.directory / "commitlog").iterdir())
    data = bytearray(path.read_bytes())
    at = data.find(b"0,1,\x1bRMQ_SYS_TRANS_OP")
    assert at > 0
    data[at : at + 4] = b"0;1,"
    head = data.rfind((0xDAA320A7).to_bytes(4, "big"), 0, at)
    data[head + 4 : head + 8] = (zlib.crc32(b"0;1,") & 0x7FFFFFFF).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_wrong_op_offset, _delete_queue])
@pytest.mark.parametrize("keep_offsets", [True, False])
async def test_a_damaged_op_queue_is_rebuilt(tmp_path: Path, damage: Any, keep_offsets: bool) -> None:
    # guards committed and rolled-back halves: without their op records all would be checked, and committed again
    life = Life(tmp_path / "store")
    async with life.running():
        await life.join()
        halves = [await life.prepare(b"%d" % number) for number in range(6)]
        await life.end(halves[0])
        await life.advance(7)
        checks = {decode_message(bytes(each.body)).body: each for each in await life.round()}
        await life.answer(checks[b"1"], COMMIT)
        await life.answer(checks[b"2"], ROLLBACK)
        await life.end(halves[3])
        await life.advance(4)
    if not keep_offsets:
        (life.directory / "config" / "consumerOffset.json").unlink()
    damage(life)
    for _ in range(2):
        async with life.running():
            assert life.pending == 2
            assert [body for body, _ in await asked(life)] == [b"4", b"5"]
            for half in halves[:4]:
                assert (await life.end(half)).code in (OK, ResponseCode.SYSTEM_ERROR)
            assert await life.bodies() == [b"0", b"1", b"3"]
            await life.advance(4)
            await life.broker.context.store.flush()
            await life.advance(1)
            assert 0 <= life.offset(OP) <= life.broker.context.store.max_offset(OP, 0)
            await life.advance(6)
            await life.kill()


async def test_a_rebuilt_op_queue_is_complete(tmp_path: Path) -> None:
    # guards the start after the one that has rebuilt it: the ends behind a pending half are in no other place
    life = Life(tmp_path / "store")
    async with life.running():
        halves = [await life.prepare(b"%d" % number) for number in range(4)]
        await life.end(halves[1])
        await life.end(halves[2], ROLLBACK)
    _wrong_op_offset(life)
    for _ in range(3):
        async with life.running():
            assert life.pending == 2
            await life.advance(3)
            await life.broker.context.store.flush()
            await life.advance(1)
            assert life.offset(OP) == 1  # the record that the first of these starts has written
            await life.advance(6)
            await life.kill()


async def test_the_settled_offset_waits_for_op_records(tmp_path: Path) -> None:
    # guards a commit record whose op record comes late: the start must read from before it
    life = Life(tmp_path / "store", transactionOpBatchInterval="3600000", flushConsumerOffsetInterval="1000")
    async with life.running():
        half = await life.prepare(b"half")
        await life.prepare(b"pending")
        await life.end(half)
        await life.client.send("T", b"plain")
        await life.broker.context.store.flush()
        await life.advance(1)
        await life.advance(5)
        state = msgspec.json.decode((life.directory / "config" / "transaction.json").read_bytes())
        assert state["settledOffset"] == (await life.stored("T"))[0].commit_log_offset
        await life.kill()
    async with life.running():
        assert await asked(life) == [(b"pending", "1")]


async def test_a_damaged_op_record_hides_no_commit(tmp_path: Path) -> None:
    # the commit is found by its record; a rollback is asked for again
    life = Life(tmp_path / "store")
    async with life.running():
        halves = [await life.prepare(b"%d" % number) for number in range(2)]
        await life.end(halves[0])
        await life.end(halves[1], ROLLBACK)
        await life.advance(3)
        await life.kill()
    (life.directory / "config" / "consumerOffset.json").unlink(missing_ok=True)
    _damaged_op_record(life)
    async with life.running():
        assert await asked(life) == [(b"1", "1")]
        assert (await life.end(halves[0], ROLLBACK)).code == ResponseCode.SYSTEM_ERROR
        assert await life.bodies() == [b"0"]


async def test_an_offset_of_the_group_beyond_the_half_queue(tmp_path: Path) -> None:
    # guards halves that come after a start with such an offset: they would count as ended
    life = Life(tmp_path / "store")
    async with life.running():
        await life.end(await life.prepare(b"old"))
    _set_offset(life, HALF, 1000)
    async with life.running():
        await life.prepare(b"new")
        assert await asked(life) == [(b"new", "1")]
        await life.advance(2)
        assert life.offset(HALF) == 1


async def test_a_start_takes_little_memory_for_each_pending_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # guards the start of a broker with a million of them
    life = Life(tmp_path / "store")
    taken: list[int] = []
    only = (tracemalloc.Filter(inclusive=True, filename_pattern=read_back_module.__file__),)

    async def search(_: Any) -> None:
        await trio.lowlevel.checkpoint()
        snapshot = tracemalloc.take_snapshot().filter_traces(only)
        taken.append(sum(trace.size for trace in snapshot.traces))

    async with life.running():
        for number in range(500):
            unique = f"C0A800010000000000000000{number:08d}"
            text = {"REAL_TOPIC": "T", "REAL_QID": "0", "PGROUP": "P", "UNIQ_KEY": unique, "TRAN_MSG": "true"}
            put = message(b"half", HALF, 0, properties=join_properties(text).encode())
            life.broker.context.store.put_message(put, lambda _: None)
    monkeypatch.setattr(read_back_module._ReadBack, "search_commits", search)
    tracemalloc.start()
    try:
        async with life.running():
            assert life.pending == 500
    finally:
        tracemalloc.stop()
    assert taken[0] < 60 * 500


async def test_a_state_file_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    life = Life(tmp_path / "store")
    async with life.running():
        pass
    (life.directory / "config").mkdir(exist_ok=True)
    (life.directory / "config" / "transaction.json").write_text('{"settledOffset": "x"}')
    with pytest.RaisesGroup(pytest.RaisesExc(StartError, match="transaction.json"), flatten_subgroups=True):
        async with life.running():
            pass


async def test_a_settled_offset_of_another_store_does_not_count(tmp_path: Path) -> None:
    # guards a config directory that was copied from elsewhere: the commit record must still be found
    life = Life(tmp_path / "store")
    async with life.running():
        await life.end(await life.prepare(b"half"))
        await life.kill()
    (life.directory / "config" / "transaction.json").write_text('{"settledOffset": 1000000, "opOffset": 0}')
    async with life.running():
        assert not await asked(life)


async def test_halves_that_apaches_broker_has_stored_again(tmp_path: Path) -> None:
    # guards an exchange of stores: its copies have no link to the first record, which its offset has passed
    life = Life(tmp_path / "store")
    async with life.running():
        first = await life.prepare(b"half", properties={})
        store = life.broker.context.store
        (half,) = await life.stored(HALF, [0])
        copy = "".join(f"{key}\x01{value}\x02" for key, value in half.properties.items())
        put = message(b"half", HALF, 0, properties=f"{copy}TRANSACTION_CHECK_TIMES\x011\x02".encode())
        assert store.put_message(put, lambda _: None) is not None
    _set_offset(life, HALF, 1)
    async with life.running():
        assert life.pending == 1
        assert (await life.end(first)).code == ResponseCode.SYSTEM_ERROR
        assert await asked(life) == [(b"half", "2")]
