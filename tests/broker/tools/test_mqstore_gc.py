"""``mqstore tiered gc``: what is found, what is kept, and a broker that goes on meanwhile."""

import json
from collections.abc import Sequence
from threading import Thread
from typing import Any

import pytest
import trio

from tests.broker.tools.test_mqstore import run
from tests.store.simdisk import SimDisk
from tests.store.stores import fill, settings
from tests.store.tiered.bucket import history
from tests.store.tiered.bucket.faulty_store import BROKER, CLUSTER
from tests.store.tiered.bucket.stores import Objects, opened, tier, uploaded
from tests.store.tiered.test_tiered_message_store import all_offsets
from trimq.broker.store.tiered.bucket import joiner, object_contents, uploader
from trimq.broker.store.tiered.bucket.garbage import find_garbage, kind_of, search
from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore, connect
from trimq.broker.store.tiered.bucket.unfinished_uploads import ListedUploads, UnfinishedUpload
from trimq.broker.tiered_config import TieredStorageLevel
from trimq.broker.tools import collect_garbage, tiered_commands
from trimq.broker.tools.collect_garbage import OTHER_STORES, GarbageReport, find, garbage_lines
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.verify_bucket import BucketVerification
from trimq.protocol.bucket_names import ObjectName, indexes_name, page_name, state_name

DUE = tier(tiered_store_bucket_grace_time=-(10**12))
"""All that was ever written is older than the grace."""
NOW = 1 << 60


def of(objects: ObstoreStore, config: Any = DUE, cluster: str = CLUSTER, broker: str = BROKER) -> OfflineBucket:
    return OfflineBucket.of(config, settings(), cluster, broker, objects, SimDisk())


async def collected(found: OfflineBucket, uploads: Any = None) -> GarbageReport:
    report = await collect_garbage.find(found, uploads, NOW)
    await collect_garbage.delete(found, uploads, report, lambda _: None)
    return report


async def owner_of(found: OfflineBucket, uploads: int = 4) -> Manifest:
    """A broker with epoch 2 that has uploaded some objects; its root covers all but the last."""
    before = history.manifest(found.bucket, "before")
    await before.claim()
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, uploads - 1)
    await owner.save(b"state", [str(IndexName(5, 6, 1000, 3, 2))])
    await history.upload(found.bucket, owner, 1)
    return owner


async def write(found: OfflineBucket, names: Sequence[str]) -> None:
    for name in names:
        await found.bucket.create(name, [b"1"])


async def named(found: OfflineBucket) -> set[str]:
    return {info.name for info in await found.bucket.list("")}


async def test_what_is_left_behind_is_found_by_kind_and_deleted() -> None:
    found = of(Objects())
    owner = await owner_of(found)
    assert owner.root is not None
    await history.join(found.bucket, owner, owner.entries[:2])
    await owner.save()
    kept = await named(found)
    garbage = {
        "upload object": [
            history.name(0, 1),
            history.name(9000, 1),
            history.name(1500, 2),  # behind a restart: between those that the manifest has
        ],
        "segment": [
            str(ObjectName(0, 2000, 1, 1, 0)),  # an older owner's
            str(ObjectName(0, 2000, 1, 2, 7)),  # an earlier attempt of a join that was done since
        ],
        "page": [page_name(1, 1, 3), page_name(owner.root.sequence, 2, 3)],
        "state": [state_name(1, 1)],
        "index list": [indexes_name(1, 1)],
        "index file": [str(IndexName(9, 9, 9, 9, 1)), str(IndexName(4, 9, 9, 9, 2))],
    }
    await write(found, [name for names in garbage.values() for name in names])
    await write(found, ["notes.txt", "log/strange"])
    old = {"log/00000000000000000000-00000002", "log/00000000000000001000-00000002"}  # joined
    old |= set(owner.garbage_pages())
    report = await collect_garbage.find(found, None, NOW)
    by_kind: dict[str, set[str]] = {}
    for one in report.objects:
        by_kind.setdefault(one.kind, set()).add(one.name)
    assert {kind: names - old for kind, names in by_kind.items()} == {
        kind: set(names) for kind, names in garbage.items()
    }
    assert report.strange == ["log/strange", "notes.txt"]
    assert report.problem == OTHER_STORES
    text = "\n".join(garbage_lines(report))
    assert "nothing was deleted; --delete does it" in text
    assert f"garbage     {len(by_kind['segment'])} of kind segment, 2 bytes" in text
    assert "note        notes.txt is no object of a broker: it stays" in text
    assert await named(found) >= kept | old
    await collect_garbage.delete(found, None, report, lambda _: None)
    assert await named(found) == (kept - old) | {"notes.txt", "log/strange"}
    assert f"deleted: {len(report.objects)} objects" in list(garbage_lines(report))[-1]
    report = await collect_garbage.find(found, None, NOW)
    assert list(garbage_lines(report))[-1] == "there is no garbage"


