"""Listing and aborting uploads through botocore, with its own stub: what a real server rarely answers.

tests/interop/test_bucket_tools.py has the rest, against a server.
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.abc import MetaPathFinder
from typing import Any

import pytest
from botocore.stub import Stubber

from trimq.broker.store.tiered.bucket.unfinished_uploads import (
    UnfinishedUpload,
    UnfinishedUploads,
    open_unfinished_uploads,
)
from trimq.broker.tiered_config import TieredStoreConfig

NAME = "C1/broker-a/segments/1"


def opened(**options: Any) -> UnfinishedUploads:
    found = open_unfinished_uploads(TieredStoreConfig(tiered_store_bucket="s3://history", **options))
    assert found is not None
    return found


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> UnfinishedUploads:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return opened()


@pytest.fixture
def stub(uploads: Any) -> Iterator[Stubber]:
    with Stubber(uploads._client) as stub:
        yield stub
        stub.assert_no_pending_responses()


def answer(number: int, *, more: bool) -> dict[str, Any]:
    begun = datetime.fromtimestamp(number, UTC)
    return {
        "Uploads": [{"Key": f"{NAME}{number}", "UploadId": f"id{number}", "Initiated": begun}],
        "IsTruncated": more,
        "NextKeyMarker": f"{NAME}{number}",
        "NextUploadIdMarker": f"id{number}",
        "ResponseMetadata": {"HTTPHeaders": {"date": f"Thu, 01 Jan 1970 00:01:0{number} GMT"}},
    }


def test_all_pages_are_listed(uploads: UnfinishedUploads, stub: Stubber) -> None:
    asked = {"Bucket": "history", "Prefix": "C1/"}
    stub.add_response("list_multipart_uploads", answer(1, more=True), asked)
    marker = {"KeyMarker": f"{NAME}1", "UploadIdMarker": "id1"}
    stub.add_response("list_multipart_uploads", answer(2, more=False), asked | marker)
    assert uploads.list("C1/") == (
        [UnfinishedUpload(f"{NAME}1", "id1", 1000), UnfinishedUpload(f"{NAME}2", "id2", 2000)],
        61_000,  # when it began to list
    )


def test_an_answer_without_a_time(uploads: UnfinishedUploads, stub: Stubber) -> None:
    stub.add_response("list_multipart_uploads", {"ResponseMetadata": {}})
    assert uploads.list("") == ([], 0)


def test_an_upload_that_has_gone_is_no_error(uploads: UnfinishedUploads, stub: Stubber) -> None:
    upload = UnfinishedUpload(NAME, "id", 1)
    stub.add_response("abort_multipart_upload", {}, {"Bucket": "history", "Key": NAME, "UploadId": "id"})
    uploads.abort(upload)
    stub.add_client_error("abort_multipart_upload", "NoSuchUpload", http_status_code=404)
    uploads.abort(upload)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(403, "AccessDenied", PermissionError), (401, "Unauthorized", PermissionError), (503, "SlowDown", OSError)],
)
def test_an_error_has_the_code_and_no_text(
    uploads: UnfinishedUploads, stub: Stubber, status: int, code: str, kind: type[OSError]
) -> None:
    stub.add_client_error("abort_multipart_upload", code, "the secret of the server", http_status_code=status)
    with pytest.raises(OSError, match=f"refuses AbortMultipartUpload in history: .* {status} {code}$") as caught:
        uploads.abort(UnfinishedUpload(NAME, "id", 1))
    assert type(caught.value) is kind
    assert caught.value.__cause__ is None


def test_where_requests_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**options: Any) -> tuple[str, str, str]:
        meta = opened(**options)._client.meta  # type: ignore[attr-defined]
        return meta.endpoint_url, meta.region_name, meta.config.s3["addressing_style"]

    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(variable, raising=False)
    amazon = "https://s3.{}amazonaws.com"
    assert place()[1:] == ("us-east-1", "path")
    assert place(tiered_store_bucket_path_style=False)[2] == "virtual"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert place()[:2] == (amazon.format("eu-west-1."), "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    assert place()[1] == "eu-west-2"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere:9000")
    assert place()[0] == "https://elsewhere:9000"
    given = place(tiered_store_bucket_region="eu-west-3", tiered_store_bucket_endpoint="http://127.0.0.1:9")
    assert given[:2] == ("http://127.0.0.1:9", "eu-west-3")


def test_a_region_that_is_none_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot be asked for uploads in history: InvalidRegionError"):
        opened(tiered_store_bucket_region="no region")


def test_profiles_of_a_user_do_not_count(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore does not read them either: a command must not use other keys than the broker."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id=other\naws_secret_access_key=other\n", encoding="utf-8")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PermissionError, match="there are no credentials for history"):
        opened().list("")


class Missing(MetaPathFinder):
    """As without the package."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "botocore":
            raise ModuleNotFoundError(name=fullname)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(OSError, match=r"botocore is missing: pip install 'trimq\[s3\]'"):
        opened()


def test_a_library_with_a_missing_part_is_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(ModuleNotFoundError):
        opened()


@pytest.mark.parametrize("bucket", ["gs://x", "az://x", "memory://x"])
def test_other_object_stores(bucket: str) -> None:
    assert open_unfinished_uploads(TieredStoreConfig(tiered_store_bucket=bucket)) is None
