"""The seam to object stores: one small interface for all that the tier asks of a bucket.

Calls block: they are made through ``Disk.run``, in a thread in production, inline in a simulation (bucket.py). Errors
are OSError with these meanings: FileNotFoundError, FileExistsError (create), PermissionError, ChangedError (replace);
any other one says that the store is away, slow, full or faulty, or that there is no such bucket, and that the call may
have had its effect.

So after any other error, a caller that tries again must expect to meet what it wrote itself. If ``create`` then raises
FileExistsError, it reads the object: with the same bytes (or, under a name that has the epoch, the same owner in it)
the object is its own. If ``replace`` raises ChangedError, it reads the object too: it has been replaced if the new
content is there; if the old version is still there, which S3 allows when two requests meet, the call is repeated.
A server may refuse an object before it has read its bytes, and close the connection, so that its answer gets lost:
after any other error it is best to read before trying again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class ChangedError(OSError):
    """An object was not replaced: it is not the version any more that was to be replaced, or is being replaced now."""


class ObjectInfo(NamedTuple):
    """An object in a listing: name, bytes, time of its last change in ms since the epoch."""

    name: str
    size: int
    modified_ms: int


class Read(NamedTuple):
    """A whole object, and its version for ``replace`` (the ETag; for Google the generation too)."""

    data: bytes
    version: str


class ObjectWriter(Protocol):
    """Writes one object in parts (a multipart upload). It exists once ``finish`` has returned.

    After an error all further calls raise OSError. Parts of an object that was not finished stay in the bucket, not
    visible, until a rule of the bucket deletes them (AbortIncompleteMultipartUpload).
    """

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
        """Write an object in parts of so many bytes, at least 5 MiB. An object of that name would be replaced."""
        ...

    def read(self, name: str) -> Read:
        """A whole object. FileNotFoundError if it does not exist."""
        ...

    def read_range(self, name: str, begin: int, length: int) -> Any:
        """Up to ``length`` (at least one) bytes of an object from ``begin`` on, read-only.

        FileNotFoundError if it does not exist, OSError if it ends before ``begin``.
        """
        ...

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        """Up to ``count`` objects whose names begin with ``prefix``, are longer, and come behind ``after``; by name.

        One request for each thousand.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; no error if one does not exist."""
        ...