async def test_what_is_under_way_is_kept_however_old_it_is() -> None:
    """A broker can be frozen for longer than the grace between an object and the root that names it."""
    found = of(Objects())
    owner = await owner_of(found)
    assert owner.root is not None
    sequence = owner.root.sequence
    under_way = [
        history.name(owner.end + 1000, 2),  # an upload that has begun since the manifest was read
        history.name(0, 3),  # another broker has just become the owner
        str(ObjectName(0, 2000, 1, 2, 7)),  # a join: what it replaces is in the manifest
        str(ObjectName(0, 2000, 1, 3, 0)),
        page_name(sequence + 1, 2, 0),  # a save
        state_name(sequence + 1, 2),
        page_name(sequence + 1, 3, 0),  # a claim
        indexes_name(sequence + 1, 2),
        str(IndexName(7, 9, 9, 9, 2)),  # an index file that the next root names
        str(IndexName(1, 9, 9, 9, 3)),
    ]
    await write(found, under_way)
    report = await collected(found)
    assert await named(found) >= set(under_way)
    assert {one.name for one in report.objects}.isdisjoint(under_way)
    # Without a named index file nothing says how far uploads were.
    await owner.save(indexes=[])
    await collected(found)
    assert under_way[-2] in await named(found)


async def test_young_objects_are_kept() -> None:
    objects = Objects()
    found = of(objects, tier())
    await owner_of(found)
    garbage = history.name(0, 1)
    await write(found, [garbage])
    assert (await collect_garbage.find(found, None, NOW)).objects == []
    assert garbage in {one.name for one in (await collect_garbage.find(of(objects), None, NOW)).objects}


class Uploads:
    """Uploads that a test lists: see UnfinishedUploads."""

    def __init__(self, uploads: Sequence[UnfinishedUpload], now_ms: int) -> None:
        self._listed = list(uploads)
        self._now_ms = now_ms
        self.aborted: list[str] = []

    def list(self, prefix: str) -> ListedUploads:
        return ListedUploads([upload for upload in self._listed if upload.name.startswith(prefix)], self._now_ms)

    def abort(self, upload: UnfinishedUpload) -> None:
        self.aborted.append(upload.upload_id)


async def test_uploads_follow_the_rules_of_objects() -> None:
    grace = 1000
    found = of(Objects(), tier(tiered_store_bucket_grace_time=grace))
    owner = await owner_of(found)
    await history.join(found.bucket, owner, owner.entries[:2])
    await owner.save()
    prefix = found.bucket.prefix
    now = 1_000_000
    joined = str(ObjectName(0, 2000, 1, 2, 0))
    uploads = Uploads(
        [
            UnfinishedUpload(prefix + joined, "its object is there", now - grace - 1),
            UnfinishedUpload(prefix + str(ObjectName(0, 2000, 1, 1, 5)), "older owner", now - grace - 1),
            UnfinishedUpload(prefix + str(ObjectName(0, 2000, 1, 1, 6)), "young", now - grace),
            UnfinishedUpload(prefix + str(ObjectName(2000, 3000, 1, 2, 6)), "a join under way", 0),
            UnfinishedUpload(prefix + "backup", "strange", 0),
            UnfinishedUpload("other/" + joined, "elsewhere", 0),
        ],
        now,
    )
    report = await collected(found, uploads)
    assert uploads.aborted == ["its object is there", "older owner"]
    assert (report.problem, report.objects) == ("", [])
    assert list(garbage_lines(report))[-1] == "deleted: 0 objects, 0 bytes; 2 uploads aborted"
    assert any(line.startswith("upload begun") and line.endswith(joined) for line in garbage_lines(report))
    # An object store that does not say what time it is: this machine's clock may be wrong.
    assert (await collected(found, Uploads([UnfinishedUpload(prefix + joined, "x", 5)], 0))).uploads == []


async def test_uploads_that_cannot_be_listed_stop_nothing() -> None:
    class Refused(Uploads):
        def list(self, prefix: str) -> ListedUploads:
            raise PermissionError(f"no listing of {prefix}")

    found = of(Objects())
    await owner_of(found)
    await write(found, [history.name(0, 1)])
    report = await collected(found, Refused([], 0))
    assert "cannot be listed: no listing of" in report.problem
    assert history.name(0, 1) not in await named(found)


def test_a_command_without_the_library_for_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = connect("memory://gc", endpoint="", region="", path_style=True, timeout_ms=1000)
    trio.run(lambda: owner_of(of(objects)))

    def missing(_: Any) -> None:
        raise OSError("the package botocore is missing")

    monkeypatch.setattr(tiered_commands, "open_unfinished_uploads", missing)
    words = ("gc", "--bucket", "memory://gc", "--cluster", CLUSTER, "--broker", BROKER)
    done = run("tiered", *words)
    assert done.exit_code == 0, done.output
    assert "note        uploads that were never completed are not looked for: the package botocore" in done.output
    assert done.output.endswith("there is no garbage\n")
    done = run("tiered", *words, "--delete", "--json")
    report = json.loads(done.stdout)
    assert (report["isDeleted"], report["objects"], report["uploads"]) == (True, [], [])


