"""Apache's broker and TriMQ's take turns on a store with timed messages and open transactions.

Whatever one broker has promised, the other keeps: messages for a later time come at that time, or at once if it has
passed; halves without an outcome are checked and end as their producer says; what has ended does not end again.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests.interop.harness import probe
from tests.interop.harness.drivers import JavaClient, Producer, Record, bodies, message, unique
from tests.interop.harness.log_image import Record as Stored
from tests.interop.harness.log_image import live_image
from tests.interop.harness.servers import Cluster, Peer, broker_on_store
from tests.interop.harness.waiting import wait_until
from tests.interop.test_timers import TIMER_CHECK_POINT
from tests.interop.test_transactions import half, wait_until_resolved

Exit = Literal["clean", "kill"]

LOG_FILE = 16 * 1024 * 1024
OP = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TIMER = "rmq_sys_wheel_timer"
FAR = 3600
WINDOW = 35
"""The roll window in slots of 100 ms, if messages have to roll."""
NEXT_MS = 4_000
RECALLED_MS = 3_000
"""Less than the window: Apache's broker delivers recalled messages that had to roll and are overdue at its start."""

#: Apache's broker counts a check also when no producer is there to be asked, and stops slowly: no half is given up.
PROPERTIES = {
    "transactionCheckMax": "1000000",
    "mappedFileSizeCommitLog": str(LOG_FILE),
    "transactionCheckInterval": "500",
    "transactionTimeOut": "1500",
    "transactionOpBatchInterval": "200",
}


@dataclass
class Promises:
    """What the turns so far have to keep: bodies that must come, bodies that must never come, and those for later."""

    store: Path
    topic: str
    group: str
    wanted: set[str] = field(default_factory=set)
    never: set[str] = field(default_factory=set)
    far: dict[str, str] = field(default_factory=dict)

    def records(self, topic: str) -> list[Stored]:
        return live_image(self.store, LOG_FILE).of(topic)

    def delivered(self) -> Counter[str]:
        return Counter(record.body.decode() for record in self.records(self.topic))


def timed(cluster: Cluster, turn: int, promises: Promises, producer: Producer) -> None:
    """Send messages for this turn, the next one, and for after the test; recall one of the next turn's.

    In every turn another one of those for after the test is recalled and stays in the timer.
    """
    specs = [message(body, delay_ms=1_200) for body in sorted(soon(turn))]
    specs += [message(f"next-{turn}-{number}", delay_ms=NEXT_MS) for number in range(5)]
    specs += [message(f"far-{turn}", delay_sec=FAR)]
    sent = dict(zip(bodies(specs), producer.send(promises.topic, specs), strict=True))
    promises.wanted |= {body for body in sent if body.startswith(("soon", "next"))}
    promises.never |= {f"recalled-{turn}", f"far-{turn}"}
    # Alone, so that all of its time is there for the recall.
    [recalled] = producer.send(promises.topic, [message(f"recalled-{turn}", delay_ms=RECALLED_MS)])
    producer.recall(promises.topic, recalled["recallHandle"])
    for earlier, handle in promises.far.items():
        # A handle that another broker gave out: the far message stays away as it is, recalled or not.
        assert producer.recall(promises.topic, handle) == sent_key(promises, earlier)
    promises.far = {f"far-{turn}": sent[f"far-{turn}"]["recallHandle"]}


def soon(turn: int) -> set[str]:
    """The timed messages that are due while the turn lasts."""
    return {f"soon-{turn}-{number}" for number in range(5)}


def checkpoint_with_all(cluster: Cluster, promises: Promises) -> None:
    """Wait for a checkpoint of the timer with all recalls.

    In Apache's broker a recall that no checkpoint has may miss its message, if that is overdue at the start.
    """
    records = len(promises.records(TIMER))
    wait_until(lambda: checkpoint_offset(cluster) >= records, "a checkpoint of the timer with the recalls")


def checkpoint_offset(cluster: Cluster) -> int:
    """The offset in the timer's queue up to which the last checkpoint of the timer goes."""
    (offset,) = struct.unpack_from(">q", probe.ask(cluster.broker.address, TIMER_CHECK_POINT).body, 16)
    return int(offset)


def sent_key(promises: Promises, body: str) -> str:
    return next(one.properties["UNIQ_KEY"] for one in promises.records(TIMER) if one.body.decode() == body)


def transactions(turn: int, promises: Promises, producer: Producer) -> None:
    """End some halves at once; leave others for the producer of the next turn to decide."""
    specs = [half(f"commit-{turn}", "commit", "rollback"), half(f"rollback-{turn}", "rollback", "commit")]
    specs += [half(f"adopted-{turn}", "unknown", "commit"), half(f"dropped-{turn}", "unknown", "rollback")]
    before = len(ended(promises))
    producer.transaction(promises.topic, specs)
    promises.wanted |= {f"commit-{turn}", f"adopted-{turn}"}
    promises.never |= {f"rollback-{turn}", f"dropped-{turn}"}
    # An outcome that is in no op record yet is lost in a kill of Apache's broker.
    wait_until(lambda: len(ended(promises)) >= before + 2, "op records of the two halves that ended")


