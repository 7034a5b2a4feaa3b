"""The file of users and policies on the broker's disk: replaced as a whole, for its owner only."""

from trimq.broker.store.disk.disk import Disk
from trimq.broker.store.disk.durable_files import make_durable_directory, read_whole, write_durably
from trimq.protocol.auth.auth_file import AUTH_FILE, AuthFileError
from trimq.remoting.config.private_file import problem_of_directory, problem_of_file


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

        Raises OSError, and AuthFileError if others may read or own it, or could put another file in its place.
        """
        return await self._disk.run(self._read)

    async def replace(self, data: bytes) -> None:
        """Return when ``data`` is durable in place of the old bytes. Raises OSError."""
        await self._disk.run(self._replace, data)

    def _read(self) -> bytes | None:
        # Also without a file: one that was made now would refuse the next start.
        directory = self._disk.stat(self._directory)
        if directory is not None:
            _check(problem_of_directory(self._directory, directory.permissions, directory.owner))
        found = self._disk.stat(self.path)
        if found is None:
            return None
        _check(problem_of_file(self.path, found.permissions, found.owner))
        return read_whole(self._disk, self.path)

    def _replace(self, data: bytes) -> None:
        make_durable_directory(self._disk, self._directory)
        write_durably(self._disk, self.path, data, private=True)


def _check(problem: str) -> None:
    if problem:
        raise AuthFileError(problem)
