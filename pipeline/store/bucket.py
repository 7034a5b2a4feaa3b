"""A bucket of an object store, read through the library obstore (extra ``s3``).

Credentials come from the library's own chain, such as the environment and the machine's role, on the driver and on each
executor. No option, plan or error has them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from trimq.pipeline.options import OptionError, Options
from trimq.pipeline.store.files import StorePathError
from trimq.protocol.bucket_access import (
    ENDPOINT,
    PREFIX,
    is_no_bucket,
    is_refused,
    reason_of,
    store_config,
    without_user,
)
from trimq.protocol.bucket_names import broker_prefix

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

BUCKET_OPTIONS: Final = ("cluster", "broker", "endpoint", "region", "pathStyle")
_OF_FILES: Final = ("storageOptions", "consumeQueues", "tieredStoreFilePath")
_URL: Final = re.compile(r"(s3a?|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)/?(.*)")
_EXPECTED: Final = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, without a user or a password"
_ATTEMPTS: Final = 8
_RETRY: Final = timedelta(minutes=2)
_CONNECT: Final = timedelta(seconds=5)
_REQUEST: Final = timedelta(seconds=60)


class BucketPlace(NamedTuple):
    """Where the tier of brokers is: a bucket, what stands before the cluster's name in it, and how it is reached.

    ``kind``: s3, gs or az. ``brokers``: empty for all of the cluster.
    """

    kind: str
    name: str
    prefix: str
    cluster: str
    brokers: tuple[str, ...]
    endpoint: str
    region: str
    path_style: bool

    @property
    def url(self) -> str:
        """The bucket, for errors."""
        return f"{self.kind}://{self.name}"


def bucket_of(options: Options) -> BucketPlace | None:
    """The bucket that the options name, None if the path is that of a store's files. Raises OptionError."""
    cluster = options.text("cluster")
    if cluster is None:
        for name in BUCKET_OPTIONS:
            if options.has(name):
                raise OptionError(name, _shown(options, name), "to be given with cluster, for a bucket")
        return None
    for name in _OF_FILES:
        if options.has(name):
            expected = "not to be given with cluster: keys come from the environment of driver and executors"
            raise OptionError(name, "...", expected if name == "storageOptions" else "not to be given with cluster")
    found = _URL.fullmatch(options.text("path") or "")
    prefix = found[3].strip("/") if found else ""
    if found is None or not PREFIX.fullmatch(prefix):
        raise OptionError("path", _shown(options, "path"), _EXPECTED)
    endpoint = options.text("endpoint") or ""
    if endpoint and not ENDPOINT.fullmatch(endpoint):
        expected = "https://HOST:PORT, or http:// without encryption, without a user or a password"
        raise OptionError("endpoint", _shown(options, "endpoint"), expected)
    return BucketPlace(
        "s3" if found[1] == "s3a" else found[1],
        found[2],
        prefix,
        cluster,
        options.words("broker"),
        endpoint,
        options.text("region") or "",
        options.flag("pathStyle", default=True),
    )


def _shown(options: Options, name: str) -> str | None:
    value = options.text(name)
    return None if value is None else without_user(value)


class BucketError(OSError):
    """A request that failed, or an object that is not what it should be; the text says what can be done."""


class ObjectGoneError(BucketError):
    """An object that was planned to be read is not in the bucket any more."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is not in the bucket any more: since this table was planned, it was joined with others, or its "
            "messages have expired. Load the table again; if a query takes longer than the broker's "
            "tieredStoreBucketGraceTime, increase that"
        )
        self.name = name

    def __reduce__(self) -> tuple[type["ObjectGoneError"], tuple[str]]:
        """Pickled by its name: ``__init__`` makes the text."""
        return type(self), (self.name,)


class BucketReader:
    """Reads objects of a bucket. Calls may come from several threads."""

    def __init__(self, place: BucketPlace) -> None:
        """Sends no request. Raises BucketError."""
        self.place = place
        try:
            import obstore  # noqa: PLC0415 - only tables of a bucket need it
            from obstore import store  # noqa: PLC0415 - as above
        except ModuleNotFoundError as error:
            if error.name != "obstore":
                raise
            raise BucketError(
                "a table of a bucket needs the package obstore, on the driver and on each executor: "
                "pip install 'trimq[spark,s3]'"
            ) from error
        self._library = obstore
        client: ClientConfig = {
            "timeout": _REQUEST,
            "connect_timeout": _CONNECT,
            "allow_http": place.endpoint.startswith("http://"),
        }
        retry: RetryConfig = {"max_retries": _ATTEMPTS, "retry_timeout": _RETRY}
        config = store_config(
            place.kind, place.name, endpoint=place.endpoint, region=place.region, path_style=place.path_style
        )
        kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
        with self._errors(place.url):
            self._store = kinds[place.kind](place.name, config=config, client_options=client, retry_config=retry)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn the library's errors into FileNotFoundError or BucketError."""
        try:
            yield
        except (self._library.exceptions.BaseError, OSError) as error:
            # Not chained: the library's text can have a signature in it.
            text, failed = str(error), error
        else:
            return
        if is_no_bucket(text):
            raise BucketError(f"{self.place.url}: the bucket does not exist")
        if isinstance(failed, FileNotFoundError):
            raise FileNotFoundError(f"{name} is not in {self.place.url}")
        refused = isinstance(
            failed, self._library.exceptions.PermissionDeniedError | self._library.exceptions.UnauthenticatedError
        )
        if refused or is_refused(text):
            raise BucketError(
                f"{self.place.url} refuses access to {name}: {reason_of(text)}. Keys come from the environment "
                "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME ...) or from the "
                "machine, of the driver and of each executor"
            )
        raise BucketError(f"{self.place.url} has failed at {name}: {reason_of(text)}")

    def read(self, name: str) -> bytes:
        """A whole object. Raises FileNotFoundError, BucketError."""
        with self._errors(name):
            return bytes(self._library.get(self._store, name).bytes())

    def read_range(self, name: str, begin: int, length: int) -> memoryview:
        """Some bytes of an object. Raises ObjectGoneError, BucketError."""
        try:
            with self._errors(name):
                data = memoryview(self._library.get_range(self._store, name, start=begin, length=length))
        except FileNotFoundError:
            raise ObjectGoneError(name) from None
        if len(data) != length:
            raise BucketError(f"{name} in {self.place.url} is cut off")
        return data

    def brokers(self) -> list[str]:
        """The names of all brokers of the cluster with objects in the bucket, sorted. Raises BucketError."""
        above = broker_prefix(self.place.prefix, self.place.cluster, "")[:-1]
        with self._errors(above):
            found = self._library.list_with_delimiter(self._store, above)["common_prefixes"]
        return sorted(unquote(path.rstrip("/").rpartition("/")[2]) for path in found)

    def chosen_brokers(self) -> list[str]:
        """The brokers that the options name, or all of the cluster. Raises StorePathError, BucketError."""
        brokers = list(self.place.brokers) or self.brokers()
        if not brokers:
            above = broker_prefix(self.place.prefix, self.place.cluster, "")[:-1]
            raise StorePathError(
                f"{self.place.url} has no broker of cluster {self.place.cluster}: nothing is in {above}"
            )
        return brokers
