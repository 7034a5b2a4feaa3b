"""How a bucket is opened, without a server: what is wrong stops the start, or is an error of the first request."""

import json
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, S3Store

from trimq.broker.store.disk.mapped_file_queue import StoreLoadError
from trimq.broker.store.tiered.bucket import obstore_store
from trimq.broker.store.tiered.bucket.object_store import ChangedError, ObjectStore
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore, mode_of, version_of
from trimq.broker.store.tiered.bucket.open_object_store import open_object_store
from trimq.broker.tiered_config import BUCKET_PROVIDER, TieredStoreConfig

SECRET = "an-unguessable-secret"


def opened(bucket: str, **options: Any) -> ObjectStore:
    return open_object_store(
        TieredStoreConfig(tiered_backend_service_provider=BUCKET_PROVIDER, tiered_store_bucket=bucket, **options)
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for name in ("HTTP_PROXY", "http_proxy", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections: bound, without a listener."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_memory_is_kept_under_its_name() -> None:
    opened("memory://one").create("a", [b"1", b"2"])
    assert opened("memory://one").read("a").data == b"12"
    with pytest.raises(FileNotFoundError):
        opened("memory://other").read("a")


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_a_store_that_is_away_is_an_os_error_without_a_secret(
    closed_port: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0c2VjcmV0")
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    store = opened(
        f"{kind}://history",
        tiered_store_bucket_endpoint=f"http://127.0.0.1:{closed_port}",
        tiered_store_bucket_request_timeout=2000,
    )
    with pytest.raises(OSError, match=f"the object store has failed at log/1: .*127.0.0.1:{closed_port}") as caught:
        store.create("log/1", [b"1"])
    text = "".join(traceback.format_exception(caught.value))
    for secret in (SECRET, "c2VjcmV0c2VjcmV0"):
        assert secret not in text


def test_an_endpoint_of_the_environment_is_encrypted(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(OSError, match="HTTP error: builder error"):
        opened("s3://history").read("a")


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {"virtual_hosted_style_request": False}),
        (
            {"tiered_store_bucket_endpoint": "https://store:9000", "tiered_store_bucket_region": "eu-1"},
            {"endpoint": "https://store:9000", "region": "eu-1", "virtual_hosted_style_request": False},
        ),
        (
            {"tiered_store_bucket_endpoint": "https://store:9000", "tiered_store_bucket_path_style": False},
            {"endpoint": "https://history.store:9000", "virtual_hosted_style_request": True},
        ),
    ],
)
def test_options_arrive_at_the_library(
    options: dict[str, Any], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    store = opened("s3://history", tiered_store_bucket_request_timeout=2500, **options)
    assert isinstance(store, ObstoreStore)
    library = store._store
    assert isinstance(library, S3Store)
    found = dict(library.config)
    # Without the condition two brokers could own one bucket, whatever the environment says.
    assert found.pop("conditional_put") == "etag"
    assert {key: found[key] for key in config} == {key: str(value).lower() for key, value in config.items()}
    assert library.client_options is not None
    assert library.retry_config is not None
    assert library.retry_config["max_retries"] == 0


@pytest.mark.parametrize(
    ("bucket", "text"),
    [("az://history", "tieredStoreBucket=az://history: .*[Aa]ccount"), ("gs://history", "tieredStoreBucket=gs://")],
)
def test_an_environment_that_cannot_be_used_is_a_start_error(
    tmp_path: Path, bucket: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(StoreLoadError, match=text):
        opened(bucket)


def test_an_environment_that_cannot_be_used_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    account = {"client_email": "", "private_key": SECRET, "private_key_id": "", "disable_oauth": SECRET}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    with pytest.raises(StoreLoadError, match="tieredStoreBucket=gs://history: ") as caught:
        opened("gs://history")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_library_with_a_missing_part_is_no_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, obstore_store.__name__, None)
    with pytest.raises(ModuleNotFoundError):
        opened("memory://one")


def test_versions_have_what_each_object_store_compares() -> None:
    amazon: Any = {"e_tag": '"1f"', "version": None}
    google: Any = {"e_tag": '"1f"', "version": "1764"}
    assert mode_of(version_of(amazon)) == {"e_tag": '"1f"'}
    assert mode_of(version_of(google)) == google
    amazon["e_tag"] = None
    assert version_of(amazon) == ""


def test_only_the_known_version_is_replaced() -> None:
    store = ObstoreStore(MemoryStore())
    first = store.replace("root", b"1", None)
    with pytest.raises(ChangedError):
        store.replace("root", b"2", None)
    second = store.replace("root", b"2", first)
    assert store.read("root") == (b"2", second)
    with pytest.raises(ChangedError):
        store.replace("root", b"3", first)


def test_a_deletion_goes_on_behind_an_object_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Google and Azure, of which no server runs here: the library ends at the first that is missing."""
    store = ObstoreStore(MemoryStore())
    for name in ("a", "c"):
        store.create(name, [b""])
    original = obstore.delete

    def ending_early(library: Any, names: Any) -> None:
        for name in [names] if isinstance(names, str) else names:
            obstore.head(library, name)
            original(library, name)

    monkeypatch.setattr(obstore, "delete", ending_early)
    store.delete(["a", "b", "c"])
    assert store.list("") == []
    store.delete([])


def test_an_object_in_parts() -> None:
    store = ObstoreStore(MemoryStore())
    writer = store.writer("a", 1000)
    for _ in range(5):
        writer.write(bytes(700))
    writer.finish()
    assert len(store.read("a").data) == 3500
    with pytest.raises(OSError, match="has failed at a"):
        writer.write(b"more")
    with pytest.raises(OSError, match="a part of a was not written"):
        writer.finish()
