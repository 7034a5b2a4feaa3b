"""``mqstore tiered ls`` and ``verify`` on a bucket in memory: sound, damaged, and while its broker goes on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from tests.broker.tools.test_mqstore import run
from tests.store.simdisk import SimDisk
from tests.store.stores import TOPIC, fill, settings, until_dispatched
from tests.store.tiered.bucket import history
from tests.store.tiered.bucket.faulty_store import BROKER, CLUSTER
from tests.store.tiered.bucket.stores import Objects, opened, tier
from tests.store.tiered.bucket.test_bucket_message_store import write
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.index_objects import IndexName
from trimq.broker.store.tiered.bucket.manifest import Manifest
from trimq.broker.store.tiered.bucket.object_store import ObjectStore
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore, connect
from trimq.broker.tools import command_parts
from trimq.broker.tools.bucket_listing import bucket_lines, list_bucket
from trimq.broker.tools.offline_bucket import OfflineBucket
from trimq.broker.tools.offline_store import NotUsableError
from trimq.broker.tools.verify_bucket import BucketReport, BucketVerification
from trimq.protocol.bucket_manifest import PageRef, decode_indexes, decode_root, encode_page, encode_root
from trimq.protocol.bucket_names import page_name
from trimq.protocol.bucket_object import BucketFormatError, decode_end, decode_header, encode_header
from trimq.protocol.tiered_index_layout import GROUP

PREFIX = "C1/broker-a/"
COUNT, OTHERS, LATER = 60, 5, 7


class Bucket(NamedTuple):
    """A bucket with a history: three upload objects, the last of which no page names."""

    objects: Objects
    found: OfflineBucket

    def get(self, name: str) -> bytes:
        return ObstoreStore.read(self.objects, name).data

    def put(self, name: str, data: bytes) -> None:
        self.objects.delete([name])
        ObstoreStore.create(self.objects, name, [data])

    def change(self, name: str, at: int, data: bytes | None = None) -> None:
        """Change bytes of an object; without ``data`` one bit."""
        old = bytearray(self.get(name))
        at %= len(old)
        new = bytes([old[at] ^ 1]) if data is None else data
        old[at : at + len(new)] = new
        self.put(name, bytes(old))

    def names(self, part: str) -> Sequence[str]:
        return self.objects.named(part)

    def verify(self, *topics: str, messages: bool = True) -> BucketReport:
        async def check() -> BucketReport:
            verification = BucketVerification(self.found, check_messages=messages)
            await verification.read(frozenset(topics))
            done = [0]
            report = await verification.run(done.append)
            assert done == sorted(done)
            assert done[-1] == verification.total
            return report

        return trio.run(check)


INDEX = {"tiered_store_index_file_max_hash_slot_num": 64, "tiered_store_index_file_max_index_num": 40}


async def fill_bucket(objects: ObjectStore, *, last: bool = True) -> None:
    """``last``: also an upload object that no page names."""
    disk = SimDisk()
    async with opened(disk, objects, tier(**INDEX)) as store:
        await fill(store, COUNT)
        await fill(store, OTHERS, topic="Other", queue_id=2)
        disk.make_directory(f"{store.root}/config")
        write(disk, f"{store.root}/config/topics.json", b'{"topicConfigTable":{}}')
        offsets = {"offsetTable": {f"{TOPIC}@g": {"0": COUNT + LATER + 3}}}
        write(disk, f"{store.root}/config/consumerOffset.json", json.dumps(offsets).encode())
        await upload(store)
        await fill(store, LATER, first=COUNT)
        await upload(store)
        assert store.tier_index is not None
        while await store.tier_index.upload_next():
            pass
        if last:
            assert isinstance(objects, Objects)
            await fill(store, 1, topic="Last")
            objects.fail = refused
            with pytest.raises(OSError, match="refused"):
                await upload(store)
    if last:
        assert isinstance(objects, Objects)
        objects.fail = allowed


def allowed(call: str, name: str, done: bool) -> None: ...


def refused(call: str, name: str, done: bool) -> None:
    if call == "replace":
        raise OSError(f"{name} refused")


async def upload(store: BucketMessageStore) -> None:
    await until_dispatched(store)
    await store.flush()
    await store.uploads.upload_all()


@pytest.fixture
def bucket() -> Bucket:
    objects = Objects()
    trio.run(fill_bucket, objects)
    return Bucket(objects, OfflineBucket.of(tier(), settings(), "C1", "broker-a", objects, SimDisk()))


def shown(report: BucketReport) -> dict[str, str]:
    """The faults by kind, without kinds that have none."""
    kinds = {"lost": report.lost, "repairable": report.repairable, "index": report.index}
    return {kind: "\n".join(faults.shown) for kind, faults in kinds.items() if faults.count}


def test_a_sound_bucket(bucket: Bucket) -> None:
    report = bucket.verify()
    assert shown(report) == {}
    assert report.verdict.name == "SOUND"
    assert (report.queues, report.messages, report.objects) == (3, COUNT + OTHERS + LATER + 1, 3)
    assert (report.pages, report.state_files, report.holes) == (1, 2, 0)
    assert report.index_files >= 3
    assert report.index_entries > COUNT
    assert report.notes == []
    only = bucket.verify("Other")
    assert (only.messages, only.objects, only.index_files, only.state_files) == (OTHERS, 1, 0, 0)
    ends = bucket.verify(messages=False)
    assert (ends.messages, ends.bytes, shown(ends)) == (report.messages, report.bytes, {})


LOG, STATE, PAGE, INDEX_LIST, INDEX_FILE = "/log/", "/state/", "/manifest/page-", "/manifest/indexes-", "/index/"


def delete(bucket: Bucket, name: str) -> None:
    bucket.objects.delete([name])


def cut(bucket: Bucket, name: str) -> None:
    bucket.put(name, bucket.get(name)[:-1])


def flip(at: int) -> Callable[[Bucket, str], None]:
    return lambda bucket, name: bucket.change(name, at)


def another_epoch(bucket: Bucket, name: str) -> None:
    header = decode_header(bucket.get(name))
    bucket.change(name, 0, encode_header(header._replace(epoch=header.epoch + 1)))


def shorten_last_slot(bucket: Bucket, name: str) -> None:
    """One entry fewer belongs to the last slot that has some."""
    data = bucket.get(name)
    slots = [28 + 8 * number for number in range(64)]
    at = max(at for at in slots if GROUP.unpack_from(data, at)[1])
    place, length = GROUP.unpack_from(data, at)
    bucket.change(name, at, GROUP.pack(place, length - 28))


DAMAGE: dict[str, tuple[str, Callable[[Bucket, str], None], str, str, int]] = {
    "object gone": (LOG, delete, "lost", f"is not in the bucket: {COUNT + OTHERS} messages", COUNT + OTHERS),
    "object cut": (LOG, cut, "lost", "the manifest says", COUNT + OTHERS),
    "header": (LOG, flip(20), "lost", "the header of the object is damaged", COUNT + OTHERS),
    "header of another": (LOG, another_epoch, "lost", "its header says LOG of epoch 2", COUNT + OTHERS),
    "footer": (LOG, flip(-20), "lost", "messages: the footer of the object is damaged", COUNT + OTHERS),
    "message": (LOG, flip(64 + OTHERS * 20 + 7), "lost", f"Other/2 messages 0 to {OTHERS - 1}: their checksum", OTHERS),
    "page gone": (PAGE, delete, "lost", "2 objects of the page manifest/page-", COUNT + OTHERS + LATER),
    "page damaged": (PAGE, flip(30), "lost", "the manifest page is damaged", COUNT + OTHERS + LATER),
    "list gone": (INDEX_LIST, delete, "lost", "the list of index files manifest/indexes-", 0),
    "list damaged": (INDEX_LIST, cut, "lost", "the list of index files is damaged", 0),
    "index gone": (INDEX_FILE, delete, "index", "its keys are not found", 0),
    "index cut": (INDEX_FILE, cut, "index", "its name says", 0),
    "index header": (INDEX_FILE, flip(0), "index", "entries do not make", 0),
    "index slot": (INDEX_FILE, flip(28 + 7), "index", "its slots do not lead", 0),
    "index entries": (INDEX_FILE, shorten_last_slot, "index", "its slots do not lead to", 0),
    "index hash": (INDEX_FILE, flip(28 + 64 * 8 + 3), "index", "in the slot of another key", 0),
    "index place": (INDEX_FILE, flip(28 + 64 * 8 + 14), "index", "lead to no message", 0),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_found(bucket: Bucket, case: str) -> None:
    part, damage, kind, text, lost = DAMAGE[case]
    root = decode_root(bucket.get(f"{PREFIX}manifest/root"))
    named = f"{root} {decode_indexes(bucket.get(PREFIX + root.indexes))}"
    damage(bucket, next(name for name in bucket.names(part) if part == LOG or name.removeprefix(PREFIX) in named))
    report = bucket.verify()
    faults = shown(report)
    assert list(faults) == [kind], faults
    assert text in faults[kind]
    assert report.messages == COUNT + OTHERS + LATER + 1 - lost
    assert report.verdict == {"lost": 3, "index": 1}[kind]


def test_ends_of_objects_are_checked_without_messages(bucket: Bucket) -> None:
    name = bucket.names(LOG)[0]
    bucket.change(name, 64 + 10)
    assert shown(bucket.verify(messages=False)) == {}
    bucket.change(name, -20)
    assert "damaged" in shown(bucket.verify(messages=False))["lost"]


def test_the_state_for_a_restore(bucket: Bucket) -> None:
    """The newest one counts: that of an upload object behind the root, otherwise the root's."""
    for name in bucket.names(STATE):
        bucket.change(name, 5)
    report = bucket.verify()
    assert list(shown(report)) == ["repairable"]
    assert "the state in state/" in shown(report)["repairable"]
    assert report.verdict == 1
    for name in bucket.names(STATE):
        delete(bucket, name)
    assert "is not in the bucket" in shown(bucket.verify())["repairable"]
    (_, _, last) = bucket.names(LOG)
    found = decode_end(bucket.get(last), len(bucket.get(last)))
    assert not found.state_length


