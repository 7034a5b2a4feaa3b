"""Multipart uploads that were begun and never completed: their parts cost money, and no listing shows them.

The library obstore can neither list nor abort them, nor sign such a request. So this asks S3 through botocore (extra
``s3``), with the credentials that obstore would take: environment, web identity, container, machine; no profile.
Google and Azure: a rule of the bucket, and Azure's own limit of a week.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, Protocol

from trimq.broker.tiered_config import TieredStoreConfig

_REFUSED: Final = (401, 403)
_REGION: Final = "us-east-1"


class UnfinishedUpload(NamedTuple):
    """An upload: name of its object, id, and when it began (ms)."""

    name: str
    upload_id: str
    begun_ms: int


class ListedUploads(NamedTuple):
    """The uploads, and the time (ms) at which the object store has listed them; 0 if it does not say."""

    uploads: list[UnfinishedUpload]
    now_ms: int


class UnfinishedUploads(Protocol):
    """The uploads of a bucket. Names are relative to its root. Calls block, and raise OSError without any secret."""

    def list(self, prefix: str) -> ListedUploads:
        """All uploads to names that begin with ``prefix``."""
        ...

    def abort(self, upload: UnfinishedUpload) -> None:
        """Delete the parts of an upload; no error if it is there no more."""
        ...


def open_unfinished_uploads(config: TieredStoreConfig) -> UnfinishedUploads | None:
    """Those of tieredStoreBucket; None for a bucket that is not one of S3. Sends no request.

    Raises OSError if a library is missing, or if the environment has unusable settings.
    """
    if not config.tiered_store_bucket.startswith("s3://"):
        return None
    try:
        from botocore.config import Config  # noqa: PLC0415 - a broker without a bucket does not need it
        from botocore.session import Session  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if error.name != "botocore":  # a part of it is missing
            raise
        raise OSError("the package botocore is missing: pip install 'trimq[s3]'") from error
    name = config.tiered_store_bucket.removeprefix("s3://")
    timeout = config.tiered_store_bucket_request_timeout / 1000
    # As obstore does: no file of a user's profile counts.
    session = Session(session_vars={"profile": (None, None, None, None)})
    for variable in ("config_file", "credentials_file"):
        session.set_config_variable(variable, os.devnull)
    options = Config(
        connect_timeout=timeout,
        read_timeout=timeout,
        retries={"total_max_attempts": 1},
        signature_version="s3v4",
        s3={"addressing_style": "path" if config.tiered_store_bucket_path_style else "virtual"},
    )
    with _errors(name):
        client = session.create_client(
            "s3",
            region_name=config.tiered_store_bucket_region or _first("AWS_REGION", "AWS_DEFAULT_REGION") or _REGION,
            endpoint_url=config.tiered_store_bucket_endpoint or _first("AWS_ENDPOINT_URL", "AWS_ENDPOINT") or None,
            config=options,
        )
    return _S3Uploads(client, name)


def _first(*variables: str) -> str:
    return next((os.environ[name] for name in variables if os.environ.get(name)), "")


@contextmanager
def _errors(name: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError  # noqa: PLC0415 - as above

    try:
        yield
    except ClientError as error:
        # Not chained, and no text of the server: it can have a signature in it.
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        reason = f"HTTP status {status} {error.response.get('Error', {}).get('Code', '')}".strip()
        kind = PermissionError if status in _REFUSED else OSError
        raise kind(f"the object store refuses {error.operation_name} in {name}: {reason}") from None
    except NoCredentialsError:
        raise PermissionError(f"there are no credentials for {name}: set AWS_ACCESS_KEY_ID, or use a role") from None
    except BotoCoreError as error:
        raise OSError(f"the object store cannot be asked for uploads in {name}: {type(error).__name__}") from None


class _S3Uploads:
    """See UnfinishedUploads. ``client``: botocore's."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def list(self, prefix: str) -> ListedUploads:
        """See UnfinishedUploads."""
        uploads: list[UnfinishedUpload] = []
        now_ms = 0
        with _errors(self._bucket):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                now_ms = now_ms or _time_of(page)
                uploads += [
                    UnfinishedUpload(found["Key"], found["UploadId"], int(found["Initiated"].timestamp() * 1000))
                    for found in page.get("Uploads", ())
                ]
        return ListedUploads(uploads, now_ms)

    def abort(self, upload: UnfinishedUpload) -> None:
        """See UnfinishedUploads."""
        try:
            with _errors(self._bucket):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.name, UploadId=upload.upload_id)
        except OSError as error:
            if "NoSuchUpload" not in str(error):
                raise


def _time_of(page: Mapping[str, Any]) -> int:
    date = page["ResponseMetadata"].get("HTTPHeaders", {}).get("date", "")
    return int(parsedate_to_datetime(date).timestamp() * 1000) if date else 0
