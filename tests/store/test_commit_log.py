import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.store.builders import HOST, HOST_V6, Rig, batch, config, message, records
from trimq.broker.store.types import PutMessageStatus
from trimq.protocol import sysflag
from trimq.protocol.record import RecordState, check_record, decode_head, encode_record


async def test_a_record_is_stored_as_the_reference_form_says() -> None:
    async with Rig().running() as rig:
        put = message(b"hello", properties=b"TAGS\x01a\x02", flag=7, sys_flag=1, queue_id=3, reconsume_times=2)
        result = rig.put(put)
        assert result is not None
        assert (result.status, result.physical_offset, result.queue_offset) == (PutMessageStatus.PUT_OK, 0, 0)
        assert bytes(rig.files.files[0].view[: result.size]) == encode_record(
            topic=b"TopicTest",
            body=b"hello",
            properties=b"TAGS\x01a\x02",
            queue_id=3,
            queue_offset=0,
            physical_offset=0,
            born_timestamp=1_700_000_000_000,
            born_host=HOST,
            store_timestamp=1_700_000_000_000,
            store_host=HOST,
            flag=7,
            sys_flag=1,
            reconsume_times=2,
        )


@pytest.mark.parametrize("born", [HOST, HOST_V6])
@pytest.mark.parametrize("store", [HOST, HOST_V6])
@pytest.mark.parametrize("topic", ["T", "%RETRY%" + "g" * 200])
async def test_hosts_of_both_kinds_and_long_topics(born: bytes, store: bytes, topic: str) -> None:
    async with Rig().running() as rig:
        # wrong flags of the hosts are corrected
        lie = sysflag.BORN_HOST_V6 | sysflag.STORE_HOST_V6 if born == store == HOST else 0
        rig.put(message(b"x" * 100, topic, born_host=born, store_host=store, sys_flag=lie))
        rig.put(batch([b"y", b"z"], topic, born_host=born, store_host=store, sys_flag=lie))
        stored = records(rig.files)
        assert [item.body for item in stored] == [b"x" * 100, b"y", b"z"]
        assert {item.topic for item in stored} == {topic}
        head = decode_head(rig.files.files[0].view, 0)
        assert (head.born_host, head.store_host) == (born, store)


async def test_queue_offsets_are_counted_for_each_queue() -> None:
    async with Rig().running() as rig:
        for queue_id in (0, 1, 0, 1, 1):
            rig.put(message(queue_id=queue_id))
        rig.put(message(topic="Other"))
        assert [result.queue_offset for result in rig.answers.results] == [0, 0, 1, 1, 2, 0]
        assert rig.log.queue_offset("TopicTest", 1) == 3


async def test_a_message_whose_topic_is_made_anew_goes_to_the_new_queue() -> None:
    """It holds the old queue, given by the caller or found when it had to wait for space."""
    async with Rig().running() as rig:
        rig.put(message())
        old = rig.log.queue("TopicTest", 0)
        late = message(queue=old)
        late.measure(rig.log)
        rig.log.forget_topic("TopicTest")
        rig.put(late)
        assert [result.queue_offset for result in rig.answers.results] == [0, 0]
        assert late.queue is rig.log.queue("TopicTest", 0)
        assert (late.queue is old, old.next_offset) == (False, 1)


async def test_prepared_and_rollback_take_no_queue_offset() -> None:
    async with Rig().running() as rig:
        kinds = [0, sysflag.TRANSACTION_PREPARED, sysflag.TRANSACTION_ROLLBACK, sysflag.TRANSACTION_COMMIT, 0]
        for kind in kinds:
            rig.put(message(sys_flag=kind))
        assert [result.queue_offset for result in rig.answers.results] == [0, 0, 0, 1, 2]
        assert rig.log.queue_offset("TopicTest", 0) == 3


async def test_store_timestamps_never_go_back() -> None:
    times = iter([1000, 2000, 1500, 1700, 2500])
    async with Rig(wall_ms=lambda: next(times)).running() as rig:
        for _ in range(3):
            rig.put(message())
        rig.put(batch([b"a", b"b"]))
        rig.put(message())
        assert [result.store_timestamp for result in rig.answers.results] == [1000, 2000, 2000, 2000, 2500]