async def test_a_damaged_state_behind_the_root() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 1, state=b"no state")
    report = await verified(found)
    assert "the state in log/" in shown(report)["lost"]
    assert "state of the broker is damaged" in shown(report)["lost"]
    assert report.verdict == 3


async def verified(found: OfflineBucket, *, messages: bool = False) -> BucketReport:
    verification = BucketVerification(found, check_messages=messages)
    await verification.read()
    return await verification.run(lambda _: None)


async def test_holes_and_overlaps_of_a_manifest() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 5)
    first, second, third, _, _ = owner.entries
    await owner.save()
    report = await verified(found)
    assert shown(report) == {}
    assert any("there is no state" in note for note in report.notes)
    await history.join(found.bucket, owner, [first, second])  # its builder writes one message only: number 0
    owner.change([third.object], [])
    await owner.save()
    report = await verified(found)
    assert shown(report) == {}
    assert report.holes == 2
    assert any("the log from 2000 to 3000 is in no object" in note for note in report.notes)
    assert any("T/0: messages 1 to 2 are not in the bucket" in note for note in report.notes)
    assert any("3 objects with messages or keys are not in the manifest" in note for note in report.notes)
    owner.change([], [first])
    await owner.save()
    report = await verified(found)
    assert "cover the same part of the log" in shown(report)["lost"]
    assert "T/0: segments/" in shown(report)["lost"] or "begins with message 0" in shown(report)["lost"]
    assert "is not behind the one before in the log" in shown(report)["lost"]


