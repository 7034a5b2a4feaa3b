"""The file of users and policies on the broker's disk: replaced as a whole, for its owner only."""

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole, write_durably
from trimq.protocol.auth.auth_file import AUTH_FILE, AuthFileError

_OTHERS_READ_OR_WRITE = 0o077
_OTHERS_WRITE = 0o022


class DiskAuthFile:
    """An AuthFile (remoting/auth/auth_store.py) in a directory of the disk."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory.rstrip("/")

    @property
    def path(self) -> str:
        """Its name."""
        return f"{self._directory}/{AUTH_FILE}"

    async def read(self) -> bytes | None:
        """All bytes; None if there is no file.

        Raises OSError, and AuthFileError if others may read it, or could put another file in its place.
        """
        return await self._disk.run(self._read)

    async def replace(self, data: bytes) -> None:
        """Return when ``data`` is durable in place of the old bytes. Raises OSError."""
        await self._disk.run(self._replace, data)

    def _read(self) -> bytes | None:
        # Also without a file: one that was made now would refuse the next start.
        directory = self._disk.stat(self._directory)
        if directory is not None and directory.permissions & _OTHERS_WRITE:
            raise AuthFileError(
                f"others may replace it (mode {directory.permissions:04o} of its directory): "
                f"chmod go-w {self._directory}"
            )
        found = self._disk.stat(self.path)
        if found is None:
            return None
        if found.permissions & _OTHERS_READ_OR_WRITE:
            raise AuthFileError(f"others may read it (mode {found.permissions:04o}): chmod 600 {self.path}")
        return read_whole(self._disk, self.path)

    def _replace(self, data: bytes) -> None:
        make_durable_directory(self._disk, self._directory)
        write_durably(self._disk, self.path, data, private=True)
