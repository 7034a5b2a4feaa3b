"""The files brokerIdentity and brokerIdentity-temp: which id the controllers have assigned to this store.

One line: ``cluster#broker#id``; the temporary file, written before the id is asked for, also has ``#checkCode``.
Source: RocketMQ's BrokerMetadata and TempBrokerMetadata.
"""

from pathlib import Path
from typing import Final, NamedTuple

from trimq.broker.start_error import StartError
from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import delete_durably, make_durable_directory, read_whole, write_durably

_TEMPORARY: Final = "-temp"


class Applied(NamedTuple):
    """An id that is asked for. ``check_code`` shows a controller that a repeated request is the same one."""

    broker_id: int
    check_code: str


class BrokerIdentityFile:
    """The identity of a store, which belongs to one broker of one cluster. Files are small: they are written inline."""

    def __init__(self, disk: Disk, path: str, cluster: str, broker: str) -> None:
        self._disk = disk
        self._path = path
        self._names = cluster, broker

    def broker_id(self) -> int | None:
        """The assigned id; None if none was. Raises StartError if the file is of another broker, or damaged."""
        fields = self._read(self._path, 3)
        return None if fields is None else self._number(self._path, fields[2])

    def applied(self) -> Applied | None:
        """The id that an earlier start has asked for, without noting that it was assigned. Raises as ``broker_id``."""
        path = self._path + _TEMPORARY
        fields = self._read(path, 4)
        return None if fields is None else Applied(self._number(path, fields[2]), fields[3])

    def apply(self, applied: Applied) -> None:
        """Before an id is asked for. Raises OSError."""
        text = "#".join((*self._names, str(applied.broker_id), applied.check_code))
        make_durable_directory(self._disk, str(Path(self._path).parent))
        write_durably(self._disk, self._path + _TEMPORARY, text.encode())

    def forget_applied(self) -> None:
        """The id was given to another broker. Raises OSError."""
        delete_durably(self._disk, self._path + _TEMPORARY)

    def assign(self, broker_id: int) -> None:
        """The id is assigned. Raises OSError."""
        write_durably(self._disk, self._path, "#".join((*self._names, str(broker_id))).encode())
        delete_durably(self._disk, self._path + _TEMPORARY)

    def _read(self, path: str, fields: int) -> list[str] | None:
        try:
            data = read_whole(self._disk, path)
        except OSError as error:
            raise StartError(f"{path} cannot be read: {error}") from error
        if data is None:
            return None
        found = data.decode(errors="replace").strip().split("#")
        if len(found) != fields:
            raise StartError(f"{path} is damaged: it should have {fields} parts, separated by #")
        if tuple(found[:2]) != self._names:
            raise StartError(
                f"the store belongs to the broker {found[1]} of {found[0]} ({path}), not to {self._names[1]} of "
                f"{self._names[0]}: set brokerName and brokerClusterName, or use another storePathRootDir"
            )
        return found

    @staticmethod
    def _number(path: str, text: str) -> int:
        if not text.isdigit() or not int(text):
            raise StartError(f"{path} is damaged: {text!r} is not a broker id")
        return int(text)
