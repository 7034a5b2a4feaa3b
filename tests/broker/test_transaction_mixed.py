"""Halves mixed into ordinary traffic: the fast paths and the native extension give the records of the full path."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.broker.fast_paths import fast_paths
from tests.broker.test_send_native import make_topic, send_frame
from tests.broker.transactions import COMMIT, HALF, OP, ROLLBACK, UNKNOWN, Life, Place, end_ext, place_of
from tests.broker.wire_client import WireClient
from trimq.broker.services.transaction.service import TransactionalMessageService
from trimq.protocol.batch import encode_batch
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.command import Encoding, RemotingCommand
from trimq.protocol.frame import encode
from trimq.protocol.message import StoredMessage
from trimq.protocol.native import NATIVE

TOPIC = "Orders"
NATIVE_ONLY = pytest.mark.skipif(not NATIVE.is_on, reason=f"the native extension is off: {NATIVE.reason}")
EXAMPLES = max(8, settings().max_examples // 20)
"""Fewer examples than other tests: each of them starts two brokers."""

KINDS = st.sampled_from(
    ["plain", "plain", "plain", "half", "flag only", "property only", "delayed", "batch", "refused", "no queue"]
)


def frame_of(kind: str, number: int) -> bytes:
    """A send of the kind; the fields do not depend on the path."""
    usual = {"UNIQ_KEY": f"7F{number:030X}", "WAIT": "true", "KEYS": f"k{number}", "TAGS": "a"}
    half = {"TRAN_MSG": "true", "PGROUP": "P"}
    match kind:
        case "half":
            return send_frame(number, usual | half, sys_flag=4)
        case "no queue":
            return send_frame(number, usual | half, sys_flag=4, queue_id=9)
        case "flag only":
            return send_frame(number, usual, sys_flag=4)
        case "property only":
            return send_frame(number, usual | half, v1=True)
        case "delayed":
            return send_frame(number, usual | {"DELAY": "1"})
        case "refused":
            return send_frame(number, usual | half | {"DELAY": "1"}, sys_flag=4)
        case "batch":
            body = encode_batch(
                [(0, b"b%d" % number, f"UNIQ_KEY\x01{number}x{each}\x02".encode()) for each in range(3)]
            )
            return send_frame(number, {}, code=RequestCode.SEND_BATCH_MESSAGE, body=body, batch="true")
    return send_frame(number, usual)


@asynccontextmanager
async def brokers(changes: dict[str, Any]) -> AsyncIterator[tuple[Life, Life]]:
    """Two brokers with the topic; the second one serves everything by its full path."""
    with tempfile.TemporaryDirectory(prefix="trimq-") as temporary:
        fast, full = Life(Path(temporary) / "fast", **changes), Life(Path(temporary) / "full", **changes)
        async with fast.running(), full.running():
            full.take_full_paths()
            for life in (fast, full):
                await make_topic(life, TOPIC)  # type: ignore[arg-type]
                await life.prepare(topic="T")  # creates the log's first file, without which nothing is taken
                await life.end(Place(0, 0, ""), ROLLBACK)
            yield fast, full


async def run(life: Life, kinds: Sequence[str], ends: Sequence[int]) -> list[tuple[int, str | None, dict[str, str]]]:
    """Send all in one write, then end the halves; returns the replies."""
    await life.client.stream.send_all(b"".join(frame_of(kind, 1000 + at) for at, kind in enumerate(kinds)))
    replies = [await life.client.reply(1000 + at) for at in range(len(kinds))]
    answers = [comparable_reply(reply) for reply in replies]
    halves = [place_of(reply) for reply, kind in zip(replies, kinds, strict=True) if "half" in kind or "only" in kind]
    for half, end in zip(halves, ends, strict=False):
        reply = await life.client.ask(RequestCode.END_TRANSACTION, end_ext(half, end))
        answers.append(comparable_reply(reply))
    return answers


def comparable_reply(reply: RemotingCommand) -> tuple[int, str | None, dict[str, str]]:
    ext = reply.ext_fields()
    if "msgId" in ext:
        ext["msgId"] = ",".join(one[16:] for one in ext["msgId"].split(","))
    return reply.code, reply.remark, ext


def comparable(message: StoredMessage) -> dict[str, Any]:
    own = {"store_timestamp", "born_host", "store_host"}
    return {name: getattr(message, name) for name in message.__struct_fields__ if name not in own}


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=40),
    ends=st.lists(st.sampled_from([COMMIT, ROLLBACK, COMMIT]), max_size=40),
)
@example(kinds=["plain", "half", "half", "half", "plain", "no queue", "half"], ends=[COMMIT] * 4)
@settings(max_examples=EXAMPLES, deadline=None)
def test_all_paths_store_and_answer_the_same(flush: str, kinds: list[str], ends: list[int]) -> None:
    # guards halves against the paths that do not know them: one stored in its own topic would be seen at once
    async def both() -> None:
        async with brokers({"flushDiskType": flush}) as (fast, full):
            taken = fast_paths(fast.broker)
            assert await run(fast, kinds, ends) == await run(full, kinds, ends)
            if kinds.count("plain") > 2:
                assert taken, "no send has taken a fast path: the test compares nothing"
            await compare(fast, full)

    trio.run(both)


async def compare(fast: Life, full: Life) -> None:
    """Both brokers have stored the same, and know the same of each half."""
    for topic in (TOPIC, HALF, OP, "SCHEDULE_TOPIC_XXXX"):
        one, two = [await life.stored(topic, range(4)) for life in (fast, full)]
        assert [comparable(each) for each in one] == [comparable(each) for each in two]
        for queue in range(4):
            units = [await life.broker.context.store.queue_units(topic, queue, 0, 100) for life in (fast, full)]
            if topic != "SCHEDULE_TOPIC_XXXX":
                assert units[0] == units[1]
    assert fast.pending == full.pending
    assert fast.transactions.halves.table == full.transactions.halves.table
    for name in ("commits", "rollbacks", "refused"):
        assert getattr(fast.counters, name) == getattr(full.counters, name)
    assert counted(fast) == counted(full)
    assert await indexed(fast) == await indexed(full)


def counted(life: Life) -> list[tuple[int, int]]:
    stats = life.broker.context.stats
    items = [stats.broker_put, *stats.topic_counters(TOPIC), *stats.topic_counters(HALF)]
    return [(item.value, item.times) for item in items]


async def indexed(life: Life) -> list[tuple[int, int]]:
    index = life.broker.context.store.index
    assert index is not None
    await index.flush_pending()
    return [(entry.phy, entry.key_hash) for file in index.files for entry in file.entries()]


# -- ends between sends, in one write

Step = tuple[str, int, int]
"""Kind of a request; for ends the number of the half, and the state."""
MOST = 6
"""Halves before the ends."""
STEPS = st.one_of(
    st.sampled_from(["plain", "plain", "half"]).map(lambda kind: (kind, 0, 0)),
    st.tuples(
        st.sampled_from(["end", "end", "end", "oneway", "wrong group", "wrong offset", "wrong place", "check"]),
        st.integers(0, MOST - 1),
        st.sampled_from([COMMIT, COMMIT, ROLLBACK, UNKNOWN, 7]),
    ),
)
TOGETHER = [
    ("plain", 0, 0),
    ("end", 0, COMMIT),
    ("end", 1, ROLLBACK),
    ("oneway", 2, COMMIT),
    ("oneway", 3, ROLLBACK),
    ("half", 0, 0),
    ("check", 4, COMMIT),
    *[("plain", 0, 0)] * 30,
]
"""All that is served in one round: this must not be left to chance."""
ODD = {
    "usual": {},
    "no group": {"PGROUP": ""},
    "real place": {"REAL_TOPIC": "Other"},
    "id": {"__transactionId__": "x"},
    "immunity": {"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"},
    "many": {f"p{number}": "v" for number in range(40)},
    "user's": {"ä": "ö\n", "KEYS": "k1 k2"},
}
"""Properties of halves beside those that all have."""


def half_frame(number: int, odd: str, *, binary: bool) -> bytes:
    usual = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": f"7F{number:030X}", "WAIT": "true", "TAGS": "a"}
    properties = {name: value for name, value in (usual | ODD[odd]).items() if value}
    return send_frame(number, properties, sys_flag=4, binary=binary)


def ends_known_at_once(steps: Sequence[Step], halves: int) -> list[Step]:
    """Without ends of a half after its commit: under SYNC_FLUSH their replies depend on when the disk is done."""
    committed = set()
    kept = []
    for kind, at, state in steps:
        if kind in ("end", "oneway", "check") and state in (COMMIT, ROLLBACK):
            if at % halves in committed:
                continue
            if state == COMMIT:
                committed.add(at % halves)
        kept.append((kind, at, state))
    return kept


def step_frame(number: int, step: Step, halves: Sequence[Place], *, binary: bool) -> bytes:
    kind, at, state = step
    if kind == "plain":
        return send_frame(number, binary=binary)
    if kind == "half":
        return half_frame(number, "usual", binary=binary)
    half = halves[at % len(halves)]
    wrong: dict[str, dict[str, Any]] = {
        "wrong group": {"producerGroup": "Q"},
        "wrong offset": {"tranStateTableOffset": half.queue_offset + 1},
        "wrong place": {"commitLogOffset": half.log_offset + 1},
    }
    changes = wrong.get(kind, {})
    ext = {name: str(value) for name, value in end_ext(half, state, check=kind == "check", **changes).items()}
    encoding = Encoding.ROCKETMQ if binary else Encoding.JSON
    flag = 2 if kind == "oneway" else 0
    return encode(RemotingCommand(37, number, flag, 479, "JAVA", ext=ext, encoding=encoding))


async def act(
    life: Life, odd: Sequence[str], steps: Sequence[Step], *, binary: bool
) -> list[tuple[int, str | None, dict[str, str]]]:
    """Send the halves and then the steps, in one write each; returns the replies."""
    await life.client.stream.send_all(b"".join(half_frame(1000 + at, one, binary=binary) for at, one in enumerate(odd)))
    replies = [await life.client.reply(1000 + at) for at in range(len(odd))]
    halves = [place_of(reply) for reply in replies]
    frames = [step_frame(2000 + at, step, halves, binary=binary) for at, step in enumerate(steps)]
    await life.client.stream.send_all(b"".join(frames))
    replies += [await life.client.reply(2000 + at) for at, step in enumerate(steps) if step[0] != "oneway"]
    await life.client.ask(RequestCode.END_TRANSACTION, end_ext(halves[0], UNKNOWN))  # behind all one-way requests
    assert not life.client.replies, "a one-way request was answered"
    await life.settled()
    return [comparable_reply(reply) for reply in replies]


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
@given(
    odd=st.lists(st.sampled_from(["usual", "usual", *ODD]), min_size=1, max_size=MOST),
    steps=st.lists(STEPS, max_size=40),
    binary=st.booleans(),
)
@example(odd=["usual"] * MOST, steps=TOGETHER, binary=False)
@example(odd=["usual"] * MOST, steps=[*TOGETHER[:2], *TOGETHER], binary=False)
@example(odd=["usual"] * MOST, steps=[("wrong offset", 2, COMMIT)], binary=False)
@example(odd=["usual"] * MOST, steps=[("wrong group", 2, COMMIT)], binary=False)
@example(odd=["usual"] * MOST, steps=[("end", at, ROLLBACK) for at in range(MOST)], binary=True)
@settings(max_examples=EXAMPLES, deadline=None)
def test_ends_among_sends_are_the_same_by_all_paths(
    flush: str, odd: list[str], steps: list[Step], *, binary: bool
) -> None:
    if flush == "SYNC_FLUSH":
        steps = ends_known_at_once(steps, len(odd))

    async def both() -> None:
        async with brokers({"flushDiskType": flush}) as (fast, full):
            taken = fast_paths(fast.broker)
            assert await act(fast, odd, steps, binary=binary) == await act(full, odd, steps, binary=binary)
            await compare(fast, full)
            if NATIVE.is_on and set(odd) == {"usual"} and len(steps) > 4 and steps[0][0] in ("end", "oneway", "check"):
                assert steps[0][2] in (UNKNOWN, 7) or 37 in taken, "no end was served together with others"

    trio.run(both)


# -- what a round meets


async def halves_of(life: Life, count: int) -> list[Place]:
    await life.client.stream.send_all(b"".join(half_frame(1000 + at, "usual", binary=False) for at in range(count)))
    return [place_of(await life.client.reply(1000 + at)) for at in range(count)]


async def end_all(life: Life, halves: Sequence[Place], state: int) -> list[tuple[int, str | None, dict[str, str]]]:
    """End all in one write; returns the replies."""
    frames = [step_frame(2000 + at, ("end", at, state), halves, binary=False) for at in range(len(halves))]
    await life.client.stream.send_all(b"".join(frames))
    return [comparable_reply(await life.client.reply(2000 + at)) for at in range(len(halves))]


@NATIVE_ONLY
async def test_ends_at_the_end_of_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the states of halves whose commit records did not fit: they are put again, one by one
    refused: list[int] = []
    not_committed = TransactionalMessageService.not_committed

    def noted(self: TransactionalMessageService, offsets: Sequence[int]) -> None:
        refused.extend(offsets)
        not_committed(self, offsets)

    monkeypatch.setattr(TransactionalMessageService, "not_committed", noted)
    async with brokers({"mappedFileSizeCommitLog": 1 << 14, "commitLogReserveStep": 1 << 14}) as (fast, full):
        for _ in range(16):
            answers = [await end_all(life, await halves_of(life, 20), COMMIT) for life in (fast, full)]
            assert answers[0] == answers[1]
            assert {code for code, *_ in answers[0]} == {0}
        assert refused, "no round has met the end of a file"
        await compare(fast, full)


@NATIVE_ONLY
async def test_ends_on_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    # guards the halves of commits that are answered with an error: the producer may repeat them
    async def flush() -> bool:
        return False

    async with brokers({"flushDiskType": "SYNC_FLUSH"}) as lives:
        found = []
        for life in lives:
            halves = await halves_of(life, 20)
            await life.settled()
            sync = life.broker.context.store.write_path.sync
            with monkeypatch.context() as patch:
                patch.setattr(sync, "flush_inline", lambda: None)
                patch.setattr(sync, "advance", flush)
                patch.setattr(sync, "flush", flush)
                patch.setattr(sync, "failed", "the device is gone")
                found.append(await end_all(life, halves, COMMIT))
                await life.settled()
        assert {code for code, *_ in found[0]} == {ResponseCode.SERVICE_NOT_AVAILABLE}
        assert found[0] == found[1]
        fast, full = lives
        assert fast.transactions.halves.table == full.transactions.halves.table
        assert fast.pending == full.pending == 20
        assert fast.counters.commits == full.counters.commits == 0


async def test_a_damaged_half_is_not_committed() -> None:
    # guards consumers: a commit record with a checksum of its own would hide the damage
    async with brokers({}) as lives:
        for life in lives:
            halves = await halves_of(life, 20)
            await life.settled()
            (path,) = (life.directory / "commitlog").glob("0*")
            with path.open("r+b") as file:
                file.seek(halves[7].log_offset)
                record = file.read(200)
                at = record.index(b"body")
                file.seek(halves[7].log_offset + at)
                file.write(b"B")
            codes = [code for code, *_ in await end_all(life, halves, COMMIT)]
            assert codes == [ResponseCode.SYSTEM_ERROR if at == 7 else 0 for at in range(20)]
            assert len(await life.stored(TOPIC)) == 19
            assert life.pending == 1


async def test_a_commit_record_has_the_host_of_its_half() -> None:
    # guards traces of who has sent a message: another instance of the producer may answer the check
    async with brokers({}) as lives:
        for life in lives:
            async with WireClient.connect(life.broker.endpoint) as other:
                halves = await halves_of(life, 20)
                sent_from, life.client = life.client, other
                await end_all(life, halves, COMMIT)
                hosts = {message.born_host for message in await life.stored(TOPIC)}
                assert hosts == {sent_from.plain.socket.getsockname()[:2]}
                life.client = sent_from


async def test_the_limit_of_halves_counts_within_a_round() -> None:
    async with brokers({"maxPendingHalfMessages": "10"}) as lives:
        for life in lives:
            frames = [half_frame(1000 + at, "usual", binary=False) for at in range(20)]
            await life.client.stream.send_all(b"".join(frames))
            codes = [(await life.client.reply(1000 + at)).code for at in range(20)]
            assert codes == [0] * 10 + [codes[-1]] * 10
            assert codes[-1] != 0
            assert life.pending == 10
