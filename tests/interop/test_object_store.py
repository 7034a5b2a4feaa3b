"""The seam to object stores against a real server of S3: each call, each error, and the number of requests."""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
import trio

from tests.interop.harness.buckets import PREFIX, open_bucket
from tests.interop.harness.object_server import SECRET_KEY, ObjectServer
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.object_store import ChangedError

MIB = 1024 * 1024


@pytest.fixture
def name(object_server: ObjectServer) -> str:
    """A bucket of this test."""
    return object_server.create_bucket()


@pytest.fixture
def bucket(object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return open_bucket(monkeypatch, object_server.endpoint, name)


async def test_what_was_written_is_read(bucket: Bucket, object_server: ObjectServer, name: str) -> None:
    await bucket.create("log/1", [b"one", memoryview(b"-two")])
    assert (await bucket.read("log/1")).data == b"one-two"
    assert bytes(await bucket.read_range("log/1", 4, 2)) == b"tw"
    assert bytes(await bucket.read_range("log/1", 4, 200)) == b"two"
    # The name arrives as it was given: what is encoded in it is not encoded again.
    assert (object_server.files(name) / "prod" / "mq" / "C%2F1" / "broker-a" / "log" / "1").read_bytes() == b"one-two"
    assert bucket.requests == {"put": 1, "get": 3}


async def test_an_object_is_created_once(bucket: Bucket) -> None:
    await bucket.create("log/1", [b"first"])
    with pytest.raises(FileExistsError, match="log/1 is in the bucket already"):
        await bucket.create("log/1", [b"second"])
    assert (await bucket.read("log/1")).data == b"first"


async def test_of_eight_creators_one_wins(bucket: Bucket) -> None:
    outcomes: Counter[str] = Counter()
    won: list[bytes] = []

    async def create(number: int) -> None:
        content = bytes([number]) * 100_000
        try:
            await bucket.create("log/race", [content])
        except FileExistsError:
            outcomes["lost"] += 1
        else:
            outcomes["won"] += 1
            won.append(content)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(create, number)
    assert outcomes == {"won": 1, "lost": 7}
    assert [(await bucket.read("log/race")).data] == won


async def test_only_the_known_version_is_replaced(bucket: Bucket) -> None:
    first = await bucket.replace("manifest/root", b"1", None)
    with pytest.raises(ChangedError):
        await bucket.replace("manifest/root", b"other", None)
    second = await bucket.replace("manifest/root", b"2", first)
    assert await bucket.read("manifest/root") == (b"2", second)
    with pytest.raises(ChangedError, match="was changed meanwhile"):
        await bucket.replace("manifest/root", b"3", first)
    assert (await bucket.read("manifest/root")).data == b"2"
    with pytest.raises(ChangedError):
        await bucket.replace("manifest/none", b"1", first)


async def test_of_eight_owners_one_wins(bucket: Bucket) -> None:
    version = await bucket.replace("manifest/root", b"old", None)
    won: list[bytes] = []

    async def own(number: int) -> None:
        try:
            await bucket.replace("manifest/root", b"owner %d" % number, version)
        except ChangedError:
            return
        won.append(b"owner %d" % number)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(own, number)
    assert won == [(await bucket.read("manifest/root")).data]


async def test_what_does_not_exist(bucket: Bucket) -> None:
    with pytest.raises(FileNotFoundError, match="log/1 is not in the bucket"):
        await bucket.read("log/1")
    with pytest.raises(FileNotFoundError):
        await bucket.read_range("log/1", 0, 1)
    assert await bucket.list("log/") == []
    await bucket.delete(["log/1"])


async def test_a_range_behind_the_end_is_an_error(bucket: Bucket) -> None:
    await bucket.create("log/1", [b"123"])
    with pytest.raises(OSError, match="HTTP status 416 InvalidRange") as caught:
        await bucket.read_range("log/1", 3, 1)
    assert type(caught.value) is OSError


async def every_error(bucket: Bucket) -> list[OSError]:
    """The errors of all calls on a bucket with which none succeeds."""

    async def write_parts() -> None:
        writer = bucket.writer("log/parts", 8 * MIB)
        await writer.write(bytes(8 * MIB))
        await writer.finish()

    calls = [
        lambda: bucket.create("log/1", [b"1"]),
        lambda: bucket.replace("log/1", b"1", None),
        lambda: bucket.replace("log/1", b"1", '"0123"'),
        lambda: bucket.read("log/1"),
        lambda: bucket.read_range("log/1", 0, 1),
        lambda: bucket.list("log/"),
        lambda: bucket.delete(["log/1", "log/2"]),
        write_parts,
    ]
    errors = []
    for call in calls:
        with pytest.raises(OSError) as caught:
            await call()
        errors.append(caught.value)
    return errors


async def test_a_wrong_key_is_refused_and_no_text_has_a_secret(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a-wrong-secret"
    errors = await every_error(open_bucket(monkeypatch, object_server.endpoint, name, secret))
    # The library makes an error without a kind of what fails while it writes parts.
    assert [type(error) for error in errors[:-1]] == [PermissionError] * (len(errors) - 1)
    assert type(errors[-1]) in (PermissionError, OSError)
    for error in errors:
        assert "HTTP status 403 SignatureDoesNotMatch" in str(error)
        text = "".join(traceback.format_exception(error)) + repr(error)
        for word in (secret, SECRET_KEY, "Signature=", "AWSAccessKeyId"):
            assert word not in text


async def test_a_bucket_that_does_not_exist_is_no_missing_object(
    object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in await every_error(open_bucket(monkeypatch, object_server.endpoint, "no-such-bucket")):
        assert type(error) is OSError
        assert "the bucket does not exist" in str(error)


async def test_a_bucket_that_is_deleted(bucket: Bucket, object_server: ObjectServer, name: str) -> None:
    await bucket.create("log/1", [b"1"])
    object_server.delete_bucket(name)
    for error in await every_error(bucket):
        assert type(error) is OSError
        assert "the bucket does not exist" in str(error)


async def test_a_listing_is_sorted_and_its_pages_miss_nothing(bucket: Bucket, object_server: ObjectServer) -> None:
    names = [f"log/{number:05d}" for number in range(1100)]

    async def create(some: list[str]) -> None:
        for one in some:
            await bucket.create(one, [one.encode()])

    async with trio.open_nursery() as nursery:
        for worker in range(8):
            nursery.start_soon(create, names[worker::8])
    await bucket.create("logs", [b"not in the directory"])
    await bucket.create("other/1", [b""])

    async def listed(mark: str, prefix: str, after: str, count: int) -> tuple[list[str], int]:
        """Names, and the listings that the server saw."""
        await bucket.replace(f"{mark}-begins", b"", None)
        found = await bucket.list(prefix, after, count)
        await bucket.replace(f"{mark}-ends", b"", None)
        seen = object_server.requests(f"{PREFIX}{mark}-ends")
        operations = seen[seen.index(("PutObject", f"{PREFIX}{mark}-begins")) :]
        return [info.name for info in found], [operation for operation, _ in operations].count("ListObjectsV2")

    assert await listed("a", "log/", "", 1000) == (names[:1000], 1)
    assert await listed("b", "log/", names[999], 1000) == (names[1000:], 1)
    assert await listed("c", "log/", "", 10) == (names[:10], 1)
    assert await listed("d", "log/000", names[50], 1000) == (names[51:100], 1)
    assert await listed("e", "log/", "log/01099", 1000) == ([], 1)
    assert await listed("f", "log", "", 1) == (names[:1], 1)
    before = bucket.requests["list"]
    assert await listed("g", "log/", "", 2000) == (names, 2)
    assert bucket.requests["list"] == before + 2
    assert await bucket.list("log/00007") == []  # no longer name begins with it
    [info] = await bucket.list("log/0000", "log/00006", 1)
    assert (info.name, info.size) == ("log/00007", 9)


async def test_many_are_deleted_with_few_requests(bucket: Bucket, object_server: ObjectServer, name: str) -> None:
    directory = object_server.files(name) / PREFIX / "log"
    await bucket.create("log/first", [b""])
    for number in range(1200):  # as files, which takes less time than as many requests
        (directory / f"{number:04d}").touch()
    await bucket.delete(["log/first", "log/missing", *(f"log/{number:04d}" for number in range(1199))])
    await bucket.create("deleted", [b""])
    seen = object_server.requests(f"{PREFIX}deleted")
    operations = [operation for operation, _ in seen[seen.index(("PutObject", f"{PREFIX}log/first")) :]]
    assert operations == ["PutObject", "DeleteObjects", "DeleteObjects", "PutObject"]
    assert bucket.requests["delete"] == 2
    assert [info.name for info in await bucket.list("log/")] == ["log/1199"]


@pytest.mark.parametrize(
    ("size", "requests"),
    [
        (1000, ["PutObject"]),
        (8 * MIB, ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"]),
        (24 * MIB, ["CreateMultipartUpload", *["UploadPart"] * 3, "CompleteMultipartUpload"]),
        (24 * MIB + 1, ["CreateMultipartUpload", *["UploadPart"] * 4, "CompleteMultipartUpload"]),
    ],
)
async def test_an_object_in_parts(bucket: Bucket, object_server: ObjectServer, size: int, requests: list[str]) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    writer = bucket.writer(f"segments/{size}", 8 * MIB)
    for at in range(0, size, 3 * MIB):
        await writer.write(content[at : at + 3 * MIB])
    with pytest.raises(FileNotFoundError):
        await bucket.read_range(f"segments/{size}", 0, 1)
    await writer.finish()
    assert bytes(await bucket.read_range(f"segments/{size}", size - 1000, 1000)) == content[-1000:]
    [info] = await bucket.list("segments/")
    assert info.size == size
    await bucket.create(f"written-{size}", [b""])
    seen = object_server.requests(f"{PREFIX}written-{size}")
    mine = [operation for operation, name in seen if name == f"{PREFIX}segments/{size}"]
    assert [operation for operation in mine if operation != "GetObject"] == requests
    assert bucket.requests["put"] == len(requests) + 1
    assert bucket.calls["put"].sizes.total == size


async def test_the_bucket_in_the_name_of_the_host(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No resolver knows the host: the server itself stands in as the proxy that does."""
    monkeypatch.setenv("HTTP_PROXY", object_server.endpoint)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    endpoint = f"http://localhost:{object_server.port}"
    bucket = open_bucket(monkeypatch, endpoint, name, tiered_store_bucket_path_style=False)
    await bucket.create("log/host", [b"1"])
    assert [info.name for info in await bucket.list("log/")] == ["log/host"]
    log = (object_server.directory / "access.log").read_text(encoding="utf-8")
    object_server.requests(f"{PREFIX}log/host")
    log = (object_server.directory / "access.log").read_text(encoding="utf-8")
    assert f" s3_PutObject {PREFIX}log/host http://{name}.localhost:{object_server.port}/prod/mq/" in log


async def test_calls_are_measured(bucket: Bucket) -> None:
    await bucket.create("log/1", [b"12", b"3"])
    await bucket.read_range("log/1", 1, 2)
    await bucket.read("log/1")
    with pytest.raises(FileNotFoundError):
        await bucket.read("log/2")
    with pytest.raises(OSError, match="416"):
        await bucket.read_range("log/1", 9, 1)
    await bucket.list("log/")
    await bucket.delete(["log/1"])
    await bucket.delete([])
    counts = {
        kind: (sum(stats.succeeded.counts), sum(stats.failed.counts), stats.sizes.total)
        for kind, stats in bucket.calls.items()
    }
    assert counts == {"put": (1, 0, 3), "get": (3, 1, 5), "list": (1, 0, 0), "delete": (1, 0, 0)}
    assert bucket.requests == {"put": 1, "get": 4, "list": 1, "delete": 1}