async def test_a_broker_goes_on_while_garbage_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write of uploads, joins, claims and expiry: another process deletes all that is garbage, however young.

    Nothing that the broker needs is among it.
    """
    monkeypatch.setattr(object_contents, "OBJECT_BYTES", 2000)
    monkeypatch.setattr(uploader, "OBJECTS_A_ROOT", 4)
    monkeypatch.setattr(joiner, "JOIN_OBJECTS", 3)
    monkeypatch.setattr(joiner, "JOIN_SEGMENTS", 2)
    monkeypatch.setattr(joiner, "PART_SIZE", 5 * 1024 * 1024)
    objects, disk = Objects(), SimDisk()
    failures: list[BaseException] = []
    deleted: list[str] = []

    def collect(call: str, name: str, done: bool) -> None:
        if call not in {"create", "replace", "finish"} or failures:
            return

        async def run() -> None:
            try:
                report = await collected(of(ObstoreStore(objects._store), DUE, "C1", "broker-a"))
                deleted.extend(one.name for one in report.objects)
            except Exception as error:  # noqa: BLE001 - a thread has no one to raise it to
                if "no history" not in str(error):
                    failures.append(error)

        thread = Thread(target=trio.run, args=(run,))
        thread.start()
        thread.join()

    objects.fail = collect
    index = {"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 40}
    config = tier(**index, tiered_storage_level=TieredStorageLevel.FORCE)
    expected: list[Any] = []
    for turn in range(3):
        async with opened(disk, objects, config) as store:
            for queue_id in range(3):
                await fill(store, 20, first=20 * turn, queue_id=queue_id)
            await uploaded(store)
            while await store.joiner.join_next(0):
                await store.uploads.save()
            assert store.tier_index is not None
            while await store.tier_index.upload_next():
                pass
            expected = await all_offsets(store, 0, 20 * (turn + 1), queue_id=1)
    assert failures == []
    assert len(expected) == 60
    kinds = {kind_of(name) for name in deleted}
    assert kinds >= {"upload object", "segment", "page"}, kinds
    found = of(objects, DUE, "C1", "broker-a")
    verification = BucketVerification(found)
    await verification.read()
    report = await verification.run(lambda _: None)
    assert (report.verdict, report.messages, report.holes) == (0, 180, 0), (report.lost, report.index)
    async with opened(SimDisk(), objects, config) as store:
        assert await all_offsets(store, 0, 60, queue_id=1) == expected


async def test_the_owner_keeps_an_index_file_that_it_could_not_name_yet() -> None:
    objects, disk = Objects(), SimDisk()
    small = {"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 40}
    async with opened(disk, objects, tier(**small, tiered_store_bucket_grace_time=-(10**12))) as store:
        await fill(store, 20)
        await uploaded(store)
        assert store.tier_index is not None

        def refuse(call: str, name: str, done: bool) -> None:
            if call == "replace":
                raise OSError(f"{name} refused")

        objects.fail = refuse
        with pytest.raises(OSError, match="refused"):
            await store.tier_index.upload_next()
        (name,) = objects.named("/index/")
        with pytest.raises(OSError, match="refused"):
            await store.upkeep.delete_garbage()
        own = store._index_objects.names
        assert own is not None
        found = await find_garbage(store.bucket, store.manifest, 1 << 60, -(10**12), own)
        assert name.removeprefix(store.bucket.prefix) not in {info.name for info in found}
        objects.fail = lambda call, name, done: None
        await store.upkeep.delete_garbage()
        assert objects.named("/index/") == [name]
        assert await store.tier_index.upload_next()
        assert store.manifest.root is not None
        assert objects.named("/index/") == [store.bucket.prefix + known for known in store.manifest.indexes]
        # What was never named is garbage all the same.
        objects.create(store.bucket.prefix + str(IndexName(1 << 50, 9, 9, 9, 1)), [b"1"])
        assert await store.upkeep.delete_garbage() >= 1
        assert len(objects.named("/index/")) == len(store.manifest.indexes)


async def test_what_the_last_root_has_just_replaced_is_not_garbage_for_others() -> None:
    """An object may be old and have been joined a moment ago: only the owner knows."""
    objects = Objects()
    async with opened(SimDisk(), objects) as store:
        await fill(store, 20)
        await uploaded(store)
        objects.create(store.bucket.prefix + str(ObjectName(0, 2000, 1, 0, 5)), [b"left"])
        (root,) = [info for info in objects.list("", count=1000) if info.name.endswith("manifest/root")]
        now = max(info.modified_ms for info in objects.list("", count=1000))
        early = await search(store.bucket, store.manifest, root.modified_ms + 900, 1000)
        assert (early.garbage, early.is_early) == ([], True)
        late = await search(store.bucket, store.manifest, now + 10**6, -1000)
        assert [info.name for info in late.garbage] == [str(ObjectName(0, 2000, 1, 0, 5))]
        assert not late.is_early
    report = await find(of(objects, tier()), None, root.modified_ms + 900)
    assert report.objects == []
    assert any("A broker that runs deletes it itself" in line for line in garbage_lines(report))