async def test_the_manifest_and_a_directory_say_different_things() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 1, queues=3)
    (entry,) = owner.entries
    rows = list(entry.stretches)
    owner.change([entry.object], [entry._replace(stretches=[rows[0], rows[1]._replace(last_physical=77)])])
    await owner.save()
    report = await verified(found)
    assert shown(report) == {
        "lost": f"T/1 messages 0 to 0: the directory of {entry.object.name} does not have them as the manifest says"
    }
    assert any("has messages of T/2, which the manifest does not name: deleted" in note for note in report.notes)


async def test_what_a_broker_replaces_meanwhile_is_no_fault() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 3)
    await owner.save()
    verification = BucketVerification(found, check_messages=False)
    await verification.read()
    first, second, _ = owner.entries
    await history.join(found.bucket, owner, [first, second])
    await owner.save()
    await found.bucket.delete([first.object.name, *owner.garbage_pages()])
    report = await verification.run(lambda _: None)
    assert shown(report) == {}
    assert any(f"{first.object.name} was replaced" in note for note in report.notes)


async def test_a_page_that_is_replaced_while_it_is_read() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 2)
    await owner.save()
    (old,) = history.pages_of(owner)
    await history.upload(found.bucket, owner, 1)
    root = await found.bucket.read("manifest/root")
    await owner.save()
    new = await found.bucket.read("manifest/root")
    path = found.bucket.prefix + "manifest/root"
    objects.delete([path, found.bucket.prefix + old.name])
    objects.create(path, [root.data])
    put_back = [path]

    def replace(call: str, name: str, done: bool) -> None:
        if call == "read" and name.endswith(old.name) and put_back:
            ObstoreStore.delete(objects, [put_back.pop()])
            ObstoreStore.create(objects, path, [new.data])

    objects.fail = replace
    report = await verified(found)
    assert (shown(report), report.objects) == ({}, 3)


