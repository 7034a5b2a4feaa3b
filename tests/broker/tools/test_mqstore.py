"""mqstore on sound and damaged stores that this broker wrote."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result

from tests.store.stores import fill, opened, put, settings
from trimq.broker.config import MessageStoreConfig
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import StoreLock
from trimq.broker.tools.cli import main
from trimq.broker.tools.offline_store import ReadOnlyDisk
from trimq.protocol import sysflag
from trimq.protocol.queue_unit import UNIT_SIZE

FILE = 8192
COUNT = 100
TOPIC = "TopicTest"
QUEUE = f"consumequeue/{TOPIC}/0"


def _write(root: Path, more: Callable[[Any], Any] | None = None) -> MessageStoreConfig:
    config = settings(str(root))

    async def write() -> None:
        async with opened(RealDisk(), config) as store:
            await fill(store, COUNT)
            await fill(store, 5, topic="Other", queue_id=2)
            await put(store, b"\xff\xfe", topic="Other", tag="T", unique="odd", keys="a b")
            await put(store, b"half", topic="Half", sys_flag=sysflag.TRANSACTION_PREPARED, unique="half")
            if more is not None:
                await more(store)

    trio.run(write)
    return config


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written") / "store"
    _write(root)
    return root


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    """A separate copy of the store for each test."""
    root = tmp_path / "store"
    shutil.copytree(written, root)
    return root


@pytest.fixture
def conf(tmp_path: Path) -> str:
    """The configuration with which the store was written."""
    file = tmp_path / "broker.conf"
    file.write_text("maxHashSlotNum=16\nmaxIndexNum=20\nmaxMessageSize=4000\n", encoding="utf-8")
    return str(file)


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def verify(store: Path, conf: str) -> tuple[int, dict[str, Any]]:
    done = run("verify", store, "-c", conf, "--json")
    return done.exit_code, json.loads(done.stdout)


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def log(store: Path, number: int) -> Path:
    return store / "commitlog" / f"{number * FILE:020d}"


def contents(store: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file() and path.name != "lock"}


# -- verify


def test_a_sound_store(store: Path, conf: str) -> None:
    before = contents(store)
    code, report = verify(store, conf)
    assert code == 0
    assert report["verdict"] == "SOUND"
    assert report["records"] == COUNT + 7
    assert report["units"] == COUNT + 6
    assert report["keys"] == 2 * COUNT + 10 + 3 + 1
    assert report["index_files"] > 1
    assert contents(store) == before, "verify changes nothing"


def test_the_report_as_text(store: Path, conf: str) -> None:
    done = run("verify", store, "-c", conf)
    assert done.exit_code == 0
    assert "the store is sound" in done.stdout
    assert f"records     {COUNT + 7}" in done.stdout


def test_a_flipped_bit_in_a_body(store: Path, conf: str) -> None:
    path = log(store, 1)
    at = path.read_bytes().index(b"TopicTest-0-4")
    change(path, at, b"t")
    code, report = verify(store, conf)
    assert code == 3
    assert report["log"]["count"] == 1
    assert "CRC" in report["log"]["shown"][0]
    assert report["records"] == COUNT + 6, "records after the damage are read"


def test_a_log_file_that_is_missing_or_short(store: Path, conf: str) -> None:
    os.truncate(log(store, 1), 5000)
    code, report = verify(store, conf)
    assert code == 3
    assert "has 5000 bytes" in report["log"]["shown"][0]
    log(store, 1).unlink()
    code, report = verify(store, conf)
    assert code == 3
    assert "a file is missing" in report["log"]["shown"][0]


def test_a_log_whose_end_is_missing(store: Path, conf: str) -> None:
    max((store / "commitlog").iterdir()).unlink()
    code, report = verify(store, conf)
    assert code == 3
    assert "the checkpoint knows it up to" in report["log"]["shown"][0]


@pytest.mark.parametrize("number", [0, 31, COUNT - 1])
def test_a_queue_unit_that_is_wrong(store: Path, conf: str, number: int) -> None:
    file, at = divmod(number * UNIT_SIZE, 200)
    change(store / QUEUE / f"{file * 200:020d}", at + 7, b"\x77")
    code, report = verify(store, conf)
    assert code == 1
    assert f"{TOPIC}/0 at {number}:" in report["consume_queues"]["shown"][0]


def test_a_queue_file_that_is_missing(store: Path, conf: str) -> None:
    (store / QUEUE / f"{200:020d}").unlink()
    code, report = verify(store, conf)
    assert code == 1
    assert report["consume_queues"]["count"] == 11


def test_units_that_lead_to_no_record(store: Path, conf: str) -> None:
    last = store / "consumequeue/Other/2" / f"{0:020d}"
    change(last, 5 * UNIT_SIZE, last.read_bytes()[:UNIT_SIZE])
    code, report = verify(store, conf)
    assert code == 1
    assert "1 units from 5 on point to no record" in report["consume_queues"]["shown"][0]


def test_an_index_entry_that_cannot_be_reached(store: Path, conf: str) -> None:
    first = min((store / "index").iterdir())
    data = first.read_bytes()
    slot = next(slot for slot in range(16) if any(data[40 + 4 * slot : 44 + 4 * slot]))
    change(first, 40 + 4 * slot, bytes(4))
    code, report = verify(store, conf)
    assert code == 1
    assert f"slot {slot} points to 0" in report["index"]["shown"][0]


def test_an_index_file_that_is_missing(store: Path, conf: str) -> None:
    sorted((store / "index").iterdir())[1].unlink()
    code, report = verify(store, conf)
    assert code == 1
    assert "is not found by" in report["index"]["shown"][0]


def test_index_files_of_another_configuration(store: Path) -> None:
    done = run("verify", store)
    assert done.exit_code == 1
    assert "pass the broker's configuration with -c" in done.stdout


def _start(store: Path) -> None:
    """Start with the configuration with which the store was written, and stop in order."""

    async def run() -> None:
        async with opened(RealDisk(), settings(str(store))):
            pass

    trio.run(run)


def _cut(start: int, length: int) -> Callable[[Path], None]:
    return lambda store: os.truncate(store / QUEUE / f"{start:020d}", length)


# guards: the next start repairs what verify says it repairs; it leaves alone what verify says only a rebuild repairs
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(
    ("harm", "start_repairs"),
    [
        *[
            pytest.param(_cut(start, length), True, id=f"file {start} has {length} bytes")
            for start in (0, 400, 1800)
            for length in (0, 100, 101, 220, 400)
        ],
        pytest.param(lambda store: (store / QUEUE / f"{400:020d}").unlink(), True, id="a file is missing"),
        pytest.param(lambda store: shutil.rmtree(store / QUEUE), True, id="a queue is missing"),
        pytest.param(lambda store: change(store / QUEUE / f"{400:020d}", 27, b"\1"), False, id="a unit is wrong"),
        pytest.param(lambda store: min((store / "index").iterdir()).unlink(), True, id="an index file is missing"),
        pytest.param(lambda store: os.truncate(min((store / "index").iterdir()), 9), True, id="an index file is cut"),
        pytest.param(lambda store: change(min((store / "index").iterdir()), 40, bytes(64)), False, id="no slots"),
        pytest.param(lambda store: os.truncate(store / "checkpoint", 100), True, id="a checkpoint that is cut"),
    ],
)
def test_what_the_next_start_repairs(
    store: Path, conf: str, harm: Callable[[Path], None], start_repairs: bool, killed: bool
) -> None:
    harm(store)
    if killed:
        (store / "abort").write_text("1", encoding="utf-8")
    code, report = verify(store, conf)
    assert code == 1
    if not killed:
        assert report["start_mends"] == start_repairs
    advice = run("verify", store, "-c", conf).stdout.splitlines()[-1]
    assert ("the next start does it" in advice) == report["start_mends"]
    assert "mqstore rebuild" in advice
    _start(store)
    code, again = verify(store, conf)
    if report["start_mends"]:
        assert (code, again["verdict"]) == (0, "SOUND")
    assert run("rebuild", store, "-c", conf).exit_code == 0
    assert verify(store, conf)[0] == 0


def test_a_size_of_queue_files_with_which_no_broker_would_start(store: Path, conf: str) -> None:
    with Path(conf).open("a", encoding="utf-8") as file:
        file.write("mappedFileSizeConsumeQueue=400\n")
    done = run("verify", store, "-c", conf)
    assert done.exit_code == 2
    assert "would not start" in done.stderr
    assert "mappedFileSizeConsumeQueue=200)" in done.stderr


def test_the_only_queue_file_is_no_evidence_against_the_last_stop(tmp_path: Path, conf: str) -> None:
    root = tmp_path / "small"

    async def write() -> None:
        async with opened(RealDisk(), settings(str(root))) as store:
            await fill(store, 3)

    trio.run(write)
    os.truncate(root / QUEUE / f"{0:020d}", 400)
    code, report = verify(root, conf)
    assert code == 1
    assert report["consume_queues"]["shown"][0].endswith("has 400 bytes, 200 are expected")


def test_a_checkpoint_of_the_wrong_size(store: Path, conf: str) -> None:
    os.truncate(store / "checkpoint", 100)
    assert verify(store, conf)[0] == 1


# guards: without a refusal, a rebuild of a store whose log is not mounted would delete its queues
@pytest.mark.parametrize("apache", [False, True])
def test_a_log_that_is_not_there(store: Path, conf: str, apache: bool) -> None:
    shutil.rmtree(store / "commitlog")
    if apache:
        change(store / "checkpoint", 512, bytes(8))
    before = contents(store)
    code, report = verify(store, conf)
    assert code == 3
    assert "holds no log file" in report["log"]["shown"][0]
    done = run("rebuild", store, "-c", conf)
    assert done.exit_code == 2
    assert "holds no log file" in done.stderr
    assert contents(store) == before


def test_a_state_file_that_cannot_be_read(store: Path, conf: str) -> None:
    (store / "config").mkdir()
    (store / "config" / "topics.json").write_text('{"topicConfigTable":{', encoding="utf-8")
    assert verify(store, conf)[0] == 3
    (store / "config" / "topics.json.bak").write_text("", encoding="utf-8")
    assert verify(store, conf)[0] == 3, "an empty backup is none"
    (store / "config" / "topics.json.bak").write_text("{}", encoding="utf-8")
    code, report = verify(store, conf)
    assert code == 0
    assert "topics.json.bak" in " ".join(report["notes"])


def test_a_store_that_was_not_stopped_in_order(store: Path, conf: str) -> None:
    (store / "abort").write_text("1", encoding="utf-8")
    code, report = verify(store, conf)
    assert code == 0
    assert not report["stopped_in_order"]


def test_an_index_without_tags_is_sound_and_reported(tmp_path: Path, conf: str) -> None:
    """As RocketMQ before 5.5 writes it: verify, and a rebuild that follows the configuration key."""
    root = tmp_path / "store"
    _write(root)
    _, report = verify(root, conf)
    assert (report["tags"], report["untagged"], report["notes"]) == (1, 0, [])
    with Path(conf).open("a", encoding="utf-8") as file:
        file.write("indexTagEnable=false\n")
    assert run("rebuild", root, "-c", conf).exit_code == 0
    code, report = verify(root, conf)
    assert (code, report["tags"], report["untagged"]) == (0, 0, 1)
    assert "indexTagEnable" in " ".join(report["notes"])


def test_a_due_time_before_the_records_is_sound_and_a_later_one_is_not(tmp_path: Path, conf: str) -> None:
    """The clock was ahead and was set back: due times follow the clock, store timestamps do not."""
    delayed = "SCHEDULE_TOPIC_XXXX"

    async def park(store: Any) -> None:
        store.clock.set_wall_ms(store.clock.wall_ms() - 3_600_000)
        await put(store, b"later", topic=delayed, queue_id=2, more="DELAY\x013\x02")

    root = tmp_path / "parked"
    _write(root, park)
    assert verify(root, conf)[0] == 0
    path = root / "consumequeue" / delayed / "2" / f"{0:020d}"
    change(path, 12, (1_700_000_000_000 + 10_001).to_bytes(8, "big"))
    code, report = verify(root, conf)
    assert (code, report["consume_queues"]["count"]) == (1, 1)


def test_earlier_lives_of_a_topic(tmp_path: Path, conf: str) -> None:
    async def again(store: Any) -> None:
        await store.delete_topic("Other")
        await put(store, b"new life", topic="Other", queue_id=2)

    root = tmp_path / "again"
    _write(root, again)
    code, report = verify(root, conf)
    assert (report["superseded"], report["consume_queues"]["count"], code) == (1, 5, 1)


def test_a_store_in_use_is_left_alone(store: Path, conf: str) -> None:
    lock = StoreLock.acquire(RealDisk(), str(store))
    try:
        for command in ("verify", "dump", "stat", "rebuild"):
            done = run(command, store, "-c", conf)
            assert done.exit_code == 2
            assert "in use" in done.stderr or "open in this process" in done.stderr
    finally:
        lock.release()


def test_what_is_no_store(tmp_path: Path) -> None:
    for command in ("verify", "dump", "stat", "rebuild"):
        done = run(command, tmp_path)
        assert done.exit_code == 2
        assert "is not a store" in done.stderr
        assert run(command, tmp_path / "nowhere").exit_code == 2
    assert not (tmp_path / "nowhere").exists()


def test_long_work_shows_how_far_it_is(store: Path, conf: str) -> None:
    screen, terminal = pty.openpty()
    words = ["verify", str(store), "-c", conf]
    code = f"from trimq.broker.tools.cli import main; main({words!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=terminal,
            env=os.environ | {"TERM": "xterm"},
            check=False,
        )
        shown = os.read(screen, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(screen)
    assert done.returncode == 0
    assert "verifying" in shown
    assert b"the store is sound" in done.stdout


# -- dump and stat


def _dumped(*words: object) -> list[dict[str, Any]]:
    done = run("dump", *words)
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_dump(store: Path, conf: str) -> None:
    found = _dumped(store, "-c", conf)
    assert len(found) == COUNT + 7
    assert [one["queueOffset"] for one in found if one["topic"] == TOPIC] == list(range(COUNT))
    assert found[0]["body"].startswith("TopicTest-0-0-")
    assert [one["commitLogOffset"] for one in found] == sorted(one["commitLogOffset"] for one in found)
    assert [one["bodyBase64"] for one in found if "bodyBase64" in one] == ["//4="]


def test_dump_filters(store: Path, conf: str) -> None:
    assert len(_dumped(store, "-c", conf, "-t", "Other")) == 6
    assert len(_dumped(store, "-c", conf, "-t", "Other", "-t", "Half")) == 7
    assert len(_dumped(store, "-c", conf, "-t", "Other", "-i", 2)) == 5
    assert [one["msgId"] for one in _dumped(store, "-c", conf, "-k", "b")] == ["odd"]
    assert [one["msgId"] for one in _dumped(store, "-c", conf, "-k", "odd")] == ["odd"]
    (limited,) = _dumped(store, "-c", conf, "-n", 1, "--no-body")
    assert "body" not in limited
    time = limited["storeTimestamp"]
    assert _dumped(store, "-c", conf, "--end", time) == []
    assert len(_dumped(store, "-c", conf, "--begin", time)) == COUNT + 7
    assert _dumped(store, "-c", conf, "--begin", "2999-01-01T00:00:00") == []
    assert run("dump", store, "--begin", "soon").exit_code == 2


def test_dump_reports_damage(store: Path, conf: str) -> None:
    path = log(store, 1)
    change(path, path.read_bytes().index(b"TopicTest-0-4"), b"t")
    found = _dumped(store, "-c", conf)
    assert [one["damagedAt"] // FILE for one in found if "damagedAt" in one] == [1]
    assert len(found) == COUNT + 7


def test_stat(store: Path, conf: str) -> None:
    done = run("stat", store, "-c", conf, "--json")
    stat = json.loads(done.stdout)
    assert (stat["logStart"], stat["damaged"]) == (0, 0)
    assert stat["topics"][TOPIC]["messages"] == COUNT
    assert stat["topics"]["Other"]["queues"] == 2
    assert sum(topic["bytes"] for topic in stat["topics"].values()) <= stat["logEnd"] <= stat["logFiles"] * FILE
    assert "Other" in run("stat", store, "-c", conf).stdout


# -- rebuild


def _lose_index(store: Path) -> None:
    shutil.rmtree(store / "index")


def _lose_queues(store: Path) -> None:
    shutil.rmtree(store / "consumequeue")


def _break_unit(store: Path) -> None:
    change(store / QUEUE / f"{200:020d}", 7, b"\x77")


def _break_chain(store: Path) -> None:
    change(min((store / "index").iterdir()), 40, bytes(64))


def _shift_queue(store: Path) -> None:
    path = store / QUEUE / f"{0:020d}"
    units = path.read_bytes()
    path.write_bytes(units[UNIT_SIZE:] + bytes(UNIT_SIZE))


@pytest.mark.parametrize("harm", [_lose_index, _lose_queues, _break_unit, _break_chain, _shift_queue])
def test_rebuild(store: Path, conf: str, harm: Callable[[Path], None]) -> None:
    harm(store)
    if harm is not _lose_index:
        assert verify(store, conf)[0] == 1
    done = run("rebuild", store, "-c", conf)
    assert done.exit_code == 0, done.stderr
    assert f"{COUNT + 7} records read" in done.stdout
    code, report = verify(store, conf)
    assert code == 0
    assert (report["units"], report["keys"]) == (COUNT + 6, 2 * COUNT + 14)
    assert report["stopped_in_order"]


def test_rebuild_of_a_damaged_log_says_so_and_serves_the_rest(store: Path, conf: str) -> None:
    path = log(store, 1)
    change(path, path.read_bytes().index(b"TopicTest-0-4"), b"t")
    done = run("rebuild", store, "-c", conf)
    assert done.exit_code == 3
    assert "damaged:" in done.stdout
    code, report = verify(store, conf)
    assert code == 3
    assert (report["consume_queues"]["count"], report["index"]["count"]) == (0, 0)


def test_a_store_that_is_looked_at_cannot_be_changed(store: Path) -> None:
    """Guards the store that verify reads against writes by code shared with the broker."""
    disk = ReadOnlyDisk()
    path = str(log(store, 0))
    fd = disk.open(path)
    before = log(store, 0).read_bytes()
    for change_it in (
        lambda: disk.pwrite(fd, b"x", 0),
        lambda: disk.create(str(store / "new"), 1),
        lambda: disk.truncate(fd, 0),
        lambda: disk.delete(path),
    ):
        with pytest.raises(PermissionError, match="open for reading only"):
            change_it()
    disk.close(fd)
    assert log(store, 0).read_bytes() == before
    assert not (store / "new").exists()


def test_stores_that_cannot_be_looked_at(store: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.conf"
    wrong.write_text("mappedFileSizeCommitLog=many\n")
    done = run("verify", store, "-c", str(wrong))
    assert done.exit_code == 2
    assert "the configuration cannot be used" in done.stderr
    assert "wrong.conf" in done.stderr
    (store / "consumequeue" / "CURRENT").write_text("MANIFEST-000001")
    done = run("verify", store)
    assert done.exit_code == 2
    assert "stored in RocksDB" in done.stderr


def test_an_empty_newest_log_file_is_reported(store: Path, conf: str) -> None:
    newest = max((store / "commitlog").iterdir())
    (newest.parent / f"{int(newest.name) + FILE:020d}").touch()
    code, report = verify(store, conf)
    assert code == 0
    assert any("is empty: the next start deletes it" in note for note in report["notes"])


@pytest.mark.parametrize("name", ["checkpoint", "abort"])
def test_a_rebuild_that_something_is_in_the_way_of_says_what(store: Path, conf: str, name: str) -> None:
    path = store / name
    path.unlink(missing_ok=True)
    path.mkdir()
    done = run("rebuild", store, "-c", conf)
    assert done.exit_code == 2, (done.exception, done.stderr)
    assert str(path) in done.stderr
