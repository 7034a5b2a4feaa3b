"""An object store in memory that counts its calls, and fails those that a test names, before or after their effect."""

from collections.abc import Sequence
from typing import Any

from obstore.store import MemoryStore

from tests.store.simdisk import SimDisk
from trimq.broker.store.tiered.bucket.bucket import Bucket
from trimq.broker.store.tiered.bucket.object_store import ObjectInfo, ObjectWriter, Read
from trimq.broker.store.tiered.bucket.obstore_store import ObstoreStore
from trimq.protocol.bucket_names import broker_prefix

CLUSTER, BROKER = "C1", "broker-a"
PREFIX = broker_prefix("tier", CLUSTER, BROKER)


class Cut(BaseException):
    """The process ends in the middle of a call."""


class FaultyStore:
    """See ObjectStore. ``calls``: method and name of each call so far."""

    def __init__(self, store: ObstoreStore | None = None) -> None:
        self.store = store or ObstoreStore(MemoryStore())
        self.calls: list[tuple[str, str]] = []
        self._failures: dict[int | tuple[str, int], tuple[BaseException, bool]] = {}

    def fail(self, nth: int, error: BaseException, *, after: bool) -> None:
        """Let the nth call from now on (1: the next) raise an error, before or after its effect."""
        self._failures[len(self.calls) + nth] = error, after

    def fail_method(self, method: str, error: BaseException, *, after: bool, nth: int = 1) -> None:
        """Let the nth call of a method from now on raise an error, before or after its effect."""
        self._failures[method, len(self.names(method)) + nth] = error, after

    def fail_no_more(self) -> None:
        """Forget the failures that have not occurred yet."""
        self._failures.clear()

    def names(self, method: str = "", since: int = 0) -> list[str]:
        """The names in the calls of a method (all methods) from a call on."""
        return [name for called, name in self.calls[since:] if called == method or not method]

    def _call(self, method: str, name: str, *arguments: Any) -> Any:
        self.calls.append((method, name.removeprefix(PREFIX)))
        nothing: tuple[BaseException | None, bool] = None, False
        error, after = self._failures.pop(len(self.calls), nothing)
        if error is None:
            error, after = self._failures.pop((method, len(self.names(method))), nothing)
        if error is not None and not after:
            raise error
        try:
            return getattr(self.store, method)(name, *arguments)
        finally:
            if error is not None:
                raise error

    def create(self, name: str, data: Sequence[Any]) -> None:
        self._call("create", name, data)

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        found: str = self._call("replace", name, data, version)
        return found

    def writer(self, name: str, part_size: int) -> ObjectWriter:
        return self.store.writer(name, part_size)

    def read(self, name: str) -> Read:
        found: Read = self._call("read", name)
        return found

    def read_range(self, name: str, begin: int, length: int) -> Any:
        return self._call("read_range", name, begin, length)

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        found: list[ObjectInfo] = self._call("list", prefix, after, count)
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._call("delete", name)
        self.store.delete(names)

    # -- for tests

    def bucket(self) -> Bucket:
        """The bucket of the tests' broker in this store."""
        return Bucket(self, SimDisk(), PREFIX)

    def put(self, name: str, data: bytes) -> None:
        """Write or replace an object, not as one of the calls."""
        self.remove(name)
        self.store.create(PREFIX + name, [data])

    def get(self, name: str) -> bytes:
        """Read an object, not as one of the calls."""
        return self.store.read(PREFIX + name).data

    def remove(self, name: str) -> None:
        """Delete an object, not as one of the calls."""
        self.store.delete([PREFIX + name])

    def objects(self) -> Sequence[str]:
        """The names of all objects, not as one of the calls."""
        return [info.name.removeprefix(PREFIX) for info in self.store.list(PREFIX, count=100_000)]