async def test_an_object_that_does_not_fit_one_page() -> None:
    objects = Objects()
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, objects, SimDisk())
    owner = history.manifest(found.bucket, "me")
    await owner.claim()
    await history.upload(found.bucket, owner, 2, queues=4)
    await owner.save()
    assert owner.root is not None
    first, second = owner.entries
    parts = [
        [first, second._replace(stretches=second.stretches[:1])],
        [second._replace(stretches=second.stretches[1:])],
    ]
    refs = []
    for number, part in enumerate(parts):
        name, data = page_name(99, 1, number), encode_page(part)
        await found.bucket.create(name, [data])
        refs.append(PageRef(name, len(data), len(part)))
    path = found.bucket.prefix + "manifest/root"
    objects.delete([path])
    objects.create(path, [encode_root(replace(owner.root, pages=tuple(refs)))])
    report = await verified(found)
    assert (shown(report), report.objects, report.messages, report.pages) == ({}, 2, 8, 2)
    assert not any("deleted" in note for note in report.notes)


async def test_a_bucket_without_a_history() -> None:
    found = OfflineBucket.of(tier(), settings(), CLUSTER, BROKER, Objects(), SimDisk())
    with pytest.raises(NotUsableError, match=r"no history of broker .* is empty"):
        await verified(found)
    with pytest.raises(NotUsableError, match="no history"):
        await list_bucket(found)
    await found.bucket.create("log/x", [b"1"])
    with pytest.raises(BucketFormatError, match="without its root"):
        await list_bucket(found)


def test_an_index_file_with_a_strange_name(bucket: Bucket) -> None:
    async def change() -> None:
        owner = Manifest(bucket.found.bucket, "C1", "broker-a")
        await owner.claim()
        await owner.save(indexes=["index/1", str(IndexName(1, 2, 3, 0, 1))])

    trio.run(change)
    assert shown(bucket.verify())["index"].count("is no name of an index file") == 2
    listed = trio.run(list_bucket, bucket.found)
    assert [file.upto for file in listed.index] == [None, 3]


# -- ls


def test_what_is_listed(bucket: Bucket) -> None:
    bucket.objects.calls.clear()
    listed = trio.run(list_bucket, bucket.found)
    assert [(queue.topic, queue.queue_id, queue.min_offset, queue.max_offset) for queue in listed.queues] == [
        ("Last", 0, 0, 1),
        ("Other", 2, 0, OTHERS),
        (TOPIC, 0, 0, COUNT + LATER),
    ]
    queue = listed.queues[-1]
    assert (queue.messages, queue.objects) == (COUNT + LATER, 2)
    assert queue.begin_timestamp is not None
    assert queue.end_timestamp is not None
    assert queue.begin_timestamp <= queue.end_timestamp
    assert [PREFIX + one.name for one in listed.objects] == bucket.names(LOG)
    assert [one.is_saved for one in listed.objects] == [True, True, False]
    assert [one.begin for one in listed.objects] == [0, *(one.end for one in listed.objects[:-1])]
    assert listed.end == listed.objects[-1].end > listed.root.end == listed.objects[-2].end
    assert listed.root.epoch == 1
    assert [PREFIX + file.name for file in listed.index] == bucket.names(INDEX_FILE)
    assert not {call for call, name in bucket.objects.calls if call == "read_range" and "/index/" in name}
    text = "\n".join(bucket_lines(listed, segments=True))
    assert f"epoch 1; the root was replaced {listed.root.sequence} times" in text
    assert "2 objects up to" in text
    assert text.count("\nobject ") == 3
    assert text.count("\nindex ") == len(listed.index)
    assert "\nobject" not in "\n".join(bucket_lines(listed, segments=False))
    only = trio.run(list_bucket, bucket.found, frozenset(["Other"]))
    assert [(one.messages, one.queues) for one in only.objects] == [(OTHERS, 1)]
    assert (len(only.queues), only.index) == (1, [])


async def test_a_queue_whose_messages_have_expired_is_listed_with_its_end() -> None:
    objects, disk = Objects(), SimDisk()
    async with opened(disk, objects) as store:
        await fill(store, 3)
        await upload(store)
        assert await store.bucket_queues.expire(1 << 60)
        found = OfflineBucket.of(tier(), settings(), "C1", "broker-a", objects, disk)
        listed = await list_bucket(found)
        (queue,) = listed.queues
        assert (queue.min_offset, queue.max_offset, queue.messages, queue.begin_timestamp) == (3, 3, 0, None)
        assert listed.objects == []
        assert (await verified(found)).verdict == 0
        await fill(store, 2, first=3)
        await upload(store)
        (queue,) = (await list_bucket(found)).queues
        assert (queue.min_offset, queue.max_offset, queue.messages) == (3, 5, 2)
        assert (await verified(found, messages=True)).holes == 0


