"""``mqstore tiered`` on sound and damaged tiers that this broker wrote."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.tools.test_mqstore import change, run
from tests.store.stores import TOPIC, fill, until_dispatched
from tests.store.tiered.real_stores import opened_store
from trimq.broker.tools import command_parts
from trimq.protocol.tiered_layout import PHYSICAL, segment_name

COUNT, OTHERS = 60, 5
OPTIONS = {
    "tieredStoreIndexFileMaxHashSlotNum": 64,
    "tieredStoreIndexFileMaxIndexNum": 40,
    "maxHashSlotNum": 16,
    "maxIndexNum": 20,
    "maxMessageSize": 4000,
}


async def write(root: Path) -> None:
    async with opened_store(root, tiered_store_index_file_max_index_num=40) as store:
        await fill(store, COUNT)
        await fill(store, OTHERS, topic="Other", queue_id=2)
        await until_dispatched(store)
        await store.flush()
        await store.uploads.upload_all()
        assert store.tier_index is not None
        await store.tier_index.upload_next()
        # As after a kill: the last index files stay local.
        await store.tier_index.close(upload=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tier")
    trio.run(write, root)
    return root


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture
def conf(place: Path, tmp_path: Path) -> str:
    file = tmp_path / "broker.conf"
    options = {**OPTIONS, "tieredStoreFilePath": place / "tier"}
    file.write_text("".join(f"{key}={value}\n" for key, value in options.items()), encoding="utf-8")
    return str(file)


def segments(place: Path, kind: str, topic: str = f"{TOPIC}/0") -> list[Path]:
    (folder,) = place.glob(f"tier/*/broker-a/{topic}/{kind}")
    return sorted((file for file in folder.iterdir() if not file.suffix), key=lambda file: file.name[8:])


def verify(place: Path, conf: str, *more: str) -> tuple[int, dict[str, Any]]:
    done = run("tiered", "verify", place / "store", "-c", conf, "--json", *more)
    assert done.stdout, (done.output, done.exception)
    return done.exit_code, json.loads(done.stdout)


def shown(report: dict[str, Any], kind: str) -> str:
    return "\n".join(report[kind]["shown"])


def test_a_sound_tier(place: Path, conf: str) -> None:
    code, report = verify(place, conf)
    assert (code, report["verdict"]) == (0, "SOUND")
    assert (report["queues"], report["messages"], report["known_offsets"]) == (2, COUNT + OTHERS, COUNT + OTHERS)
    assert report["bytes"] == sum(file.stat().st_size for file in place.glob("tier/*/broker-a/*/*/COMMIT_LOG/*"))
    assert report["index_entries"] == 2 * (COUNT + OTHERS)
    assert report["index_files"] >= 3
    done = run("tiered", "verify", place / "store", "-c", conf)
    assert done.exit_code == 0
    assert f"{COUNT + OTHERS} in 2 queues" in done.output
    assert done.output.endswith("the tier is sound\n")
    assert verify(place, conf, "-t", "Other")[1]["messages"] == OTHERS
    # Without a configuration the directory is enough, if local index files have the default size or are not looked at.
    assert run("tiered", "verify", place / "store", "--tier", place / "tier", "-t", "Other").exit_code == 0


@pytest.mark.parametrize("topics", [(), ("-t", TOPIC)])
def test_the_progress_of_a_verification_ends_at_its_total(
    place: Path, conf: str, topics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    reports: list[int] = []

    @contextmanager
    def recorded(label: str, total: int) -> Iterator[Callable[[int], None]]:
        totals.append(total)
        yield reports.append

    monkeypatch.setattr(command_parts, "progress", recorded)
    assert verify(place, conf, *topics)[0] == 0
    (total,) = totals
    assert len(reports) > 2
    assert reports == sorted(reports)
    assert reports[-1] == total > 0


def test_what_is_listed(place: Path, conf: str) -> None:
    done = run("tiered", "ls", place / "store", "-c", conf, "--json")
    assert done.exit_code == 0, done.output
    listed = json.loads(done.stdout)
    by_topic = {queue["topic"]: queue for queue in listed["queues"]}
    ours = by_topic[TOPIC]
    assert (ours["queueId"], ours["minOffset"], ours["maxOffset"], ours["knownOffsets"]) == (0, 0, COUNT, COUNT)
    assert [Path(one["file"]) for one in ours["commitLog"]] == segments(place, "COMMIT_LOG")
    assert [one["size"] for one in ours["commitLog"]] == [one["fileSize"] for one in ours["commitLog"]]
    assert all(one["beginTimestamp"] <= one["endTimestamp"] for one in ours["commitLog"])
    assert by_topic["Other"]["queueId"] == 2
    states = [file["state"] for file in listed["index"]]
    assert states[0] == "UPLOAD"
    assert states[-1] == "UNSEALED"
    assert set(states[1:-1]) <= {"SEALED", "UPLOAD"}
    assert sum(file["entries"] for file in listed["index"]) == 2 * (COUNT + OTHERS)
    text = run("tiered", "ls", place / "store", "-c", conf, "--segments").output
    assert text.count("COMMIT_LOG ") == len(ours["commitLog"]) + 1
    assert f"{TOPIC:32} {0:5} {0:12} {COUNT:12}" in text
    only = run("tiered", "ls", place / "store", "-c", conf, "-t", "Other").output
    assert TOPIC not in only
    assert "Other" in only
    assert "index" not in only


def lose_a_segment(place: Path) -> None:
    segments(place, "COMMIT_LOG")[1].unlink()


def cut_a_segment(place: Path) -> None:
    file = segments(place, "COMMIT_LOG")[0]
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_body(place: Path) -> None:
    change(segments(place, "COMMIT_LOG")[0], 100, b"?")


def wrong_queue_offset(place: Path) -> None:
    file = segments(place, "COMMIT_LOG")[0]
    (size,) = struct.unpack_from(">i", file.read_bytes())
    change(file, size + 20, struct.pack(">q", 7))


def wrong_topic(place: Path) -> None:
    file = segments(place, "COMMIT_LOG")[0]
    change(file, file.read_bytes().index(TOPIC.encode(), 188), b"X")


def wrong_unit(place: Path) -> None:
    change(segments(place, "CONSUME_QUEUE")[0], 8, struct.pack(">i", 95))


def unit_to_nowhere(place: Path) -> None:
    change(segments(place, "CONSUME_QUEUE")[0], 0, struct.pack(">q", 1 << 40))


def gap_in_the_log(place: Path) -> None:
    edit(place, "commitLogFileSegmentTable", lambda table: table.pop(sorted(table, key=int)[1]))


def forget_the_topic(place: Path) -> None:
    metadata(place, lambda tables: tables["topicMetadataTable"].pop(TOPIC))


def cut_an_uploaded_index(place: Path) -> None:
    (file, *_) = segments(place, "INDEX", "rmq_sys_INDEX/0")
    file.write_bytes(file.read_bytes()[:-28])


def metadata(place: Path, by: Any) -> None:
    file = place / "store/config/tieredStoreMetadata.json"
    tables = json.loads(file.read_text())
    by(tables)
    file.write_text(json.dumps(tables))


def edit(place: Path, table: str, by: Any) -> None:
    metadata(place, lambda tables: by(tables[table][f"broker-a/{TOPIC}/0"]))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lose_a_segment, "is missing"),
        (cut_a_segment, "were uploaded"),
        (flip_a_body, f"{TOPIC}/0 message 0: the record at 0 is damaged: body CRC"),
        (wrong_queue_offset, "is message 7 of queue 0"),
        (wrong_topic, "the record at 0 is one of topic X"),
        (wrong_unit, "the record at 0 is message 0 of queue 0"),
        (unit_to_nowhere, "where the stream has no record"),
        (gap_in_the_log, "the segment before ends at"),
        (forget_the_topic, "the metadata has segments of it, but not the topic"),
        (cut_an_uploaded_index, "were uploaded"),
    ],
)
def test_lost_and_damaged_messages(damage: Any, says: str, place: Path, conf: str) -> None:
    damage(place)
    code, report = verify(place, conf)
    assert (code, report["verdict"]) == (3, "DAMAGED")
    assert says in shown(report, "lost")
    assert run("tiered", "verify", place / "store", "-c", conf).output.endswith("messages are lost\n")


def test_bodies_are_not_compared_without_crc(place: Path, conf: str) -> None:
    flip_a_body(place)
    assert verify(place, conf, "--no-crc")[0] == 0


def test_what_an_interrupted_upload_leaves_is_repaired_by_a_start(place: Path, conf: str) -> None:
    log, units = segments(place, "COMMIT_LOG")[-1], segments(place, "CONSUME_QUEUE")[-1]
    log.write_bytes(log.read_bytes() + b"torn record")
    units.write_bytes(units.read_bytes() + b"torn")
    code, report = verify(place, conf)
    assert (code, report["verdict"]) == (1, "REPAIRABLE")
    assert "11 bytes behind the last message" in shown(report, "repairable")
    assert "a torn unit" in shown(report, "repairable")
    assert any("a start takes the file's" in note for note in report["notes"])
    assert "the tier needs repair" in run("tiered", "verify", place / "store", "-c", conf).output


def test_an_interrupted_deletion_and_bytes_behind_a_segment(place: Path, conf: str) -> None:
    first, second, *_ = segments(place, "COMMIT_LOG")
    second.write_bytes(second.read_bytes() + b"more")

    def deleting(table: dict[str, Any]) -> None:
        table["0"]["status"] = 2

    edit(place, "commitLogFileSegmentTable", deleting)
    assert f"{first}  status 2" in run("tiered", "ls", place / "store", "-c", conf, "--segments").output
    report = verify(place, conf)[1]
    assert f"{first}: its deletion was interrupted" in shown(report, "repairable")
    assert f"{second} has 4 bytes behind its end" in shown(report, "repairable")


def test_a_gap_between_units_and_files_that_are_not_known_are_notes(place: Path, conf: str) -> None:
    queue = segments(place, "CONSUME_QUEUE")
    (queue[0].parent / segment_name(1 << 40)).write_bytes(b"")

    def gap(table: dict[str, Any]) -> None:
        table.pop(sorted(table, key=int)[1])

    edit(place, "consumeQueueFileSegmentTable", gap)
    code, report = verify(place, conf)
    assert code == 0
    notes = "\n".join(report["notes"])
    assert "the messages between were deleted before they were uploaded" in notes
    assert f"{queue[0].parent / segment_name(1 << 40)} is not in the metadata" in notes
    assert report["messages"] == COUNT + OTHERS - 20


def test_messages_without_an_entry_of_their_own_have_lost_their_offset(place: Path, conf: str) -> None:
    (side,) = (
        file for file in segments(place, "CONSUME_QUEUE")[0].parent.glob("*.phy") if file.name[8:28].strip("0") == ""
    )
    change(side, 0, PHYSICAL.pack(5, 1, 1))
    change(side, PHYSICAL.size, PHYSICAL.pack(-1, 0, 0))
    code, report = verify(place, conf)
    assert (code, report["known_offsets"]) == (0, COUNT + OTHERS - 2)
    assert any(note.startswith("2 messages have lost their offset in the log") for note in report["notes"])
    side.unlink()
    assert verify(place, conf)[1]["known_offsets"] == COUNT + OTHERS - 20
    text = run("tiered", "ls", place / "store", "-c", conf, "--segments").output
    (line,) = (line for line in text.splitlines() if line.endswith("no log offsets"))
    assert str(side.with_suffix("")) in line


def test_log_offsets_that_do_not_grow(place: Path, conf: str) -> None:
    side = Path(f"{segments(place, 'CONSUME_QUEUE')[0]}.phy")
    physical, size, crc = PHYSICAL.unpack_from(side.read_bytes(), 3 * PHYSICAL.size)
    change(side, 3 * PHYSICAL.size, PHYSICAL.pack(physical + (1 << 30), size, crc))
    code, report = verify(place, conf)
    assert (code, report["known_offsets"]) == (0, COUNT + OTHERS)
    (note,) = report["notes"]
    assert note.startswith(f"{TOPIC}/0 message 4 had log offset ")
    assert f"one before it {physical + (1 << 30)}" in note


def local_index(place: Path) -> Path:
    return max(
        (file for file in (place / "store/tiered_index_file").iterdir() if file.name.isdigit()), key=lambda f: f.name
    )


def test_faults_of_the_index(place: Path, conf: str) -> None:
    uploaded = segments(place, "INDEX", "rmq_sys_INDEX/0")[0]
    first_item = 28 + 64 * 8

    def after(file: Path, at: int, data: bytes) -> str:
        before = file.read_bytes()
        change(file, at, data)
        code, report = verify(place, conf)
        assert (code, report["verdict"]) == (1, "REPAIRABLE")
        file.write_bytes(before)
        return shown(report, "index")

    assert "which has no such key" in after(uploaded, first_item + 12, struct.pack(">q", 1))
    slot = next(at for at in range(28, first_item, 8) if uploaded.read_bytes()[at + 4 : at + 8] != bytes(4))
    text = after(uploaded, slot, struct.pack(">ii", 5, 28))
    assert "refers to 28 bytes at 5" in text
    assert "its slots lead to" in text
    assert "stands in slot" in after(uploaded, first_item, struct.pack(">i", 1))
    assert "do not make" in after(uploaded, 24, struct.pack(">i", 1 << 20))
    assert "its header cannot be read" in after(uploaded, 0, b"bad!")
    local = local_index(place)
    assert "entry 1 follows entry 99, not 0; a start of TriMQ links" in after(
        local, first_item + 32 + 28, struct.pack(">i", 99)
    )
    head = next(at for at in range(28, first_item, 8) if local.read_bytes()[at : at + 4] != bytes(4))
    assert f"slot {(head - 28) // 8} leads to entry 0, its newest is" in after(local, head, bytes(4))
    assert "a start of TriMQ links" in after(local, 24, struct.pack(">i", 1))
    assert "its header says 10000" in after(local, 24, struct.pack(">i", 10000))
    assert "which has no such key" in after(local, first_item + 32 + 12, struct.pack(">q", 1))
    other = local.read_bytes()
    local.write_bytes(other + b"more")
    assert "pass the broker's configuration with -c" in shown(verify(place, conf)[1], "index")


def test_what_cannot_be_checked(place: Path, conf: str, tmp_path: Path) -> None:
    def refusal(*more: object) -> str:
        done = run("tiered", "ls", place / "store", *more)
        assert done.exit_code == 2
        return done.stderr

    assert "Pass its directory with --tier" in refusal()
    assert f"there is no directory {tmp_path / 'gone'}" in refusal("--tier", tmp_path / "gone")
    file = place / "store/config/tieredStoreMetadata.json"
    file.write_text("[]")
    assert "it lists what the tier holds" in refusal("-c", conf)
    file.unlink()
    assert "has no tier" in refusal("-c", conf)


def test_an_expiry_that_was_interrupted_is_no_damage(place: Path, conf: str) -> None:
    """The file is gone, its metadata is not yet; the units of its messages are."""
    first, *_ = segments(place, "COMMIT_LOG")
    first.unlink()

    def deleting(table: dict[str, Any]) -> None:
        table["0"]["status"] = 2

    edit(place, "commitLogFileSegmentTable", deleting)
    code, report = verify(place, conf)
    assert (code, report["verdict"]) == (1, "REPAIRABLE")
    assert report["lost"]["count"] == 0
    assert 0 < report["messages"] < COUNT + OTHERS


@pytest.mark.parametrize("kind", ["COMMIT_LOG", "CONSUME_QUEUE"])
def test_bytes_behind_a_segment_are_not_taken_for_messages(kind: str, place: Path, conf: str) -> None:
    first, *_ = segments(place, kind)
    first.write_bytes(first.read_bytes() + b"x" * 300)
    code, report = verify(place, conf)
    assert (code, report["messages"]) == (1, COUNT + OTHERS)
    assert f"{first} has 300 bytes behind its end" in shown(report, "repairable")
