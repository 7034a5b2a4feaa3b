"""``mqstore tiered`` as a process on a bucket of a real object store, and the commands of docs/operate.md for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.broker.wire_client import WireClient
from tests.docs.commands import PAGES
from tests.docs.test_operate import sh
from tests.interop.harness.buckets import open_bucket
from tests.interop.harness.object_server import CREDENTIALS, SECRET_KEY, ObjectServer
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.store.tiered.bucket.unfinished_uploads import open_unfinished_uploads
from trimq.broker.testing import running_broker
from trimq.broker.tiered_config import BUCKET_PROVIDER, PLUG_IN, TieredStoreConfig
from trimq.protocol.bucket_names import ObjectName, page_name

PREFIX = "prod/C1/broker-a/"
MIB = 1024 * 1024
SENT = 30
_MAIN = "import sys; from trimq.broker.tools.cli import main; main(sys.argv[1:])"


@pytest.fixture
def name(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of this test; this process may use it."""
    for key, value in CREDENTIALS.items():
        monkeypatch.setenv(key, value)
    return object_server.create_bucket()


@pytest.fixture
def settings(object_server: ObjectServer, name: str) -> dict[str, Any]:
    return {
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": BUCKET_PROVIDER,
        "tieredStoreBucket": f"s3://{name}",
        "tieredStoreBucketPrefix": "prod",
        "tieredStoreBucketEndpoint": object_server.endpoint,
        "tieredStoreBucketGraceTime": 60_000,
        "brokerClusterName": "C1",
        "brokerName": "broker-a",
        "mappedFileSizeCommitLog": MIB,
    }


@pytest.fixture
def conf(settings: dict[str, Any], tmp_path: Path) -> str:
    file = tmp_path / "broker.conf"
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
    return str(file)


