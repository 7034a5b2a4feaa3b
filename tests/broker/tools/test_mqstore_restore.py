"""``mqstore tiered restore``: an empty directory becomes the store of a broker whose history is in a bucket."""

import json
from pathlib import Path

import pytest
import trio

from tests.broker.tools.test_mqstore import run
from tests.broker.tools.test_mqstore_bucket import COUNT, LATER, OTHERS, PLAIN, PREFIX, fill_bucket
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from tests.store.tiered.bucket.stores import opened, tier
from tests.store.tiered.test_tiered_message_store import all_offsets
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.disk.store_lock import StoreLock
from trimq.broker.store.tiered.bucket.object_store import ObjectStore
from trimq.broker.store.tiered.bucket.obstore_store import connect
from trimq.broker.tools.restore_store import NOT_RESTORED

NEXT = COUNT + LATER + 3
"""Behind the consumer group, which had messages that were not uploaded."""


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    objects = connect(f"memory://{tmp_path.name}", **PLAIN)
    trio.run(lambda: fill_bucket(objects, last=False))
    return objects


@pytest.fixture
def conf(objects: ObjectStore, tmp_path: Path) -> str:
    file = tmp_path / "broker.conf"
    lines = ["tieredBackendServiceProvider=trimq.Bucket", f"tieredStoreBucket=memory://{tmp_path.name}"]
    lines += ["brokerClusterName=C1", "brokerName=broker-a"]
    lines += [f"mappedFileSizeCommitLog={settings().mapped_file_size_commit_log}"]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def test_a_broker_goes_on_with_a_restored_store(objects: ObjectStore, conf: str, tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    done = run("tiered", "restore", root, "-c", conf, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    local = settings(str(root))
    assert report["logStart"] % local.mapped_file_size_commit_log == 0
    assert report["logStart"] > 0
    assert report["files"] == ["topics.json", "consumerOffset.json"]
    assert report["notRestored"] == NOT_RESTORED
    assert "30000 ms" in report["mayBeMissing"]
    keys = ("topic", "queueId", "begin", "end", "start", "missing")
    assert [tuple(queue[key] for key in keys) for queue in report["queues"]] == [
        ("Other", 2, 0, OTHERS, OTHERS, 0),
        (TOPIC, 0, 0, COUNT + LATER, NEXT, 3),
    ]
    assert (root / "config" / "topics.json").read_bytes() == b'{"topicConfigTable":{}}'
    config = tier(tiered_store_bucket=f"memory://{tmp_path.name}")

    async def go_on() -> None:
        async with opened(RealDisk(), objects, config, local) as store:
            assert store.next_offset(TOPIC, 0) == NEXT
            assert len(await all_offsets(store, 0, COUNT + LATER)) == COUNT + LATER
            await fill(store, 2, first=NEXT)
            await until_dispatched(store)
            await store.flush()  # the stop uploads them

    trio.run(go_on)
    listed = json.loads(run("tiered", "ls", "-c", conf, "--json").stdout)
    assert listed["end"] > report["logStart"]
    assert [queue["maxOffset"] for queue in listed["queues"]] == [OTHERS, NEXT + 2]
    verified = json.loads(run("tiered", "verify", "-c", conf, "--json").stdout)
    assert (verified["verdict"], verified["holes"]) == ("SOUND", 3)


def test_what_is_printed(conf: str, tmp_path: Path) -> None:
    done = run("tiered", "restore", tmp_path / "new", "-c", conf)
    assert done.exit_code == 0, done.output
    assert f"{TOPIC:32} {0:5} {0:12} {COUNT + LATER:12} {NEXT:12}  at least 3" in done.output
    assert f"{'Other':32} {2:5} {0:12} {OTHERS:12} {OTHERS:12}  -" in done.output
    assert "not restored    delayed and timed messages that were not due, half messages" in done.output
    assert "may be missing  messages that were sent after the last upload" in done.output


def test_a_directory_with_files_is_refused(conf: str, tmp_path: Path) -> None:
    root = tmp_path / "new"
    (root / "commitlog").mkdir(parents=True)
    (root / "consumequeue").mkdir()
    other = root / "config" / "delayOffset.json"
    other.parent.mkdir()
    other.write_text("{}")
    done = run("tiered", "restore", root, "-c", conf)
    assert done.exit_code == 2
    assert f"{root} is not empty: {other} is there" in done.output
    other.unlink()
    # What an interrupted restore has left.
    (root / "config" / "topics.json").write_text("old")
    (root / "config" / "tierRestored.json").write_text("old")
    (root / "commitlog" / "00000000000000000000").touch()
    assert run("tiered", "restore", root, "-c", conf).exit_code == 0
    assert (root / "config" / "topics.json").read_text() != "old"
    done = run("tiered", "restore", root, "-c", conf)
    assert done.exit_code == 2
    assert "is not empty" in done.output
    assert "commitlog" in done.output


def test_a_log_elsewhere_is_not_overwritten(conf: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "00000000000000000000").write_bytes(b"1")
    with Path(conf).open("a", encoding="utf-8") as file:
        file.write(f"\nstorePathCommitLog={log}\n")
    done = run("tiered", "restore", tmp_path / "new", "-c", conf)
    assert done.exit_code == 2
    assert f"{log} is there" in done.output


def test_a_store_that_a_broker_has_open_is_refused(conf: str, tmp_path: Path) -> None:
    root = tmp_path / "new"
    lock = StoreLock.acquire(RealDisk(), str(root))
    try:
        done = run("tiered", "restore", root, "-c", conf)
    finally:
        lock.release()
    assert done.exit_code == 2
    assert "is open in this process already" in done.output
    assert run("tiered", "restore", root, "-c", conf).exit_code == 0


def test_without_a_history_nothing_is_restored(conf: str, tmp_path: Path) -> None:
    done = run("tiered", "restore", tmp_path / "new", "-c", conf, "--broker", "other")
    assert done.exit_code == 2
    assert "there is no history of broker other" in done.output
    assert not (tmp_path / "new" / "commitlog").exists()
    (tmp_path / "file").write_text("")
    done = run("tiered", "restore", tmp_path / "file" / "store", "-c", conf)
    assert done.exit_code == 2


def test_a_damaged_state_stops_a_restore(conf: str, objects: ObjectStore, tmp_path: Path) -> None:
    for info in objects.list(f"{PREFIX}state/"):
        objects.delete([info.name])
        objects.create(info.name, [b"no state"])
    done = run("tiered", "restore", tmp_path / "new", "-c", conf)
    assert done.exit_code == 2
    assert "the state of the broker is damaged" in done.output
    assert not (tmp_path / "new" / "commitlog").exists()
