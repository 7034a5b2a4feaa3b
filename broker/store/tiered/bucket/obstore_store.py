"""Object stores through the library obstore (extra ``s3``): S3, Google Cloud Storage, Azure, and memory for tests.

Credentials come from the library's own chain, such as the environment and the machine's role. They stand nowhere else.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from trimq.broker.store.tiered.bucket.object_store import ChangedError, ObjectInfo, ObjectWriter, Read


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turn the library's errors into those of object_store.py."""
    try:
        yield
    except (FileNotFoundError, NotFoundError) as error:
        raise FileNotFoundError(f"{name} is not in the bucket") from error
    except AlreadyExistsError as error:
        raise FileExistsError(f"{name} is in the bucket already") from error
    except PreconditionError as error:
        raise ChangedError(f"{name} was changed by another process") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(f"the object store refuses access to {name}") from error
    except BaseError as error:
        raise OSError(f"the object store has failed at {name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
                mode: Any = "create" if version is None else {"e_tag": version}
                result = obstore.put(self._store, name, data, mode=mode)
        except FileExistsError as error:
            raise ChangedError(str(error)) from error
        return result["e_tag"] or ""

    def writer(self, name: str, part_size: int) -> ObjectWriter:
        """See ObjectStore."""
        return _Writer(name, obstore.open_writer(self._store, name, buffer_size=part_size, max_concurrency=1))

    def read(self, name: str) -> Read:
        """See ObjectStore."""
        with _errors(name):
            result = obstore.get(self._store, name)
            return Read(bytes(result.bytes()), result.meta["e_tag"] or "")

    def read_range(self, name: str, begin: int, length: int) -> Any:
        """See ObjectStore."""
        with _errors(name):
            return obstore.get_range(self._store, name, start=begin, length=length)

    def list(self, prefix: str, after: str = "", count: int = 1000) -> list[ObjectInfo]:
        """See ObjectStore."""
        with _errors(prefix):
            # The library lists directories: the rest of a prefix is compared here.
            directory = prefix.rpartition("/")[0]
            offset = max(after, prefix)
            found: list[ObjectInfo] = []
            for chunk in obstore.list(self._store, directory or None, offset=offset, chunk_size=count):
                for meta in chunk:
                    if not meta["path"].startswith(prefix):
                        return sorted(found)[:count]
                    found.append(ObjectInfo(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000)))
                if len(found) >= count:
                    break
            return sorted(found)[:count]

    def delete(self, names: Sequence[str]) -> None:
        """See ObjectStore."""
        try:
            with _errors(names[0] if names else ""):
                obstore.delete(self._store, list(names))
        except FileNotFoundError:
            pass


class _Writer:
    """See ObjectWriter."""

    def __init__(self, name: str, file: Any) -> None:
        self._name = name
        self._file = file

    def write(self, data: Any) -> None:
        with _errors(self._name):
            self._file.write(data)

    def finish(self) -> None:
        with _errors(self._name):
            self._file.close()
