"""An object store that is slow, cut off, overloaded or away: errors in time, a loop that goes on, and then it works."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.interop.harness.buckets import PREFIX, open_bucket
from tests.interop.harness.faulty_proxy import UNAVAILABLE, Fault, FaultyProxy, faulty_proxy
from tests.interop.harness.object_server import ObjectServer, running_object_server
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.object_store import ChangedError

KIB = 1024
PART = 5 * KIB * KIB
TIMEOUT_MS = 1000
IN_TIME = 4.0
"""Seconds within which a call with that timeout ends on a machine that is busy with other tests."""

Call = Callable[[Bucket], Awaitable[object]]


async def _write_parts(bucket: Bucket) -> None:
    writer = bucket.writer("segments/1", PART)
    for _ in range(2):
        await writer.write(bytes(PART))
    await writer.finish()


#: log/known has 256 KiB; the others do not exist.
CALLS: dict[str, Call] = {
    "create": lambda bucket: bucket.create("log/new", [bytes(256 * KIB)]),
    "replace": lambda bucket: bucket.replace("manifest/new", bytes(128 * KIB), None),
    "read": lambda bucket: bucket.read("log/known"),
    "read_range": lambda bucket: bucket.read_range("log/known", 64 * KIB, 64 * KIB),
    "list": lambda bucket: bucket.list("log/"),
    "delete": lambda bucket: bucket.delete(["log/unneeded"]),
    "parts": _write_parts,
}
FAULTS = {
    "too slow": Fault(delay=30),
    "request cut": Fault(request_bytes=100),
    "reply lost": Fault(reply_bytes=0),
    "reply cut": Fault(reply_bytes=100),
    "unavailable": Fault(answer=UNAVAILABLE),
    "swallowed": Fault(swallows=True),
}


@pytest.fixture
def name(object_server: ObjectServer) -> str:
    """A bucket of this test."""
    return object_server.create_bucket()


@asynccontextmanager
async def proxied(
    server: ObjectServer, name: str, environment: pytest.MonkeyPatch
) -> AsyncIterator[tuple[FaultyProxy, Bucket]]:
    async with faulty_proxy(server.port) as proxy:
        yield proxy, open_bucket(environment, proxy.endpoint, name, tiered_store_bucket_request_timeout=TIMEOUT_MS)


async def failed(call: Call, bucket: Bucket) -> OSError:
    """The error of a call, which came in time, while the loop went on."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(0.01)
            ticks += 1

    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick)
        with pytest.raises(OSError) as caught:
            await call(bucket)
        nursery.cancel_scope.cancel()
    took = time.monotonic() - began
    assert took < IN_TIME
    assert ticks >= int(10 * took)
    return caught.value


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_a_fault_is_an_error_in_time_and_the_next_call_works(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch, fault: Fault, call: Call
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        await bucket.create("log/known", [bytes(256 * KIB)])
        with proxy.fault(fault):
            error = await failed(call, bucket)
        assert type(error) is OSError
        assert "the object store has failed at" in str(error)
        if fault.answer is not None:
            assert "HTTP status 503" in str(error)
        assert (await bucket.read("log/known")).data == bytes(256 * KIB)
        try:
            await call(bucket)
        except (FileExistsError, ChangedError):
            assert fault.reply_bytes is not None or fault.delay


async def test_a_slow_object_store_is_waited_for(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        with proxy.fault(Fault(delay=0.3)):
            began = time.monotonic()
            await bucket.create("log/1", [b"1"])
            assert time.monotonic() - began >= 0.3
            assert (await bucket.read("log/1")).data == b"1"


async def test_a_create_whose_reply_is_lost_is_known_by_its_content(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        content = bytes(range(256)) * 1024
        with proxy.fault(Fault(reply_bytes=0)):
            error = await failed(lambda bucket: bucket.create("log/1", [content]), bucket)
            assert not isinstance(error, FileExistsError)  # the call was sent once
        with pytest.raises(FileExistsError):
            await bucket.create("log/1", [content])
        assert (await bucket.read("log/1")).data == content


async def test_a_replacement_whose_reply_is_lost_is_known_by_its_content(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        first = await bucket.replace("manifest/root", b"1", None)
        with proxy.fault(Fault(reply_bytes=0)):
            error = await failed(lambda bucket: bucket.replace("manifest/root", b"2", first), bucket)
            assert not isinstance(error, ChangedError)
        with pytest.raises(ChangedError):
            await bucket.replace("manifest/root", b"2", first)
        found = await bucket.read("manifest/root")
        assert found.data == b"2"
        assert await bucket.replace("manifest/root", b"3", found.version) != found.version


async def test_an_upload_that_is_cut_leaves_no_object(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        with proxy.fault(Fault(request_bytes=128 * KIB)):
            await failed(CALLS["create"], bucket)
        with pytest.raises(FileNotFoundError):
            await bucket.read("log/new")
        await bucket.create("log/new", [b"whole"])
        assert (await bucket.read("log/new")).data == b"whole"


async def test_after_a_failed_part_nothing_more_is_sent(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(object_server, name, monkeypatch) as (proxy, bucket):
        writer = bucket.writer(f"segments/{name}", PART)
        with proxy.fault(Fault(answer=UNAVAILABLE, answers=re.compile(rb"partNumber="))):
            await writer.write(bytes(PART))  # it is sent while the next one is made
            await failed(lambda _: writer.write(bytes(PART)), bucket)
        with pytest.raises(OSError, match=rf"a part of {PREFIX}segments/{name} was not written"):
            await writer.write(bytes(PART))
        with pytest.raises(OSError, match=r"was not written"):
            await writer.finish()
        await bucket.create(f"after-{name}", [b""])
        seen = object_server.requests(f"{PREFIX}after-{name}")
        assert {operation for operation, one in seen if one == f"{PREFIX}segments/{name}"} == {"CreateMultipartUpload"}
        assert not {"CreateBucket", "PostObject"} & {operation for operation, _ in seen}
        assert await bucket.list("segments/") == []


async def test_a_server_that_is_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_object_server(tmp_path) as server:
        bucket = open_bucket(monkeypatch, server.endpoint, server.create_bucket())
        await bucket.create("log/1", [b"1"])
        server.process.kill()
        for call in CALLS.values():
            assert type(await failed(call, bucket)) is OSError
        await trio.to_thread.run_sync(server.start)
        assert (await bucket.read("log/1")).data == b"1"