def mqstore(*words: object, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "tiered", *map(str, words)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


async def send(store: Path, settings: dict[str, Any], first: int = 0) -> None:
    async with running_broker(store, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        for number in range(first, first + SENT):
            assert (await client.send("T", b"%d" % number)).code == 0
        assert isinstance(broker.context.store, BucketMessageStore)
        await broker.context.store.flush()
        await broker.context.store.uploads.upload_all()


def names(object_server: ObjectServer, name: str) -> set[str]:
    root = object_server.files(name) / PREFIX
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def make_old(object_server: ObjectServer, name: str, *objects: str) -> None:
    """Let objects be a day old: the server's times are those of its files."""
    for path in objects:
        file = object_server.files(name) / PREFIX / path
        os.utime(file, (file.stat().st_mtime - 86_400,) * 2)


async def in_thread(fn: Callable[..., Any], *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(fn, *arguments)


async def test_the_commands_of_the_page(
    object_server: ObjectServer, name: str, settings: dict[str, Any], conf: str, tmp_path: Path
) -> None:
    await send(tmp_path / "store", settings)
    page = page_name(1, 1, 7)
    (object_server.files(name) / PREFIX / page).write_bytes(b"left behind")
    make_old(object_server, name, page, "manifest/root")
    out = await in_thread(sh, "operate bucket", {"CONF": conf})
    assert re.search(rf"^T +0 +0 +{SENT} ", out, re.MULTILINE), out
    assert "the tier is sound\n" in out
    assert f"{page}\n" in out
    assert page not in names(object_server, name)
    restored = tmp_path / "restored"
    out = await in_thread(sh, "operate bucket_restore", {"CONF": conf, "STORE": str(restored)})
    assert re.search(rf"^T +0 +0 +{SENT} +{SENT}  -$", out, re.MULTILINE), out
    await send(restored, settings, first=SENT)
    async with running_broker(restored, **settings) as broker, WireClient.connect(broker.endpoint) as client:
        assert [(await client.pull_messages("T", at))[0].body for at in (0, 2 * SENT - 1)] == [b"0", b"59"]
    assert "the tier is sound" in await in_thread(mqstore, "verify", "-c", conf)


async def test_options_name_a_bucket(
    object_server: ObjectServer, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    await send(tmp_path / "store", settings)
    words = ["--bucket", f"s3://{name}", "--prefix", "prod", "--endpoint", object_server.endpoint]
    words += ["--cluster", "C1", "--broker", "broker-a", "--region", "us-east-1"]
    listed = json.loads(await in_thread(mqstore, "ls", "--json", *words))
    assert [(queue["topic"], queue["maxOffset"]) for queue in listed["queues"]] == [("T", SENT)]
    text = await in_thread(lambda: mqstore("ls", *words, code=2, AWS_SECRET_ACCESS_KEY="another-secret"))
    assert "the object store refuses access to prod/C1/broker-a/manifest/root: HTTP status 403" in text
    (log,) = (path for path in names(object_server, name) if path.startswith("log/"))
    file = object_server.files(name) / PREFIX / log
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert f"their checksum in {log}" in await in_thread(lambda: mqstore("verify", *words, code=3))


async def begin_upload(bucket: Any, path: str) -> None:
    """Begin a multipart upload that is never completed."""
    writer = bucket.writer(path, 5 * MIB)
    await writer.write(bytes(5 * MIB + 1))


async def test_uploads_that_were_never_completed_are_aborted(
    object_server: ObjectServer,
    name: str,
    settings: dict[str, Any],
    conf: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await send(tmp_path / "store", settings)
    await send(tmp_path / "store", settings, first=SENT)  # another epoch
    bucket = open_bucket(monkeypatch, object_server.endpoint, name)
    bucket.prefix = PREFIX
    dead, alive = str(ObjectName(0, 4000, 1, 1, 3)), str(ObjectName(0, 4000, 1, 2, 4))
    for path in dead, alive, "strange":
        await begin_upload(bucket, path)
    writer = bucket.writer("segments/whole", 5 * MIB)
    await writer.write(bytes(6 * MIB))
    await writer.finish()
    await bucket.delete(["segments/whole"])
    config = TieredStoreConfig(tiered_store_bucket=f"s3://{name}", tiered_store_bucket_endpoint=object_server.endpoint)
    uploads = open_unfinished_uploads(config)
    assert uploads is not None
    listed = uploads.list(PREFIX)
    assert {upload.name for upload in listed.uploads} == {PREFIX + path for path in (dead, alive, "strange")}
    assert uploads.list("prod/C2/").uploads == []
    assert all(abs(listed.now_ms - upload.begun_ms) < 60_000 for upload in listed.uploads)

    async def found() -> list[str]:
        report = json.loads(await in_thread(mqstore, "gc", "--json", "-c", conf))
        assert report["problem"] == ""
        return [upload["name"] for upload in report["uploads"]]

    assert await found() == []  # too young
    ids = {upload.upload_id for upload in listed.uploads}
    for directory in object_server.files(name).rglob("*"):
        if directory.name in ids:
            os.utime(directory, (directory.stat().st_mtime - 86_400,) * 2)
    assert await found() == [dead]
    assert "1 uploads that were never completed" in await in_thread(mqstore, "gc", "-c", conf)
    assert len(uploads.list(PREFIX).uploads) == 3
    assert "1 uploads aborted" in await in_thread(mqstore, "gc", "--delete", "-c", conf)
    assert {upload.name for upload in uploads.list(PREFIX).uploads} == {PREFIX + path for path in (alive, "strange")}
    uploads.abort(next(upload for upload in listed.uploads if upload.name.endswith(dead)))  # gone: no error
    # Now a broker and the commands have done all that they do.
    log = (object_server.directory / "access.log").read_text(encoding="utf-8")
    check_policy("".join(line for line in log.splitlines(keepends=True) if f"/{name}" in line))


ACTIONS = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObjects": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
}
"""What S3 asks a key to be allowed for an operation."""


def check_policy(log: str) -> None:
    """The policy of the page allows what is in the log of the server, and nothing else."""
    (text,) = re.findall(r"^```json\n(\{\"Version.*?)^```$", PAGES["operate"].read_text(), re.MULTILINE | re.DOTALL)
    statements = json.loads(text)["Statement"]
    allowed = {action for statement in statements for action in statement["Action"]}
    assert {ACTIONS[operation] for operation in re.findall(r" s3_(\w+) ", log)} == allowed
    (on_bucket,) = (statement for statement in statements if not statement["Resource"].endswith("/*"))
    assert all("List" in action for action in on_bucket["Action"])


async def test_uploads_that_may_not_be_listed(
    object_server: ObjectServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TieredStoreConfig(tiered_store_bucket=f"s3://{name}", tiered_store_bucket_endpoint=object_server.endpoint)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    uploads = open_unfinished_uploads(config)
    assert uploads is not None
    with pytest.raises(PermissionError, match="HTTP status 403 SignatureDoesNotMatch") as caught:
        uploads.list("")
    assert "secret" not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)
    for key in CREDENTIALS:
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_PROFILE", "a-profile-that-does-not-count")
    uploads = open_unfinished_uploads(config)
    assert uploads is not None
    with pytest.raises(PermissionError, match="there are no credentials"):
        uploads.list("")


async def test_a_store_that_is_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    uploads = open_unfinished_uploads(TieredStoreConfig(tiered_store_bucket=f"s3://{name}"))
    assert uploads is not None
    with pytest.raises(OSError, match="cannot be asked for uploads"):
        uploads.list("")