# -- the commands


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> str:
    trio.run(lambda: fill_bucket(connect("memory://commands", **PLAIN), last=False))
    file = tmp_path_factory.mktemp("conf") / "broker.conf"
    lines = ("tieredBackendServiceProvider=trimq.Bucket", "tieredStoreBucket=memory://commands")
    file.write_text("\n".join((*lines, "brokerClusterName=C1", "brokerName=broker-a")), encoding="utf-8")
    return str(file)


PLAIN: dict[str, Any] = {"endpoint": "", "region": "", "path_style": True, "timeout_ms": 1000}
NAMED = ("--bucket", "memory://commands", "--cluster", "C1", "--broker", "broker-a")


def test_a_bucket_is_named_by_configuration_or_options(conf: str, tmp_path: Path) -> None:
    for words in (("-c", conf), NAMED, (tmp_path / "no-store", "-c", conf)):
        done = run("tiered", "ls", *words, "--json")
        assert done.exit_code == 0, done.output
        listed = json.loads(done.stdout)
        assert [queue["topic"] for queue in listed["queues"]] == ["Other", TOPIC]
        assert listed["queues"][1]["maxOffset"] == COUNT + LATER
    done = run("tiered", "verify", *NAMED, "--json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (0, "SOUND")
    done = run("tiered", "verify", *NAMED)
    assert f"{COUNT + OTHERS + LATER} in 2 queues" in done.output
    assert done.output.endswith("the tier is sound\n")
    assert f"{TOPIC:32} {0:5} {0:12} {COUNT + LATER:12}" in run("tiered", "ls", "-c", conf).output


def test_a_bucket_is_named_by_the_variables_of_a_container(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMQ_TIERED_BACKEND_SERVICE_PROVIDER", "trimq.Bucket")
    monkeypatch.setenv("TRIMQ_TIERED_STORE_BUCKET", "memory://commands")
    monkeypatch.setenv("TRIMQ_BROKER_NAME", "broker-a")
    assert "no history of broker broker-a in cluster DefaultCluster" in run("tiered", "ls").output
    assert f"{TOPIC:32} {0:5} {0:12} {COUNT + LATER:12}" in run("tiered", "ls", "--cluster", "C1").output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ls",), "where is the tier?"),
        (("ls", "--prefix", "x"), "which bucket?"),
        (("gc",), "which bucket?"),
        (("ls", *NAMED, "--tier", "x"), "does not go together"),
        (("ls", *NAMED, "--prefix", "x"), "there is no history of broker broker-a in cluster C1"),
        (("verify", *NAMED, "--prefix", "x"), "there is no history"),
        (("ls", "--bucket", "ftp://x"), "--bucket"),
        (("ls", "--bucket", "s3://x", "--endpoint", "localhost"), "--endpoint"),
    ],
)
def test_what_cannot_be_used(words: tuple[str, ...], text: str) -> None:
    done = run("tiered", *words)
    assert done.exit_code == 2
    assert text in done.output
    assert done.output.startswith("mqstore: ")


def test_a_damaged_bucket_ends_with_3(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = connect("memory://damaged", **PLAIN)
    trio.run(lambda: fill_bucket(objects, last=False))
    first = objects.list(f"{PREFIX}log/")[0].name
    objects.delete([first])
    done = run("tiered", "verify", "-c", conf, "--bucket", "memory://damaged")
    assert done.exit_code == 3
    assert f"fault       lost: {first.removeprefix(PREFIX)} is not in the bucket" in done.output
    assert done.output.endswith("the tier is damaged: messages are lost\n")
    objects.delete([f"{PREFIX}manifest/root"])
    done = run("tiered", "verify", "-c", conf, "--bucket", "memory://damaged")
    assert done.exit_code == 2
    assert "without its root the history cannot be read" in done.output


def test_the_bar_is_in_bytes(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[tuple[str, int | None]] = []
    original = command_parts.progress

    def recorded(what: str, total: int | None, unit: str = "") -> Any:
        totals.append((what, total))
        return original(what, total, unit)

    monkeypatch.setattr(command_parts, "progress", recorded)
    assert run("tiered", "verify", "-c", conf).exit_code == 0
    ((what, total),) = totals
    assert what == "verifying"
    assert total is not None
    assert total > 10_000
