"""A broker with a tier: pulls, ids and retries of messages that its disk no longer has."""

import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.broker.wire_client import WireClient
from trimq.broker.config import SCHEMA
from trimq.broker.controller import BrokerController
from trimq.broker.store.tiered.access.tiered_message_store import TieredMessageStore
from trimq.broker.store.tiered.bucket.bucket_message_store import BucketMessageStore
from trimq.broker.testing import running_broker
from trimq.broker.tiered_config import BUCKET_PROVIDER, PLUG_IN, POSIX_PROVIDER
from trimq.protocol.codes import RequestCode, ResponseCode
from trimq.protocol.message import StoredMessage, decode_messages
from trimq.protocol.tiered_layout import APACHE_UPLOADED
from trimq.remoting.config.configuration import Configuration
from trimq.remoting.config.properties import ConfigError

TOPIC, COUNT = "Tiered", 100


@asynccontextmanager
async def tiered_broker(tmp_path: Path, **changes: object) -> AsyncIterator[tuple[BrokerController, WireClient]]:
    keys: dict[str, Any] = {
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": POSIX_PROVIDER,
        "tieredStoreFilePath": str(tmp_path / "tier"),
        "mappedFileSizeCommitLog": 16384,
        "commitLogReserveStep": 4096,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
        "tieredStoreIndexFileMaxHashSlotNum": 1000,
        "tieredStoreIndexFileMaxIndexNum": 4000,
    }
    async with (
        running_broker(tmp_path / "store", **(keys | changes)) as broker,
        WireClient.connect(broker.endpoint) as client,
    ):
        yield broker, client


async def send_and_upload(broker: BrokerController, client: WireClient) -> list[StoredMessage]:
    """Send messages of 500 bytes, upload them, and delete the local log but for its last file."""
    for number in range(COUNT):
        await client.send(TOPIC, f"{number}".encode().ljust(500, b"."))
    messages: list[StoredMessage] = []
    while len(messages) < COUNT:
        messages += await client.pull_messages(TOPIC, len(messages))
    store = broker.context.store
    assert isinstance(store, TieredMessageStore)
    assert await store.flush()
    await store.uploads.upload_all()
    while len(store.files.files) > 1:
        assert await store._clean._delete_log_files(immediately=True)
    await store._clean._follow()
    return messages


async def test_a_consumer_reads_the_tier_and_goes_on_in_the_log(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path) as (broker, client):
        messages = await send_and_upload(broker, client)
        found: list[StoredMessage] = []
        while len(found) < COUNT:
            reply = await client.pull(TOPIC, len(found))
            assert reply.code == ResponseCode.SUCCESS
            assert reply.ext_fields()["minOffset"] == "0"
            assert reply.ext_fields()["maxOffset"] == str(COUNT)
            found += decode_messages(bytes(reply.body))
        assert [(m.queue_offset, m.body, m.commit_log_offset) for m in found] == [
            (m.queue_offset, m.body, m.commit_log_offset) for m in messages
        ]
        reply = await client.ask(RequestCode.GET_MIN_OFFSET, {"topic": TOPIC, "queueId": 0})
        assert reply.ext_fields()["offset"] == "0"


async def test_a_message_of_the_tier_is_found_by_its_id_and_sent_back(tmp_path: Path) -> None:
    async with tiered_broker(tmp_path) as (broker, client):
        messages = await send_and_upload(broker, client)
        first = messages[3]
        assert first.commit_log_offset < broker.context.store.min_phy_offset
        reply = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": first.commit_log_offset})
        assert decode_messages(bytes(reply.body))[0].body == first.body
        back = {"offset": first.commit_log_offset, "group": "G", "delayLevel": 1, "originTopic": TOPIC}
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == ResponseCode.SUCCESS
        delayed = await client.pull_messages("SCHEDULE_TOPIC_XXXX")
        assert [message.body for message in delayed] == [first.body]


