"""Object stores through the library obstore (extra ``s3``): S3, Google Cloud Storage, Azure, and memory for tests.

Credentials come from the library's own chain, such as the environment and the machine's role. They stand nowhere else.
The library does not repeat a request, so a call of this module is one request, and callers know how often they tried.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from trimq.broker.store.tiered.bucket.object_store import ChangedError, ObjectInfo, ObjectWriter, Read
from trimq.broker.store.tiered.bucket.store_errors import as_os_error
from trimq.protocol.bucket_access import store_config

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult
    from obstore.store import ClientConfig, RetryConfig

_CONNECT: Final = timedelta(seconds=5)
_IDLE: Final = timedelta(seconds=15)
"""Connections are closed before servers do that, since a request could be under way then."""
_STORES: Final[dict[str, Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_memory: Final[dict[str, MemoryStore]] = {}


def connect(url: str, *, endpoint: str, region: str, path_style: bool, timeout_ms: int) -> "ObstoreStore":
    """The bucket of a URL, see tieredStoreBucket. Raises OSError if the environment has unusable settings."""
    kind, _, name = url.partition("://")
    if kind == "memory":
        return ObstoreStore(_memory.setdefault(name, MemoryStore()))
    timeout = timedelta(milliseconds=timeout_ms)
    client: ClientConfig = {
        "timeout": timeout,
        "connect_timeout": min(timeout, _CONNECT),
        "pool_idle_timeout": _IDLE,
        "allow_http": endpoint.startswith("http://"),
    }
    retry: RetryConfig = {"max_retries": 0, "retry_timeout": timeout}
    with _errors(name):
        config = store_config(kind, name, endpoint=endpoint, region=region, path_style=path_style)
        opened = _STORES[kind]
        return ObstoreStore(opened(name, config=config, client_options=client, retry_config=retry))


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn the library's errors into those of object_store.py."""
    try:
        yield
    except (BaseError, OSError) as error:
        # Not chained: the library's text can have a signature in it.
        raise as_os_error(error, name) from None


def version_of(result: "ObjectMeta | PutResult") -> str:
    """The version of an object as one text: the ETag and, for Google, the generation."""
    return f"{result['e_tag'] or ''} {result['version'] or ''}".strip()


def mode_of(version: str) -> "PutMode":
    """The condition that an object still has this version."""
    e_tag, _, generation = version.partition(" ")
    return {"e_tag": e_tag, "version": generation} if generation else {"e_tag": e_tag}


class ObstoreStore:
    """See ObjectStore. ``store`` is one of obstore's."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def create(self, name: str, data: Sequence[Any]) -> None:
        """See ObjectStore."""
        with _errors(name):
            obstore.put(self._store, name, data if len(data) != 1 else data[0], mode="create")

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        """See ObjectStore."""
        try:
            with _errors(name):
                mode = "create" if version is None else mode_of(version)
                return version_of(obstore.put(self._store, name, data, mode=mode))
        except FileExistsError as error:
            raise ChangedError(str(error)) from None

    def writer(self, name: str, part_size: int) -> ObjectWriter:
        """See ObjectStore."""
        return _Writer(name, obstore.open_writer(self._store, name, buffer_size=part_size, max_concurrency=1))

    def read(self, name: str) -> Read:
        """See ObjectStore."""
        with _errors(name):
            result = obstore.get(self._store, name)
            return Read(bytes(result.bytes()), version_of(result.meta))

    def read_range(self, name: str, begin: int, length: int) -> Any:
        """See ObjectStore."""
        with _errors(name):
            return obstore.get_range(self._store, name, start=begin, length=length)

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        """See ObjectStore."""
        with _errors(prefix):
            # The library lists directories: the rest of a prefix is compared here.
            directory = prefix.rpartition("/")[0]
            found: list[ObjectInfo] = []
            chunks = obstore.list(self._store, directory or None, offset=max(after, prefix), chunk_size=count)
            for meta in next(iter(chunks), ()):
                if not meta["path"].startswith(prefix):
                    break
                found.append(ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000)))
            return found

    def delete(self, names: Sequence[str]) -> None:
        """See ObjectStore."""
        try:
            with _errors(names[0] if names else ""):
                obstore.delete(self._store, list(names))
        except FileNotFoundError:
            # Google and Azure say so, and the library then leaves out those that follow.
            for name in names:
                self._delete_one(name)

    def _delete_one(self, name: str) -> None:
        try:
            with _errors(name):
                obstore.delete(self._store, name)
        except FileNotFoundError:
            pass


class _Writer:
    """See ObjectWriter."""

    def __init__(self, name: str, file: Any) -> None:
        self._name = name
        self._file = file
        self._has_failed = False

    @contextmanager
    def _call(self) -> Iterator[None]:
        # After a failure the library would go on, with an empty name: the object store could create a bucket.
        if self._has_failed:
            raise OSError(f"a part of {self._name} was not written")
        self._has_failed = True
        with _errors(self._name):
            yield
        self._has_failed = False

    def write(self, data: Any) -> None:
        with self._call():
            self._file.write(data)

    def finish(self) -> None:
        with self._call():
            self._file.close()