async def test_a_file_ends_with_a_blank_and_the_record_goes_into_the_next() -> None:
    async with Rig(settings=config(4096)).running() as rig:
        for number in range(20):
            rig.put(message(bytes([number]) * 1000))
            await trio.testing.wait_all_tasks_blocked()
        stored = records(rig.files)
        assert [item.body[0] for item in stored] == list(range(20))
        assert len(rig.files.files) == 7
        blanks = [item for item in rig.dispatcher.seen if len(item) == 2]
        assert [following for _, following in blanks] == [4096 * number for number in range(1, 7)]
        for at, _ in blanks:
            view = rig.files.files[at // 4096].view
            assert check_record(view, at % 4096).state is RecordState.BLANK
            assert int.from_bytes(view[at % 4096 : at % 4096 + 4], "big") == 4096 - at % 4096


async def test_a_record_may_leave_exactly_the_space_of_a_blank() -> None:
    async with Rig(settings=config(4096)).running() as rig:
        overhead = 91 + len("TopicTest")
        rig.put(message(b"x" * (4096 - 8 - overhead)))
        assert rig.files.files[0].wrote == 4088
        rig.put(message())
        await rig.answered(2)
        assert rig.answers.results[1].physical_offset == 4096
        too_large = rig.put(message(b"x" * (4096 - 8 - overhead + 1)))
        assert too_large is not None
        assert too_large.status is PutMessageStatus.MESSAGE_ILLEGAL
        assert "4089 bytes, a commit log file holds 4088" in too_large.remark


async def test_a_batch_lies_in_one_file() -> None:
    async with Rig(settings=config(4096)).running() as rig:
        rig.put(message(b"x" * 2000))
        rig.put(batch([b"a" * 900, b"b" * 900, b"c" * 10]))
        await rig.answered(2)
        result = rig.answers.results[1]
        assert result.physical_offset == 4096
        assert result.queue_offset == 1
        assert result.offsets == [4096, 4096 + 1000, 4096 + 2000]
        assert [item.queue_offset for item in records(rig.files)] == [0, 1, 2, 3]
        assert [item.physical_offset for item in rig.dispatcher.records] == [0, 4096, 5096, 6096]
        assert [item.size for item in rig.dispatcher.records] == [2100, 1000, 1000, 110]


@pytest.mark.parametrize(
    ("put", "status", "words"),
    [
        (message(b"x" * 1001), PutMessageStatus.MESSAGE_ILLEGAL, "1001 bytes, the limit (maxMessageSize) is 1000"),
        (message(properties=b"p" * 32768), PutMessageStatus.PROPERTIES_SIZE_EXCEEDED, "32768 bytes"),
        (message(topic="t" * 128), PutMessageStatus.MESSAGE_ILLEGAL, "128 bytes, the limit is 127"),
        (message(topic="%RETRY%" + "t" * 249), PutMessageStatus.MESSAGE_ILLEGAL, "256 bytes, the limit is 255"),
        (message(topic=""), PutMessageStatus.MESSAGE_ILLEGAL, "empty"),
        (message(queue_id=-1), PutMessageStatus.MESSAGE_ILLEGAL, "no queue -1"),
        (message(flag=1 << 40), PutMessageStatus.MESSAGE_ILLEGAL, "does not fit"),
        (message(born_timestamp=1 << 70), PutMessageStatus.MESSAGE_ILLEGAL, "does not fit"),
        (batch([b"a", b"x" * 1001]), PutMessageStatus.MESSAGE_ILLEGAL, "1001 bytes"),
        (batch([b"x" * 500, b"y" * 500]), PutMessageStatus.UNKNOWN_ERROR, "the batch would have 1200 bytes"),
        (batch([]), PutMessageStatus.MESSAGE_ILLEGAL, "no message"),
        (batch([b"a"], sys_flag=4), PutMessageStatus.MESSAGE_ILLEGAL, "transaction"),
        (batch([b"a"], topic="t" * 128), PutMessageStatus.MESSAGE_ILLEGAL, "128 bytes"),
        (batch([b"a"], born_timestamp=1 << 70), PutMessageStatus.MESSAGE_ILLEGAL, "does not fit"),
        (
            batch([b""], properties=[b"p" * 32768]),
            PutMessageStatus.PROPERTIES_SIZE_EXCEEDED,
            "32768 bytes",
        ),
    ],
)
async def test_limits_are_found_before_a_byte_is_written(put: object, status: PutMessageStatus, words: str) -> None:
    async with Rig(settings=config(1 << 17, step=1 << 17, max_message_size=1000)).running() as rig:
        result = rig.put(put)  # type: ignore[arg-type]
        if result is None:
            (result,) = await rig.answered(1)
        assert result.status is status
        assert words in result.remark
        assert not result.ok
        assert (result.physical_offset, result.queue_offset) == (-1, -1)
        assert rig.log.max_offset == 0
        after = bytes(rig.files.files[0].view) if rig.files.files else b""
        assert not any(after)
        assert rig.stats.put_message_failed_times == 1
        rig.put(message())
        assert (await rig.answered(2))[1].queue_offset == 0


@pytest.mark.parametrize("sync", [False, True])
async def test_what_is_put_is_counted_once(sync: bool) -> None:
    async with Rig(settings=config(sync=sync)).running() as rig:
        for put in (message(), batch([b"a", b"b", b"c"]), message(b"")):
            rig.put(put)
        results = await rig.answered(3)
        stats = rig.stats
        assert (stats.put_message_times_total, stats.put_message_failed_times) == (5, 0)
        assert stats.put_message_size_total == sum(result.size for result in results) == rig.log.max_offset


async def test_a_record_may_be_64_kib_larger_than_its_body_limit() -> None:
    async with Rig(settings=config(1 << 17, step=1 << 17, max_message_size=33_000)).running() as rig:
        result = rig.put(message(b"b" * 33_000, properties=b"p" * 32_439))
        assert result is not None
        assert result.status is PutMessageStatus.PUT_OK


async def test_reads_stop_at_the_end_of_the_log() -> None:
    async with Rig().running() as rig:
        first = rig.put(message(b"first"))
        second = rig.put(message(b"second"))
        assert first is not None
        assert second is not None
        data = rig.log.read(0, 1 << 20)
        assert data is not None
        assert len(data) == first.size + second.size
        assert rig.log.read(second.physical_offset + second.size, 10) == b""
        assert rig.log.read(1 << 40, 10) == b""
        assert rig.log.read(-1, 10) == b""
        assert await rig.log.read_cold(second.physical_offset, 4) == second.size.to_bytes(4, "big")
        assert await rig.log.read_cold(1 << 40, 4) == b""


async def test_what_has_cooled_down_is_not_read_from_the_map() -> None:
    async with Rig(settings=config(4096), in_memory_bytes=0).running() as rig:
        for number in range(3):
            rig.put(message(bytes([number]) * 3000))
        await rig.answered(3)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.log.read(0, 100) is not None
        rig.sim.cold = True
        assert rig.log.read(0, 100) is None
        assert (await rig.log.read_cold(0, 4)) == (3100).to_bytes(4, "big")


async def test_the_hot_range_spans_files() -> None:
    async with Rig(settings=config(4096), in_memory_bytes=5000).running() as rig:
        for number in range(4):
            rig.put(message(bytes([number]) * 3000))
        await rig.answered(4)
        await trio.testing.wait_all_tasks_blocked()
        end = rig.log.max_offset
        rig.sim.cold = True
        assert rig.log.read(end - 5000, 100) is not None
        assert rig.log.read(end - 9000, 100) is None
        assert rig.log.read(0, 100) is None


@given(
    puts=st.lists(
        st.one_of(
            st.binary(max_size=1500),
            st.lists(st.binary(max_size=300), min_size=1, max_size=8),
        ),
        max_size=25,
    ),
    file_size=st.sampled_from([4096, 8192]),
)
def test_any_sequence_of_puts_reads_back_in_order(puts: list[bytes | list[bytes]], file_size: int) -> None:
    async def scenario() -> None:
        async with Rig(settings=config(file_size)).running() as rig:
            expected: list[bytes] = []
            for put in puts:
                rig.put(batch(put) if isinstance(put, list) else message(put))
                expected += put if isinstance(put, list) else [put]
            await rig.answered(len(puts))
            assert all(result.ok for result in rig.answers.results)
            stored = records(rig.files)
            assert [item.body for item in stored] == expected
            assert [item.queue_offset for item in stored] == list(range(len(expected)))
            seen = [(item.physical_offset, item.size) for item in rig.dispatcher.records]
            assert seen == [(item.commit_log_offset, item.size) for item in stored]
            rig.sim.check_mapped_stores()

    trio.run(scenario)