@pytest.mark.parametrize("code", [RequestCode.VIEW_MESSAGE_BY_ID, RequestCode.CONSUMER_SEND_MSG_BACK])
async def test_no_other_message_answers_for_one_that_the_original_uploaded(tmp_path: Path, code: RequestCode) -> None:
    async with tiered_broker(tmp_path) as (broker, client):
        await send_and_upload(broker, client)
    for path in (tmp_path / "tier").rglob("*.phy"):
        path.unlink()
    async with tiered_broker(tmp_path) as (broker, client):
        marked = (await client.pull_messages(TOPIC))[0].commit_log_offset
        assert marked >= APACHE_UPLOADED
        ext = {"offset": marked, "group": "G", "delayLevel": 1, "originTopic": TOPIC}
        reply = await client.ask(code, ext)
        assert reply.code == ResponseCode.SYSTEM_ERROR
        assert "uploaded to the tier by RocketMQ's broker" in (reply.remark or "")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("messageStorePlugIn", "com.example.Other", "one of nothing, org.apache.rocketmq.tieredstore"),
        ("tieredBackendServiceProvider", "com.example.S3", "one of org.apache.rocketmq.tieredstore.provider.Memory"),
        ("readAheadCacheSizeThresholdRate", "1.5", "a number above 0 and at most 1"),
        ("tieredStorageLevel", "SOMETIMES", "one of DISABLE, NOT_IN_DISK, NOT_IN_MEM, FORCE"),
        ("tieredStoreFilePath", "", "a directory, with PosixFileSegment"),
        (
            "tieredBackendServiceProvider",
            BUCKET_PROVIDER,
            "the URL of a bucket, such as s3://BUCKET, with trimq.Bucket",
        ),
        *(
            ("tieredStoreBucket", url, "expected s3://BUCKET, gs://BUCKET or az://CONTAINER, without a user")
            for url in (
                "history",
                "s3://",
                "s3://history/path",
                "file:///tmp/x",
                "s3://user:secret@history",
                "s3://a?b",
            )
        ),
        *(
            ("tieredStoreBucketEndpoint", url, "expected https://HOST:PORT, or http:// without encryption")
            for url in ("minio:9000", "ftp://minio", "https://user:secret@minio", "https://minio/?a=b", "https://")
        ),
        *(
            ("tieredStoreBucketPrefix", text, "names of letters, digits and . = _ - with slashes between them")
            for text in ("/prod", "prod/", "a//b", "..", "a/../b", "a b")
        ),
        ("tieredStoreBucketPathStyle", "sometimes", "true or false"),
        ("tieredStoreBucketRequestTimeout", "99", "a whole number from 100"),
    ],
)
async def test_a_bad_value_stops_the_start(tmp_path: Path, key: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        async with tiered_broker(tmp_path, **{key: value}):
            pass
    assert "secret" not in str(caught.value)


def test_a_request_with_a_password_gets_no_reply_with_it() -> None:
    [refusal] = Configuration(SCHEMA).check_change({"tieredStoreBucket": "s3://user:secret@history"})
    assert refusal.reason.startswith("'s3://***@history' is not s3://BUCKET")


async def test_where_a_queue_begins_is_not_answered_until_the_bucket_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new group that begins with the first message would begin behind those in the bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    asked = [
        (RequestCode.GET_MIN_OFFSET, {}),
        (RequestCode.GET_EARLIEST_MSG_STORETIME, {}),
        (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"timestamp": "0"}),
    ]
    groups = {"consumerGroup": "G", "group": "G", "filterGroups": "", "compareGroup": "None"}
    reset = groups | {"timestamp": "0", "isForce": "true", "queueId": "0"}
    more_asked = [
        *asked,
        (RequestCode.GET_TOPIC_STATS_INFO, {}),
        (RequestCode.QUERY_CORRECTION_OFFSET, groups),
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset | {"offset": "3"}),
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset),
    ]
    async with tiered_broker(tmp_path) as (broker, client):
        await send_and_upload(broker, client)
        await client.send("New", b"x")
        await client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, b'{"groupName":"G"}')
        commit = {"consumerGroup": "G", "topic": TOPIC, "queueId": "0", "commitOffset": "5"}
        assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == ResponseCode.SUCCESS
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closed = listening.getsockname()[1]
    bucket = {
        "tieredBackendServiceProvider": BUCKET_PROVIDER,
        "tieredStoreBucket": "s3://history",
        "tieredStoreBucketEndpoint": f"http://127.0.0.1:{closed}",
        "tieredStoreBucketRegion": "us-east-1",
        "tieredStoreBucketPathStyle": "true",
    }
    async with tiered_broker(tmp_path, **bucket) as (broker, client):
        store = broker.context.store
        assert isinstance(store, BucketMessageStore)
        for code, more in more_asked:
            reply = await client.ask(code, {"topic": TOPIC, "queueId": "0"} | more)
            assert (reply.code, "may have older messages in the bucket" in (reply.remark or "")) == (
                ResponseCode.SYSTEM_BUSY,
                True,
            ), code
        for code, more in asked:
            # The first message is on the disk: nothing can be before it.
            reply = await client.ask(code, {"topic": "New", "queueId": "0"} | more)
            assert reply.code == ResponseCode.SUCCESS
        assert (
            await client.ask(
                RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": TOPIC} | reset | {"offset": str(COUNT)}
            )
        ).code == ResponseCode.SUCCESS
        store.is_loaded.set()  # as the first answer of the bucket does
        for code, more in more_asked:
            reply = await client.ask(code, {"topic": TOPIC, "queueId": "0"} | more)
            # The bucket of this test has nothing.
            gone = "offset" in more
            assert reply.code == (ResponseCode.SYSTEM_ERROR if gone else ResponseCode.SUCCESS), code


def test_a_bucket_without_its_library_is_a_start_error_that_names_it(tmp_path: Path) -> None:
    keys = {
        "storePathRootDir": tmp_path / "store",
        "messageStorePlugIn": PLUG_IN,
        "tieredBackendServiceProvider": BUCKET_PROVIDER,
        "tieredStoreBucket": "s3://history",
        "listenPort": 0,
        "brokerIP1": "127.0.0.1",
    }
    path = tmp_path / "broker.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
    program = "import sys; sys.modules['obstore'] = None; from trimq.broker.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "-c", str(path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "tieredStoreBucket=s3://history needs the package obstore: pip install 'trimq[s3]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_without_a_bucket_loads_no_library_for_it() -> None:
    code = """
import sys
import trimq.broker.cli, trimq.broker.controller
import trimq.broker.store.tiered.access.tiered_message_store
print("obstore" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
