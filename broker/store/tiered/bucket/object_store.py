"""The seam to object stores: one small interface for all that the tier asks of a bucket.

Calls block: they are made through ``Disk.run``, in a thread in production, inline in a simulation (bucket.py). Errors
are OSError with these meanings: FileNotFoundError, FileExistsError (create), PermissionError, ChangedError (replace);
any other one says that the store is away, slow, full or faulty, and that the call may have had its effect.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class ChangedError(OSError):
    """An object was not replaced, because it is not the version any more that was to be replaced."""


class ObjectInfo(NamedTuple):
    """An object in a listing: name, bytes, time of its last change in ms since the epoch."""

    name: str
    size: int
    modified_ms: int


class Read(NamedTuple):
    """A whole object, and its version for ``replace`` (the ETag)."""

    data: bytes
    version: str


class ObjectWriter(Protocol):
    """Writes one object in parts (a multipart upload). It exists once ``finish`` has returned."""

    def write(self, data: Any) -> None:
        """Add bytes; sends a part when enough are there. Raises OSError."""
        ...

    def finish(self) -> None:
        """Send the rest and make the object visible. Raises OSError."""
        ...


class ObjectStore(Protocol):
    """A bucket. Names are relative to its root."""

    def create(self, name: str, data: Sequence[Any]) -> None:
        """Write an object that does not exist, whose bytes are those of the pieces. FileExistsError if it does."""
        ...

    def replace(self, name: str, data: bytes, version: str | None) -> str:
        """Replace a version of an object, or create it (None); return the new version. Raises ChangedError."""
        ...

    def writer(self, name: str, part_size: int) -> ObjectWriter:
        """Write an object in parts of so many bytes. An object of that name would be replaced."""
        ...

    def read(self, name: str) -> Read:
        """A whole object. FileNotFoundError if it does not exist."""
        ...

    def read_range(self, name: str, begin: int, length: int) -> Any:
        """Up to ``length`` bytes of an object from ``begin`` on, read-only. FileNotFoundError if it does not exist."""
        ...

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        """Up to ``count`` objects whose names begin with ``prefix`` and come behind ``after``, sorted by name."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; no error if one does not exist."""
        ...
