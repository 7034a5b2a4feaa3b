"""Buckets of the real object store, opened as a broker opens them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.interop.harness.object_server import CREDENTIALS
from trimq.broker.store.disk.real_disk import RealDisk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.open_object_store import open_object_store
from trimq.broker.tiered_config import BUCKET_PROVIDER, TieredStoreConfig
from trimq.protocol.bucket_names import broker_prefix

PREFIX = broker_prefix("prod/mq", "C/1", "broker-a")


def open_bucket(
    environment: pytest.MonkeyPatch, endpoint: str, name: str, secret: str = "", prefix: str = PREFIX, **options: Any
) -> Bucket:
    """A bucket, with the server's credentials or another ``secret`` in the environment of this process."""
    for key, value in CREDENTIALS.items():
        environment.setenv(key, value)
    if secret:
        environment.setenv("AWS_SECRET_ACCESS_KEY", secret)
    config = TieredStoreConfig(
        tiered_backend_service_provider=BUCKET_PROVIDER,
        tiered_store_bucket=f"s3://{name}",
        tiered_store_bucket_endpoint=endpoint,
        **options,
    )
    return Bucket(open_object_store(config), RealDisk().with_own_threads(), prefix)