def ended(promises: Promises) -> list[str]:
    """The queue offsets in all op records: those of the halves that have ended."""
    return [offset for record in promises.records(OP) for offset in record.body.decode().split(",") if offset]


def check_kept(promises: Promises, wanted: set[str], *, once: bool) -> None:
    """Check that what is due has come, and that nothing came that must not, or before its time."""
    counts = promises.delivered()
    assert wanted <= set(counts)
    assert not promises.never & set(counts)
    assert set(counts) <= promises.wanted
    if once:
        # Apache's broker asks again about a half that has ended, until its op record is written.
        assert {body for body, count in counts.items() if count > 1 and not body.startswith("adopted")} == set()
    for record in promises.records(promises.topic):
        if "TIMER_OUT_MS" in record.properties:
            assert record.stored >= int(record.properties["TIMER_OUT_MS"]), record.body


def check_once(promises: Promises, own: set[str]) -> None:
    """Check that TriMQ has stored each of these messages, which it committed or delivered in its own turn, once."""
    counts = promises.delivered()
    assert {body: counts[body] for body in own} == dict.fromkeys(own, 1)


#: The turns, and the timer's settings: with a window of 3.5 s the later ones are stored again on their way.
CHAINS: dict[str, tuple[dict[str, str], list[tuple[Peer, Exit]]]] = {
    "clean": (
        {"timerPrecisionMs": "1000"},
        [("trimq", "clean"), ("apache", "clean"), ("trimq", "clean")],
    ),
    "killed": (
        {"timerPrecisionMs": "100", "timerRollWindowSlot": str(WINDOW)},
        [("apache", "kill"), ("trimq", "kill"), ("apache", "kill")],
    ),
}


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize("chain", CHAINS)
def test_the_other_broker_keeps_what_was_promised(chain: str, tmp_path: Path, latest_java: JavaClient) -> None:
    settings, turns = CHAINS[chain]
    promises = Promises(tmp_path / "store", unique("Promises"), unique("PG"))
    for turn, (peer, ending) in enumerate(turns):
        properties = {**PROPERTIES, **settings}
        with broker_on_store(peer, tmp_path / f"{turn}-{peer}", promises.store, properties) as cluster:
            if turn == 0:
                cluster.create_topic(promises.topic, queues=2)
            keep(cluster, latest_java, promises, turn, once=chain == "clean")
            if turn + 1 < len(turns):
                promise(cluster, latest_java, promises, turn)
                if turns[turn + 1][0] == "apache":
                    checkpoint_with_all(cluster, promises)
            if ending == "kill":
                cluster.broker.kill()
            else:
                cluster.broker.stop()
            assert (promises.store / "abort").exists() == (ending == "kill")
        if peer == "trimq" and turn + 1 < len(turns):
            check_once(promises, {f"commit-{turn}", *soon(turn)})
    # Apache's broker may deliver timed messages again that came after the last checkpoint before the kill.
    check_once(promises, {f"commit-{turn}" for turn, (peer, _) in enumerate(turns[:-1]) if peer == "trimq"})
    timers = promises.records(TIMER)
    kinds = {record.body.decode().partition("-")[0] for record in timers}
    assert kinds == {"soon", "next", "recalled", "far", "0"}
    rolled = any("TIMER_ROLL_TIMES" in record.properties for record in timers)
    assert rolled == ("timerRollWindowSlot" in settings)


def keep(cluster: Cluster, java: JavaClient, promises: Promises, turn: int, *, once: bool) -> None:
    """Wait until all promises of the turns before are kept, and check that nothing else came."""
    with java.producer(cluster, promises.group, transactional=True, heartbeat=500) as producer:
        producer.send(promises.topic, [message(f"hello-{turn}")])
        promises.wanted |= {f"hello-{turn}"}
        wait_until(
            lambda: promises.wanted <= set(promises.delivered()),
            f"messages of earlier turns: {sorted(promises.wanted - set(promises.delivered()))[:9]}",
            40,
        )
        wait_until_resolved(cluster)
        asked: list[Record] = producer.checks()
    check_kept(promises, promises.wanted, once=once)
    open_before = {f"{what}-{turn - 1}" for what in ("adopted", "dropped")} if turn else set()
    if once:
        assert set(bodies(asked)) == open_before
    else:
        # After a kill a broker's position in the half topic is an older one, so that it finds earlier copies of halves
        # that were checked: only their last copies are in op records. Those that ended without a check never return.
        assert (
            open_before
            <= set(bodies(asked))
            <= {f"{what}-{past}" for what in ("adopted", "dropped") for past in range(turn)}
        )


def promise(cluster: Cluster, java: JavaClient, promises: Promises, turn: int) -> None:
    """Send what this turn keeps itself, and what it leaves to the next one."""
    with java.producer(cluster, promises.group, transactional=True, undecided=True) as producer:
        timed(cluster, turn, promises, producer)
        transactions(turn, promises, producer)
        wait_until(lambda: soon(turn) <= set(promises.delivered()), "the messages for this turn")
